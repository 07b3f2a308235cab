"""Prepared images as batches for the encoder, decoded by loader workers ahead of it.

Batches are cut from each prepared shard by itself, from its front: the batch that a sample is in, and so the rounding
of its latent, does not depend on who encodes which shard.
"""

import os
import signal
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from diffusion.config.data import ImageSize
from diffusion.datasets.dataset import Tokenize
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.loader import BatchLoader
from diffusion.datasets.mds import check_shard, open_shard
from diffusion.datasets.transforms import ImageTransform, Placement
from diffusion.launch import end_with_parent

PREFETCH_FACTOR = 4
"""Batches that each loader worker holds ready."""

OPEN_SHARDS = 2
"""Shards that a loader worker keeps open: the one that ends and the one that begins."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one encoded data set gets of a prepared shard.

    Attributes:
        output: Number of the data set.
        size: Size that its images are brought to.
        folder: MDS folder that the shard is written to; it exists.
        mark: File that is written when the shard is on the disk.
    """

    output: int
    size: ImageSize
    folder: Path
    mark: Path


@dataclass(frozen=True, kw_only=True)
class Item:
    """A prepared shard to encode.

    Attributes:
        place: `<split>/<bucket>`.
        number: Number of the shard in its folder.
        folder: The prepared MDS folder.
        entry: The shard's entry in the index.
        source: Identity of the shard.
        withdrawn: Numbers, within the shard, of the samples that are withdrawn already.
        targets: Where it goes.
    """

    place: str
    number: int
    folder: Path
    entry: dict[str, Any]
    source: str
    withdrawn: frozenset[int]
    targets: tuple[Target, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the shard."""
        return self.entry["samples"]

    @property
    def sizes(self) -> list[ImageSize]:
        """Sizes that its images are brought to."""
        return list(dict.fromkeys(target.size for target in self.targets))


class ImageBatch(NamedTuple):
    """Consecutive samples of one prepared shard.

    Images of samples that are blank (withdrawn, or damaged) are black.
    """

    item: int
    """Number of the shard among the items."""

    start: int
    """Number of the first sample in the shard."""

    images: dict[ImageSize, Tensor]
    """For each size uint8 [B, 3, height, width]."""

    placements: dict[ImageSize, Tensor]
    """For each size int32 [B, 6], see `Placement`."""

    token_ids: list[Tensor]
    """int32 [K, L] of each sample."""

    keys: list[str]

    damaged: dict[int, str]
    """Place in the batch of each image that cannot be decoded, and why."""

    withdrawn: list[int]
    """Places in the batch of the samples that are withdrawn."""


class PreparedShards(Dataset):
    """The batches of some prepared shards; indexed by number of the shard, first sample, and sample behind the last.

    Args:
        items: The shards.
        tokenize: K captions -> int32 [K, L].
        withdrawn_keys: Keys that are withdrawn wherever they are met.
    """

    def __init__(self, items: Sequence[Item], tokenize: Tokenize, withdrawn_keys: frozenset[str]) -> None:
        self._items = items
        self._tokenize = tokenize
        self._withdrawn_keys = withdrawn_keys
        self._open: OrderedDict[int, tuple[Any, ExitStack]] = OrderedDict()

    def __getitem__(self, index: tuple[int, int, int]) -> ImageBatch:
        """Read, decode and transform a batch.

        Raises:
            DataError: The shard is missing or damaged.
        """
        number, start, stop = index
        item, reader = self._items[number], self._reader(number)
        images: dict[ImageSize, list[np.ndarray]] = {size: [] for size in item.sizes}
        placements: dict[ImageSize, list[Placement]] = {size: [] for size in item.sizes}
        token_ids, keys = [], []
        damaged: dict[int, str] = {}
        withdrawn: list[int] = []
        for i in range(start, stop):
            columns = reader[i]
            captions, image = columns["captions"], None
            if i in item.withdrawn or columns["key"] in self._withdrawn_keys:
                withdrawn.append(i - start)
                captions = [""]
            else:
                try:
                    image = decode_rgb(columns["image"])
                except UndecodableImageError as error:
                    damaged[i - start] = str(error)
            for size, stack in images.items():
                transform = ImageTransform(size=size)
                stack.append(np.zeros((3, *size), np.uint8) if image is None else transform(image))
                shown = (size.width, size.height) if image is None else image.size
                placements[size].append(transform.placement(shown))
            token_ids.append(torch.from_numpy(self._tokenize(captions).astype(np.int32)))
            keys.append(columns["key"])
        stacked = {size: torch.from_numpy(np.stack(stack)) for size, stack in images.items()}
        placed = {size: torch.tensor(of_size, dtype=torch.int32) for size, of_size in placements.items()}
        return ImageBatch(number, start, stacked, placed, token_ids, keys, damaged, withdrawn)

    def _reader(self, number: int) -> Any:
        """Open a shard that is whole, or take one that is open."""
        if number not in self._open:
            while len(self._open) >= OPEN_SHARDS:
                self._open.popitem(last=False)[1][1].close()
            stack = ExitStack()
            item = self._items[number]
            check_shard(item.folder, item.entry)
            self._open[number] = (stack.enter_context(open_shard(item.folder, item.entry)), stack)
        return self._open[number][0]


def batches_of(items: Sequence[Item], numbers: Iterable[int], batch_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the indices of the batches of some items, which are taken one by one as their batches are asked for."""
    for number in numbers:
        num_samples = items[number].num_samples
        for start in range(0, num_samples, batch_size):
            yield number, start, min(start + batch_size, num_samples)


def image_loader(
    shards: PreparedShards, indices: Iterable[tuple[int, int, int]], *, num_workers: int, pin_memory: bool
) -> BatchLoader:
    """Return a loader of `ImageBatch`es in the order of the indices; 0 workers decode in this process."""
    options: dict[str, Any] = {"prefetch_factor": PREFETCH_FACTOR} if num_workers else {}
    return BatchLoader(
        shards,
        batch_size=None,
        sampler=indices,  # pyright: ignore[reportArgumentType]
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=partial(_end_with_parent, os.getpid()),
        **options,
    )


def _end_with_parent(parent: int, _worker: int) -> None:
    """End a worker when its parent is killed: it holds the lock of the data set, too."""
    end_with_parent(signal.SIGKILL, parent)
