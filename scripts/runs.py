"""List, stop, resume and prune runs.

    python scripts/runs.py list [FOLDER ...]                  status and costs of each run
    python scripts/runs.py show RUN                           time of a run by activity
    python scripts/runs.py stop RUN                           save and end
    python scripts/runs.py resume RUN [key.sub=value ...]     restart under its supervisor, with its last command
    python scripts/runs.py prune FOLDER ... [--keep N] [--dry-run]

`prune` removes checkpoints beyond the newest N, but nothing of a running run.
"""

import argparse
import os
import sys
from pathlib import Path

from diffusion.errors import ConfigurationError, MachineError, UserError
from diffusion.launch import CommandParser, positive, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="action", required=True)
    listing = commands.add_parser("list", help="status and costs of each run")
    listing.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], help="default: runs/")
    for name, text in (("show", "time of a run by activity"), ("stop", "save and end")):
        commands.add_parser(name, help=text).add_argument("run", type=Path)
    resume = commands.add_parser("resume", help="restart under its supervisor")
    resume.add_argument("run", type=Path)
    resume.add_argument("overrides", nargs="*", metavar="key.sub=value", help="added to its last command")
    prune = commands.add_parser("prune", help="remove checkpoints that no run needs")
    prune.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that contain them")
    prune.add_argument("--keep", type=positive, help="checkpoints of each run that stay (trainer.keep_checkpoints)")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    return parser.parse_args()


def show_list(folders: list[Path]) -> None:
    """Print a line for each run."""
    from diffusion.operations.costs import read_costs, total
    from diffusion.operations.runs import find_runs, read_config, read_status
    from diffusion.reports.tables import text_table

    rows = [("run", "status", "step", "starts", "GPU-hours", "dollars")]
    for run in find_runs(folders):
        try:
            status = read_status(run, read_config(run))
        except ConfigurationError:
            rows.append((str(run), "written by another version", "", "", "", ""))
            continue
        starts = read_costs(run)
        totals, step = total(starts), starts[-1].reached if starts else 0
        dollars = f"{totals.dollars:,.2f}" if totals.dollars is not None and starts else "-"
        rows.append((str(run), status, f"{step:,}", str(len(starts)), f"{totals.gpu_hours:,.2f}", dollars))
    print("\n".join(text_table(rows)))


def show(run: Path) -> None:
    """Print a run's time by activity."""
    from diffusion.operations.costs import cost_table, read_costs
    from diffusion.operations.runs import read_config, read_status
    from diffusion.reports.run import read_run

    starts, gpu = read_costs(run), read_run(run).curve("utilisation/gpu")
    print(f"{run}: {read_status(run, read_config(run))}, step {starts[-1].reached if starts else 0:,}")
    print(*cost_table(starts, gpu.mean if gpu is not None and gpu.num_values else None), sep="\n")


def stop(run: Path) -> None:
    """Stop a run after a save."""
    from diffusion.operations import runs

    pids = runs.stop(run, runs.read_config(run))
    print(f"SIGTERM to {', '.join(map(str, pids))}: the run saves first; `list` shows its end")


def resume(run: Path, overrides: list[str]) -> None:
    """Become the supervisor of a run."""
    from diffusion.operations.runs import is_running, read_config, read_supervisor

    if is_running(run, read_config(run)):
        raise MachineError(f"{run} is running: stop it first (runs.py stop {run})")
    supervisor = read_supervisor(run)
    if supervisor is None or not supervisor.arguments:
        raise ConfigurationError(
            f"{run} was never started by scripts/supervise.py, so its command is unknown: repeat its command, which "
            "continues it"
        )
    program = Path(__file__).resolve().with_name("supervise.py")
    os.chdir(supervisor.folder)
    os.execv(sys.executable, [sys.executable, str(program), *supervisor.arguments, *overrides])


def prune(folders: list[Path], keep: int | None, *, is_dry: bool) -> None:
    """Remove checkpoints that no run needs."""
    from diffusion.checkpointing.layout import remove_checkpoint
    from diffusion.operations.runs import find_runs, find_superseded, read_config

    checkpoints: list[Path] = []
    for run in find_runs(folders):
        try:
            checkpoints += find_superseded(run, read_config(run), keep)
        except (UserError, OSError) as error:
            print(f"{run}  is skipped: {error}")
    for checkpoint in checkpoints:
        print(checkpoint)
        if not is_dry:
            remove_checkpoint(checkpoint)
    print(f"{len(checkpoints)} checkpoints {'would be removed' if is_dry else 'removed'}")


def main() -> None:
    """Run the command."""
    options = parse_arguments()
    if options.action == "list":
        show_list(options.folders)
    elif options.action == "show":
        show(options.run)
    elif options.action == "stop":
        stop(options.run)
    elif options.action == "resume":
        resume(options.run, options.overrides)
    else:
        prune(options.folders, options.keep, is_dry=options.dry_run)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
