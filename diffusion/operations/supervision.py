"""A supervisor of one job: starts it, follows its signs of life, ends it when it hangs, and starts it again."""

import datetime
import json
import logging
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from diffusion.checkpointing.roll_back import read_request
from diffusion.config.operations import SupervisionConfig
from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from diffusion.errors import MachineError
from diffusion.files import open_lock
from diffusion.operations import jobs
from diffusion.operations.beats import Beat, Phase, clear_beats, read_beats
from diffusion.operations.events import EventKind, EventLog
from diffusion.operations.jobs import Job
from diffusion.operations.patience import Condition, Watch
from diffusion.operations.restarts import Decision, Ending, Restarts
from diffusion.operations.stacks import collect_stacks, is_alive, process_of

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Time between two looks at a job."""

STRAGGLER_SECONDS = 40.0
"""How long ranks may outlive their launcher, since they save a checkpoint when it is gone; and a launcher its ranks."""

HANG_EXIT_CODE = 124
"""Of a job that was ended because it hung."""

_LOCK_SECONDS = 1.0
"""How long the lock of a run is waited for: whoever checks whether it is held holds it for a moment."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

SUPERVISED = "supervised.lock"
"""In the run folder: locked while a supervisor or its job is at work; holds its process, folder and arguments."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where a job leaves its traces."""

    run: Path
    """The run folder."""

    beats: Path
    """Where its ranks give signs of life."""


