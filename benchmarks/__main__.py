"""How fast it is: training steps, and the way of the data beside its limits.

    python -m benchmarks step --out FOLDER                      # the Trainer, and the parts of its step
    composer -n 8 -m benchmarks step trainer.parallelism=fsdp   # on several GPUs
    python -m benchmarks load open prepare [--quick]
    python -m benchmarks tables [FILE ...]                      # the tables of README and docs/performance.md

load: latents beside a stock StreamingDataset, images beside bare decoding and resizing. open: what a rank needs before
the first batch of 790 million samples. prepare: beside a loop that only decodes and copies. Ratios compare rates: above
1, ours is faster. Run it on a machine that does nothing else.

Each row is printed and written to FOLDER/rows.jsonl as soon as it is measured, also an error. The same command again
measures the missing rows.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, chosen, measure, run_rows, write
from diffusion.distributed import is_first_rank, local_rank, world_size
from diffusion.launch import CommandParser, run_command

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("step", "load", "open", "prepare")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    words = f"tables, {', '.join(PARTS)}; key.sub=value for the Trainer"
    parser.add_argument("words", nargs="+", metavar="PART", help=words)
    parser.add_argument("--out", type=Path, help="folder of rows.jsonl, created or continued")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="of names of rows, such as 'trainer/512/*'"
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: shows that it runs, not how fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--resolutions", type=int, nargs="+", help="default: 256 512 on a GPU, 32 on a CPU")
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: 16 64 128 on a GPU, 8 on a CPU")
    options = parser.parse_intermixed_args()
    options.parts = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    is_known = options.parts and (options.parts[0] == "tables" or set(options.parts) <= set(PARTS))
    if not is_known:
        parser.error(f"choose parts from {', '.join(PARTS)}, or tables")
    return options


def build(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Make the rows that are asked for, and describe the machine."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # Rows could not use a GPU that this process has initialised.
    import torch

    from benchmarks.parts import describe_machine, part_rows

    on_gpu = (options.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    resolutions = options.resolutions or ([256, 512] if on_gpu else [32])
    sizes = options.microbatches or ([16, 64, 128] if on_gpu else [8])
    rows = [
        row
        for part in options.parts
        for row in part_rows(part, device, resolutions, sizes, options.overrides, quick=options.quick)
    ]
    return chosen(rows, options.only), describe_machine(device)


def run(options: argparse.Namespace, path: Path) -> None:
    """Measure the rows: in processes of their own, or, on several ranks, in this one."""
    rows, machine = build(options)
    if world_size() == 1:
        run_rows(rows, machine, path)
        return
    from composer.utils import dist as composer_dist

    composer_dist.initialize_dist("gpu" if machine["type"] == "cuda" else "cpu")
    for row in rows:
        measured = measure(row)
        if is_first_rank():
            write(path, row, machine, **measured)


def main() -> None:
    """Measure, or make the tables."""
    options = parse_arguments()
    if options.parts[0] == "tables":
        from benchmarks.tables import write_tables

        files = [Path(name) for name in options.parts[1:]] or sorted((ROOT / "benchmarks").glob("*.jsonl"))
        write_tables(files, [ROOT / "README.md", ROOT / "docs" / "performance.md"])
        return
    with tempfile.TemporaryDirectory() as temporary:
        run(options, (options.out or Path(temporary)) / "rows.jsonl")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
