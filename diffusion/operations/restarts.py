"""Restart policy: what follows the end of a job."""

from dataclasses import dataclass

from diffusion.config.operations import SupervisionConfig
from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Ending of one start of a job."""

    code: int
    """Exit code."""

    reason: str
    """In words."""

    step: int = -1
    """Completed steps of the run; -1 if this start completed none."""

    is_lasting: bool = False
    """Whether a restart meets the same error again."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Reaction to an ending."""

    starts_again: bool
    pause: float = 0.0
    """Seconds before the restart."""

    code: int = 0
    """Exit code of the supervisor without a restart."""

    reason: str = ""


class Restarts:
    """Decides after each ending, and counts the restarts without progress.

    - Lasting errors end the job: a configuration error, data past its threshold, a loss that a rollback does not mend.
    - Other user errors (missing data, a full disk, a store without an answer) end it before its first step under this
      supervisor, since it is set up wrongly. Later they may be transient.
    - Exit code 75 restarts immediately; everything else after a pause that doubles while no new step is reached.

    Args:
        settings: limits.
    """

    def __init__(self, settings: SupervisionConfig) -> None:
        self.settings = settings
        self._last_step, self._num_in_vain = -1, 0

    def after(self, ending: Ending, *, was_signalled: bool) -> Decision:
        """Decide.

        Args:
            ending: ending of the job.
            was_signalled: whether the supervisor itself got a signal.
        """
        settings = self.settings
        if ending.code == 0 or was_signalled:
            return Decision(starts_again=False, code=ending.code, reason=ending.reason)
        if ending.is_lasting:
            return _stop(ending, "a restart meets the same error")
        if ending.code == USER_ERROR_EXIT_CODE and max(ending.step, self._last_step) < 0:
            return _stop(ending, "no restart before the first step of the run")
        is_preempted = ending.code == PREEMPTED_EXIT_CODE
        if is_preempted and not settings.continue_preempted:
            return _stop(ending, "operations.supervision.continue_preempted is false")
        if ending.step > self._last_step:
            self._last_step, self._num_in_vain = ending.step, 0
        else:
            self._num_in_vain += 1
        if self._num_in_vain > settings.max_restarts:
            return _stop(ending, f"{settings.max_restarts} consecutive restarts without a step after {self._last_step}")
        pause = min(settings.first_pause * 2.0**self._num_in_vain, settings.longest_pause)
        return Decision(starts_again=True, pause=0.0 if is_preempted else pause, reason=ending.reason)


def _stop(ending: Ending, why: str) -> Decision:
    return Decision(starts_again=False, code=ending.code, reason=f"{ending.reason}; {why}")
