"""Work within each step: addresses of random numbers, gradient clipping, collective operations, losses of streams.

Gradient clipping is by the global norm (Pascanu et al., "On the difficulty of training recurrent networks", 2013).
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed
from composer import Callback, Logger, State
from composer.utils import dist as composer_dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from diffusion.checkpointing.save import local_shard
from diffusion.composer_models import LatentDiffusionTraining
from diffusion.datasets.batch import BatchKey, num_microbatches, num_samples
from diffusion.distributed import rank, world_size
from diffusion.models.conditioning import Conditioner
from diffusion.sharding import fsdp_modules, set_collective_timeout, set_last_microbatch
from diffusion.trainer import HostNumber, LateLogger

GRADIENT_NORM = "grad_norm/total"
"""Metric: the norm of all gradients of a step over all ranks, before clipping."""

EPSILON = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""

NUM_FIRST_STEPS = 100
"""Steps of a start in which ranks meet most sizes of images, and compile for each."""


class StepAddress(Callback):
    """Write the optimizer step and the slots into the batch, before it is split into microbatches.

    Args:
        in_turns: slot i of a global batch belongs to rank i mod world size, as with torch's DistributedSampler; False:
            each rank has one contiguous range, as in the sample order of this package.
    """

    def __init__(self, *, in_turns: bool = False) -> None:
        self.in_turns = in_turns

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Add `BatchKey.STEP`, the number of steps done before this one, and `BatchKey.SLOT`."""
        batch = state.batch
        sample = batch[BatchKey.SAMPLE]
        own = torch.arange(len(sample), device=sample.device)
        step = torch.full_like(sample, state.timestamp.batch.value)
        slot = own * world_size() + rank() if self.in_turns else own + rank() * len(sample)
        if sample.is_pinned():  # Memory that is not pinned is copied to the GPU through a buffer.
            step, slot = step.pin_memory(), slot.pin_memory()
        batch[BatchKey.STEP], batch[BatchKey.SLOT] = step, slot


class CountChunks(Callback):
    """Write the number of used chunks of each caption into the batch, while it is on the host."""

    def __init__(self, conditioner: Conditioner) -> None:
        self._conditioner = conditioner

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Add `BatchKey.NUM_CHUNKS`."""
        state.batch[BatchKey.NUM_CHUNKS] = self._conditioner.count_chunks(state.batch[BatchKey.TOKEN_IDS])


class DataPosition(Callback):
    """Start at the epoch and sample of the Trainer's timestamp.

    At the end of an epoch Composer saves `sample_in_epoch=0` of the epoch that has ended, which would be replayed.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        """Set the position from the timestamp of the checkpoint."""
        dataset: Any = getattr(state.train_dataloader, "dataset", None)
        if state.timestamp.batch.value == 0 or not hasattr(dataset, "load_state_dict"):
            return
        position = dataset.state_dict(num_samples=0, from_beginning=False)
        position.update(
            epoch=state.timestamp.epoch.value,
            sample_in_epoch=state.timestamp.sample_in_epoch.value,
        )
        dataset.load_state_dict(position)


class ClipGradients(Callback):
    """Scale the gradients of a step down to a maximum norm over all parameters of all ranks, and log the norm.

    The host does not wait for the norm: it reads its copy when it reads the loss.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm
        self._norm = HostNumber()
        self._is_clipped = False

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Clip the gradients; a skipped step has none."""
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        gradients = [weight.grad for group in groups for weight in group["params"] if weight.grad is not None]
        self._is_clipped = bool(gradients)
        if gradients:
            norm = _global_norm(gradients)
            coefficient = (self.max_norm / (norm + EPSILON)).clamp(max=1.0)
            torch._foreach_mul_([local_shard(gradient) for gradient in gradients], coefficient)  # pyright: ignore[reportPrivateImportUsage]
            self._norm = HostNumber()
            self._norm.start(norm)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the norm."""
        if self._is_clipped:
            is_late = isinstance(logger, LateLogger)
            logger.log_metrics({GRADIENT_NORM: self._norm if is_late else self._norm.read()})  # pyright: ignore[reportArgumentType]


def _global_norm(gradients: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm over all gradients, float32 []; over all ranks if FSDP2 shards them."""
    norm = torch.nn.utils.get_total_norm([local_shard(gradient) for gradient in gradients])
    if isinstance(gradients[0], DTensor):
        mesh = gradients[0].device_mesh  # (replicas,) shards
        squares = norm.square()
        torch.distributed.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norm = squares.sqrt()
    return norm


