"""Keep a training job going to its end: `supervise.py -- composer run.py yamls/phase1.yaml [key.sub=value ...]`.

The job is started again when it crashes, hangs or is pre-empted, and ended for good by errors that this does not mend.
How long is waited and how often it is started again says `operations.supervision` in the run's configuration.
Exit code: 0 when the run has finished, 75 when it was told to end and is saved, else that of the job.
"""

import argparse
import logging
import os

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command", nargs="+", help="after `--`: the command that starts the job, with the run's YAML and its overrides"
    )
    return parser.parse_args()


def main() -> None:
    """Supervise."""
    command = parse_arguments().command
    from diffusion.operations.command import read_command
    from diffusion.operations.events import EventLog
    from diffusion.operations.jobs import Command
    from diffusion.operations.supervision import Supervisor

    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s")
    supervised = read_command(command, os.environ)
    supervisor = Supervisor(
        lambda lock: Command(command, keep_open=lock),
        supervised.places,
        supervised.settings,
        EventLog(supervised.places.run, supervised.webhook),
        command,
    )
    supervisor.listen()
    raise SystemExit(supervisor.run())


if __name__ == "__main__":
    raise SystemExit(run_command(main))
