"""Composer's Trainer with fewer reads from the device. Only this file uses its private parts.

A read from a GPU waits until the work before it is done. Composer reads eight times in a step, once between the
backward pass and the optimizer. One read remains: the loss for the loggers, after the optimizer's step is queued. With
`log_late` the host reads it one step later, when the next step is queued, so that the GPU always has work.
"""

import datetime
import itertools
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from composer import Event, Trainer
from composer.callbacks import SpeedMonitor
from composer.core import State
from composer.core.types import TrainerMode
from composer.loggers import Logger, LoggerDestination
from composer.utils import collect_env
from composer.utils import dist as composer_dist
from torch import Tensor

from diffusion.distributed import world_size

# For the metadata of checkpoints: Composer's own function measures the processor's clock for a second in each start.
collect_env.get_cpu_model = platform.machine


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
        return num_samples * world_size(), num_tokens * world_size(), batch_time

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

    def log_late(self) -> None:
        """Log the losses of each step, and what is logged after them, when the work of the next step is queued."""
        self.logger = self.engine.logger = LateLogger(self.state, self.logger.destinations)

    def _train_batch(self, use_grad_scaling: bool) -> Any:
        """Train on a batch; return the losses, or log them later and return None."""
        losses = super()._train_batch(use_grad_scaling)
        if not isinstance(self.logger, LateLogger):
            return losses
        self.logger.release()
        numbers: Any = {name: HostNumber() for name in losses}
        for name, loss in losses.items():
            composer_dist.all_reduce(loss)
            numbers[name].start(loss.double().squeeze() / world_size())
        self.state.total_loss_dict = numbers
        self.logger.log_metrics(numbers)
        return None

    def _train_microbatches(
        self, microbatches: Sequence[Any], total_loss_dict: dict[str, Tensor], ddp_sync: bool = True
    ) -> Tensor:
        """Train on the microbatches of a step as Composer does, without a sum of the ranks' samples on the device."""
        data, scaler = self._train_data_spec, self.state.scaler
        assert data is not None
        assert scaler is not None
        scales = self._use_grad_scaling(self.state.precision, scaler)
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in self.state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch, num_samples = self.state.batch, sum(map(data.get_num_samples_in_batch, microbatches))
        for number, microbatch in enumerate(microbatches, 1):
            self.state.batch = data.microbatch_transforms(self.state.device.batch_to_device(microbatch))
            losses = self._train_microbatch(scales, num_samples, number == len(microbatches))
            for name, loss in losses.items():
                key = f"loss/train/{name}"
                total_loss_dict[key] = total_loss_dict.get(key, 0) + loss
        self.state.batch = batch
        if scales:
            for optimizer in self.state.optimizers:
                scaler.unscale_(optimizer)
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return total_loss_dict["loss/train/total"]

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

    The model counts them in `batch_flops(batch)`; by the name `flops_per_batch` Composer would sum over the ranks.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log throughput and utilisation over the last steps."""
        model: Any = getattr(state.model, "module", state.model)
        if hasattr(model, "batch_flops"):
            self.history_flops.append(model.batch_flops(state.batch) * world_size())
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

    __float__ = read


class LateLogger(Logger):
    """Logger that holds back each `HostNumber`, and all that is logged after it, until `release`.

    Loggers get the same numbers of the same steps in the same order as without it.
    """

    def __init__(self, state: State, destinations: Sequence[LoggerDestination]) -> None:
        super().__init__(state, destinations)
        self.state = state
        self._held: list[tuple[dict[str, Any], int]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers, or hold them back."""
        step = self.state.timestamp.batch.value if step is None else step
        if self._held or any(isinstance(number, HostNumber) for number in metrics.values()):
            self._held.append((metrics, step))
        else:
            super().log_metrics(metrics, step)

    def log_images(self, *args: Any, **kwargs: Any) -> None:
        """Log images, after all numbers before them."""
        self.release()
        super().log_images(*args, **kwargs)

    def release(self) -> None:
        """Log what was held back."""
        held, self._held = self._held, []
        for metrics, step in held:
            numbers = {
                name: number.read() if isinstance(number, HostNumber) else number for name, number in metrics.items()
            }
            super().log_metrics(numbers, step)
