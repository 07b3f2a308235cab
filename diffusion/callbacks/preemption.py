"""Leaving in time when the machine is taken away: a checkpoint, a marker file and an exit code of its own."""

import atexit
import functools
import json
import multiprocessing
import os
import signal
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.launch import PreemptedError

MARKER = "preempted.json"
"""In the run folder: the run was interrupted by a signal and continues when it is started again."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SaveOnPreemption(Callback):
    """On SIGTERM or SIGUSR1 to any rank, save at the end of the step and end the run.

    The handler only sets a flag. The ranks agree on it at each BATCH_CHECKPOINT, so that all save after the same step:
    the one in which the signal came, or the one after it. No evaluation follows. In the last step it is ignored.

    Schedulers send SIGTERM to every process of a job. Data workers would die of it, and the run with them before it has
    saved, so they are forked with SIGTERM blocked; they end when the run does.

    Args:
        saver: writes the checkpoint; comes before this callback.
        folder: the run folder, for the marker.
    """

    def __init__(self, saver: SaveCheckpoints, folder: Path) -> None:
        self.saver, self.marker = saver, folder / MARKER
        self._received = 0
        self._handlers: dict[int, Any] = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    @property
    def listens(self) -> bool:
        """Whether signals are received at present."""
        return bool(self._handlers)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Listen for signals, in place of Composer, which would exit at once; the run is not preempted any more."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
            os.register_at_fork(after_in_child=functools.partial(_shield, weakref.ref(self)))
            atexit.register(_end_workers)
        if dist.get_global_rank() == 0:
            self.marker.unlink(missing_ok=True)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Leave signals to who handled them before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save and end the run if a rank was told to.

        Raises:
            PreemptedError: on all ranks.
        """
        received = state.device.tensor_to_device(torch.tensor(self._received, dtype=torch.int32))
        dist.all_reduce(received, reduce_operation="MAX")
        number = int(received.item())
        if number == 0 or (state.max_duration is not None and state.timestamp >= state.max_duration):
            return
        self.saver.save(state, logger)
        step, name = state.timestamp.batch.value, signal.Signals(number).name
        place = self.saver.last_saved
        if dist.get_global_rank() == 0:
            partial = self.marker.with_suffix(".partial")
            partial.write_text(json.dumps({"step": step, "signal": name, "checkpoint": str(place)}) + "\n")
            partial.replace(self.marker)
        raise PreemptedError(f"{name} after step {step}: saved {place}. Start the same command again to continue")


def _shield(reference: "weakref.ref[SaveOnPreemption]") -> None:
    """Block SIGTERM in a process that was forked while its parent listens."""
    callback = reference()
    if callback is not None and callback.listens:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _end_workers() -> None:
    """End loader workers when the process ends: shielded from its SIGTERM, they would let it wait for ever."""
    for worker in multiprocessing.active_children():
        if worker.daemon:
            worker.kill()
