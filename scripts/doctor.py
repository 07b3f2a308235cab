"""Check what a run needs before it starts: machine, disks, data, and with several ranks whether they fit together.

    python scripts/doctor.py CONFIG.yaml [key=value ...]
    composer -n 2 scripts/doctor.py CONFIG.yaml [key=value ...] [--deep] [--json FILE] [--hosts FILE [--nodes N]]

Ends with exit code 2 if there is a problem, with 0 if there are warnings at most. With --hosts it names
the hosts that are fit, and a problem of the others is none.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.config.loading import load_config
from diffusion.distributed import agree, local_world_size, rank
from diffusion.errors import UserError
from diffusion.launch import CommandParser, run_command

if TYPE_CHECKING:
    from diffusion.config.data import DataConfig
    from diffusion.operations.checks.verdicts import Verdict


def doctor(arguments: Sequence[str]) -> None:
    """Check, print the table, and end with exit code 2 if there is a problem."""
    parser = CommandParser(prog="doctor.py", description="Check what a run needs before it starts.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to this file")
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="write the hosts to train on to this file")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="of these so many; the others are spare (all if left out)"
    )
    parser.add_argument("--deep", action="store_true", help="read all shards and compare their hashes with the index")
    parser.add_argument(
        "--patience", type=float, default=120.0, metavar="SECONDS", help="that ranks wait for each other"
    )
    options = parser.parse_intermixed_args(list(arguments))
    config = load_config(options.config, options.overrides)

    from diffusion.operations.checks.doctor import diagnose
    from diffusion.operations.checks.node_measures import NoAnswerError
    from diffusion.operations.checks.verdicts import Level, Verdict, format_table, to_json

    silent = None
    try:
        verdicts = diagnose(config, options.patience, deep=options.deep)
    except NoAnswerError as error:
        silent = error
        where = ", ".join(f"node {node}" for node in error.nodes)
        verdicts = [Verdict(check="answers", level=Level.problem, what=str(error), where=where)]
    if rank() == 0:
        print(format_table(verdicts), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(to_json(verdicts), indent=2) + "\n", encoding="utf-8")
        if options.hosts is not None:
            write_hosts(options.hosts, config.data, options.nodes, verdicts)
    if silent is not None:
        raise silent
    everywhere = options.hosts is not None  # What concerns single machines only is answered by the choice of hosts.
    num_problems = sum(verdict.level is Level.problem and not (everywhere and verdict.where) for verdict in verdicts)
    if num_problems:
        agree(lambda: refuse(num_problems))


def write_hosts(file: Path, data: "DataConfig", num_nodes: int | None, verdicts: "Sequence[Verdict]") -> None:
    """Write the hosts that are to train, on one line, and say which are left out."""
    from diffusion.operations.checks.hosts import choose_hosts
    from diffusion.operations.checks.node_measures import hosts_of_nodes
    from diffusion.operations.checks.nodes import unfit_nodes

    hosts = hosts_of_nodes()
    names = [f"node {number}" for number in range(len(hosts))]
    blamed = unfit_nodes(names, verdicts)
    choice = choose_hosts(
        hosts,
        [number for number, name in enumerate(names) if name in blamed],
        wanted=num_nodes or len(hosts),
        ranks_per_node=local_world_size(),
        data=data,
    )
    file.write_text(" ".join(choice.hosts) + "\n", encoding="utf-8")
    print(f"{choice.world_size} ranks on {', '.join(choice.hosts)}")
    for what, left_out in (("unfit", choice.unfit), ("spare", choice.spare)):
        if left_out:
            print(f"{what}: {', '.join(left_out)}")


def refuse(num_problems: int) -> None:
    """Raise the error that ends all ranks with exit code 2."""
    found = "1 problem" if num_problems == 1 else f"{num_problems} problems"
    raise UserError(f"{found} found: see the table")


if __name__ == "__main__":
    sys.exit(run_command(lambda: doctor(sys.argv[1:])))
