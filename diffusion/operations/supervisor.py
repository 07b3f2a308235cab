"""Supervisor of one job: start it, follow its heartbeats, end it when it hangs, and start it again."""

import datetime
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil

from diffusion.config.operations import SupervisionConfig
from diffusion.config.secrets import redact_arguments
from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from diffusion.errors import ConfigurationError, DataError, MachineError, explained_writes
from diffusion.files import open_lock
from diffusion.formats.run_folder import LEASE, SUPERVISED, read_request
from diffusion.operations import processes, timeouts
from diffusion.operations.events import EventKind, EventLog
from diffusion.operations.hang_detection import Condition, HangDetector, collect_stacks
from diffusion.operations.heartbeats import HeartbeatRecord, Phase, clear_heartbeats, read_heartbeats
from diffusion.operations.lease import Applicant, active_holder, await_lease

log = logging.getLogger(__name__)

HANG_EXIT_CODE = 124
"""Exit code of a job that was ended because of a hang."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


# Restarts


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Ending of one start of a job."""

    code: int
    """Exit code."""

    reason: str
    step: int = -1
    """Completed steps of the run; -1 if this start completed none."""

    is_lasting: bool = False
    """True if a restart meets the same error again."""

    is_growing: bool = False
    """True if the supervisor ended it, to start it on more hosts."""


class Restarts:
    """Decides after each ending, and counts the restarts without progress.

    - Lasting errors end the job: a configuration error, data past its threshold, a spent budget, a loss that a rollback
      does not mend.
    - Other user errors (missing data, a full disk, a store without an answer) end it before its first step under this
      supervisor, since it is set up wrongly. Later they may be transient.
    - Exit code 75 restarts immediately, or ends the job with `continue_preempted: false`.
    - Everything else restarts after a pause that doubles while no new step is reached.
    - `max_restarts` restarts without a new step end the job.
    """

    def __init__(self, settings: SupervisionConfig) -> None:
        self.settings = settings
        self._last_step, self._num_in_vain = -1, 0

    def pause_after(self, ending: Ending) -> tuple[float | None, str]:
        """Return the seconds before the next start, None without one, and the reason."""
        settings = self.settings
        is_preempted = ending.code == PREEMPTED_EXIT_CODE
        is_growing = is_preempted and ending.is_growing
        if ending.step > self._last_step:
            self._last_step, self._num_in_vain = ending.step, 0
        elif not is_growing:
            self._num_in_vain += 1
        if ending.code == 0:
            return None, ending.reason
        if ending.is_lasting:
            return None, f"{ending.reason}; a restart meets the same error"
        if ending.code == USER_ERROR_EXIT_CODE and self._last_step < 0:
            return None, f"{ending.reason}; no restart before the first step of the run"
        if is_growing:
            return 0.0, ending.reason
        if is_preempted and not settings.continue_preempted:
            return None, f"{ending.reason}; operations.supervision.continue_preempted is false"
        if self._num_in_vain > settings.max_restarts:
            number, step = settings.max_restarts, self._last_step
            return None, f"{ending.reason}; {number} consecutive restarts without a step after {step}"
        pause = min(settings.first_pause * 2.0 ** min(self._num_in_vain, 60), settings.longest_pause)
        return 0.0 if is_preempted else pause, ending.reason


def ending_of(code: int, heartbeats: Sequence[HeartbeatRecord]) -> Ending:
    """Return the ending of a start, from the exit code of its launcher and the last heartbeats.

    Not every launcher passes on the exit codes of its ranks.
    """
    failed = [one for one in heartbeats if one.phase is Phase.ended and one.error is not None]
    by_code = {one.code: one for one in reversed(failed)}
    mistake = by_code.get(USER_ERROR_EXIT_CODE)
    passed_on = mistake or by_code.get(PREEMPTED_EXIT_CODE)
    cause = passed_on or next(iter(failed), None)
    if code and passed_on is not None:
        code = passed_on.code or code
    reason = f"exit code {code}" if cause is None else f"{cause.error}"
    is_lasting = mistake is not None and mistake.is_lasting
    return Ending(code=code, reason=reason, step=_last_step(heartbeats), is_lasting=is_lasting)


def _last_step(heartbeats: Sequence[HeartbeatRecord]) -> int:
    """Return the completed steps of the run; -1 if this start completed none."""
    return max((heartbeat.step for heartbeat in heartbeats if heartbeat.num_done), default=-1)


# The supervisor


