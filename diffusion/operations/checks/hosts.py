"""On which hosts a run starts: those that are fit, and of these as many as its batch can be divided among."""

import json
import shlex
import statistics
import subprocess
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.config.data import DataConfig, group_size, legal_world_sizes
from diffusion.errors import ConfigurationError, MachineError
from diffusion.operations.checks.nodes import NodeReading, check_nodes, unfit_nodes
from diffusion.operations.checks.verdicts import Verdict, from_json, merge, problem, raise_problems


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where to start."""

    hosts: tuple[str, ...]
    world_size: int
    unfit: tuple[str, ...]
    spare: tuple[str, ...]
    """Fit, and not needed."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What hosts said of themselves."""

    hosts: tuple[str, ...]
    readings: tuple[NodeReading, ...]
    """Of those that answered."""

    verdicts: tuple[Verdict, ...]

    @property
    def unfit(self) -> list[str]:
        """Hosts with a problem that not all have, or out of line."""
        return unfit_nodes(self.hosts, self.verdicts)

    def refuse(self) -> None:
        """Raise what no other choice of hosts mends.

        Raises:
            MachineError: all hosts have the same problem, or the only one has any.
        """
        place = self.hosts[0] if len(self.hosts) == 1 else "all hosts"
        shared = [verdict for verdict in self.verdicts if not verdict.where]
        raise_problems([replace(verdict, what=f"{place}: {verdict.what}") for verdict in shared], MachineError)


def host_names(text: str, where: str) -> tuple[str, ...]:
    """Read names of hosts with blanks or line breaks between them; what follows a # is a comment.

    Args:
        text: the names.
        where: they stand, for messages.

    Raises:
        ConfigurationError: there are none, or one comes twice.
    """
    names = tuple(name for line in text.splitlines() for name in line.partition("#")[0].split())
    if not names:
        raise ConfigurationError(f"{where} names no hosts: name those that ssh reaches, spare ones last")
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(f"{where} names {', '.join(doubled)} more than once: name each host once")
    return names


def survey(hosts: Sequence[str], command: Callable[[str], Sequence[str]], patience: float) -> Survey:
    """Check hosts, all at the same time and each by itself, and compare what they have measured.

    Args:
        hosts: their names.
        command: runs `diffusion.operations.checks.this_machine` on a host.
        patience: seconds after which one that has not answered is unfit.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(lambda host: _ask(command(host), patience), hosts))
    found = [
        (host, from_json(answer["verdicts"]) if isinstance(answer, dict) else [answer])
        for host, answer in zip(hosts, answers, strict=True)
    ]
    readings = [
        NodeReading(**{**answer["reading"], "name": host})
        for host, answer in zip(hosts, answers, strict=True)
        if isinstance(answer, dict)
    ]
    verdicts = [*merge(found), *(check_nodes(readings) if readings else [])]
    return Survey(hosts=tuple(hosts), readings=tuple(readings), verdicts=tuple(verdicts))


def _ask(command: Sequence[str], patience: float) -> dict[str, Any] | Verdict:
    """What a host says by a command, or the problem that it says nothing."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, complaint = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()  # And not waited for: it may hang in the kernel.
        return problem("answers", f"no answer for {patience:.0f} s", "see what it waits for (disk, GPU)")
    try:
        answer = json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if process.returncode or not isinstance(answer, dict):
        said = (complaint.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return problem("answers", f"it cannot be checked ({said})", "see that it can be reached, and has this folder")
    return answer


def command_over_ssh(ssh: Sequence[str], arguments: Sequence[str]) -> Callable[[str], Sequence[str]]:
    """The check of a host that sees the present folder at the same place.

    Args:
        ssh: program and options.
        arguments: YAML and overrides of the run.
    """
    check = shlex.join(["-m", "diffusion.operations.checks.this_machine", *arguments])
    remote = f'cd {shlex.quote(str(Path.cwd()))} && exec "${{BIN:-.venv/bin}}/python" {check}'
    options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    return lambda host: [*ssh, *options, host, remote]


def choose_fit_hosts(found: Survey, *, wanted: int | None, ranks_per_host: int | None, data: DataConfig) -> Choice:
    """Choose among hosts that were checked.

    Args:
        found: what they said.
        wanted: nodes; None: all of them.
        ranks_per_host: None: one for each GPU, or one without GPUs; then a host with another number of GPUs than most
            fit ones have is left out.
        data: what is divided among the ranks.

    Raises:
        MachineError: all hosts have the same problem, or those that are fit cannot do it.
    """
    found.refuse()
    unfit = set(found.unfit)
    if ranks_per_host is None:
        num_gpus = {reading.name: reading.num_gpus for reading in found.readings if reading.name not in unfit}
        usual = statistics.mode(num_gpus.values()) if num_gpus else 1
        unfit |= {host for host, number in num_gpus.items() if number != usual}
        ranks_per_host = max(1, usual)
    return choose_hosts(
        found.hosts,
        [place for place, host in enumerate(found.hosts) if host in unfit],
        wanted=wanted or len(found.hosts),
        ranks_per_node=ranks_per_host,
        data=data,
    )


def choose_hosts(
    hosts: Sequence[str], unfit: Collection[int], *, wanted: int, ranks_per_node: int, data: DataConfig
) -> Choice:
    """Choose hosts in the given order: as many as wanted, or else the largest number that is legal.

    What is computed does not depend on it; a smaller number takes longer.

    Args:
        hosts: all that are there, spare ones last.
        unfit: places of those that are to be left out.
        wanted: nodes.
        ranks_per_node: ranks of each.
        data: what is divided among the ranks.

    Raises:
        MachineError: not even one host can do it.
    """
    fit = [host for place, host in enumerate(hosts) if place not in unfit]
    left_out = tuple(host for place, host in enumerate(hosts) if place in unfit)
    legal = set(legal_world_sizes(data.global_batch_size, group_size(data)))
    num = next((num for num in range(min(wanted, len(fit)), 0, -1) if num * ranks_per_node in legal), None)
    if num is None:
        raise MachineError(
            f"{len(fit)} of {len(hosts)} hosts are fit, and no number of them with {ranks_per_node} ranks each divides "
            f"data.global_batch_size={data.global_batch_size} evenly: mend {', '.join(left_out) or 'nothing'}, or "
            "start another number of ranks on each"
        )
    return Choice(hosts=tuple(fit[:num]), world_size=num * ranks_per_node, unfit=left_out, spare=tuple(fit[num:]))
