"""Check machines, disks, data and ranks before a run starts.

    python scripts/doctor.py CONFIG.yaml [key=value ...]
    composer -n 2 scripts/doctor.py CONFIG.yaml [key=value ...] [--deep] [--json FILE] [--hosts FILE [--nodes N]]

Exit code: 2 for a problem, else 0. With --hosts the fit hosts are written to a file, and problems of the others do not
count.
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
    """Run the checks, print the table, and raise an error if there is a problem."""
    parser = CommandParser(prog="doctor.py", description="Check machines, disks, data and ranks before a run starts.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the verdicts to this file")
    parser.add_argument("--hosts", type=Path, metavar="FILE", help="write the hosts to train on to this file")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of these hosts (default: all); others are spare")
    parser.add_argument("--deep", action="store_true", help="read all shards and compare their hashes with the index")
    parser.add_argument(
        "--timeout", "--patience", type=float, default=120.0, metavar="SECONDS", help="for which ranks wait for others"
    )
    options = parser.parse_intermixed_args(list(arguments))
    config = load_config(options.config, options.overrides)

    from diffusion.operations.checks.ranks import NoAnswerError
    from diffusion.operations.checks.registry import diagnose
    from diffusion.operations.checks.verdicts import Level, Verdict, format_table, to_json

    no_answer = None
    try:
        verdicts = diagnose(config, options.timeout, deep=options.deep)
    except NoAnswerError as error:
        no_answer = error
        where = ", ".join(f"node {node}" for node in error.nodes)
        verdicts = [Verdict(check="answers", level=Level.problem, what=str(error), where=where)]
    if rank() == 0:
        print(format_table(verdicts), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(to_json(verdicts), indent=2) + "\n", encoding="utf-8")
        if options.hosts is not None:
            write_hosts(options.hosts, config.data, options.nodes, verdicts)
    if no_answer is not None:
        raise no_answer
    problems = [verdict for verdict in verdicts if verdict.level is Level.problem]
    if options.hosts is not None:  # The choice of hosts avoids the problems of single machines.
        problems = [verdict for verdict in problems if not verdict.where]
    agree(lambda: raise_number(len(problems)))


def write_hosts(file: Path, data: "DataConfig", num_nodes: int | None, verdicts: "Sequence[Verdict]") -> None:
    """Write the chosen hosts on one line, and print the others."""
    from diffusion.operations.checks.nodes import unfit_nodes
    from diffusion.operations.checks.ranks import hosts_of_nodes
    from diffusion.operations.hosts import choose_hosts

    hosts = hosts_of_nodes()
    names = [f"node {number}" for number in range(len(hosts))]
    unfit = unfit_nodes(names, verdicts)
    choice = choose_hosts(
        hosts,
        [number for number, name in enumerate(names) if name in unfit],
        wanted=num_nodes or len(hosts),
        ranks_per_node=local_world_size(),
        data=data,
    )
    file.write_text(" ".join(choice.hosts) + "\n", encoding="utf-8")
    print(f"{choice.world_size} ranks on {', '.join(choice.hosts)}")
    for label, others in (("unfit", choice.unfit), ("spare", choice.spare)):
        if others:
            print(f"{label}: {', '.join(others)}")


def raise_number(num_problems: int) -> None:
    """Raise an error with the number of problems, if there are any."""
    if num_problems:
        raise UserError(f"{num_problems} problem{'s' if num_problems > 1 else ''} found: see the table")


if __name__ == "__main__":
    sys.exit(run_command(lambda: doctor(sys.argv[1:])))