class Supervisor:
    """Keeps one job going to its end.

    Args:
        start: starts the job; gets the descriptor of a file that is to stay open as long as the job's processes.
        places: where it leaves its traces.
        settings: how long it waits, and how often it starts again.
        events: where it tells what happens.
        arguments: of the command that supervises, for who is to start it again later.
        prepare: called before each start; a `MachineError` that it raises counts as the end of that start.
    """

    def __init__(
        self,
        start: Callable[[int], Job],
        places: Places,
        settings: SupervisionConfig,
        events: EventLog,
        arguments: Sequence[str] = (),
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.places, self.settings, self.events = places, settings, events
        self._start, self._restarts = start, Restarts(settings)
        self._prepare, self._arguments = prepare, tuple(arguments)
        self._told: int | None = None
        # A handler runs in the thread that waits, wherever that is. An Event that it sets there while the thread is
        # within one of its methods waits for ever for a lock that the thread holds; putting here is reentrant.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def listen(self) -> None:
        """From now on pass on signals to the job, and end with it."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._told = number
        self._woken.put(None)

    def _wait(self, seconds: float) -> None:
        """Wait, but not beyond a signal."""
        with suppress(queue.Empty):
            self._woken.get(timeout=seconds)

    def run(self) -> int:
        """Supervise the job until it has finished, or cannot.

        Returns:
            Exit code: 0 when it has finished, 75 when the supervisor was told to end and the job was saved.

        Raises:
            MachineError: a job of this run is at work already, or its folder cannot be written to.
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
            decision = self._restarts.after(ending, was_told=self._told is not None)
            if not decision.starts_again:
                kind = EventKind.finished if decision.code == 0 else EventKind.stopped
                self.events.add(kind, decision.reason, code=decision.code)
                return decision
            self.events.add(EventKind.ended, ending.reason, code=ending.code, step=ending.step, pause=decision.pause)
            self._wait(decision.pause)

    # One start

    def _start_once(self, lock: int) -> Ending:
        """Check the machines, start the job and attend it."""
        error = None if self._told is not None else self._check()
        if self._told is not None:
            return Ending(code=PREEMPTED_EXIT_CODE, reason="the supervisor was told to end")
        if error is not None:
            return Ending(code=USER_ERROR_EXIT_CODE, reason=f"{type(error).__name__}: {error}")
        clear_beats(self.places.beats)
        job = self._start(lock)
        self.events.add(EventKind.started, processes=job.pids)
        ending = self._attend(job)
        if (rollback := read_request(self.places.run)) is not None:
            reason = f"the loss of step {rollback.step} is {rollback.loss}"
            self.events.add(EventKind.going_back, reason, to=rollback.limit)
        return ending

    def _check(self) -> MachineError | None:
        try:
            self._prepare()
        except MachineError as error:
            return error
        return None

    def _attend(self, job: Job) -> Ending:
        """Wait for the end of a start, or end it when it hangs."""
        watch, condition, is_passed_on = Watch(self.settings), Condition.working, False
        while (code := job.poll()) is None:
            beats = read_beats(self.places.beats)
            if self._told is not None and not is_passed_on:
                is_passed_on = True
                self._pass_on(job)
            judgement = watch.judge(beats, _stopped(beats))
            if judgement.condition is Condition.hang:
                return self._end_hanging(job, beats, judgement.reason)
            if judgement.condition is not condition:
                condition = judgement.condition
                is_slow = condition is Condition.slow_data
                self.events.add(EventKind.slow_data if is_slow else EventKind.data_came, judgement.reason)
            self._wait(POLL_SECONDS)
        self._await_stragglers()
        return ending_of(code, read_beats(self.places.beats))

    def _pass_on(self, job: Job) -> None:
        """Tell the ranks, which tell one another; or the launcher, while none has begun."""
        assert self._told is not None
        self.events.add(EventKind.told, f"{signal.Signals(self._told).name} came and is passed on")
        jobs.tell(self._ranks() or job.pids)

    def _end_hanging(self, job: Job, beats: Sequence[Beat], reason: str) -> Ending:
        """Write down where the ranks are, and end them all."""
        text = collect_stacks(self.places.beats, beats)
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
        path = self.places.run / f"stacks-{now}.txt"
        log.error("%s", text)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror)
        self.events.add(EventKind.hang, reason, stacks=path.name, step=_step(beats))
        self._end(job)
        return Ending(code=HANG_EXIT_CODE, reason=reason, step=_step(beats))

    def _end(self, job: Job) -> None:
        """Kill the ranks of this machine, and the launcher after it has had time to end those of others."""
        processes = jobs.tree([*job.pids, *self._ranks()])
        jobs.kill(jobs.tree(self._ranks()))
        jobs.tell(job.pids)
        psutil.wait_procs([each for each in processes if each.pid in job.pids], timeout=STRAGGLER_SECONDS)
        jobs.kill(processes)

    def _await_stragglers(self) -> None:
        """See that no rank of this machine goes on without its launcher."""
        _, still_there = psutil.wait_procs(jobs.tree(self._ranks()), timeout=STRAGGLER_SECONDS)
        jobs.kill(still_there)

    def _ranks(self) -> list[int]:
        """Processes of ranks that run on this machine."""
        return [beat.pid for beat in read_beats(self.places.beats) if is_alive(beat)]

    def _lock(self) -> int:
        try:
            self.places.run.mkdir(parents=True, exist_ok=True)
            lock = open_lock(self.places.run / SUPERVISED, timeout=_LOCK_SECONDS)
        except TimeoutError as error:
            raise self._already_running() from error
        except OSError as error:
            what = f"the run folder {self.places.run} cannot be written to: {error.strerror}"
            raise MachineError(f"{what}. Free space, or choose another output_folder") from error
        if self._ranks():
            os.close(lock)
            raise self._already_running()
        os.ftruncate(lock, 0)
        here = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), "folder": str(Path.cwd())}
        os.write(lock, json.dumps(here | {"arguments": self._arguments}).encode())
        return lock

    def _already_running(self) -> MachineError:
        return MachineError(
            f"a job of {self.places.run} is at work, supervised or not. End it (SIGTERM to a rank saves it), or wait "
            "for its end"
        )


def ending_of(code: int, beats: Sequence[Beat]) -> Ending:
    """How a start ended, from the exit code of its launcher and what its ranks said last.

    Not every launcher passes on the exit codes of its ranks.
    """
    said = [beat for beat in beats if beat.phase is Phase.ended and beat.error is not None]
    mistake = next((beat for beat in said if beat.code == USER_ERROR_EXIT_CODE), None)
    preempted = next((beat for beat in said if beat.code == PREEMPTED_EXIT_CODE), None)
    first = mistake or preempted or next(iter(said), None)
    if code and (mistake or preempted) is not None:
        assert first is not None
        code = first.code or code
    reason = f"exit code {code}" if first is None else f"{first.error}"
    return Ending(code=code, reason=reason, step=_step(beats), is_lasting=mistake is not None and mistake.is_lasting)


def _step(beats: Sequence[Beat]) -> int:
    """Steps that the run has done, if this start did one."""
    return max((beat.step for beat in beats if beat.num_done), default=-1)


def _stopped(beats: Sequence[Beat]) -> list[int]:
    processes = {beat.rank: process_of(beat) for beat in beats}
    return [rank for rank, process in processes.items() if process is not None and _is_stopped(process)]


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
