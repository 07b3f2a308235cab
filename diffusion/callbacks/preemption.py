"""Pre-emption: a signal saves a checkpoint, writes a marker file and ends the run with an exit code of its own."""

import atexit
import functools
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

from diffusion.callbacks.monitoring import CostMeter
from diffusion.callbacks.saving import SaveCheckpoints
from diffusion.distributed import is_first_rank
from diffusion.errors import PreemptedError
from diffusion.files import write_json
from diffusion.formats.run_folder import PREEMPTED
from diffusion.trainer import HostNumber

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_SPENT = 1
"""Rank 0's number for a spent budget: smaller than any signal, which comes first."""


class DelayedMaximum:
    """The largest of the ranks' numbers, one step later, so that no rank waits for its device or for another rank.

    All ranks call `start` and `finish` alternately. The device is that of the tensors of collectives.
    """

    def __init__(self, device: torch.device) -> None:
        self._number = torch.zeros((), dtype=torch.int32, device=device)
        self._result = HostNumber()
        self._work: Any = None

    def start(self, number: int) -> None:
        """Start to compare the ranks' numbers."""
        assert self._work is None, "the comparison before this one is not finished"
        self._number.fill_(number)
        self._work = torch.distributed.all_reduce(self._number, torch.distributed.ReduceOp.MAX, async_op=True)
        if self._number.is_cuda:
            self._work.wait()  # On the GPU's stream, not here.
            self._result.start(self._number)

    def finish(self) -> int:
        """Return the largest of the numbers of the last `start`; 0 without one."""
        if self._work is None:
            return 0
        if not self._number.is_cuda:
            self._work.wait()
            self._result.start(self._number)
        self._work = None
        return int(self._result.read())


class SaveOnPreemption(Callback):
    """On SIGTERM, SIGUSR1 or Ctrl-C to any rank, save at the end of a step and end the run.

    The handler only sets a flag. At each BATCH_CHECKPOINT the ranks start to exchange it and read the exchange of the
    step before, so that all save after the same step, at most two steps after the signal. Samples and an evaluation
    that are due in these steps come first. In the last step a signal is ignored. A second Ctrl-C ends the run at once.
    A spent budget ends the run in the same way. The saver comes before this callback.

    Schedulers send SIGTERM to every process of a job, and terminals SIGINT. They would end loader workers, and the run
    with them before it has saved, so workers are forked with both blocked; they end with the run.
    """

    def __init__(self, saver: SaveCheckpoints, folder: Path, meter: CostMeter) -> None:
        self.saver, self.marker, self.meter = saver, folder / PREEMPTED, meter
        self._received = 0
        self._handlers: dict[int, Any] = {}
        self._agreement: DelayedMaximum

    def fit_start(self, state: State, logger: Logger) -> None:
        """Handle signals in place of Composer, which would exit at once, and remove the marker."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
            os.register_at_fork(after_in_child=functools.partial(_shield, weakref.ref(self)))
            atexit.register(end_workers)
        self._agreement = DelayedMaximum(state.device.tensor_to_device(torch.zeros(1)).device)
        if is_first_rank():
            self.marker.unlink(missing_ok=True)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(number, self._handlers[number])

    def fit_end(self, state: State, logger: Logger) -> None:
        """Restore the earlier signal handlers."""
        self._agreement.finish()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save and end the run after a signal to any rank, or when the budget is spent.

        Raises:
            PreemptedError: on all ranks: a signal came.
            BudgetSpentError: on all ranks.
        """
        number = self._agreement.finish()
        if state.max_duration is not None and state.timestamp >= state.max_duration:
            return
        if number == 0:
            self._agreement.start(self._received or int(self.meter.is_spent) * _SPENT)
            return
        self.saver.save(state, logger)
        step, checkpoint = state.timestamp.batch.value, self.saver.last_saved
        if number == _SPENT:
            self.meter.end(step, f"saved {checkpoint}")
        name = signal.Signals(number).name
        if is_first_rank():
            write_json(self.marker, {"step": step, "signal": name, "checkpoint": str(checkpoint)})
        raise PreemptedError(f"{name} after step {step}: saved {checkpoint}. Start the same command again to continue")


def _shield(reference: "weakref.ref[SaveOnPreemption]") -> None:
    """Block SIGTERM and SIGINT in a process that was forked while its parent handles them."""
    callback = reference()
    if callback is not None and signal.getsignal(signal.SIGTERM) == callback._receive:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def end_workers() -> None:
    """End loader workers when the process ends: with SIGTERM blocked, it would wait for them forever."""
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if workers and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Torch reports killed workers as a failure.
    for worker in workers:
        worker.kill()
