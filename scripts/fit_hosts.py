"""Choose the hosts of a run: each is checked by ssh, and unfit ones are replaced by spare ones or dropped.

    python scripts/fit_hosts.py "host1 host2 host3" CONFIG.yaml [key.sub=value ...] [--nodes 2]

Prints their names to stdout and findings to stderr. The hosts see this folder at the same path. The environment
variable SSH holds the ssh program and its options. Exit code 2 if the run cannot start.
"""

import sys
from collections.abc import Sequence

from diffusion.config.loading import load_config
from diffusion.launch import CommandParser, positive, run_command, say_to_stderr


def fit_hosts(arguments: Sequence[str]) -> None:
    """Check the hosts and print the chosen ones."""
    parser = CommandParser(prog="fit_hosts.py", description="Choose the hosts of a run.")
    parser.add_argument("hosts", help="names, spare ones last")
    parser.add_argument("config", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument("--nodes", type=positive, metavar="N", help="number of hosts (default: all)")
    parser.add_argument("--ranks-per-host", type=positive, metavar="N", help="default: one for each GPU")
    options = parser.parse_intermixed_args(list(arguments))
    config = load_config(options.config, options.overrides)
    from diffusion.operations.checks.verdicts import Level, format_table
    from diffusion.operations.hosts import check_over_ssh, choose_surveyed, parse_host_names, ssh_command, survey

    hosts = parse_host_names(options.hosts, f"'{options.hosts}'")
    timeout = config.operations.supervision.check_timeout
    if timeout is None:
        print(*hosts[: options.nodes])
        return

    found = survey(hosts, check_over_ssh(ssh_command(), [options.config, *options.overrides]), timeout)
    if findings := [verdict for verdict in found.verdicts if verdict.level is not Level.ok]:
        say_to_stderr(format_table(findings))
    ranks = options.ranks_per_host
    print(*choose_surveyed(found, wanted=options.nodes, ranks_per_host=ranks, data=config.data).hosts)


if __name__ == "__main__":
    sys.exit(run_command(lambda: fit_hosts(sys.argv[1:])))
