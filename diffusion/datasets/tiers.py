"""What is read from each tier of storage: the store that holds the data, and the cache on a node's disk."""

import multiprocessing
from typing import NamedTuple


class TierCounts(NamedTuple):
    """What a rank has read since its data was opened."""

    samples: int = 0
    """Looked for ahead of being read, of streams that have a remote."""

    hits: int = 0
    """... whose shard lay on the node's disk then; no shard that is still on its way."""

    fetched_shards: int = 0
    """Files that this rank fetched from the store, for itself or for others of its node."""

    fetched_bytes: int = 0
    read_bytes: int = 0
    """Of samples, from the disk."""

    def plus(self, other: "TierCounts") -> "TierCounts":
        """Both together."""
        return TierCounts(*(one + two for one, two in zip(self, other, strict=True)))

    def since(self, before: "TierCounts") -> "TierCounts":
        """What has been added."""
        return TierCounts(*(now - then for now, then in zip(self, before, strict=True)))


class TierMeter:
    """Counts over the loader workers of a rank, in memory that they share."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.Array("q", len(TierCounts._fields))

    def add(self, counts: TierCounts) -> None:
        """Add what was read."""
        with self._numbers.get_lock():
            for place, number in enumerate(counts):
                self._numbers[place] += number

    def read(self) -> TierCounts:
        """All that was added."""
        with self._numbers.get_lock():
            return TierCounts(*self._numbers)
