"""List, stop, resume and prune runs; what they cost, and what is stored for them.

    python scripts/runs.py list [FOLDER ...]                  status and costs of each run
    python scripts/runs.py show RUN                           time of a run by activity
    python scripts/runs.py stop RUN                           save and end
    python scripts/runs.py resume RUN [key.sub=value ...] [--yes]     restart, with the last command of its supervisor
    python scripts/runs.py costs RUN [--storage-price P] [--egress-price P]     GPU time, storage, traffic; its budget
    python scripts/runs.py inventory ROOT ... [--runs FOLDER ...]               data, checkpoints, caches; who uses them
    python scripts/runs.py prune FOLDER ... [--keep N] [--yes]

A root is a folder or s3://bucket/prefix. `prune` lists whole checkpoints beyond the newest N, and with `--yes` removes
them; never those of a running run.
"""

import argparse
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

from diffusion.errors import ConfigurationError, MachineError, UserError
from diffusion.launch import CommandParser, positive, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="ACTION")
    listing = commands.add_parser("list", help="status and costs of each run")
    listing.add_argument("folders", nargs="*", type=Path, default=[Path("runs")], help="default: runs/")
    for name, text in (("show", "time of a run by activity"), ("stop", "save and end")):
        commands.add_parser(name, help=text).add_argument("run", type=Path)
    resuming = commands.add_parser("resume", help="restart under its supervisor")
    resuming.add_argument("run", type=Path)
    resuming.add_argument("overrides", nargs="*", metavar="key.sub=value", help="added to its last command")
    text = "run the command of a folder that was moved or copied"
    resuming.add_argument("--yes", action="store_true", dest="is_confirmed", help=text)
    costs = commands.add_parser(
        "costs", help="GPU time, storage and traffic in dollars, and whether the budget suffices"
    )
    costs.add_argument("run", type=Path)
    costs.add_argument(
        "--gpu-price", type=float, help="dollars per GPU-hour, if the run has no plan.price_per_gpu_hour"
    )
    costs.add_argument("--egress-price", type=float, help="dollars per TB read from the store")
    inventory = commands.add_parser("inventory", help="data sets, checkpoints and caches, and which runs use them")
    inventory.add_argument("roots", nargs="+", metavar="ROOT", help="folder, or s3://bucket/prefix")
    inventory.add_argument(
        "--runs",
        nargs="+",
        type=Path,
        default=[],
        dest="folders",
        metavar="RUN",
        help="run folders, or folders that contain them",
    )
    for command in (costs, inventory):
        command.add_argument("--storage-price", type=float, help="dollars per TB and month")
    pruning = commands.add_parser("prune", help="remove checkpoints that no run needs")
    pruning.add_argument("folders", nargs="+", type=Path, help="run folders, or folders that contain them")
    pruning.add_argument("--keep", type=positive, help="checkpoints of each run that stay (trainer.keep_checkpoints)")
    text = "remove them; without it they are only listed"
    pruning.add_argument("--yes", action="store_true", dest="is_confirmed", help=text)
    actions = {
        "list": show_list, "show": show, "stop": stop, "resume": resume, "costs": show_costs,
        "inventory": show_inventory, "prune": prune,
    }  # fmt: skip
    for name, action in actions.items():
        commands.choices[name].set_defaults(action=action)
    return parser.parse_args()


def show_list(folders: list[Path]) -> None:
    """Print a line for each run."""
    from diffusion.formats.run_folder import find_runs
    from diffusion.operations.costs import read_costs, total
    from diffusion.operations.runs import read_status
    from diffusion.reports.tables import text_table

    rows = [("run", "status", "step", "starts", "GPU-hours", "dollars")]
    for run in find_runs(folders):
        starts = read_costs(run)
        totals, step = total(starts), starts[-1].reached if starts else 0
        dollars = f"{totals.dollars:,.2f}" if totals.dollars is not None and starts else "-"
        rows.append((str(run), read_status(run), f"{step:,}", str(len(starts)), f"{totals.gpu_hours:,.2f}", dollars))
    print("\n".join(text_table(rows)))


def show(run: Path) -> None:
    """Print a run's time by activity."""
    from diffusion.operations.costs import cost_table, read_costs
    from diffusion.operations.runs import read_status
    from diffusion.reports.run import read_run

    starts, gpu = read_costs(run), read_run(run).curve("utilisation/gpu")
    print(f"{run}: {read_status(run)}, step {starts[-1].reached if starts else 0:,}")
    print(*cost_table(starts, gpu.mean if gpu is not None else None), sep="\n")


def stop(run: Path) -> None:
    """Stop a run after a save."""
    from diffusion.formats.run_folder import read_config
    from diffusion.operations import runs

    pids = runs.stop(run, read_config(run))
    print(f"SIGTERM to {', '.join(map(str, pids))}: the run saves first; `list` shows its end")