class Growth:
    """Looks for hosts that came back, in the background, at an interval in seconds; a look takes minutes."""

    def __init__(self, look: Callable[[], bool], interval: float) -> None:
        self._look, self._interval = look, interval
        self._last, self._found = time.monotonic(), False
        self._thread: threading.Thread | None = None

    def is_possible(self) -> bool:
        """Return what the last look has found, and begin the next one if it is time."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._last = None, time.monotonic()
        if self._thread is None and time.monotonic() - self._last >= self._interval:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self._found

    def _run(self) -> None:
        self._found = self._look()


class Supervisor:
    """Keeps one job running until it has finished.

    `start` returns the command of the next start; a `MachineError` counts as the end of that start. The environment is
    that of the job, the arguments are those of the supervisor, stored for `runs.py resume`. `growth` says whether the
    job would start on more hosts now, and the seconds between two looks; None: never look. `interrupt` is called at a
    signal and at the end, and ends both soon.
    """

    def __init__(
        self,
        start: Callable[[], Sequence[str]],
        run: Path,
        heartbeats: Path,
        settings: SupervisionConfig,
        events: EventLog,
        *,
        environment: dict[str, str],
        arguments: Sequence[str] = (),
        growth: tuple[Callable[[], bool], float] | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_folder, self.heartbeats, self.settings, self.events = run, heartbeats, settings, events
        self._start, self._environment, self._growth, self._interrupt = start, environment, growth, interrupt
        self._restarts, self._arguments = Restarts(settings), tuple(arguments)
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
        self._interrupt()
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
            ConfigurationError: the command cannot be started.
            MachineError: a job of this run is running already, or its folder cannot be written.
        """
        lock = self._lock()
        try:
            while True:
                ending = self._start_once(lock)
                pause, reason = self._restarts.pause_after(ending)
                if self._signal is not None:
                    pause, reason = None, ending.reason
                if pause is None:
                    kind = EventKind.stopped if ending.code else EventKind.finished
                    self.events.add(kind, reason, code=ending.code)
                    return ending.code
                self.events.add(EventKind.ended, reason, code=ending.code, step=ending.step, pause=pause)
                self._wait(pause)
        finally:
            os.close(lock)
            self._interrupt()
            self.events.close()

    def _start_once(self, lock: int) -> Ending:
        """Start the job and follow it to its end."""
        signalled = Ending(code=PREEMPTED_EXIT_CODE, reason="the supervisor got a signal")
        if self._signal is not None:
            return signalled
        try:
            command = self._start()
        except MachineError as error:
            failed = Ending(code=USER_ERROR_EXIT_CODE, reason=f"{type(error).__name__}: {error}")
            return failed if self._signal is None else signalled
        if self._signal is not None:
            return signalled
        if self._ranks():
            return self._other_start()
        clear_heartbeats(self.heartbeats)
        job = start_command(command, lock, self._environment)
        self.events.add(EventKind.started, processes=[job.pid])
        ending = self._follow(job)
        with suppress(DataError, OSError):  # The next start reads it again.
            if (rollback := read_request(self.run_folder)) is not None:
                reason = f"the loss of step {rollback.step} is {rollback.loss}"
                self.events.add(EventKind.rolling_back, reason, to=rollback.limit)
        return ending

    def _follow(self, job: subprocess.Popen) -> Ending:
        """Wait for the end of the job, or end it when it hangs."""
        detector, condition, is_passed_on = HangDetector(self.settings), Condition.working, False
        growth, is_growing = Growth(*self._growth) if self._growth is not None else None, False
        while (code := job.poll()) is None:
            heartbeats = read_heartbeats(self.heartbeats)
            if self._signal is not None and not is_passed_on:
                is_passed_on = True
                self.events.add(EventKind.signal, f"{signal.Signals(self._signal).name} is passed on")
                # The ranks notify one another; before the first heartbeat only the launcher is known.
                processes.terminate(self._ranks() or [job.pid])
            if growth is not None and not is_growing and _last_step(heartbeats) >= 0 and growth.is_possible():
                is_growing = True
                self.events.add(EventKind.growing, "more hosts are fit; it saves a checkpoint and continues on them")
                processes.terminate(self._ranks() or [job.pid])
            statuses = {one.rank: processes.status(one) for one in heartbeats}
            stopped = [rank for rank, status in statuses.items() if status == psutil.STATUS_STOPPED]
            have_exited = all(one.host == socket.gethostname() and statuses[one.rank] is None for one in heartbeats)
            now, reason = detector.judge(heartbeats, stopped, have_exited=have_exited)
            if now is Condition.hang:
                ending = self._end_hang(job, heartbeats, reason)
                if not have_exited and {one.phase for one in heartbeats} == {Phase.ended}:
                    ending = ending_of(max(one.code or 0 for one in heartbeats), heartbeats)
                return replace(ending, is_growing=is_growing)
            if now is not condition:
                condition = now
                self.events.add(EventKind.slow_data if now is Condition.slow_data else EventKind.data_came, reason)
            self._wait(timeouts.POLL)
        have_ended = any(one.phase is Phase.ended for one in read_heartbeats(self.heartbeats))
        if code == USER_ERROR_EXIT_CODE and not have_ended and self._ranks():  # It ended before its first heartbeat.
            return self._other_start()
        left = [*processes.tree(self._ranks()), *processes.session(job.pid)]  # Some may have no heartbeat yet.
        _, stragglers = psutil.wait_procs(left, timeout=timeouts.STRAGGLERS)
        processes.kill(stragglers)
        ending = ending_of(code if code >= 0 else 128 - code, read_heartbeats(self.heartbeats))
        return replace(ending, is_growing=is_growing)

    def _other_start(self) -> Ending:
        """Return the ending of a job while ranks of another start are running."""
        return Ending(code=USER_ERROR_EXIT_CODE, reason=f"another start of {self.run_folder} is running")

    def _end_hang(self, job: subprocess.Popen, heartbeats: Sequence[HeartbeatRecord], reason: str) -> Ending:
        """Write the stack traces of the ranks and kill the job."""
        text = collect_stacks(self.heartbeats, heartbeats)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        path = self.run_folder / f"stacks-{now}.txt"
        log.error("%s", text)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
        step = _last_step(heartbeats)
        self.events.add(EventKind.hang, reason, stacks=path.name, step=step)
        self._kill(job)
        return Ending(code=HANG_EXIT_CODE, reason=reason, step=step)

    def _kill(self, job: subprocess.Popen) -> None:
        """Kill the ranks of this machine, then the launcher, which first gets time to end those of other machines."""
        everything = [*processes.tree([job.pid, *self._ranks()]), *processes.session(job.pid)]
        processes.kill(processes.tree(self._ranks()))
        processes.terminate([job.pid])
        psutil.wait_procs([process for process in everything if process.pid == job.pid], timeout=timeouts.STRAGGLERS)
        processes.kill(everything)

    def _ranks(self) -> list[int]:
        """Return the processes of the ranks on this machine."""
        return [heartbeat.pid for heartbeat in read_heartbeats(self.heartbeats) if processes.is_alive(heartbeat)]

    def _lock(self) -> int:
        run = self.run_folder
        activity = f"a job of {run} is running already"
        remedy = "End it (SIGTERM to a rank saves it), or wait for its end"
        running = MachineError(f"{activity}, supervised or not. {remedy}")
        here = processes.own_record() | {"folder": str(Path.cwd()), "arguments": self._arguments}
        record = json.dumps(here).encode()
        with (
            explained_writes(f"the run folder {run}", "Free space, or choose another output_folder"),
            ExitStack() as stack,
        ):
            run.mkdir(parents=True, exist_ok=True)
            try:
                lock = open_lock(run / SUPERVISED, timeout=timeouts.SUPERVISOR_LOCK)
            except TimeoutError as error:
                raise running from error
            stack.callback(os.close, lock)
            if self._ranks():
                raise running
            if active_holder(run / LEASE) is not None:  # On another host, or it has just ended there.
                await_lease(Applicant(run / LEASE), activity, remedy).release()
            os.fchmod(lock, 0o600)  # An argument may be a secret.
            os.pwrite(lock, record, 0)
            os.ftruncate(lock, len(record))
            stack.pop_all()
        return lock


def start_command(command: Sequence[str], lock: int, environment: dict[str, str]) -> subprocess.Popen:
    """Start a command in a session of its own; it inherits the lock, which lasts as long as its processes.

    Raises:
        ConfigurationError: the program does not exist.
    """
    try:
        return subprocess.Popen(command, start_new_session=True, pass_fds=(lock,), env=environment)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ConfigurationError(
            f"the command cannot be started: {command[0]}: {error.strerror}. Name an existing program, as in "
            "composer run.py yamls/phase1.yaml"
        ) from error


def split_command(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the YAML file and the overrides in a command that starts a job; a ConfigurationError without a YAML."""
    position = next((i for i, argument in enumerate(command) if Path(argument).suffix in (".yaml", ".yml")), None)
    if position is None:
        raise ConfigurationError(
            f"the command '{' '.join(redact_arguments(command))}' names no YAML file: give the whole command that "
            "starts the job, as in composer run.py yamls/phase1.yaml"
        )
    return command[position], [word for word in command[position + 1 :] if "=" in word and not word.startswith("-")]
