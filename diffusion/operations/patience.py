"""Whether a job hangs, waits for slow data, or does what takes its time: judged from the signs of life of its ranks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from diffusion.config.operations import SupervisionConfig
from diffusion.operations.beats import Beat, Phase

_ORDER = {
    Phase.starting: 0,
    Phase.between: 0,
    Phase.evaluation: 0,
    Phase.data: 1,
    Phase.compiling: 2,
    Phase.step: 3,
    Phase.ending: 4,
}
"""Of ranks at the same number of steps, the one with the lowest phase is behind."""


class Condition(str, Enum):
    """How a job does."""

    working = "working"
    slow_data = "slow_data"
    """It has been silent for as long as a hang, but the slowest rank waits for its batch."""

    hang = "hang"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How a job does, and why."""

    condition: Condition
    reason: str
    """In words."""


class Watch:
    """Follows the signs of life of one start of a job, by its own clock: those of the machines may differ.

    In each step all ranks wait for the slowest, so that what counts is the time since the last sign of any rank, and
    the phase of those that are behind.

    Args:
        settings: how long it waits.
        now: clock, in seconds.
    """

    def __init__(self, settings: SupervisionConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._now = settings, now
        self._last = now()
        self._counts: dict[int, int] = {}

    def judge(self, beats: Sequence[Beat], stopped: Sequence[int] = ()) -> Judgement:
        """Judge a job.

        Args:
            beats: the last signs of its ranks.
            stopped: ranks whose processes are known to be stopped (SIGSTOP), which wait for nothing.
        """
        counts = {beat.rank: beat.count for beat in beats}
        if counts != self._counts:
            self._counts, self._last = counts, self._now()
        silence = self._now() - self._last
        condition, limit, what = self._expectation(beats, stopped)
        if silence > limit:
            return Judgement(condition=Condition.hang, reason=f"no sign of any rank for {silence:.0f} s: {what}")
        if condition is Condition.slow_data and silence > self._hang_limit(beats):
            return Judgement(condition=condition, reason=f"no batch for {silence:.0f} s: {what}")
        return Judgement(condition=Condition.working, reason=what)

    def _expectation(self, beats: Sequence[Beat], stopped: Sequence[int]) -> tuple[Condition, float, str]:
        """What the silence of a job means until it is too long, how long that is in seconds, and who is behind."""
        active = [beat for beat in beats if beat.phase is not Phase.ended]
        if not active:
            return Condition.working, self.settings.pause_timeout, "no rank has begun"
        if stopped:
            return Condition.hang, self._hang_limit(beats), f"{_ranks(list(stopped))} was stopped"
        places = {beat.rank: (beat.step, _ORDER[beat.phase]) for beat in active}
        behind = [beat for beat in active if places[beat.rank] == min(places.values())]
        phase, step = behind[0].phase, behind[0].step
        what = f"{_ranks([beat.rank for beat in behind])} of {len(beats)} in phase {phase.value} of step {step}"
        if phase is Phase.data:
            return Condition.slow_data, self.settings.data_timeout, what
        if phase is Phase.step and behind[0].median_step is not None:
            return Condition.hang, self._hang_limit(beats), what
        return Condition.working, self.settings.pause_timeout, what

    def _hang_limit(self, beats: Sequence[Beat]) -> float:
        medians = [beat.median_step for beat in beats if beat.median_step is not None]
        return max(self.settings.hang_floor, self.settings.hang_factor * max(medians, default=0.0))


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
