"""Entries that callbacks add to a batch, before it is split into microbatches."""

import torch
from composer import Callback, Logger, State

from diffusion.datasets.batch import BatchKey
from diffusion.distributed import rank, world_size
from diffusion.models.conditioning import Conditioner


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
