"""List, stop, resume and prune runs.

    python scripts/runs.py list [FOLDER ...]                  status and costs of each run
    python scripts/runs.py show RUN                           time of a run by activity
    python scripts/runs.py stop RUN                           save and end
    python scripts/runs.py resume RUN [key.sub=value ...]     restart under its supervisor, with its last command
    python scripts/runs.py prune FOLDER ... [--keep N] [--dry-run]

`prune` removes checkpoints beyond the newest N and caches of finished runs, but nothing of a running run.
"""

import argparse
import os
import sys
from pathlib import Path

from diffusion.errors import ConfigurationError, MachineError, UserError
from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    listing = commands.add_parser("list", help="status and costs of each run")
    listing.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], help="default: runs/")
    for name, text in (("show", "time of a run by activity"), ("stop", "save and end")):
        commands.add_parser(name, help=text).add_argument("run", type=Path)
    resume = commands.add_parser("resume", help="restart under its supervisor")
    resume.add_argument("run", type=Path)
    resume.add_argument("overrides", nargs="*", metavar="key.sub=value", help="added to its last command")
    prune = commands.add_parser("prune", help="remove what no run needs")
    prune.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that contain them")
    prune.add_argument("--keep", type=int, help="whole checkpoints of each run that stay (trainer.keep_checkpoints)")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    return parser.parse_args()


def show_list(folders: list[Path]) -> None:
    """Print a line for each run."""
    from diffusion.operations.costs import total
    from diffusion.operations.runs import find_runs, read_config, read_overview
    from diffusion.reports.tables import text_table

    rows = [("run", "status", "step", "starts", "GPU-hours", "dollars")]
    for folder in find_runs(folders):
        try:
            overview = read_overview(folder, read_config(folder))
        except ConfigurationError:
            rows.append((str(folder), "written by another version", "", "", "", ""))
            continue
        totals = total(overview.starts)
        dollars = f"{totals.dollars:,.2f}" if totals.dollars is not None and overview.starts else "-"
        counts = (f"{overview.step:,}", str(len(overview.starts)), f"{totals.gpu_hours:,.2f}")
        rows.append((str(folder), overview.status, *counts, dollars))
    print("\n".join(text_table(rows)))


def show(run: Path) -> None:
    """Print a run's time by activity."""
    from diffusion.operations.costs import cost_table
    from diffusion.operations.runs import read_config, read_overview
    from diffusion.reports.run import read_run

    overview = read_overview(run, read_config(run))
    gpu = read_run(run).curve("utilisation/gpu")
    print(f"{overview.folder}: {overview.status}, step {overview.step:,}")
    print(*cost_table(overview.starts, gpu.mean if gpu is not None and gpu.num_values else None), sep="\n")


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
    """Remove what no run needs."""
    from diffusion.operations.checks.verdicts import size_text
    from diffusion.operations.runs import Removable, find_removable, find_runs, read_config, remove_all

    if keep is not None and keep < 1:
        raise ConfigurationError(f"--keep {keep}: at least 1 checkpoint stays, from which the run continues")
    found: list[Removable] = []
    for run in find_runs(folders):
        try:
            found += find_removable(run, read_config(run), keep)
        except (UserError, OSError) as error:
            print(f"{run}  is skipped: {error}")
    for one in found:
        print(f"{one.path}  {size_text(one.num_bytes)}  ({one.why})")
    failures = [] if is_dry else remove_all(found)
    what = "would be removed" if is_dry else "removed"
    print(f"{what}: {len(found) - len(failures)} items, {size_text(sum(one.num_bytes for one in found))}")
    if failures:
        raise MachineError("; ".join(failures))


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
