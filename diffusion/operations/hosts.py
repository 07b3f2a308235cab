"""Hosts of a supervised job: checked before each start, and chosen among the fit ones."""

import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.config.data import DataConfig, group_size, legal_world_sizes
from diffusion.errors import ConfigurationError, MachineError
from diffusion.operations.checks.nodes import NodeSpeed, compare_nodes, unfit_nodes
from diffusion.operations.checks.verdicts import Level, Verdict, from_json, merge, problem, raise_problems
from diffusion.operations.events import EventKind, EventLog, log
from diffusion.operations.processes import Command

HOSTS_PLACEHOLDER = "{hosts}"
"""Word in a command that is replaced with the chosen hosts, separated by blanks."""

CHECK_MODULE = "diffusion.operations.checks.this_machine"
"""Program that checks a host."""


def parse_host_names(text: str, source: str) -> tuple[str, ...]:
    """Parse host names separated by blanks or line breaks, with comments from # to the end of the line.

    Args:
        text: the names.
        source: origin of the text, for messages.

    Raises:
        ConfigurationError: there are none, or duplicates.
    """
    names = tuple(name for line in text.splitlines() for name in line.partition("#")[0].split())
    if not names:
        raise ConfigurationError(f"{source} names no hosts: name those that ssh reaches, spare ones last")
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"{source} names {', '.join(duplicates)} more than once: name each host once")
    return names


# Survey


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Results of the checks of some hosts."""

    hosts: tuple[str, ...]
    speeds: tuple[NodeSpeed, ...]
    """Measurements of the hosts that answered."""

    verdicts: tuple[Verdict, ...]

    @property
    def unfit(self) -> list[str]:
        """Hosts that are too slow, or with a problem that not all hosts have."""
        return unfit_nodes(self.hosts, self.verdicts)

    def raise_shared_problems(self) -> None:
        """Raise the problems that no choice of hosts avoids.

        Raises:
            MachineError: all hosts have the same problem, or the only one has any.
        """
        subject = self.hosts[0] if len(self.hosts) == 1 else "all hosts"
        shared = [verdict for verdict in self.verdicts if not verdict.where]
        raise_problems([replace(verdict, what=f"{subject}: {verdict.what}") for verdict in shared], MachineError)


def survey(hosts: Sequence[str], command: Callable[[str], Sequence[str]], timeout: float) -> Survey:
    """Check hosts in parallel, each by itself, and compare their measurements.

    Args:
        hosts: their names.
        command: returns the command that runs `CHECK_MODULE` on a host.
        timeout: seconds after which a host without an answer is unfit.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: _run_check(command(host), timeout), hosts))
    found, speeds = [], []
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, Verdict):
            found.append((host, [answer]))
        else:
            found.append((host, from_json(answer["verdicts"])))
            speeds.append(NodeSpeed(**{**answer["reading"], "name": host}))
    verdicts = [*merge(found), *(compare_nodes(speeds) if speeds else [])]
    return Survey(hosts=tuple(hosts), speeds=tuple(speeds), verdicts=tuple(verdicts))


def _run_check(command: Sequence[str], timeout: float) -> dict[str, Any] | Verdict:
    """Return the answer of a host's check, or the problem that there is none."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()  # Without waiting: it may hang in the kernel.
        what = f"no answer for {timeout:.0f} s"
        return problem(what, "find out what the check waits for (disk, GPU)", check="answers")
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if process.returncode or not isinstance(answer, dict):
        reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        remedy = "make sure that ssh reaches it and that it has this folder"
        return problem(f"the check failed ({reason})", remedy, check="answers")
    return answer


def check_over_ssh(ssh: Sequence[str], arguments: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """Return the command that checks a host with the current folder at the same path.

    Args:
        ssh: program and options.
        arguments: YAML and overrides of the run.
    """
    check = shlex.join(["-m", CHECK_MODULE, *arguments])
    remote = f'cd {shlex.quote(str(Path.cwd()))} && exec "${{BIN:-.venv/bin}}/python" {check}'
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    return lambda host: [*ssh, *options, host, remote]


def ssh_command() -> list[str]:
    """Return the ssh program and its options from the environment variable SSH."""
    return shlex.split(os.environ.get("SSH", "ssh"))


# Choice


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Hosts of a start."""

    hosts: tuple[str, ...]
    world_size: int
    unfit: tuple[str, ...]
    spare: tuple[str, ...]
    """Fit hosts that are not needed."""


