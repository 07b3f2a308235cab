"""A loader worker's samples as Streaming numbers them, a batch at a time, and the shards that they lie in."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

from diffusion.datasets.batching import WorkerSlots
from diffusion.randomness import NUM_INDEX_BITS, NUM_OCCURRENCE_BITS


class SampleId(int):
    """Streaming's number of a sample, with the address of the slot that it fills."""

    address: int


class Part(NamedTuple):
    """Samples that are read one after the other, and the shards that they lie in."""

    sample_ids: list[SampleId]
    shards: Mapping[int, int]
    """How many of the samples lie in each, in the order in which they are needed."""


class WorkerSamples:
    """A worker's part of an epoch, in parts of a batch each.

    Args:
        slots: addresses of the samples.
        size: samples of a part.
        first_samples: Streaming's number of the first sample of each stream.
        first_of_shards: and of each shard.
    """

    def __init__(self, slots: WorkerSlots, size: int, first_samples: list[int], first_of_shards: list[int]) -> None:
        self._slots, self._size = slots, size
        self._first_samples, self._first_of_shards = first_samples, first_of_shards
        self._parts: dict[int, Part] = {}
        self._looked, self._lock = 0, Lock()

    def __len__(self) -> int:
        return len(self._slots)

    def part(self, start: int) -> Part:
        """The part that begins at a place; computed by the thread that asks first."""
        part = self._parts.get(start)
        if part is None:
            stop = min(start + self._size, len(self))
            sample_ids = [self._sample_id(self._slots[place]) for place in range(start, stop)]
            shards = Counter(bisect_right(self._first_of_shards, number) - 1 for number in sample_ids)
            part = self._parts[start] = Part(sample_ids, shards)
        return part

    def is_first_look(self, start: int) -> bool:
        """Whether no thread has looked for the part that begins at a place; all of them go forward."""
        with self._lock:
            is_first, self._looked = start >= self._looked, max(start + 1, self._looked)
            return is_first

    def step(self, place: int) -> int:
        """Step that a place belongs to; past the last place, the one after the last of the epoch."""
        return self._slots.step(place)

    def forget(self, start: int) -> None:
        """Free a part that was read, and what is before it."""
        for place in [place for place in list(self._parts) if place <= start]:
            self._parts.pop(place, None)

    def _sample_id(self, address: int) -> SampleId:
        stream, index = address >> (NUM_INDEX_BITS + NUM_OCCURRENCE_BITS), address & ((1 << NUM_INDEX_BITS) - 1)
        sample_id = SampleId(self._first_samples[stream] + index)
        sample_id.address = address
        return sample_id
