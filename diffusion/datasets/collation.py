"""From samples to batches: tensors, or lists of tensors where groups of several shapes meet in one step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffusion.datasets.batch import BatchKey, Entry
from diffusion.datasets.dataset import Sample
from diffusion.errors import DataError

SHAPED = frozenset({BatchKey.IMAGE, BatchKey.LATENT_MEAN, BatchKey.LATENT_LOGVAR})
"""Entries whose shape is that of the image."""


def collate(samples: list[Sample]) -> dict[BatchKey, Tensor]:
    """Stack the entries of samples: [...] each -> [B, ...].

    Raises:
        DataError: they have several shapes.
    """
    return {key: _stack(key, samples) for key in samples[0]}


@dataclass(frozen=True)
class CollateGroups:
    """Stacks the entries of samples that come in groups of one shape.

    The entries in `SHAPED` become lists with one tensor [G, ...] for each group, the others tensors [B, ...].
    """

    group_size: int
    """G."""

    def __call__(self, samples: list[Sample]) -> dict[BatchKey, Entry]:
        """Stack the entries of whole groups.

        Raises:
            DataError: the samples of a group have several shapes.
        """
        groups = [samples[start : start + self.group_size] for start in range(0, len(samples), self.group_size)]
        return {
            key: [_stack(key, group) for group in groups] if key in SHAPED else _stack(key, samples)
            for key in samples[0]
        }


def _stack(key: BatchKey, samples: list[Sample]) -> Tensor:
    try:
        return torch.from_numpy(np.stack([sample[key] for sample in samples]))
    except ValueError as error:
        shapes = sorted({np.shape(sample[key]) for sample in samples})
        raise DataError(
            f"one batch (or group) holds {key.value} of the shapes {', '.join(map(str, shapes))}: give the streams the "
            "`resolution` of what they hold, and set data.mixing to groups or bucket"
        ) from error
