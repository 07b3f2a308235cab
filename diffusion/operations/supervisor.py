"""Supervisor of one job: start it, follow its heartbeats, end it when it hangs, and start it again."""

import datetime
import json
import logging
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from diffusion.checkpointing.roll_back import read_request
from diffusion.config.loading import load_config
from diffusion.config.operations import SupervisionConfig
from diffusion.config.schema import Config
from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from diffusion.errors import ConfigurationError, MachineError
from diffusion.files import open_lock
from diffusion.operations import processes
from diffusion.operations.events import EventKind, EventLog
from diffusion.operations.hang_detection import Condition, HangDetector, collect_stacks
from diffusion.operations.heartbeats import HeartbeatRecord, Phase, clear_heartbeats, heartbeat_folder, read_heartbeats
from diffusion.operations.processes import Command
from diffusion.operations.restarts import Decision, Ending, Restarts

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Interval at which the heartbeats are read."""

STRAGGLER_SECONDS = 40.0
"""Time for ranks to end after their launcher, since they save a checkpoint then; and for a launcher after its ranks."""

HANG_EXIT_CODE = 124
"""Exit code of a job that was ended because of a hang."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

SUPERVISED = "supervised.lock"
"""File in the run folder, locked while a supervisor or its job runs; holds process, folder and arguments."""

_LOCK_SECONDS = 1.0
"""Timeout of the lock, which `runs.supervisor_of` holds for a moment."""


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """Folders of a run."""

    run: Path
    heartbeats: Path


