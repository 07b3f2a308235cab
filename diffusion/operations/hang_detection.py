"""Hang detection from the heartbeats of a job, and the stack traces of its ranks."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from diffusion.config.operations import SupervisionConfig
from diffusion.distributed import name_ranks
from diffusion.operations import timeouts
from diffusion.operations.heartbeats import HeartbeatRecord, Phase, stacks_file
from diffusion.operations.processes import is_alive

STACKS_SIGNAL = signal.SIGUSR2
"""Signal on which a rank writes the stack traces of its threads."""

_PHASE_ORDER = {
    Phase.starting: 0,
    Phase.between: 0,
    Phase.evaluation: 0,
    Phase.data: 1,
    Phase.compiling: 2,
    Phase.step: 3,
    Phase.ending: 4,
}
"""Order of the phases of ranks at the same step; the lowest is the slowest rank."""


class Condition(str, Enum):
    """Condition of a job."""

    working = "working"
    slow_data = "slow_data"
    """No heartbeat for the timeout of a step, but the slowest rank waits for its batch."""

    hang = "hang"


class HangDetector:
    """Judges the heartbeats of one start of a job, by its own clock in seconds.

    In each step all ranks wait for the slowest. So the silence is the time since the last heartbeat of any rank, and
    the timeout depends on the phase of the slowest ranks.
    """

    def __init__(self, settings: SupervisionConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._now = settings, now
        self._last = now()
        self._counts: dict[int, int] = {}

    def judge(
        self, heartbeats: Sequence[HeartbeatRecord], stopped: Sequence[int] = (), *, have_exited: bool = False
    ) -> tuple[Condition, str]:
        """Return the condition of a job, and the reason in words, from the last heartbeat of each rank.

        Processes of `stopped` ranks are stopped (SIGSTOP). If all `have_exited`, their command may go on with
        something else.
        """
        counts = {heartbeat.rank: heartbeat.count for heartbeat in heartbeats}
        if counts != self._counts:
            self._counts, self._last = counts, self._now()
        silence = self._now() - self._last
        condition, timeout, reason = self._expectation(heartbeats, stopped, have_exited)
        if silence > timeout:
            return Condition.hang, f"no heartbeat of any rank for {silence:.0f} s: {reason}"
        if condition is Condition.slow_data and silence > self._step_timeout(heartbeats):
            return condition, f"no batch for {silence:.0f} s: {reason}"
        return Condition.working, reason

    def _expectation(
        self, heartbeats: Sequence[HeartbeatRecord], stopped: Sequence[int], have_exited: bool
    ) -> tuple[Condition, float, str]:
        """Return the condition of a silent job before its timeout, the timeout in seconds, and the slowest ranks."""
        active = [heartbeat for heartbeat in heartbeats if heartbeat.phase is not Phase.ended]
        if not heartbeats:
            return Condition.working, self.settings.pause_timeout, "no rank has started"
        if not active and have_exited:
            return Condition.working, self.settings.pause_timeout, "all ranks have ended, but not their command"
        if not active:
            return Condition.working, timeouts.EXIT, "all ranks have ended, but not their processes"
        if stopped:
            return Condition.hang, self._step_timeout(heartbeats), f"{name_ranks(stopped)} was stopped"
        progress = {heartbeat.rank: (heartbeat.step, _PHASE_ORDER[heartbeat.phase]) for heartbeat in active}
        slowest = [heartbeat for heartbeat in active if progress[heartbeat.rank] == min(progress.values())]
        ranks, phase = name_ranks([heartbeat.rank for heartbeat in slowest]), slowest[0].phase
        reason = f"{ranks} of {len(heartbeats)} in phase {phase.value} of step {slowest[0].step}"
        if phase is Phase.data:
            return Condition.slow_data, self.settings.data_timeout, reason
        if phase is Phase.step and slowest[0].median_step is not None:
            return Condition.hang, self._step_timeout(heartbeats), reason
        return Condition.working, self.settings.pause_timeout, reason

    def _step_timeout(self, heartbeats: Sequence[HeartbeatRecord]) -> float:
        medians = [heartbeat.median_step for heartbeat in heartbeats if heartbeat.median_step is not None]
        return max(self.settings.hang_floor, self.settings.hang_factor * max(medians, default=0.0))


def collect_stacks(folder: Path, heartbeats: Sequence[HeartbeatRecord]) -> str:
    """Collect the stack traces of the ranks on this machine, whose last heartbeats are given.

    Returns:
        A text with one part for each rank, also for those without an answer.
    """
    files = {one.rank: stacks_file(folder, one.rank) for one in heartbeats}
    sizes = {
        one.rank: files[one.rank].stat().st_size for one in heartbeats if is_alive(one) and files[one.rank].exists()
    }
    requested = [one for one in heartbeats if one.rank in sizes]
    for one in requested:
        with contextlib.suppress(ProcessLookupError):
            _signal_main_thread(one.pid)
            os.kill(one.pid, signal.SIGCONT)  # A stopped process writes nothing.
    deadline = time.monotonic() + timeouts.STACKS
    while time.monotonic() < deadline and not all(
        _has_written(files[one.rank], one, sizes[one.rank]) for one in requested
    ):
        time.sleep(0.05)
    parts = []
    for one in heartbeats:
        text = files[one.rank].read_text(errors="replace").rstrip() if one in requested else ""
        missing = f"no answer from process {one.pid} on {one.host}: ended, hung in the kernel, or on another machine"
        parts.append(f"rank {one.rank}, in phase {one.phase.value} of step {one.step}:\n{text or missing}\n")
    return "\n".join(parts)


def _signal_main_thread(pid: int) -> None:
    """Send the signal to the main thread; to any thread before glibc 2.30.

    The kernel delivers a signal to any thread that wakes. A handler there would race with the main thread.
    """
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is None or send(pid, pid, int(STACKS_SIGNAL)):
        os.kill(pid, STACKS_SIGNAL)


def _has_written(file: Path, heartbeat: HeartbeatRecord, size: int) -> bool:
    """Return whether a rank has ended, or has written all since its file had a size."""
    if not is_alive(heartbeat):
        return True
    if file.stat().st_size == size:
        return False
    try:
        status = Path(f"/proc/{heartbeat.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    fields = dict(line.split(":", 1) for line in status.splitlines())
    # The signal is pending before the handler runs, and blocked while it runs.
    masks = (int(fields[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return not any(mask >> STACKS_SIGNAL - 1 & 1 for mask in masks)
