"""What one process does of an encoding: takes prepared shards as it can, encodes and writes them."""

import contextlib
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from diffusion.errors import DataError
from diffusion.preparation.encoding.images import ImageBatch, Item, PreparedShards, batches_of, image_loader
from diffusion.preparation.encoding.models import Encoder, EncodingModels
from diffusion.preparation.encoding.writer import Columns, ShardWriter

logger = logging.getLogger(__name__)

MAX_DAMAGED = 10
MAX_DAMAGED_FRACTION = 0.001

UNDER_WAY = 2
"""Batches whose forward pass was begun and whose result is not taken yet."""


class Counters(Protocol):
    """Numbers that all processes of an encoding share."""

    def add(self, name: str, amount: int) -> int:
        """Add to a number, which begins at 0; return it."""
        ...


class LocalCounters:
    """The numbers of one process."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int) -> int:
        """Add to a number, which begins at 0; return it."""
        self._values[name] = self._values.get(name, 0) + amount
        return self._values[name]


@dataclass(frozen=True, kw_only=True)
class Work:
    """An encoding, the same for all its processes.

    Attributes:
        name: Tells this encoding from every other.
        items: The shards that are missing.
        outs: The data sets, for messages.
        num_samples: Samples of all shards, those that are not missing among them.
        num_damaged: Damaged images that are marked already.
        withdrawn_keys: Keys that are withdrawn wherever they are met.
        batch_size: Images of a forward pass.
        mean_only: Leave the log-variance out.
        precision: `fp32` or `bf16`.
        max_shard_bytes: Size above which another shard is begun.
    """

    name: str
    items: Sequence[Item]
    outs: Sequence[Path]
    num_samples: int
    num_damaged: int
    withdrawn_keys: frozenset[str]
    batch_size: int
    mean_only: bool
    precision: str
    max_shard_bytes: int


def encode_items(
    work: Work, models: EncodingModels, counters: Counters, *, device: str, num_workers: int, progress: bool
) -> None:
    """Take shards until there are none, and encode them.

    Args:
        work: The encoding.
        models: The networks.
        counters: Shared with the other processes.
        device: Torch device.
        num_workers: Loader processes that decode; 0 decodes in this one.
        progress: Show a bar of what all processes do.

    Raises:
        DataError: A shard is missing, too many images are damaged, or latents are not finite.
        MachineError: A shard cannot be written.
    """
    encoder = Encoder(models, device, work.precision)
    columns = Columns(models=models, mean_only=work.mean_only, max_shard_bytes=work.max_shard_bytes)
    shards = PreparedShards(work.items, models.tokenize, work.withdrawn_keys)
    loader = image_loader(
        shards,
        batches_of(work.items, _taken(work, counters), work.batch_size),
        num_workers=num_workers,
        pin_memory=encoder.device.type == "cuda",
    )
    writer = ShardWriter(work.items, columns, work.outs)
    total = sum(item.num_samples for item in work.items)
    interval = 0.2 if sys.stderr.isatty() else 30.0
    try:
        with tqdm(total=total, desc="encoding", unit=" images", mininterval=interval, disable=not progress) as bar:
            waiting: deque = deque()
            for batch in loader:
                _count_damaged(work, batch, counters)
                waiting.append(encoder.start(batch))
                if len(waiting) >= UNDER_WAY:
                    waiting[0].wait()
                    writer.put(waiting.popleft())
                bar.update(counters.add("images", len(batch.keys)) - bar.n)
            for encoded in waiting:
                encoded.wait()
                writer.put(encoded)
        writer.finish()
    except BaseException:
        try:
            with contextlib.suppress(Exception):  # Who counts may be gone, which is not to hide what happened here.
                counters.add("failed", 1)
        finally:
            writer.abandon()
        raise


def max_damaged(num_samples: int) -> float:
    """Return how many images may be damaged before an encoding ends."""
    return max(MAX_DAMAGED, MAX_DAMAGED_FRACTION * num_samples)


def _taken(work: Work, counters: Counters) -> Iterator[int]:
    """Yield the numbers of the items that this process takes; none any more once another process has failed."""
    while (number := counters.add("taken", 1) - 1) < len(work.items) and not counters.add("failed", 0):
        yield number


def _count_damaged(work: Work, batch: ImageBatch, counters: Counters) -> None:
    """Report the damaged images of a batch.

    Raises:
        DataError: There are too many.
    """
    for i, reason in batch.damaged.items():
        folder = work.items[batch.item].folder
        what = f"{folder}, key '{batch.keys[i]}' cannot be decoded ({reason}), and could be when it was prepared"
        total = work.num_damaged + counters.add("damaged", 1)
        logger.warning("%s; it is marked as damaged (%d of %d so far)", what, total, work.num_samples)
        if total > max_damaged(work.num_samples):
            raise DataError(
                f"{total} of {work.num_samples} images are damaged (at most {MAX_DAMAGED} or "
                f"{MAX_DAMAGED_FRACTION:.1%} may be), the last: {what}. Check the disk, and copy or prepare the data "
                "set again"
            )
