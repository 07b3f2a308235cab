"""Check what a run needs before it starts: machine, disks, data, and with several ranks whether they fit together.

    python scripts/doctor.py CONFIG.yaml [key=value ...]
    composer -n 2 scripts/doctor.py CONFIG.yaml [key=value ...] [--json FILE]

Ends with exit code 2 if there is a problem, with 0 if there are warnings at most.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from diffusion.config.loading import load_config
from diffusion.errors import UserError
from diffusion.launch import CommandParser, agree, rank, run_command


def doctor(arguments: Sequence[str]) -> None:
    """Check, print the table, and end with exit code 2 if there is a problem."""
    parser = CommandParser(prog="doctor.py", description="Check what a run needs before it starts.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found to this file")
    options = parser.parse_intermixed_args(list(arguments))
    config = load_config(options.config, options.overrides)

    from diffusion.health.doctor import diagnose
    from diffusion.health.verdicts import Level, format_table, to_json

    verdicts = diagnose(config)
    if rank() == 0:
        print(format_table(verdicts), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(to_json(verdicts), indent=2) + "\n", encoding="utf-8")
    num_problems = sum(verdict.level is Level.problem for verdict in verdicts)
    if num_problems:
        agree(lambda: refuse(num_problems))


def refuse(num_problems: int) -> None:
    """Raise the error that ends all ranks with exit code 2."""
    found = "1 problem" if num_problems == 1 else f"{num_problems} problems"
    raise UserError(f"{found} found: see the table")


if __name__ == "__main__":
    sys.exit(run_command(lambda: doctor(sys.argv[1:])))