class AccumulateLocally(Callback):
    """Let FSDP2 gather the weights for the first microbatch of a step and reduce the gradients after the last one.

    By default it does both for every microbatch.
    """

    def __init__(self) -> None:
        self._num_left = 0
        self._modules: list[FSDPModule] = []
        self._is_last = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the modules once: a network has hundreds of others."""
        self._modules = fsdp_modules(state.model)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Count the microbatches of this step."""
        size = state.device_train_microbatch_size
        self._num_left = num_microbatches(state.batch, num_samples(state.batch) if size is None else size)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Mark the last microbatch for FSDP2, if the one before was not the last, or the reverse."""
        self._num_left -= 1
        is_last = self._num_left == 0
        if is_last != self._is_last:
            set_last_microbatch(self._modules, is_last)
        self._is_last = is_last

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Check the count: without a last microbatch the gradients of the ranks would differ."""
        assert self._num_left == 0, f"{self._num_left} microbatches were expected and did not come"


class CollectiveTimeout(Callback):
    """Change the timeout of collectives, in seconds, at the start of training and again after its first steps.

    Ranks that compile are slow. With None for `then` the first timeout stays: where ranks have images of different
    sizes, one may compile a rare size at any step while the others wait.
    """

    def __init__(self, first: float, then: float | None, num_first_steps: int = NUM_FIRST_STEPS) -> None:
        self.first, self.then = first, then
        self._num_left = num_first_steps

    def fit_start(self, state: State, logger: Logger) -> None:
        """Set the timeout of the first steps."""
        set_collective_timeout(self.first, state.device_mesh)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Set the usual timeout after the first steps."""
        self._num_left -= 1
        if self._num_left == 0 and self.then is not None:
            set_collective_timeout(self.then, state.device_mesh)


class StreamLosses(Callback):
    """Log `loss/train/stream/NAME`: the mean loss of the samples of each stream over an interval in steps.

    Sums and counts stay on the device, where those of all ranks are added at the end of each step. They are part of
    checkpoints, so that a resumed run logs the same numbers on any number of ranks.
    """

    def __init__(self, model: LatentDiffusionTraining, streams: Sequence[str], interval: int) -> None:
        self.streams, self.interval = list(streams), interval
        self._sums = torch.zeros(2, len(streams), dtype=torch.float64)
        """Sums of this rank in this step."""

        self._totals = torch.zeros_like(self._sums)
        """Sums of all ranks in the steps before."""

        self._model = model

    def init(self, state: State, logger: Logger) -> None:
        """Move the sums to the device."""
        self._sums, self._totals = map(state.device.tensor_to_device, (self._sums, self._totals))

    def after_loss(self, state: State, logger: Logger) -> None:
        """Add the errors [B] of a microbatch, and their number, to the sums [2, streams]."""
        errors = self._model.errors
        of_stream = state.batch[BatchKey.STREAM] == torch.arange(len(self.streams), device=errors.device)[:, None]
        self._sums[0] += (of_stream * errors.double()).sum(dim=1)
        self._sums[1] += of_stream.sum(dim=1)

    def _by_stream(self) -> dict[str, list[float]]:
        return dict(zip(self.streams, self._totals.T.tolist(), strict=True))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Add up, and log at the end of each interval."""
        composer_dist.all_reduce(self._sums)
        self._totals += self._sums
        self._sums.zero_()
        if state.timestamp.batch.value % self.interval:
            return
        means = {f"loss/train/stream/{name}": total / num for name, (total, num) in self._by_stream().items() if num}
        self._totals.zero_()
        logger.log_metrics(means)

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts as text: one entry for any streams, without a collective operation."""
        return {"sums": json.dumps(self._by_stream())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the sums of a checkpoint."""
        totals = json.loads(state.get("sums", "{}"))
        sums = [totals.get(name, [0.0, 0.0]) for name in self.streams]
        self._totals = torch.tensor(sums, dtype=torch.float64, device=self._sums.device).T.contiguous()
