"""Check machines, disks, data and ranks before a run starts.

    python scripts/doctor.py CONFIG.yaml [key=value ...]
    composer -n 2 scripts/doctor.py CONFIG.yaml [key=value ...] [--deep] [--json FILE]

Exit code: 2 for a problem, else 0.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from diffusion.config.loading import load_config
from diffusion.distributed import agree, is_first_rank
from diffusion.errors import UserError, explained_writes
from diffusion.files import write_json
from diffusion.launch import CommandParser, output_file, run_command

if TYPE_CHECKING:
    from diffusion.config.schema import Config
    from diffusion.operations.checks.verdicts import Verdict


def doctor(arguments: Sequence[str]) -> None:
    """Run the checks, print the table, and raise an error if there is a problem."""
    parser = CommandParser(prog="doctor.py", description="Check machines, disks, data and ranks before a run starts.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write the verdicts to this file")
    parser.add_argument("--deep", action="store_true", help="read all shards and compare their hashes with the index")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="for which ranks wait for others"
    )
    options = parser.parse_intermixed_args(list(arguments))
    config = load_config(options.config, options.overrides)

    from diffusion.operations.checks.doctor import diagnose
    from diffusion.operations.checks.verdicts import Level, format_table, on_each_machine

    verdicts = diagnose(config, options.timeout, deep=options.deep)
    verdicts += on_each_machine(lambda: check_initial_weights(config))

    def report() -> None:
        print(format_table(verdicts), flush=True)
        if options.json is not None:
            with explained_writes(options.json):
                write_json(options.json, [asdict(verdict) for verdict in verdicts])

    agree(lambda: report() if is_first_rank() else None)
    if num := sum(verdict.level is Level.problem for verdict in verdicts):
        error = UserError(f"{num} problem{'s' if num > 1 else ''} found: see the table")
        error.is_agreed = True  # The verdicts are the same on all ranks.
        raise error


def check_initial_weights(config: "Config") -> Iterator["Verdict"]:
    """Check that the weights that a run starts with are there, and the objective that they were trained with."""
    from diffusion.loading import absent_weights, check_objective
    from diffusion.operations.checks.verdicts import problem

    for key, text in absent_weights(config).items():
        yield problem(key, text)
    try:
        check_objective(config)
    except UserError as error:
        yield problem("init_from", str(error))


if __name__ == "__main__":
    sys.exit(run_command(lambda: doctor(sys.argv[1:])))
