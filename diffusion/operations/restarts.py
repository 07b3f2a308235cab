"""What follows the end of a job: nothing, another start, or giving up."""

from dataclasses import dataclass

from diffusion.config.operations import SupervisionConfig
from diffusion.distributed import PREEMPTED_EXIT_CODE, USER_ERROR_EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one start of a job ended."""

    code: int
    """Exit code."""

    reason: str
    """In words."""

    step: int = -1
    """Steps that the run had done; -1 if this start did none."""

    is_lasting: bool = False
    """The error comes again for sure."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do."""

    starts_again: bool
    pause: float = 0.0
    """Seconds before that."""

    code: int = 0
    """Exit code of the supervisor otherwise."""

    reason: str = ""


class Restarts:
    """Decides after each end of a job, and remembers how often in a row it came to nothing.

    - A configuration error, data past its threshold, or a loss that going back does not mend ends it.
    - Any other mistake of the user (missing data, a full disk, a store that does not answer) ends it if the run has
      never come to a step under this supervision: it is set up wrongly. Later it may pass.
    - Exit code 75 starts again at once; everything else after a pause that doubles while no new step is reached.

    Args:
        settings: the limits.
    """

    def __init__(self, settings: SupervisionConfig) -> None:
        self.settings = settings
        self._furthest, self._in_vain = -1, 0

    def after(self, ending: Ending, *, was_told: bool) -> Decision:
        """Decide.

        Args:
            ending: how the job ended.
            was_told: the supervisor itself was asked to end.
        """
        settings = self.settings
        if ending.code == 0 or was_told:
            return Decision(starts_again=False, code=ending.code, reason=ending.reason)
        if ending.is_lasting:
            return _stop(ending, "starting again does not mend it")
        if ending.code == USER_ERROR_EXIT_CODE and max(ending.step, self._furthest) < 0:
            return _stop(ending, "the run has not come to a step yet, so it is not tried again")
        is_preempted = ending.code == PREEMPTED_EXIT_CODE
        if is_preempted and not settings.continue_preempted:
            return _stop(ending, "operations.supervision.continue_preempted is false")
        if ending.step > self._furthest:
            self._furthest, self._in_vain = ending.step, 0
        else:
            self._in_vain += 1
        if self._in_vain > settings.max_restarts:
            return _stop(ending, f"{settings.max_restarts} restarts in a row reached no step after {self._furthest}")
        pause = min(settings.first_pause * 2.0**self._in_vain, settings.longest_pause)
        return Decision(starts_again=True, pause=0.0 if is_preempted else pause, reason=ending.reason)


def _stop(ending: Ending, why: str) -> Decision:
    return Decision(starts_again=False, code=ending.code, reason=f"{ending.reason}; {why}")
