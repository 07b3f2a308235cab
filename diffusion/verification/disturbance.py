"""Ending a run from within: at a chosen moment of a chosen step, whatever the speed of the machine."""

import os
import signal

from composer import Callback, Event, Logger, State
from composer.utils import dist

MOMENTS = ("before_forward", "after_backward", "batch_end")
"""Events of Composer at which a run can be disturbed: within a step before and after its gradients, and after it."""


class Disturbance(Callback):
    """Kill the last rank, or terminate all ranks, in one step; named in a YAML as a plug-in.

    Args:
        step: number of the step, from 0.
        moment: one of `MOMENTS`.
        kind: `kill`: the last rank ends by SIGKILL, as if its machine were lost, and its launcher ends the others.
            `term`: each rank gets SIGTERM, as schedulers send it.
    """

    def __init__(self, step: int, moment: str, kind: str) -> None:
        assert moment in MOMENTS, moment
        assert kind in ("kill", "term"), kind
        self.step, self.event, self.kind = step, Event(moment), kind
        self._is_done = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Send the signal when the moment has come, once."""
        done = int(state.timestamp.batch) - (1 if event is Event.BATCH_END else 0)
        if self._is_done or event is not self.event or done != self.step:
            return
        self._is_done = True
        if self.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif dist.get_global_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
