"""The global order of an epoch: which sample stands in which slot of which global batch, whatever the world.

The order is a function of the data's shape (samples per shard), the draws per stream, the seed, the epoch and
`OrderSettings`; ranks, nodes and workers only choose which slots they read. Nothing of the epoch's length is ever laid
out: a stretch of steps is computed when it is read, so that any step can be entered directly.

- A global batch is cut into *lanes*, one per canonical node (fewer where the batch does not divide). Ranks take whole
  lanes one after the other; the lanes of a node lie side by side.
- A lane owns a contiguous part of each stream, so that a node reads the same shards in every epoch, and goes through it
  in *passes* (`datasets/lanes.py`). A sample's occurrence is the number of the pass.
- Which stream a *unit* of a lane comes from (one sample, a group, or the lane's share of a global batch) is read from a
  balanced sequence: each batch holds the streams nearly in their proportions.

Shape letters: S streams, L lanes, K passes, T steps, B slots.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import numpy as np

from diffusion.config.data import Mixing, legal_world_sizes
from diffusion.datasets.balanced import MAX_TOTAL, BalancedSequence, Integers, raw_words
from diffusion.datasets.lanes import ShardAxis, Shuffle, StreamLanes
from diffusion.errors import ConfigurationError
from diffusion.randomness import NUM_INDEX_BITS, NUM_OCCURRENCE_BITS, sample_address

ORDER_VERSION = 1
"""Raised when the same settings give another order."""

MIN_CHUNK = 2**13
"""Samples that a loader worker computes at once."""

NUM_CHUNKS = 3
"""Stretches that a worker remembers, for threads of which one is ahead of another."""

_OFFSET = 4
"""Purpose in the key of a random number, beside those of `datasets/lanes.py`."""


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """What the order has to know of a stream."""

    name: str
    samples_per_shard: Integers
    draws: int
    """Samples of an epoch before it is cut to whole global batches: see `draws_per_stream`."""

    @property
    def num_samples(self) -> int:
        """Samples of the stream."""
        return int(self.samples_per_shard.sum())


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """What the order depends on besides the data and the epoch; the fields are explained in `config.data`."""

    seed: int
    global_batch_size: int
    num_canonical_nodes: int
    mixing: Mixing = Mixing.mixed
    group_size: int | None = None
    shuffle: bool = True
    shuffle_block_size: int | None = None
    """Samples of a lane, over all streams, that are shuffled together; None shuffles within each shard."""

    @property
    def unit_size(self) -> int:
        """Samples that have to stay on one rank."""
        if self.mixing is not Mixing.groups:
            return 1
        if self.group_size is None or self.group_size < 1:
            raise ConfigurationError(
                f"data.group_size is {self.group_size}, but data.mixing is groups: give their size"
            )
        return self.group_size

    @property
    def shuffling(self) -> str:
        """What is shuffled, in words."""
        if not self.shuffle:
            return "none"
        return "shard" if self.shuffle_block_size is None else f"block of {self.shuffle_block_size}"

    @property
    def num_lanes(self) -> int:
        """Parts of the global batch that read separate shards."""
        return math.gcd(self.global_batch_size // self.unit_size, self.num_canonical_nodes)


class Slots(NamedTuple):
    """Samples in slots: int64 arrays of one shape."""

    stream: Integers
    index: Integers
    occurrence: Integers

    def addresses(self) -> Integers:
        """The samples' `sample_address`es."""
        return sample_address(self.stream, self.index, self.occurrence)


def draws_per_stream(
    num_samples: Sequence[int], proportions: Sequence[float | None], repeats: Sequence[float | None]
) -> list[int]:
    """How many samples each stream gives to an epoch.

    Args:
        num_samples: [S], samples of each stream.
        proportions: [S], shares of the mix, for all or for none; the epoch is as long as all streams together.
        repeats: [S], how often each sample comes; None is once.
    """
    if all(proportion is None for proportion in proportions):
        return [
            round(num * (1.0 if repeat is None else repeat)) for num, repeat in zip(num_samples, repeats, strict=True)
        ]
    shares = np.cumsum([proportion or 0.0 for proportion in proportions])
    ends = [round(sum(num_samples) * share / shares[-1]) for share in shares.tolist()]
    return np.diff([0, *ends]).tolist()


