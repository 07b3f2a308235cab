"""See, stop, continue and tidy up runs.

    python scripts/runs.py list [FOLDER ...]                  where each run stands, and what it has cost
    python scripts/runs.py show RUN                           what its time went into
    python scripts/runs.py stop RUN                           it saves and ends
    python scripts/runs.py resume RUN [key.sub=value ...]     under its supervisor, with the command of the last time
    python scripts/runs.py prune FOLDER ... [--keep N] [--dry-run]

`prune` removes checkpoints beyond the newest N, caches of finished runs and shared memory of processes that have ended,
never anything of a run that is at work.
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
    listing = commands.add_parser("list", help="where each run stands, and what it has cost")
    listing.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], help="runs/ if none is given")
    for name, text in (("show", "what its time went into"), ("stop", "let it save and end")):
        commands.add_parser(name, help=text).add_argument("run", type=Path)
    resume = commands.add_parser("resume", help="start it again under its supervisor")
    resume.add_argument("run", type=Path)
    resume.add_argument("overrides", nargs="*", metavar="key.sub=value", help="added to the command of the last time")
    prune = commands.add_parser("prune", help="remove what no run needs any more")
    prune.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that hold them")
    prune.add_argument(
        "--keep", type=int, help="whole checkpoints of each run that stay; else trainer.keep_checkpoints"
    )
    prune.add_argument("--dry-run", action="store_true", help="only tell what would be removed")
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
    """Print what a run's time went into."""
    from diffusion.operations.costs_text import describe_costs
    from diffusion.operations.runs import read_config, read_overview
    from diffusion.reports.run import read_run

    overview = read_overview(run, read_config(run))
    gpu = read_run(run).curve("utilisation/gpu")
    print(describe_costs(overview, gpu.mean if gpu is not None and gpu.num_values else None))


def resume(run: Path, overrides: list[str]) -> None:
    """Become the supervisor of a run."""
    from diffusion.operations.runs import is_live, read_config, read_supervision

    if is_live(run, read_config(run)):
        raise MachineError(f"{run} is at work: stop it first (runs.py stop {run}), or let it go on")
    supervision = read_supervision(run)
    if supervision is None or not supervision.arguments:
        raise ConfigurationError(
            f"{run} was never started by scripts/supervise.py, so its command is not known: start the same command as "
            "before, which continues it"
        )
    program = Path(__file__).resolve().with_name("supervise.py")
    os.chdir(supervision.folder)
    os.execv(sys.executable, [sys.executable, str(program), *supervision.arguments, *overrides])


def prune(folders: list[Path], keep: int | None, *, is_dry: bool) -> None:
    """Remove what no run needs."""
    from diffusion.operations.checks.verdicts import size_text
    from diffusion.operations.pruning import find_dead_memory, find_removable, remove_all
    from diffusion.operations.runs import find_runs, read_config

    if keep is not None and keep < 1:
        raise ConfigurationError(f"--keep {keep}: at least 1 checkpoint stays, from which the run continues")
    found = find_dead_memory()
    for run in find_runs(folders):
        try:
            found += find_removable(run, read_config(run), keep)
        except (UserError, OSError) as error:
            print(f"{run}  stays as it is: {error}")
    for one in found:
        print(f"{one.path}  {size_text(one.num_bytes)}  ({one.why})")
    failures = [] if is_dry else remove_all(found)
    what = "would be removed" if is_dry else "removed"
    print(f"{len(found) - len(failures)} things of together {size_text(sum(one.num_bytes for one in found))} {what}")
    if failures:
        raise MachineError("; ".join(failures))


def main() -> None:
    """Do what the command line says."""
    options = parse_arguments()
    if options.action == "list":
        show_list(options.folders)
    elif options.action == "show":
        show(options.run)
    elif options.action == "stop":
        from diffusion.operations.runs import read_config, stop

        asked = stop(options.run, read_config(options.run))
        print(f"asked {', '.join(map(str, asked))} to end: it saves first; `list` shows when it is done")
    elif options.action == "resume":
        resume(options.run, options.overrides)
    else:
        prune(options.folders, options.keep, is_dry=options.dry_run)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
