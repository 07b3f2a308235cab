"""Run a sweep: one run at several points of its configuration.

    python scripts/sweep.py yamls/sweeps/learning_rate.yaml                              # one after the other, here
    python scripts/sweep.py yamls/sweeps/learning_rate.yaml --launcher "composer -n 8"   # each on all GPUs
    python scripts/sweep.py SWEEP.yaml --jobs 16 --launcher "sbatch --wait"              # sixteen jobs of a cluster
    python scripts/sweep.py yamls/sweeps/learning_rate.yaml --table                      # the table only

The file format is that of `wandb sweep`. The same command continues a sweep without repeating finished points. Prints a
table, best point first, and writes points.csv and points.png.
"""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", metavar="SWEEP.yaml", help="sweeps, and key.sub=value for all points")
    parser.add_argument("--out", type=Path, default=Path("runs/sweeps"), help="parent of the folders of the sweeps")
    parser.add_argument("--launcher", help="${interpreter} in the command (default: this Python)")
    parser.add_argument("--jobs", type=int, default=1, help="simultaneous points (default 1)")
    parser.add_argument("--seed", type=int, default=17, help="of random sweeps")
    parser.add_argument("--table", action="store_true", help="write table and plot, and run nothing")
    return parser.parse_intermixed_args()


def run_sweep(path: Path, options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Run one sweep; return the log and the reason of each unfinished point."""
    from diffusion import sweeps

    sweep = sweeps.read_sweep(path)
    folder = options.out / sweep.name
    interpreter = shlex.split(options.launcher) if options.launcher else [sys.executable]
    points = sweeps.make_points(sweep, folder, interpreter=interpreter, overrides=overrides, seed=options.seed)
    failed = {} if options.table else sweeps.run_points(points, num_jobs=options.jobs)
    keys, metric = list(sweep.settings.parameters), sweep.settings.metric
    table = sweeps.result_table(points, metric, failed)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "points.csv", index=False)
    sweeps.draw(table, keys, metric, folder / "points.png")
    print(sweeps.format_table(table, keys, metric))
    return [f"{point.folder / sweeps.LOG}: {failed[point.name]}" for point in points if point.name in failed]


def main() -> None:
    """Run the sweeps one after the other."""
    from diffusion.errors import MachineError

    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    overrides = [word for word in options.sweeps if "=" in word]
    files = [Path(word) for word in options.sweeps if "=" not in word]
    if unfinished := [problem for path in files for problem in run_sweep(path, options, overrides)]:
        listed = "\n".join(f"  - {problem}" for problem in unfinished)
        raise MachineError(f"{len(unfinished)} points did not finish. The same command runs them again:\n{listed}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
