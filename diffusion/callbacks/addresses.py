"""Addresses of random numbers and the position in the data, which both follow from the step."""

from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.datasets.batch import BatchKey


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
        own, rank = torch.arange(len(sample), device=sample.device), dist.get_global_rank()
        step = torch.full_like(sample, state.timestamp.batch.value)
        slot = own * dist.get_world_size() + rank if self.in_turns else own + rank * len(sample)
        if sample.is_pinned():  # Memory that is not pinned is copied to the GPU through a buffer.
            step, slot = step.pin_memory(), slot.pin_memory()
        batch[BatchKey.STEP], batch[BatchKey.SLOT] = step, slot


class DataPosition(Callback):
    """Start at the epoch and sample of the Trainer's timestamp.

    At the end of an epoch Composer saves `sample_in_epoch=0` of the epoch that has ended, which would be replayed.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        """Set the position from the timestamp of the checkpoint."""
        if state.timestamp.batch.value == 0:
            return
        loader: Any = state.train_dataloader
        dataset = getattr(loader, "dataset", None)
        if dataset is None or not hasattr(dataset, "load_state_dict"):
            return
        position = dataset.state_dict(num_samples=0, from_beginning=False)
        position.update(
            epoch=state.timestamp.epoch.value,
            sample_in_epoch=state.timestamp.sample_in_epoch.value,
        )
        dataset.load_state_dict(position)
