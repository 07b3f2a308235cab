"""Composer's Trainer with fewer reads from the device, and the only use of its private parts.

A read from a GPU waits for all work before it. Composer makes eight in a step, one of them between the backward pass
and the optimizer. Two remain: the number of samples before the first microbatch, and the loss for the loggers, after
the optimizer's step is queued.
"""

import datetime
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from composer import Event, Trainer
from composer.callbacks import SpeedMonitor
from composer.core import State
from composer.core.types import TrainerMode
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor


class HostTrainer(Trainer):
    """Trainer whose ranks have equal shares of each batch and equal numbers of batches (`drop_last`)."""

    def _use_closures(self) -> bool:
        """Run the backward pass before the optimizer's step: a closure within it would read the loss.

        Only optimizers that evaluate the loss several times in a step need a closure.
        """
        return False

    def _accumulate_time_across_ranks(
        self, num_samples: int, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Return samples and tokens of all ranks, and the time of this one."""
        world_size = dist.get_world_size()
        return num_samples * world_size, num_tokens * world_size, batch_time

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Any]:
        """Iterate over the batches of this rank; in training without a collective operation for each."""
        if trainer_mode is not TrainerMode.TRAIN:
            yield from super()._iter_dataloader(trainer_mode)
            return
        assert self.state.dataloader is not None
        num_batches = None if self.state.dataloader_len is None else int(self.state.dataloader_len)
        batches = itertools.islice(self.state.dataloader, num_batches)
        while True:
            self.engine.run_event(Event.BEFORE_DATALOADER)
            try:
                batch = next(batches)
            except StopIteration:
                self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                return
            yield batch

    def _train_microbatch(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Train on a microbatch without a copy of it, which only metrics in training need."""
        assert not self.state.train_metrics
        self.state.batch = _Uncopied(self.state.batch)
        return super()._train_microbatch(*args, **kwargs)


class _Uncopied(dict[str, Any]):
    """A batch whose deep copy is itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Uncopied":
        return self


class HostSpeedMonitor(SpeedMonitor):
    """SpeedMonitor that multiplies the operations of this rank by the world size, without a sum on the device.

    The model counts them in `batch_flops(batch)`; Composer's name for it, `flops_per_batch`, would start the sum.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log throughput and utilisation over the last steps."""
        model: Any = getattr(state.model, "module", state.model)
        if hasattr(model, "batch_flops"):
            self.history_flops.append(model.batch_flops(state.batch) * dist.get_world_size())
        super().batch_end(state, logger)


class HostNumber:
    """A number on the device that the host reads later, without waiting for later work."""

    def __init__(self) -> None:
        self._copy = torch.zeros(())
        self._copied: Any = None

    def start(self, number: Tensor) -> None:
        """Start to copy a tensor [] of any dtype."""
        if self._copy.dtype != number.dtype or self._copy.is_pinned() != number.is_cuda:
            self._copy = torch.empty((), dtype=number.dtype, pin_memory=number.is_cuda)
        self._copy.copy_(number, non_blocking=True)
        if number.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> float:
        """Return the number of the last `start`, after waiting for its copy and for nothing later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.item()
