"""Keep a training job running: `supervise.py -- composer run.py yamls/phase1.yaml [key.sub=value ...]`.

The job is restarted after a crash, a hang or a pre-emption, and ends after an error that a restart meets again. The
machine is checked before each start. With --hosts all hosts in a file are checked, and unfit ones are replaced by spare
ones or dropped:

    supervise.py --hosts hosts.txt --nodes 16 -- launchers/ssh.sh {hosts} yamls/phase1.yaml [key.sub=value ...]

Timeouts and limits are in `operations.supervision` of the run's configuration. Exit code: 0 after the end of the run,
75 after a signal that saved it, else that of the job.
"""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.config.secrets import redact_arguments
from diffusion.errors import ConfigurationError
from diffusion.launch import CommandParser, duration, positive, run_command

if TYPE_CHECKING:
    from diffusion.operations.hosts import HostPool


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--hosts",
        type=Path,
        metavar="FILE",
        help="names of hosts that ssh reaches, spare ones last; # begins a comment",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="number of hosts of the job (default: all)")
    parser.add_argument("--ranks-per-host", type=positive, metavar="N", help="default: one for each GPU")
    parser.add_argument(
        "--grow-after",
        type=duration,
        metavar="TIME",
        help="look every 30m, say, for hosts that are fit again, and continue on them; default: only at a restart",
    )
    parser.add_argument(
        "command", nargs="+", help="after `--`: the command that starts the job, with the run's YAML and its overrides"
    )
    options, unknown = parser.parse_known_args()
    if unknown:
        raise ConfigurationError(
            f"supervise.py does not know {' '.join(redact_arguments(unknown))}: put `--` before the command that it "
            "belongs to, as in supervise.py -- composer -n 8 run.py yamls/phase1.yaml"
        )
    return options


def read_pool(options: argparse.Namespace) -> "HostPool | None":
    """Read the hosts that are available; None for a job of this machine."""
    from diffusion.operations.hosts import HOSTS_PLACEHOLDER, HostPool, read_host_names

    if options.hosts is None:
        if any(one is not None for one in (options.nodes, options.ranks_per_host, options.grow_after)):
            raise ConfigurationError("--nodes, --ranks-per-host and --grow-after need --hosts FILE: add it")
        return None
    hosts = read_host_names(options.hosts)
    if not any(HOSTS_PLACEHOLDER in word for word in options.command):
        raise ConfigurationError(
            f"--hosts {options.hosts}: the command needs the word {HOSTS_PLACEHOLDER} in place of the hosts, as in "
            "launchers/ssh.sh {hosts} yamls/phase1.yaml"
        )
    return HostPool(hosts=hosts, wanted=options.nodes, ranks_per_host=options.ranks_per_host)


def main() -> None:
    """Supervise."""
    options = parse_arguments()
    pool = read_pool(options)
    from diffusion.config.checks import check
    from diffusion.config.loading import load_config
    from diffusion.operations.events import EventLog
    from diffusion.operations.heartbeats import heartbeat_folder
    from diffusion.operations.hosts import HostedJob
    from diffusion.operations.metrics import read_run_metrics, served
    from diffusion.operations.supervisor import Supervisor, split_command

    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s")
    yaml, overrides = split_command(options.command)
    config = load_config(yaml, overrides)
    check(config, world_size=None, may_be_random=True)  # The command may build its own model.
    run, settings = Path(config.output_folder).expanduser(), config.operations.supervision
    if options.grow_after is not None and settings.check_timeout is None:
        raise ConfigurationError("--grow-after needs the check of hosts: set operations.supervision.check_timeout")
    events = EventLog(run, webhook_address(settings.webhook_variable))
    job = HostedJob(options.command, [yaml, *overrides], pool, config, settings.check_timeout, events)
    heartbeats = heartbeat_folder(config, run)
    supervisor = Supervisor(
        job.start,
        run,
        heartbeats,
        settings,
        events,
        arguments=sys.argv[1:],
        environment=job.environment,
        growth=None if options.grow_after is None else (job.could_grow, options.grow_after),
        interrupt=job.interrupt,
    )
    supervisor.listen()
    with served(settings.prometheus, lambda: {run.name: read_run_metrics(run, heartbeats)}):
        raise SystemExit(supervisor.run())


def webhook_address(variable: str | None) -> str | None:
    """Return the address to which events are posted, a secret, from an environment variable."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigurationError(
            f"operations.supervision.webhook_variable is {variable}, but the environment has no such variable. Set it "
            "to the address to which events are posted, or the key to null"
        )
    return os.environ[variable]


if __name__ == "__main__":
    raise SystemExit(run_command(main))
