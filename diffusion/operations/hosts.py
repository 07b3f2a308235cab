"""Hosts of a supervised job: checked before each start, and chosen among the fit ones."""

import json
import os
import shlex
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.config.checks import rank_problems
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import python_command
from diffusion.operations import timeouts
from diffusion.operations.checks.nodes import NodeSpeed, compare_nodes, unfit_nodes
from diffusion.operations.checks.verdicts import Level, Verdict, merge, problem, raise_problems
from diffusion.operations.events import EventKind, EventLog, log

HOSTS_PLACEHOLDER = "{hosts}"
"""Word in a command that is replaced with the chosen hosts, separated by blanks."""

CHECK_MODULE = "diffusion.operations.checks.nodes"
"""Program that checks a host."""


def read_host_names(file: Path) -> tuple[str, ...]:
    """Read host names separated by blanks or line breaks, with comments from # to the end of the line.

    Raises:
        ConfigurationError: the file of the option --hosts cannot be read, or there are no names, or duplicates.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hosts {file} cannot be read: {error}") from error
    names = tuple(name for line in lines for name in line.partition("#")[0].split())
    if not names:
        raise ConfigurationError(f"--hosts {file} names no hosts: name those that ssh reaches, spare ones last")
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"--hosts {file} names {', '.join(duplicates)} more than once: name each host once")
    return names


# Survey


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Results of the checks of some hosts."""

    hosts: tuple[str, ...]
    speeds: dict[str, NodeSpeed]
    """Measurements of the hosts that answered."""

    verdicts: tuple[Verdict, ...]

    @property
    def unfit(self) -> list[str]:
        """Hosts that are too slow, or with a problem that not all hosts have."""
        return unfit_nodes(self.hosts, self.verdicts)