def choose_surveyed(found: Survey, *, wanted: int | None, ranks_per_host: int | None, data: DataConfig) -> Choice:
    """Choose among checked hosts.

    Args:
        found: results of the checks.
        wanted: number of hosts; None is all of them.
        ranks_per_host: None is one rank for each GPU, or one without GPUs; hosts with another number of GPUs than most
            are unfit then.
        data: data whose batches are divided among the ranks.

    Raises:
        MachineError: all hosts have the same problem, or no number of fit ones suits the batches.
    """
    found.raise_shared_problems()
    unfit = set(found.unfit)
    if ranks_per_host is None:
        num_gpus = {speed.name: speed.num_gpus for speed in found.speeds if speed.name not in unfit}
        usual = statistics.mode(num_gpus.values()) if num_gpus else 1
        unfit |= {host for host, number in num_gpus.items() if number != usual}
        ranks_per_host = max(1, usual)
    unfit_positions = [position for position, host in enumerate(found.hosts) if host in unfit]
    wanted = wanted or len(found.hosts)
    return choose_hosts(found.hosts, unfit_positions, wanted=wanted, ranks_per_node=ranks_per_host, data=data)


def choose_hosts(
    hosts: Sequence[str], unfit: Collection[int], *, wanted: int, ranks_per_node: int, data: DataConfig
) -> Choice:
    """Choose hosts in their order: the wanted number, or else the largest one that divides the batches.

    The results of the run do not depend on the number.

    Args:
        hosts: all hosts, spare ones last.
        unfit: positions of unfit hosts.
        wanted: number of hosts.
        ranks_per_node: ranks of each.
        data: data whose batches are divided among the ranks.

    Raises:
        MachineError: no number of fit hosts suits the batches.
    """
    fit = [host for position, host in enumerate(hosts) if position not in unfit]
    dropped = tuple(host for position, host in enumerate(hosts) if position in unfit)
    legal = set(legal_world_sizes(data.global_batch_size, group_size(data)))
    num = next((num for num in range(min(wanted, len(fit)), 0, -1) if num * ranks_per_node in legal), None)
    if num is None:
        raise MachineError(
            f"{len(fit)} of {len(hosts)} hosts are fit, and no number of them with {ranks_per_node} ranks each divides "
            f"data.global_batch_size={data.global_batch_size} evenly: repair {', '.join(dropped) or 'nothing'}, or "
            "start another number of ranks on each"
        )
    return Choice(hosts=tuple(fit[:num]), world_size=num * ranks_per_node, unfit=dropped, spare=tuple(fit[num:]))


# Supervised jobs


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts available to a job."""

    hosts: tuple[str, ...]
    """Spare ones last."""

    wanted: int | None = None
    """Number of hosts of the job; None is all of them."""

    ranks_per_host: int | None = None
    """None is one for each GPU, or one without GPUs."""


class HostedJob:
    """A job that starts on fit hosts.

    Args:
        command: command that starts it.
        arguments: YAML and overrides in it.
        fleet: hosts that ssh reaches; None is this machine alone.
        data: data whose batches are divided among the ranks.
        timeout: seconds for the check; None omits it.
        events: log of events.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        fleet: Fleet | None,
        data: DataConfig,
        timeout: float | None,
        events: EventLog,
    ) -> None:
        self._command, self._fleet, self._data = tuple(command), fleet, data
        self._timeout, self._events = timeout, events
        self.hosts = fleet.hosts[: fleet.wanted] if fleet is not None else ()
        here = [sys.executable, "-m", CHECK_MODULE, *arguments]
        self._check = (lambda host: here) if fleet is None else check_over_ssh(ssh_command(), arguments)

    def check(self) -> None:
        """Check the hosts and choose those of the next start.

        Raises:
            MachineError: no start is possible.
        """
        if self._timeout is None:
            return
        found = survey(self._fleet.hosts if self._fleet else [socket.gethostname()], self._check, self._timeout)
        for verdict in found.verdicts:
            host = verdict.where or ", ".join(found.hosts)
            if verdict.level is Level.problem or unfit_nodes(found.hosts, [verdict]):
                self._events.add(EventKind.unfit, verdict.sentence, check=verdict.check, host=host)
            if verdict.level is Level.warning:
                log.warning("%s: %s", host, verdict.sentence)
        if self._fleet is None:
            found.raise_shared_problems()
            return
        wanted, ranks = self._fleet.wanted, self._fleet.ranks_per_host
        choice = choose_surveyed(found, wanted=wanted, ranks_per_host=ranks, data=self._data)
        self.hosts = choice.hosts
        log.info("%d ranks on %s", choice.world_size, ", ".join(choice.hosts))

    def start(self, keep_open: int) -> Command:
        """Start the job.

        Args:
            keep_open: descriptor that it inherits.
        """
        hosts = " ".join(self.hosts)
        command = [word.replace(HOSTS_PLACEHOLDER, hosts) for word in self._command]
        own = {}
        if self._fleet is not None:  # The launcher neither checks nor restarts by itself.
            ranks = self._fleet.ranks_per_host
            own = {"ATTEMPTS": "1", "CHECK": "false"} | ({"RANKS_PER_HOST": str(ranks)} if ranks else {})
        return Command(command, keep_open=keep_open, environment={**os.environ, **own})
