"""How fast it is: training steps beside what the machine can do, and the way of the data beside its limits.

    python -m benchmarks plan [1] [2] [3] [4] --out FOLDER     # the first 40 minutes on a GPU, in four calls
    python -m benchmarks step ratio parity bytes save [--out FOLDER]
    python -m benchmarks prepare load encode [--out FOLDER] [--quick]
    composer -n 8 -m benchmarks step trainer.parallelism=fsdp   # the Trainer on several GPUs
    python -m benchmarks tables [FILE ...]                      # the tables of README and docs/performance.md

plan: 1 correctness and the rates of single operators; 2 steps at 512 px; 3 the Trainer at 256 px; 4 losses over 100
steps beside fp32, the stall of a checkpoint, samples. A call ends within --minutes; rows for which time is short are
left for the next call, which measures them after its own.

step: the bare U-Net in fp32 and with each option added, a plain loop with diffusers, and the Trainer, with the parts of
its step. ratio: the Trainer's step over the plain loop's, in turns on the same U-Net. parity: the loss with each option
beside fp32. bytes: what a step moves apart from matrix products. save: checkpoints beside a raw file. prepare: beside a
loop that only decodes and copies. load: latents beside a stock StreamingDataset and webdataset, images beside bare
decoding and resizing. encode: beside the bare networks (the full-size VAE of SD2 with random weights). Ratios of data
and checkpoints are rates: above 1 is faster than what is named. Run it on a machine that does nothing else.

Each row is printed and written to FOLDER/rows.jsonl as soon as it is measured, an error in place of its result as well.
The same command again measures the rows that are not there.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, chosen, run_here, run_rows
from diffusion.distributed import local_rank, rank, world_size
from diffusion.launch import CommandParser, run_command

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("step", "ratio", "parity", "bytes", "save", "prepare", "load", "encode")
CALLS = ("1", "2", "3", "4")
FILE = "rows.jsonl"
WEEK_MINUTES = 10080


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = f"plan, tables, {', '.join(PARTS)}; key.sub=value for the Trainer"
    parser.add_argument("words", nargs="+", metavar="PART", help=words)
    parser.add_argument("--out", type=Path, help="folder of rows.jsonl, created or continued")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="of names of rows, such as 'step/512/*'"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="of each call of the plan (default 9.5)")
    parser.add_argument("--quick", action="store_true", help="little of everything: shows that it runs, not how fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    kinds = ("stable_diffusion_2", "tiny")
    parser.add_argument("--architecture", choices=kinds, help="default: stable_diffusion_2 on a GPU, tiny on a CPU")
    parser.add_argument("--resolutions", type=int, nargs="+", help="default: 256 512 on a GPU, 32 on a CPU")
    parser.add_argument("--microbatches", type=int, nargs="+", help="default: 16 64 128 on a GPU, 8 on a CPU")
    options = parser.parse_intermixed_args()
    options.parts = [word for word in options.words if "=" not in word]
    options.overrides = [word for word in options.words if "=" in word]
    known = CALLS if options.parts[:1] == ["plan"] else PARTS
    for part in options.parts[1:] if options.parts[:1] == ["plan"] else options.parts:
        if part not in known and options.parts[0] != "tables":
            parser.error(f"{part} is nothing that is measured: choose from {', '.join(known)}")
    if options.parts[:1] == ["plan"] and options.out is None:
        parser.error("plan needs --out FOLDER, to continue there")
    return options


def build(options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Make the rows that are asked for, and describe the machine."""
    import torch

    from benchmarks.plan import Benchmark, describe_machine
    from diffusion.config.model import Architecture

    on_gpu = (options.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
    device = torch.device("cuda", local_rank()) if on_gpu else torch.device("cpu")
    default = Architecture.stable_diffusion_2 if on_gpu else Architecture.tiny
    benchmark = Benchmark(
        device=device,
        architecture=Architecture(options.architecture or default),
        overrides=options.overrides,
        quick=options.quick,
    )
    if options.parts[0] == "plan":
        calls = [int(call) for call in options.parts[1:] or CALLS]
        order = [*calls, *(call for call in range(1, calls[-1]) if call not in calls)]
        rows = [row for call in order for row in benchmark.call(call)]
    else:
        resolutions = options.resolutions or ([256, 512] if on_gpu else [32])
        sizes = options.microbatches or ([16, 64, 128] if on_gpu else [8])
        rows = [row for part in options.parts for row in benchmark.part(part, resolutions, sizes)]
    return chosen(rows, options.only), describe_machine(device)


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Measure the rows; the exit code."""
    start = time.monotonic()
    if world_size() > 1:
        from composer.utils import dist

        rows, machine = build(options)
        dist.initialize_dist("gpu" if machine["type"] == "cuda" else "cpu")
        run_here(rows, machine, folder / FILE if rank() == 0 else None)
        return 0
    is_plan = options.parts[0] == "plan"
    minutes = options.minutes * len(options.parts[1:] or CALLS) if is_plan else WEEK_MINUTES
    return 0 if run_rows(partial(build, options), folder / FILE, start + 60 * minutes) else 1


def main() -> None:
    """Measure, or make the tables."""
    options = parse_arguments()
    if options.parts[0] == "tables":
        from benchmarks.tables import write_tables

        files = [Path(name) for name in options.parts[1:]] or sorted((ROOT / "benchmarks").glob("*.jsonl"))
        write_tables(files, [ROOT / "README.md", ROOT / "docs" / "performance.md"])
        return
    with tempfile.TemporaryDirectory() as temporary:
        if code := measure(options, options.out or Path(temporary)):
            raise SystemExit(code)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
