"""Name the hosts to start a run on: each is checked by ssh, and unfit ones are replaced by spare ones or left out.

    python scripts/fit_hosts.py "host1 host2 host3" CONFIG.yaml [key.sub=value ...] [--nodes 2]

The names are on stdout, what was found is on stderr. The hosts see this folder at the same place. The environment
variable SSH holds the ssh program and its options. Exit code 2 if the run cannot start.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from diffusion.config.loading import load_config
from diffusion.launch import CommandParser, positive, run_command, say_to_stderr


def fit_hosts(arguments: Sequence[str]) -> None:
    """Check, and print the hosts."""
    parser = CommandParser(prog="fit_hosts.py", description="Name the hosts to start a run on.")
    parser.add_argument("hosts", help="names, spare ones last")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument("--nodes", type=positive, metavar="N", help="how many are wanted (all if left out)")
    parser.add_argument("--ranks-per-host", type=positive, metavar="N", help="one for each GPU if left out")
    options = parser.parse_intermixed_args(list(arguments))
    config = load_config(options.config, options.overrides)
    from diffusion.operations.checks.hosts import choose_fit_hosts, command_over_ssh, host_names, survey
    from diffusion.operations.checks.verdicts import Level, format_table

    hosts = host_names(options.hosts, f"'{options.hosts}'")
    patience = config.operations.supervision.check_timeout
    if patience is None:
        print(*hosts[: options.nodes])
        return

    ssh = shlex.split(os.environ.get("SSH", "ssh"))
    found = survey(hosts, command_over_ssh(ssh, [options.config, *options.overrides]), patience)
    if noteworthy := [verdict for verdict in found.verdicts if verdict.level is not Level.ok]:
        say_to_stderr(format_table(noteworthy))
    ranks = options.ranks_per_host
    print(*choose_fit_hosts(found, wanted=options.nodes, ranks_per_host=ranks, data=config.data).hosts)


if __name__ == "__main__":
    sys.exit(run_command(lambda: fit_hosts(sys.argv[1:])))
