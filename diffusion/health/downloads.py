"""How much a node downloads for a data set, seen from its cache.

Without a limit nothing leaves the cache, so what it holds tells what came. With one, shards come and go, and those are
counted whose file is younger than the last look; what came and went in between is missed.
"""

import time
from pathlib import Path

import numpy as np

from diffusion.datasets.streams import TextImageDataset


class DownloadMeter:
    """Counts the bytes that were downloaded to this node.

    Args:
        dataset: the data of training.
    """

    def __init__(self, dataset: TextImageDataset) -> None:
        self._dataset = dataset
        self.has_remote = any(stream.remote is not None for stream in dataset.streams)
        self._caches = [Path(stream.local) for stream in dataset.streams if stream.remote is not None]
        self._held = dataset.cache_usage
        self._looked = time.time()

    def bytes_since(self) -> int:
        """Bytes that came since the last call (or since this object was made)."""
        if not self.has_remote:
            return 0
        if self._dataset.cache_limit:
            return self._young_bytes()
        before, self._held = self._held, self._dataset.cache_usage
        return max(0, self._held - before)

    def _young_bytes(self) -> int:
        before, self._looked = self._looked, time.time()
        total = 0
        for path in (path for cache in self._caches for path in cache.glob("*.mds*")):
            try:
                state = path.stat()
            except FileNotFoundError:  # It has just been evicted.
                continue
            total += state.st_size if before <= state.st_mtime < self._looked else 0
        return total


def bytes_per_sample(dataset: TextImageDataset) -> float:
    """Bytes of a shard per sample of an epoch, over the streams that have a remote and as often as each is drawn."""
    sizes = np.array([shard.get_raw_size() for shard in dataset.shards], np.float64)
    parts = np.split(sizes, dataset.shard_offset_per_stream[1:])
    order = dataset.order
    assert order is not None, "the data set of training has an order"
    total = sum(
        part.sum() / shape.num_samples * shape.draws
        for part, shape, stream in zip(parts, order.streams, dataset.streams, strict=True)
        if stream.remote is not None
    )
    return total / sum(shape.draws for shape in order.streams)