def survey(
    hosts: Sequence[str],
    command: Callable[[str], Sequence[str]],
    timeout: float,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Survey:
    """Check hosts in parallel, each by itself, and compare their measurements.

    `command` returns the command that runs `CHECK_MODULE` on a host, which is unfit without an answer within `timeout`
    seconds, or before the interruption.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: _run_check(command(host), timeout, is_interrupted), hosts))
    found, speeds = [], []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Verdict):
            found.append((host, [answer]))
        else:
            found.append((host, [Verdict(**{**row, "level": Level(row["level"])}) for row in answer["verdicts"]]))
            speeds.append(NodeSpeed(**{**answer["reading"], "name": host}))
    verdicts = [*merge(found), *(compare_nodes(speeds) if speeds else [])]
    return Survey(hosts=tuple(hosts), speeds={speed.name: speed for speed in speeds}, verdicts=tuple(verdicts))


def _run_check(command: Sequence[str], timeout: float, is_interrupted: Callable[[], bool]) -> dict[str, Any] | Verdict:
    """Return the answer of a host's check, or the problem that there is none."""
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except OSError as error:
        return problem("answers", f"{command[0]} cannot be started: {error.strerror}", "install it, or correct SSH")
    deadline = time.monotonic() + timeout
    while True:
        try:
            output, errors = process.communicate(timeout=timeouts.POLL)
            break
        except subprocess.TimeoutExpired:
            if is_interrupted() or time.monotonic() > deadline:
                process.kill()  # Without waiting: it may hang in the kernel.
                remedy = "find out what the check waits for (disk, GPU)"
                return problem("answers", f"no answer for {timeout:.0f} s", remedy)
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if process.returncode or not isinstance(answer, dict):
        reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        remedy = "make sure that ssh reaches it and that it has this folder"
        return problem("answers", f"the check failed ({reason})", remedy)
    return answer


def check_over_ssh(arguments: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """Return the command that checks a host by ssh, with the current folder at the same path.

    The environment variable SSH holds the program and its options. The arguments are YAML and overrides of the run.
    """
    check = shlex.join(["-m", CHECK_MODULE, *arguments])
    remote = f'cd {shlex.quote(str(Path.cwd()))} && exec "${{BIN:-.venv/bin}}/python" {check}'
    ssh = [*shlex.split(os.environ.get("SSH", "ssh")), "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    return lambda host: [*ssh, host, remote]


# Supervised jobs


@dataclass(frozen=True, kw_only=True)
class HostPool:
    """Hosts available to a job."""

    hosts: tuple[str, ...]
    """Spare ones last."""

    wanted: int | None = None
    """Number of hosts of the job; None is all of them."""

    ranks_per_host: int | None = None
    """None is one for each GPU, or one without GPUs; hosts with another number of GPUs than most are unfit then."""


def choose_hosts(found: Survey, pool: HostPool, config: Config) -> tuple[tuple[str, ...], int]:
    """Choose fit hosts in their order: the wanted number, or else the largest one on which the run can start.

    The results of the run do not depend on the number.

    Returns:
        The hosts, and the world size.

    Raises:
        MachineError: all hosts have the same problem, or the run can start on no number of fit ones.
    """
    _raise_shared_problems(found)
    unfit, ranks = set(found.unfit), pool.ranks_per_host
    if ranks is None:
        num_gpus = {host: speed.num_gpus for host, speed in found.speeds.items() if host not in unfit}
        usual = statistics.mode(num_gpus.values()) if num_gpus else 1
        unfit |= {host for host, number in num_gpus.items() if number != usual}
        ranks = max(1, usual)
    fit = [host for host in found.hosts if host not in unfit]
    max_hosts = min(pool.wanted or len(fit), len(fit))
    problems = {num: rank_problems(config, num * ranks) for num in range(max_hosts, 0, -1)}
    num = next((num for num, of_num in problems.items() if not of_num), None)
    if num is None:
        dropped = ", ".join(host for host in found.hosts if host in unfit) or "nothing"
        what = (
            f"{len(fit)} of {len(found.hosts)} hosts are fit, and the run can start on no number of them with {ranks} "
            f"ranks each: repair {dropped}, or start another number of ranks on each."
        )
        raise MachineError(" ".join([what, *problems.get(max_hosts, [])]))
    return tuple(fit[:num]), num * ranks


def _raise_shared_problems(found: Survey) -> None:
    """Raise the problems that no choice of hosts avoids: those of all hosts, or any of the only one."""
    subject = found.hosts[0] if len(found.hosts) == 1 else "all hosts"
    shared = [verdict for verdict in found.verdicts if not verdict.where]
    raise_problems([replace(verdict, what=f"{subject}: {verdict.what}") for verdict in shared], MachineError)


class HostedJob:
    """A job that starts on fit hosts.

    The arguments are YAML and overrides in its command, the configuration is theirs. Without a pool of hosts that ssh
    reaches, it starts on this machine alone. The check takes up to `timeout` seconds; None omits it.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        pool: HostPool | None,
        config: Config,
        timeout: float | None,
        events: EventLog,
    ) -> None:
        self._command, self._pool, self._config = tuple(command), pool, config
        self._timeout, self._events = timeout, events
        self.environment = dict(os.environ)
        """Variables of the job; `start` sets the ranks of each host."""

        if pool is not None and pool.ranks_per_host is not None:
            self.environment["RANKS_PER_HOST"] = str(pool.ranks_per_host)
        self._used: tuple[str, ...] = ()
        self._num_ranks = 0
        self._speeds: dict[str, NodeSpeed] = {}
        self._is_interrupted = False
        here = [*python_command(f"import runpy; runpy.run_module('{CHECK_MODULE}', run_name='__main__')"), *arguments]
        self._check = (lambda host: here) if pool is None else check_over_ssh(arguments)

    def start(self) -> list[str]:
        """Check the hosts and return the command of the next start; a MachineError if no start is possible."""
        pool = self._pool
        hosts = pool.hosts[: pool.wanted] if pool is not None else ()
        if self._timeout is not None:
            found = self._survey(pool.hosts if pool else [socket.gethostname()])
            if self._is_interrupted:
                raise MachineError("the check of the hosts was interrupted")
            self._report(found)
            if pool is None:
                _raise_shared_problems(found)
            else:
                hosts, self._num_ranks = choose_hosts(found, pool, self._config)
                self._used, self._speeds = hosts, {host: found.speeds[host] for host in hosts}
                self.environment["RANKS_PER_HOST"] = str(self._num_ranks // len(hosts))
                log.info("%d ranks on %s", self._num_ranks, ", ".join(hosts))
        return [word.replace(HOSTS_PLACEHOLDER, " ".join(hosts)) for word in self._command]

    def could_grow(self) -> bool:
        """Check the hosts that the job does not use now; return whether it would start on more ranks with them.

        Those that it uses are not disturbed: they count as fit, with the speeds measured before its start.
        """
        pool = self._pool
        assert pool is not None
        idle = [host for host in pool.hosts if host not in self._used]
        if not idle or len(self._used) == pool.wanted:
            return False
        found = self._survey(idle)
        speeds = self._speeds | found.speeds
        verdicts = (*found.verdicts, *compare_nodes(list(speeds.values())))
        joined = Survey(hosts=pool.hosts, speeds=speeds, verdicts=verdicts)
        try:
            return choose_hosts(joined, pool, self._config)[1] > self._num_ranks
        except MachineError:
            return False

    def interrupt(self) -> None:
        """End checks of hosts, in another thread or from a signal handler; none succeeds from then on."""
        self._is_interrupted = True

    def _survey(self, hosts: Sequence[str]) -> Survey:
        assert self._timeout is not None
        return survey(hosts, self._check, self._timeout, lambda: self._is_interrupted)

    def _report(self, found: Survey) -> None:
        for verdict in found.verdicts:
            host = verdict.where or ", ".join(found.hosts)
            if verdict.level is Level.problem or unfit_nodes(found.hosts, [verdict]):
                self._events.add(EventKind.unfit, verdict.sentence, check=verdict.check, host=host)
            elif verdict.level is Level.warning:
                log.warning("%s: %s", host, verdict.sentence)