class Supervisor:
    """Keeps one job running until it has finished.

    Args:
        start: starts the job; its argument is a descriptor that the job's processes keep open.
        folders: folders of the run.
        settings: timeouts and limits of restarts.
        events: log of events.
        arguments: command line of the supervisor, stored for `runs.py resume`.
        prepare: called before each start; a `MachineError` counts as the end of that start.
    """

    def __init__(
        self,
        start: Callable[[int], Command],
        folders: RunFolders,
        settings: SupervisionConfig,
        events: EventLog,
        arguments: Sequence[str] = (),
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.folders, self.settings, self.events = folders, settings, events
        self._start, self._restarts = start, Restarts(settings)
        self._prepare, self._arguments = prepare, tuple(arguments)
        self._signal: int | None = None
        # A handler runs within the waiting thread. An Event that it sets would deadlock if the thread holds its lock;
        # SimpleQueue.put is reentrant.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def listen(self) -> None:
        """Handle signals: pass them on to the job and end with it."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._wake.put(None)

    def _wait(self, seconds: float) -> None:
        """Wait for some time or a signal."""
        with suppress(queue.Empty):
            self._wake.get(timeout=seconds)

    def run(self) -> int:
        """Supervise the job until it has finished, or cannot.

        Returns:
            Exit code: 0 after the end of the run, 75 after a signal to the supervisor, else that of the job.

        Raises:
            MachineError: a job of this run is running already, or its folder cannot be written.
        """
        lock = self._lock()
        try:
            decision = self._supervise(lock)
        finally:
            os.close(lock)
            self.events.close()
        return decision.code

    def _supervise(self, lock: int) -> Decision:
        while True:
            ending = self._start_once(lock)
            decision = self._restarts.after(ending, was_signalled=self._signal is not None)
            if not decision.starts_again:
                kind = EventKind.finished if decision.code == 0 else EventKind.stopped
                self.events.add(kind, decision.reason, code=decision.code)
                return decision
            self.events.add(EventKind.ended, ending.reason, code=ending.code, step=ending.step, pause=decision.pause)
            self._wait(decision.pause)

    # One start

    def _start_once(self, lock: int) -> Ending:
        """Check the machines, start the job and follow it to its end."""
        try:
            if self._signal is None:
                self._prepare()
        except MachineError as error:
            if self._signal is None:
                return Ending(code=USER_ERROR_EXIT_CODE, reason=f"{type(error).__name__}: {error}")
        if self._signal is not None:
            return Ending(code=PREEMPTED_EXIT_CODE, reason="the supervisor got a signal")
        clear_heartbeats(self.folders.heartbeats)
        job = self._start(lock)
        self.events.add(EventKind.started, processes=[job.pid])
        ending = self._follow(job)
        if (rollback := read_request(self.folders.run)) is not None:
            reason = f"the loss of step {rollback.step} is {rollback.loss}"
            self.events.add(EventKind.going_back, reason, to=rollback.limit)
        return ending

    def _follow(self, job: Command) -> Ending:
        """Wait for the end of the job, or end it when it hangs."""
        detector, condition, is_passed_on = HangDetector(self.settings), Condition.working, False
        while (code := job.poll()) is None:
            heartbeats = read_heartbeats(self.folders.heartbeats)
            if self._signal is not None and not is_passed_on:
                is_passed_on = True
                self.events.add(EventKind.told, f"{signal.Signals(self._signal).name} came and is passed on")
                # The ranks notify one another; before the first heartbeat only the launcher is known.
                processes.terminate(self._ranks() or [job.pid])
            stopped = [heartbeat.rank for heartbeat in heartbeats if processes.is_stopped(heartbeat)]
            judgement = detector.judge(heartbeats, stopped)
            if judgement.condition is Condition.hang:
                return self._end_hang(job, heartbeats, judgement.reason)
            if judgement.condition is not condition:
                condition = judgement.condition
                kind = EventKind.slow_data if condition is Condition.slow_data else EventKind.data_came
                self.events.add(kind, judgement.reason)
            self._wait(POLL_SECONDS)
        _, stragglers = psutil.wait_procs(processes.tree(self._ranks()), timeout=STRAGGLER_SECONDS)
        processes.kill(stragglers)
        return ending_of(code, read_heartbeats(self.folders.heartbeats))

    def _end_hang(self, job: Command, heartbeats: Sequence[HeartbeatRecord], reason: str) -> Ending:
        """Write the stack traces of the ranks and kill the job."""
        text = collect_stacks(self.folders.heartbeats, heartbeats)
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
        path = self.folders.run / f"stacks-{now}.txt"
        log.error("%s", text)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
        step = _last_step(heartbeats)
        self.events.add(EventKind.hang, reason, stacks=path.name, step=step)
        self._kill(job)
        return Ending(code=HANG_EXIT_CODE, reason=reason, step=step)

    def _kill(self, job: Command) -> None:
        """Kill the ranks of this machine, then the launcher, which first gets time to end those of other machines."""
        everything = processes.tree([job.pid, *self._ranks()])
        processes.kill(processes.tree(self._ranks()))
        processes.terminate([job.pid])
        psutil.wait_procs([process for process in everything if process.pid == job.pid], timeout=STRAGGLER_SECONDS)
        processes.kill(everything)

    def _ranks(self) -> list[int]:
        """Return the processes of the ranks on this machine."""
        heartbeats = read_heartbeats(self.folders.heartbeats)
        return [heartbeat.pid for heartbeat in heartbeats if processes.is_alive(heartbeat)]

    def _lock(self) -> int:
        run = self.folders.run
        running = MachineError(
            f"a job of {run} is running already, supervised or not. End it (SIGTERM to a rank saves it), or wait for "
            "its end"
        )
        try:
            run.mkdir(parents=True, exist_ok=True)
            lock = open_lock(run / SUPERVISED, timeout=_LOCK_SECONDS)
        except TimeoutError as error:
            raise running from error
        except OSError as error:
            raise MachineError(
                f"the run folder {run} cannot be written: {error.strerror}. Free space, or choose another output_folder"
            ) from error
        if self._ranks():
            os.close(lock)
            raise running
        os.ftruncate(lock, 0)
        here = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "folder": str(Path.cwd())}
        os.write(lock, json.dumps(here | {"arguments": self._arguments}).encode())
        return lock


def ending_of(code: int, heartbeats: Sequence[HeartbeatRecord]) -> Ending:
    """Return the ending of a start, from the exit code of its launcher and the last heartbeats.

    Not every launcher passes on the exit codes of its ranks.
    """
    failed = [one for one in heartbeats if one.phase is Phase.ended and one.error is not None]
    mistake = next((one for one in failed if one.code == USER_ERROR_EXIT_CODE), None)
    preempted = next((one for one in failed if one.code == PREEMPTED_EXIT_CODE), None)
    cause = mistake or preempted or next(iter(failed), None)
    if code and cause is not None and cause in (mistake, preempted):
        code = cause.code or code
    reason = f"exit code {code}" if cause is None else f"{cause.error}"
    is_lasting = mistake is not None and mistake.is_lasting
    return Ending(code=code, reason=reason, step=_last_step(heartbeats), is_lasting=is_lasting)


def _last_step(heartbeats: Sequence[HeartbeatRecord]) -> int:
    """Return the completed steps of the run; -1 if this start completed none."""
    return max((heartbeat.step for heartbeat in heartbeats if heartbeat.num_done), default=-1)


# The supervised command


@dataclass(frozen=True, kw_only=True)
class SupervisedCommand:
    """A command that starts a job, as the supervisor reads it."""

    config: Config
    arguments: tuple[str, ...]
    """YAML file and overrides."""

    folders: RunFolders
    webhook: str | None
    """Address for events, a secret."""


def read_command(command: Sequence[str], environment: Mapping[str, str]) -> SupervisedCommand:
    """Read the configuration of a command that starts a job.

    Args:
        command: launcher, program, the YAML of the run, and `key.sub=value`.
        environment: holds the address of the webhook.

    Raises:
        ConfigurationError: the command names no YAML, the configuration is wrong, or the webhook is not set.
    """
    yaml, overrides = split_command(command)
    config = load_config(yaml, overrides)
    name = config.operations.supervision.webhook_variable
    if name is not None and not environment.get(name):
        raise ConfigurationError(
            f"operations.supervision.webhook_variable is {name}, but the environment has no such variable. Set it to "
            "the address to which events are posted, or the key to null"
        )
    run = Path(config.output_folder).expanduser()
    return SupervisedCommand(
        config=config,
        arguments=(yaml, *overrides),
        folders=RunFolders(run=run, heartbeats=heartbeat_folder(config, run)),
        webhook=environment[name] if name is not None else None,
    )


def split_command(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the YAML file and the overrides in a command that starts a job.

    Raises:
        ConfigurationError: the command names no YAML.
    """
    position = next((i for i, argument in enumerate(command) if Path(argument).suffix in (".yaml", ".yml")), None)
    if position is None:
        raise ConfigurationError(
            f"the command '{' '.join(command)}' names no YAML file: give the whole command that starts the job, as in "
            "composer run.py yamls/phase1.yaml"
        )
    return command[position], [word for word in command[position + 1 :] if "=" in word and not word.startswith("-")]
