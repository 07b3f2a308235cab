"""The machines of a supervised job: checked before each start, and the unfit ones left out where others are there."""

import dataclasses
import os
import shlex
import socket
import sys
from collections.abc import Sequence

from diffusion.config.data import DataConfig
from diffusion.operations.checks.hosts import choose_fit_hosts, command_over_ssh, survey
from diffusion.operations.checks.nodes import unfit_nodes
from diffusion.operations.checks.verdicts import Level, warnings_of
from diffusion.operations.events import EventKind, EventLog, log
from diffusion.operations.jobs import Command

PLACE_OF_HOSTS = "{hosts}"
"""In a command: becomes the hosts to start on, with blanks between them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """Hosts that a job may start on."""

    hosts: tuple[str, ...]
    """Spare ones last."""

    wanted: int | None = None
    """How many of them; None: all."""

    ranks_per_host: int | None = None
    """None: one for each GPU, or one without GPUs."""


class Machines:
    """Where a job starts.

    Args:
        command: that starts it.
        arguments: YAML and overrides in it.
        fleet: hosts that ssh reaches; None: this machine alone is checked.
        data: what is divided among the ranks.
        patience: seconds that the check may take; None: there is none.
        events: where it tells what is wrong.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        fleet: Fleet | None,
        data: DataConfig,
        patience: float | None,
        events: EventLog,
    ) -> None:
        self._command, self._fleet, self._data = tuple(command), fleet, data
        self._patience, self._events = patience, events
        self.hosts = fleet.hosts[: fleet.wanted] if fleet is not None else ()
        here = [sys.executable, "-m", "diffusion.operations.checks.this_machine", *arguments]
        ssh = shlex.split(os.environ.get("SSH", "ssh"))
        self._check = (lambda host: here) if fleet is None else command_over_ssh(ssh, arguments)

    def check(self) -> None:
        """Check them, and choose those of the next start.

        Raises:
            MachineError: it cannot start.
        """
        if self._patience is None:
            return
        found = survey(self._fleet.hosts if self._fleet else [socket.gethostname()], self._check, self._patience)
        for verdict in found.verdicts:
            host = verdict.where or ", ".join(found.hosts)
            if verdict.level is Level.problem or unfit_nodes(found.hosts, [verdict]):
                self._events.add(EventKind.unfit, verdict.sentence, check=verdict.check, host=host)
            for text in warnings_of([verdict]):
                log.warning("%s: %s", host, text)
        if self._fleet is None:
            found.refuse()
            return
        wanted, ranks = self._fleet.wanted, self._fleet.ranks_per_host
        choice = choose_fit_hosts(found, wanted=wanted, ranks_per_host=ranks, data=self._data)
        self.hosts = choice.hosts
        log.info("%d ranks on %s", choice.world_size, ", ".join(choice.hosts))

    def start(self, keep_open: int) -> Command:
        """Start the job there; on a fleet without checks and restarts of the launcher's own, which are decided here.

        Args:
            keep_open: a file that it inherits.
        """
        hosts = " ".join(self.hosts)
        command = [word.replace(PLACE_OF_HOSTS, hosts) for word in self._command]
        own = {}
        if self._fleet is not None:
            ranks = self._fleet.ranks_per_host
            own = {"ATTEMPTS": "1", "CHECK": "false"} | ({"RANKS_PER_HOST": str(ranks)} if ranks else {})
        return Command(command, keep_open=keep_open, environment={**os.environ, **own})
