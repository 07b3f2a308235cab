"""How fast it is: training steps, and the way of the data beside its limits.

    python -m benchmarks plan [1] [2] [3] [4] --out FOLDER      # the first hour on a GPU, call by call
    python -m benchmarks step --out FOLDER                      # the Trainer, and the parts of its step
    composer -n 8 -m benchmarks step trainer.parallelism=fsdp   # on several GPUs
    python -m benchmarks load open prepare [--quick]
    python -m benchmarks tables [FILE ...]                      # the tables of README and docs/performance.md

plan: 1 correctness and the rates of single operators; 2 steps at 512 px; 3 the Trainer at 256 px; 4 losses over 100
steps beside fp32, the stall of a checkpoint, samples. A call ends within --minutes. The next call measures the rows
for which time was short, after its own.

load: latents beside a stock StreamingDataset, images beside bare decoding and resizing. open: what a rank needs before
the first batch of 790 million samples. prepare: beside a loop that only decodes and copies. Ratios compare rates: above
1, ours is faster. Run it on a machine that does nothing else.

Each row is printed and written to FOLDER/rows.jsonl as soon as it is measured, also an error. The same command again
measures the missing rows.
"""

import argparse
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, chosen, measure, run_rows, write
from diffusion.distributed import local_rank, rank, world_size
from diffusion.launch import CommandParser, run_command

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("step", "load", "open", "prepare")
CALLS = ("1", "2", "3", "4")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    words = f"plan, tables, {', '.join(PARTS)}; key.sub=value for the Trainer"
    parser.add_argument("words", nargs="+", metavar="PART", help=words)
    parser.add_argument("--out", type=Path, help="folder of rows.jsonl, created or continued")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="of names of rows, such as 'step/512/*'"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="of each call of the plan (default 9.5)")
    parser.add_argument("--quick", action="store_true", help="little of everything: shows that it runs, not how fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--resolutions", type=int, nargs="+", help="default: 256 512 on a GPU, 32 on a CPU")
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: 16 64 128 on a GPU, 8 on a CPU")
    options = parser.parse_intermixed_args()
    options.parts = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    options.command, *rest = options.parts or [""]
    if options.command == "plan" and options.out is None:
        parser.error("plan needs --out FOLDER, to continue there")
    known, given = (CALLS, rest) if options.command == "plan" else (PARTS, options.parts)
    if options.command != "tables" and (unknown := [part for part in given if part not in known]):
        parser.error(f"unknown part {unknown[0]}: choose from {', '.join(known)}")
    return options


def build(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Make the rows that are asked for, and describe the machine."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # Rows could not use a GPU that this process has initialised.
    import torch

    from benchmarks.plan import Benchmark, describe_machine

    on_gpu = (options.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    benchmark = Benchmark(device, options.overrides, quick=options.quick)
    if options.command == "plan":
        calls = [int(call) for call in options.parts[1:] or CALLS]
        order = [*calls, *(call for call in range(1, calls[-1]) if call not in calls)]
        rows = [row for call in order for row in benchmark.call(call)]
    else:
        resolutions = options.resolutions or ([256, 512] if on_gpu else [32])
        sizes = options.microbatches or ([16, 64, 128] if on_gpu else [8])
        rows = [row for part in options.parts for row in benchmark.part(part, resolutions, sizes)]
    return chosen(rows, options.only), describe_machine(device)


def run(options: argparse.Namespace, path: Path) -> None:
    """Measure the rows: in processes of their own, or, on several ranks, in this one."""
    start = time.monotonic()
    rows, machine = build(options)
    if world_size() == 1:
        num_calls = len(options.parts[1:] or CALLS)
        minutes = options.minutes * num_calls if options.command == "plan" else math.inf
        run_rows(rows, machine, path, start + 60 * minutes)
        return
    from composer.utils import dist

    dist.initialize_dist("gpu" if machine["type"] == "cuda" else "cpu")
    for row in rows:
        measured = measure(row)
        if rank() == 0:
            write(path, row, machine, **measured)


def main() -> None:
    """Measure, or make the tables."""
    options = parse_arguments()
    if options.command == "tables":
        from benchmarks.tables import write_tables

        files = [Path(name) for name in options.parts[1:]] or sorted((ROOT / "benchmarks").glob("*.jsonl"))
        write_tables(files, [ROOT / "README.md", ROOT / "docs" / "performance.md"])
        return
    with tempfile.TemporaryDirectory() as temporary:
        run(options, (options.out or Path(temporary)) / "rows.jsonl")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