def resume(run: Path, overrides: list[str], *, is_confirmed: bool = False) -> None:
    """Become the supervisor of a run; of one that was moved or copied, if the user has confirmed its command."""
    from diffusion.config.secrets import redact_arguments
    from diffusion.formats.run_folder import read_config
    from diffusion.operations.runs import is_running, read_supervisor

    if is_running(run):
        raise MachineError(f"{run} is running: stop it first (runs.py stop {run})")
    supervisor = read_supervisor(run)
    if supervisor is None or not supervisor.arguments:
        raise ConfigurationError(
            f"{run} was never started by scripts/supervise.py, so its command is unknown: repeat its command, which "
            "continues it"
        )
    trained = Path(supervisor.folder, Path(read_config(run).output_folder).expanduser())
    is_named = any(override.startswith("output_folder=") for override in overrides)
    command = shlex.join(redact_arguments(["supervise.py", *supervisor.arguments, *overrides]))
    command = command.encode("unicode_escape").decode()  # It may be someone else's.
    is_here = Path(supervisor.folder).is_absolute() and trained.resolve() == run.resolve()
    if not is_here and not (is_named and is_confirmed):
        raise ConfigurationError(
            f"{run} was moved or copied: its command trains {trained}. Give output_folder={run.resolve()}, too, and "
            f"--yes if you know the command, which is run as it stands there: {command}"
        )
    print(command, flush=True)
    program = Path(__file__).resolve().with_name("supervise.py")
    try:
        os.chdir(supervisor.folder)
    except OSError as error:
        raise ConfigurationError(
            f"{supervisor.folder}, in which {run} was started, cannot be entered: {error.strerror}. Restore it, or "
            "repeat the command of the run elsewhere"
        ) from error
    os.execv(sys.executable, [sys.executable, str(program), *supervisor.arguments, *overrides])


def show_costs(run: Path, **prices: float | None) -> None:
    """Print what a run has cost, what it will have cost at its last step, and whether its budget suffices."""
    from diffusion.formats.run_folder import read_config
    from diffusion.operations.costs import project, read_costs
    from diffusion.operations.inventory import expense_rows, stored_bytes
    from diffusion.operations.runs import read_status
    from diffusion.reports.tables import text_table

    config, starts = read_config(run), read_costs(run)
    if not starts:
        raise ConfigurationError(f"{run} has not trained yet: it has no costs.jsonl")
    size, absent = stored_bytes(run, config)
    num_steps = config.planned_steps()
    print(f"{run}: {read_status(run)}, step {starts[-1].reached:,} of {num_steps:,}")
    print(*text_table(expense_rows(starts, size, num_steps, **prices)), sep="\n")
    for folder in absent:
        print(f"not on this machine, and not counted: {folder}")
    for line in project(starts, num_steps, config.operations):
        print(line)


def show_inventory(roots: list[str], folders: list[Path], storage_price: float | None) -> None:
    """Print what is stored below roots, and which runs and evaluations use it."""
    from diffusion.evaluation.protocol import Result
    from diffusion.formats.run_folder import find_runs, read_config
    from diffusion.operations.inventory import assign_users, find_items, inventory_rows, locations_of_model, read_uses
    from diffusion.reports.run import find_results
    from diffusion.reports.tables import text_table

    uses: dict[str, list[str]] = {}
    for run in find_runs(folders):
        try:
            uses[str(run)] = read_uses(run, read_config(run))
        except UserError as error:
            print(f"{run}  is skipped: {error}")
    for path in {path for folder in folders for path in find_results(folder)}:
        try:
            locations = locations_of_model(Result.read(path).path)
        except UserError as error:
            print(f"{path}  is skipped: {error}")
            continue
        uses.setdefault(f"evaluation {path.parent.parent}", []).extend(locations)
    items = [item for root in roots for item in find_items(root)]
    assign_users(items, uses)
    print(*text_table(inventory_rows(items, storage_price)), sep="\n")


def prune(folders: list[Path], keep: int | None, *, is_confirmed: bool) -> None:
    """Remove checkpoints that no run needs."""
    from diffusion.config.fields import size_text
    from diffusion.formats.run_folder import find_runs, read_config
    from diffusion.operations.pruning import find_superseded, initial_checkpoint, may_be, num_bytes, remove
    from diffusion.operations.runs import checkpoints_of
    from diffusion.storage import is_url

    configs = {}
    for run in find_runs(folders):
        try:
            configs[run] = read_config(run)
        except UserError as error:
            print(f"{run}  is skipped: {error}")
    beginnings = {initial_checkpoint(run, config) for run, config in configs.items()}
    found = {run: checkpoints_of(run, config) for run, config in configs.items()}
    locations = {run: one if is_url(one) else os.path.realpath(one) for run, one in found.items()}
    users = Counter({run.resolve(): location for run, location in locations.items()}.values())
    num_removed = size = 0
    for run, config in configs.items():
        try:
            if users[locations[run]] > 1:
                raise ConfigurationError(f"another run has its checkpoints in {locations[run]}, too")
            for checkpoint in find_superseded(run, config, keep):
                if any(may_be(one, str(checkpoint)) for one in beginnings):
                    print(f"{checkpoint}  stays: another run began with it")
                    continue
                print(checkpoint)
                num_removed, size = num_removed + 1, size + num_bytes(checkpoint)
                if is_confirmed:
                    remove(checkpoint)
        except (UserError, OSError) as error:
            print(f"{run}  is skipped: {error}")
    what = f"{num_removed} checkpoints, {size_text(size)}"
    print(f"{what}, removed" if is_confirmed else f"{what}, would be removed: add --yes")


def main() -> None:
    """Run the command."""
    options = vars(parse_arguments())
    options.pop("action")(**options)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
