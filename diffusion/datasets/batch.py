"""Names of the entries of a training batch, how samples are collated to one, and how it is cut into microbatches.

Entries are tensors with the samples along the first dimension. Where groups of several shapes meet in one step
(`data.mixing: groups`), the entries that have a shape of their own (images, latents) are lists instead: one tensor
for each group, in the order of the samples.

Shape letters: B batch, G samples of a group.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.errors import DataError

Entry = Tensor | list[Tensor]


class BatchKey(str, Enum):
    """Keys of the dictionary that the loader yields and the model reads.

    B is the batch size, C the channels of the latent, H and W its height and width, f the pixels along a side of one
    of its positions, L the tokens of a caption.
    """

    IMAGE = "image"
    """uint8 [B, 3, fH, fW]: RGB images, when training from images."""

    LATENT_MEAN = "latent_mean"
    """float16 [B, C, H, W]: mean of the VAE's posterior, not scaled, when training from latents."""

    LATENT_LOGVAR = "latent_logvar"
    """float16 [B, C, H, W]: log-variance of the VAE's posterior; absent where only the mean was stored."""

    TOKEN_IDS = "token_ids"
    """int64 [B, L]: the caption, padded to the tokenizer's length."""

    NUM_CHUNKS = "num_chunks"
    """tuple of B integers, on the host: chunks of the caption that differ from those of the empty caption; only while
    training on captions of several chunks (`models.conditioning.Conditioner.count_chunks`)."""

    TEXT_EMBEDDING = "text_embedding"
    """float16 [B, L, D]: the text encoder's output for the caption, with `data.text_embeddings` only."""

    POOLED_TEXT_EMBEDDING = "pooled_text_embedding"
    """float16 [B, P]: the text encoder's vector for the whole caption, beside TEXT_EMBEDDING."""

    PLACEMENT = "placement"
    """int64 [B, 6]: size of the original image and what was cut off, see `datasets.transforms.Placement`; absent in
    data that does not hold it."""

    SCORES = "scores"
    """float32 [B, S]: scores of the image, NaN where one is missing; with `model.score_conditioning` only."""

    SAMPLE = "sample"
    """int64 [B]: the address of each sample, made by `diffusion.datasets.sample_order.sample_address`."""

    STEP = "step"
    """int64 [B]: the optimizer step that the sample is used in; 0 while evaluating."""

    SLOT = "slot"
    """int64 [B]: position of the sample in the global batch; only while training."""

    STREAM = "stream"
    """int64 [B]: index of the stream (resolution bucket) that the sample came from."""

    IS_COUNTED = "is_counted"
    """bool [B], in batches of validation data: false for a copy that only fills up the batches of the ranks."""


Sample = dict[BatchKey, Any]
"""Arrays and integers of one sample, without the batch dimension."""

SHAPED = frozenset({BatchKey.IMAGE, BatchKey.LATENT_MEAN, BatchKey.LATENT_LOGVAR})
"""Entries whose shape is that of the image."""


def collate(samples: Sequence[Sample], group_size: int | None = None) -> dict[BatchKey, Entry]:
    """Stack the entries of samples, [...] each -> [B, ...].

    With a `group_size` G, samples come in groups of one shape, and the entries in `SHAPED` become lists with a tensor
    [G, ...] for each group.

    Raises:
        DataError: the samples of a batch, or those of a group, have several shapes.
    """
    groups = [samples[start : start + group_size] for start in range(0, len(samples), group_size)] if group_size else []
    return {
        key: [_stack(key, group) for group in groups] if groups and key in SHAPED else _stack(key, samples)
        for key in samples[0]
    }


def _stack(key: BatchKey, samples: Sequence[Sample]) -> Tensor:
    try:
        return torch.from_numpy(np.stack([sample[key] for sample in samples]))
    except ValueError as error:
        shapes = sorted({np.shape(sample[key]) for sample in samples})
        raise DataError(
            f"one batch (or group) holds {key.value} of the shapes {', '.join(map(str, shapes))}: give the streams the "
            "`resolution` of what they hold, and set data.mixing to groups or bucket"
        ) from error


def num_samples(batch: Mapping[str, Any]) -> int:
    """B of a batch."""
    return batch[BatchKey.SAMPLE].shape[0]


def split_batch(batch: Mapping[str, Entry], size: float) -> list[dict[str, Tensor]]:
    """Cut a batch into microbatches, each of one shape.

    Args:
        batch: the entries of `BatchKey`; those that are lists hold tensors [G, ...] of one G.
        size: samples of a microbatch, a whole number; at most G if entries are lists, so that each rank has the same
            number of microbatches, whatever groups it got.

    Returns:
        Dictionaries of tensors; the last one may be smaller.
    """
    num = _microbatch_size(batch, size)
    return [
        {key: _cut(value, start, num) for key, value in batch.items()} for start in range(0, num_samples(batch), num)
    ]


def num_microbatches(batch: Mapping[str, Entry], size: float) -> int:
    """Number of microbatches that `split_batch` makes."""
    return math.ceil(num_samples(batch) / _microbatch_size(batch, size))


def _microbatch_size(batch: Mapping[str, Entry], size: float) -> int:
    lists = [value for value in batch.values() if isinstance(value, list)]
    groups = [len(value[0]) for value in lists if isinstance(value[0], Tensor)]  # A plug-in's batch may hold texts.
    num = min([int(size), *groups])
    assert all(group % num == 0 for group in groups), (num, groups)
    return num


def _cut(value: Entry, start: int, size: int) -> Tensor:
    if not isinstance(value, list):
        return value[start : start + size]
    group, first = divmod(start, len(value[0]))
    return value[group][first : first + size]
