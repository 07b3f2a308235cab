"""Run a sweep: the same run at several points of its configuration, each once.

    python scripts/sweep.py yamls/sweeps/learning_rate.yaml                              # one after the other, here
    python scripts/sweep.py yamls/sweeps/learning_rate.yaml --launcher "composer -n 8"   # each on all GPUs
    python scripts/sweep.py SWEEP.yaml --jobs 16 --launcher "sbatch --wait"              # sixteen jobs of a cluster
    python scripts/sweep.py yamls/sweeps/learning_rate.yaml --table                      # only what is there

The files are those of `wandb sweep`. The same command again continues: finished points are not repeated. Prints a
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
    parser.add_argument("--out", type=Path, default=Path("runs/sweeps"), help="for a folder of each sweep")
    parser.add_argument(
        "--launcher", help="what starts run.py, in the place of ${interpreter}; default: a fork of this"
    )
    parser.add_argument("--jobs", type=int, default=1, help="points that run at a time (default 1)")
    parser.add_argument("--seed", type=int, default=17, help="of random sweeps")
    parser.add_argument("--table", action="store_true", help="run nothing")
    return parser.parse_intermixed_args()


def train_forked(command: Sequence[str]) -> int:
    """Train as a command says, in this process."""
    from diffusion.cli import train_command
    from diffusion.operations.command import split_command

    yaml, overrides = split_command(command)
    return run_command(lambda: train_command([yaml, *overrides], say=print))


def run_sweep(path: Path, options: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Run one sweep; return what is wrong with points that did not finish."""
    from diffusion.sweeps.definition import read_sweep
    from diffusion.sweeps.points import make_points
    from diffusion.sweeps.results import PLOT, TABLE, collect, draw, format_table, write_table
    from diffusion.sweeps.running import LOG, run_points

    sweep = read_sweep(path)
    folder = options.out / sweep.name
    interpreter = shlex.split(options.launcher) if options.launcher else [sys.executable]
    points = make_points(sweep, folder, interpreter=interpreter, overrides=overrides, seed=options.seed)
    is_forked = options.launcher is None and "${interpreter}" in sweep.command and sweep.settings.program == "run.py"
    failed: dict[str, str] = {}
    if not options.table:
        if is_forked:
            import diffusion.train as imported_once_for_all_points

            assert imported_once_for_all_points
        failed = run_points(points, num_jobs=options.jobs, train=train_forked if is_forked else None)
    keys, metric = list(sweep.settings.parameters), sweep.settings.metric
    rows = collect(points, metric, failed)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(rows, folder / TABLE)
    draw(rows, keys, metric, folder / PLOT)
    print(format_table(rows, keys, metric))
    return [f"{point.folder / LOG}: {failed[point.name]}" for point in points if point.name in failed]


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
