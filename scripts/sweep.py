"""Run a sweep: one run at several points of its configuration.

    python scripts/sweep.py SWEEP.yaml key=value ...                                     # one after the other, here
    python scripts/sweep.py SWEEP.yaml key=value ... --launcher "composer -n 8"          # each on all GPUs
    python scripts/sweep.py SWEEP.yaml key=value ... --jobs 16 --launcher "sbatch --wait"  # sixteen jobs of a cluster
    python scripts/sweep.py SWEEP.yaml key=value ... --table                             # the table only

The file format is that of `wandb sweep`. The same command continues a sweep without repeating finished points. Prints a
table, best point first, and writes it to points.csv.
"""

import logging
import shlex
import signal
import sys
from pathlib import Path

from diffusion.launch import CommandParser, existing_file, positive, run_command


def main() -> None:
    """Run the unfinished points, print the table."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("sweep", type=existing_file, metavar="SWEEP.yaml", help="file of the sweep")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values of all points")
    parser.add_argument("--out", type=Path, default=Path("runs/sweeps"), help="parent of the folders of the sweeps")
    parser.add_argument(
        "--launcher", type=shlex.split, default=[sys.executable], help="${interpreter}; default: this Python"
    )
    parser.add_argument("--jobs", type=positive, default=1, help="simultaneous points; default: 1")
    parser.add_argument("--seed", type=int, default=17, help="of random sweeps")
    parser.add_argument("--table", action="store_true", help="write the table, and run nothing")
    options = parser.parse_intermixed_args()

    from diffusion.errors import MachineError, explained_writes
    from diffusion.files import write_atomically
    from diffusion.sweeps import LOG, make_points, read_sweep, result_table, run_points

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sweep = read_sweep(options.sweep)
    folder = options.out / sweep.get("name", options.sweep.stem)
    points = make_points(sweep, folder, interpreter=options.launcher, overrides=options.overrides, seed=options.seed)
    failed = {} if options.table else run_points(points, num_jobs=options.jobs)
    table = result_table(points, sweep["metric"], failed)
    with explained_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "points.csv", table.to_csv(index=False))
    print(table.to_string(index=False, na_rep="", float_format="%.4g"))
    if failed:
        listed = "\n".join(f"  - {folder / name / LOG}: {reason}" for name, reason in failed.items())
        raise MachineError(f"{len(failed)} points did not finish. The same command runs them again:\n{listed}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