class GlobalOrder:
    """The order of all epochs.

    Args:
        streams: the streams, in the order of the configuration.
        settings: what the order depends on.

    Raises:
        ConfigurationError: a stream gives less than a batch (or group, or sample), or more than can be counted.
    """

    def __init__(self, streams: Sequence[StreamShape], settings: OrderSettings) -> None:
        self.streams, self.settings = list(streams), settings
        size, unit = settings.global_batch_size, settings.unit_size
        if size % unit:
            raise ConfigurationError(f"data.group_size is {unit}, which does not divide data.global_batch_size {size}")
        self.num_lanes = settings.num_lanes
        if settings.mixing is Mixing.bucket:
            self.units_per_step, self.lane_unit, smallest = 1, size // self.num_lanes, size
        else:
            self.units_per_step, self.lane_unit, smallest = size // unit, unit, unit
        self.lane_units_per_step = max(1, self.units_per_step // self.num_lanes)
        self._check(smallest)
        self.units = np.array([stream.draws // smallest for stream in streams], np.int64)
        self.num_steps = int(self.units.sum()) // self.units_per_step
        if self.num_steps == 0:
            raise ConfigurationError(
                f"the streams give {sum(stream.draws for stream in streams)} samples an epoch, less than "
                f"data.global_batch_size {size}: lower it, add data or raise `repeat` of the streams"
            )
        self.shuffles = [self._shuffle(number) for number in range(len(self.streams))]
        self.axes = [
            ShardAxis(stream.samples_per_shard, shuffle)
            for stream, shuffle in zip(self.streams, self.shuffles, strict=True)
        ]

    def _shuffle(self, number: int) -> Shuffle | None:
        settings, block = self.settings, self.settings.shuffle_block_size
        if not settings.shuffle:
            return None
        if block is not None:
            block = max(1, round(block * self.streams[number].draws / sum(stream.draws for stream in self.streams)))
        return Shuffle(seed=settings.seed, stream=number, block_size=block)

    def _check(self, smallest: int) -> None:
        what = {Mixing.mixed: "sample", Mixing.groups: "group", Mixing.bucket: "global batch"}[self.settings.mixing]
        for stream in self.streams:
            if stream.num_samples == 0 or stream.draws < smallest:
                raise ConfigurationError(
                    f"stream '{stream.name}' ({stream.num_samples} samples) gives {stream.draws} samples an epoch, "
                    f"less than one {what} of {smallest}: it would never be seen. Raise its `repeat` or `proportion`, "
                    "or take it out of data.streams"
                )
            if stream.draws > stream.num_samples << NUM_OCCURRENCE_BITS:
                raise ConfigurationError(
                    f"stream '{stream.name}' ({stream.num_samples} samples) gives {stream.draws} samples an epoch, "
                    f"each more than {1 << NUM_OCCURRENCE_BITS} times: lower its `repeat` or `proportion`"
                )
            assert stream.num_samples < 1 << NUM_INDEX_BITS
        if (draws := sum(stream.draws for stream in self.streams)) > MAX_TOTAL:
            raise ConfigurationError(
                f"the streams give {draws} samples an epoch, but an epoch has at most {MAX_TOTAL}: lower `repeat` of "
                "the streams to a fraction, so that several epochs go once through the data"
            )

    def epoch(self, epoch: int) -> "EpochOrder":
        """The order of one epoch."""
        return EpochOrder(self, epoch)

    def rank_range(self, rank: int, num_ranks: int) -> range:
        """Slots of the global batch that a rank reads.

        Raises:
            ConfigurationError: the ranks would not get the same number of whole groups (or samples).
        """
        size, unit = self.settings.global_batch_size, self.settings.unit_size
        legal = legal_world_sizes(size, unit)
        if num_ranks not in legal:
            what = "samples" if unit == 1 else f"groups of data.group_size {unit}"
            raise ConfigurationError(
                f"{num_ranks} ranks cannot share the {size // unit} {what} of a global batch of {size}. "
                f"Legal numbers of ranks are {', '.join(map(str, legal))}"
            )
        share = size // num_ranks
        return range(rank * share, (rank + 1) * share)

    def fingerprint(self) -> dict[str, str | int | None]:
        """Everything that determines the order, by the names that an error gives it."""
        settings = self.settings
        shards, draws = hashlib.sha256(), hashlib.sha256()
        for stream in self.streams:
            shards.update(np.asarray(stream.samples_per_shard, "<i8").tobytes() + b"|")
            draws.update(f"{stream.draws}|".encode())
        return {
            "version of the order": ORDER_VERSION,
            "seed": settings.seed,
            "data.global_batch_size": settings.global_batch_size,
            "data.num_canonical_nodes": settings.num_canonical_nodes,
            "data.mixing": settings.mixing.value,
            "data.group_size": settings.group_size,
            "data.shuffle": settings.shuffling,
            "number of data.streams": len(self.streams),
            "shards of data.streams": shards.hexdigest()[:16],
            "proportion and repeat of data.streams": draws.hexdigest()[:16],
        }


def describe_changes(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """What makes two orders differ, from their fingerprints; nothing if they are the same."""
    return [
        f"{name} (was {there.get(name)}, is {here.get(name)})"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


class EpochOrder:
    """The order of one epoch.

    Args:
        whole: the order of all epochs.
        epoch: number of the epoch, below 2^32.
    """

    def __init__(self, whole: GlobalOrder, epoch: int) -> None:
        self.whole, self.num_steps = whole, whole.num_steps
        seed, shuffle = whole.settings.seed, whole.settings.shuffle
        offset = int(raw_words(1, (seed | _OFFSET << 32, epoch), (0, 0, 0))[0] >> np.uint64(32)) if shuffle else 0
        self._labels = BalancedSequence(whole.units, offset)
        # Lane c holds the units c, c + L, c + 2 L ... of the sequence; with `bucket`, every lane a part of each unit.
        is_bucket = whole.settings.mixing is Mixing.bucket
        self._stride = 1 if is_bucket else whole.num_lanes
        self._phases = np.zeros(whole.num_lanes, np.int64) if is_bucket else np.arange(whole.num_lanes)
        totals = self._read_before(whole.num_steps)
        self.streams = [
            StreamLanes(axis, totals[:, number], shuffle, epoch)
            for number, (axis, shuffle) in enumerate(zip(whole.axes, whole.shuffles, strict=True))
        ]

    @property
    def dropped(self) -> list[int]:
        """Samples of each stream that this epoch leaves out, since it is cut to whole global batches (and groups)."""
        return [shape.draws - stream.num_read for shape, stream in zip(self.whole.streams, self.streams, strict=True)]

    def _read_before(self, step: int) -> Integers:
        """Samples that each lane has read of each stream before a step: int64 [L, S]."""
        num = np.full(self.whole.num_lanes, step * self.whole.lane_units_per_step)
        cumulative = self._labels.cumulative(num, stride=self._stride, phase=self._phases)
        return np.diff(cumulative, axis=-1) * self.whole.lane_unit

    def slots(self, start: int, stop: int, first: int = 0, last: int | None = None) -> Slots:
        """Samples of some steps.

        Args:
            start: first step.
            stop: step after the last.
            first: first slot of the global batch.
            last: slot after the last; None is all.

        Returns:
            Arrays [stop - start, last - first].
        """
        whole = self.whole
        width = whole.lane_units_per_step * whole.lane_unit
        last = whole.settings.global_batch_size if last is None else last
        lanes = range(first // width, -(-last // width))
        result = np.empty((3, stop - start, len(lanes), whole.lane_units_per_step, whole.lane_unit), np.int64)
        read = self._read_before(start)
        units = range(start * whole.lane_units_per_step, stop * whole.lane_units_per_step)
        for column, lane in enumerate(lanes):
            phase = int(self._phases[lane])
            labels = self._labels.labels(units.start, units.stop, stride=self._stride, phase=phase)
            values = np.empty((3, len(units), whole.lane_unit), np.int64)
            values[0] = labels[:, None]
            for stream, count in enumerate(np.bincount(labels)):
                if count:
                    begin = int(read[lane, stream])
                    samples = self.streams[stream].sequence(lane, begin, begin + int(count) * whole.lane_unit)
                    values[1:, labels == stream] = samples.reshape(2, count, whole.lane_unit)
            result[:, :, column] = values.reshape(3, stop - start, whole.lane_units_per_step, whole.lane_unit)
        flat = result.reshape(3, stop - start, len(lanes) * width)
        return Slots(*flat[:, :, first - lanes.start * width : last - lanes.start * width])


def rank_slots(order: EpochOrder, step: int, *, rank: int, num_ranks: int) -> Slots:
    """Samples of one rank in one step, in slot order: arrays [B / num_ranks]."""
    mine = order.whole.rank_range(rank, num_ranks)
    return Slots(*(array[0] for array in order.slots(step, step + 1, mine.start, mine.stop)))


class WorkerSlots(Sequence[int]):
    """The samples of one loader worker for the rest of an epoch, computed as they are read.

    A worker reads whole batches of its rank: every `num_workers`-th step. Several threads may read, at most about
    `ahead` samples apart.

    Args:
        order: the epoch.
        first_step: step that the loader begins with.
        rank: rank of the process.
        num_ranks: world size.
        worker: number of the worker on its rank.
        num_workers: workers of a rank.
        ahead: samples by which one reader may be ahead of another.
    """

    def __init__(
        self,
        order: EpochOrder,
        *,
        first_step: int = 0,
        rank: int,
        num_ranks: int,
        worker: int = 0,
        num_workers: int = 1,
        ahead: int = 0,
    ) -> None:
        self._order, self._num_workers = order, num_workers
        self._slots = order.whole.rank_range(rank, num_ranks)
        self._steps = range(first_step + worker, order.num_steps, num_workers)
        self._steps_per_chunk = -(-max(MIN_CHUNK, ahead) // len(self._slots))
        self._chunk_size = self._steps_per_chunk * len(self._slots)
        self._chunks: dict[int, Integers] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._steps) * len(self._slots)

    def __getitem__(self, index: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Address of a sample, as made by `diffusion.randomness.sample_address`."""
        number, place = divmod(index, self._chunk_size)
        chunk = self._chunks.get(number)
        return int((self._make_chunk(number) if chunk is None else chunk)[place])

    def step(self, index: int) -> int:
        """Step of a sample; past the last sample, the one after the last of the epoch."""
        number = index // len(self._slots)
        return self._steps[number] if number < len(self._steps) else self._order.num_steps

    def _make_chunk(self, number: int) -> Integers:
        with self._lock:
            if number not in self._chunks:
                steps = self._steps[number * self._steps_per_chunk : (number + 1) * self._steps_per_chunk]
                if not steps:
                    raise IndexError(f"of {len(self)} samples")
                slots = self._order.slots(steps[0], steps[-1] + 1, self._slots.start, self._slots.stop)
                while len(self._chunks) >= NUM_CHUNKS:
                    del self._chunks[min(self._chunks)]
                self._chunks[number] = slots.addresses()[:: self._num_workers].ravel()
            return self._chunks[number]
