"""Disturbing a run from within: at a chosen moment of a chosen step, or when asked to."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from composer import Callback, Event, Logger, State
from composer.utils import dist

from diffusion.datasets.batch import BatchKey

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


class PoisonBatch(Callback):
    """Make the latents of one rank's batch NaN when a file appears, which is removed; named in a YAML as a plug-in.

    Args:
        request: path of the file.
    """

    def __init__(self, request: str) -> None:
        self.request = Path(request)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Look for the request on the last rank."""
        if dist.get_global_rank() == dist.get_world_size() - 1 and self.request.exists():
            self.request.unlink()
            mean = state.batch[BatchKey.LATENT_MEAN]
            state.batch[BatchKey.LATENT_MEAN] = torch.full_like(mean, torch.nan)


class HoldAt(Callback):
    """Keep a run from going beyond a step before one of some files is there; named in a YAML as a plug-in.

    Args:
        step: number of the step, from 0.
        releases: paths of the files.
    """

    def __init__(self, step: int, releases: Sequence[str]) -> None:
        self.step, self.releases = step, [Path(each) for each in releases]

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Wait for a file on the last rank, which looks for requests; the others wait for that one."""
        if dist.get_global_rank() != dist.get_world_size() - 1:
            return
        pause = threading.Event()
        while state.timestamp.batch.value == self.step and not any(each.exists() for each in self.releases):
            pause.wait(0.05)
