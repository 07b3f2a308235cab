"""Keep a training job going to its end: `supervise.py -- composer run.py yamls/phase1.yaml [key.sub=value ...]`.

The job is started again when it crashes, hangs or is pre-empted, and ended for good by errors that this does not mend.
Before each start the machine is checked, and the job not started on one that is unfit. With --hosts all hosts in a
file are checked, and unfit ones replaced by spare ones or left out:

    supervise.py --hosts hosts.txt --nodes 16 -- launchers/ssh.sh {hosts} yamls/phase1.yaml [key.sub=value ...]

How long is waited and how often it is started again says `operations.supervision` in the run's configuration.
Exit code: 0 when the run has finished, 75 when it was told to end and is saved, else that of the job.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.errors import ConfigurationError
from diffusion.launch import CommandParser, positive, run_command

if TYPE_CHECKING:
    from diffusion.operations.machines import Fleet


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="names of hosts that ssh reaches, spare ones last; # begins a comment",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="how many of them the job wants (all if left out)")
    parser.add_argument("--ranks-per-host", type=positive, metavar="N", help="one for each GPU if left out")
    parser.add_argument(
        "command", nargs="+", help="after `--`: the command that starts the job, with the run's YAML and its overrides"
    )
    options, unknown = parser.parse_known_args()
    if unknown:
        raise ConfigurationError(
            f"supervise.py does not know {' '.join(unknown)}: put `--` before the command that it belongs to, as in "
            "supervise.py -- composer -n 8 run.py yamls/phase1.yaml"
        )
    return options


def read_fleet(options: argparse.Namespace) -> "Fleet | None":
    """The hosts that may be used; None for a job of this machine."""
    from diffusion.operations.checks.hosts import host_names
    from diffusion.operations.machines import PLACE_OF_HOSTS, Fleet

    if options.hosts is None:
        if options.nodes is not None or options.ranks_per_host is not None:
            raise ConfigurationError("--nodes and --ranks-per-host are about the hosts of --hosts FILE: give it, too")
        return None
    try:
        text = options.hosts.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--hosts {options.hosts} cannot be read: {error.strerror}") from error
    hosts = host_names(text, f"--hosts {options.hosts}")
    if not any(PLACE_OF_HOSTS in word for word in options.command):
        raise ConfigurationError(
            f"--hosts {options.hosts}: the command must say by the word {PLACE_OF_HOSTS} where they go, as in "
            "launchers/ssh.sh {hosts} yamls/phase1.yaml"
        )
    return Fleet(hosts=hosts, wanted=options.nodes, ranks_per_host=options.ranks_per_host)


def main() -> None:
    """Supervise."""
    options = parse_arguments()
    fleet = read_fleet(options)
    from diffusion.operations.command import read_command
    from diffusion.operations.events import EventLog
    from diffusion.operations.machines import Machines
    from diffusion.operations.supervision import Supervisor

    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s")
    supervised = read_command(options.command, os.environ)
    settings, data = supervised.config.operations.supervision, supervised.config.data
    events = EventLog(supervised.places.run, supervised.webhook)
    machines = Machines(options.command, supervised.arguments, fleet, data, settings.check_timeout, events)
    supervisor = Supervisor(machines.start, supervised.places, settings, events, sys.argv[1:], machines.check)
    supervisor.listen()
    raise SystemExit(supervisor.run())


if __name__ == "__main__":
    raise SystemExit(run_command(main))
