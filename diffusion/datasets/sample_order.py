"""The global order: which sample stands in which slot of which global batch of an epoch, for any world size.

The order is a closed form of (data, seed, epoch, step). The data is the number of samples per shard and the number of
draws per stream; `OrderSettings` holds the rest. Ranks and loader workers only choose which slots they read, and any
step is entered directly: a stretch of steps is computed when it is read, and an epoch is never laid out.

From the outside in:

- A global batch of B slots is cut into L *lanes*. A lane is the part of the global batch that belongs to one canonical
  node: B / L neighbouring slots, with L = gcd(B / unit size, `num_canonical_nodes`). A rank of R reads B / R
  neighbouring slots, which may begin and end within a lane.
- A lane fills its slots in *units*: samples (`mixed`), groups (`groups`), or its part of a whole global batch
  (`bucket`). Which stream a unit comes from is read from a balanced sequence (`BalancedSequence`): every stretch of it
  holds the streams nearly in their proportions, and the units of a stream before any step have a closed form.
- Of each stream, a lane owns a contiguous range of shards (in a seeded order of shards), and reads it in *passes*
  (`LanePass`). The number of the pass is the sample's occurrence in the epoch.
- Within a pass, shards are permuted, and samples are shuffled within a shard, or in blocks over several shards.

Shape letters: S streams, L lanes, P passes, K shards, T steps, B slots, N samples.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diffusion.config.data import DataConfig, Mixing, Shuffling, StreamConfig, legal_world_sizes
from diffusion.datasets.balanced import MAX_TOTAL, BalancedSequence, Integers, permutation, raw_words
from diffusion.errors import ConfigurationError

if TYPE_CHECKING:  # The order reads no files.
    from diffusion.datasets.streams import StreamLocation

NUM_STREAM_BITS, NUM_OCCURRENCE_BITS, NUM_INDEX_BITS = 10, 13, 40
"""Together 63 bits: 1,024 streams of 1.1e12 samples, each drawn up to 8,192 times an epoch."""

ORDER_VERSION = 1
"""Part of the fingerprint: increase it with every change by which the same settings give another order."""

SHARDS_OF_STREAMS = "shards of data.streams"
"""Key of the fingerprint: changes when the data grows."""

MIN_CHUNK = 2**13
"""Samples of a rank that are computed at once."""

MIN_PIECES_TO_CUT = 4
"""Smallest number of pieces of a pass whose first one is read in two parts, which costs one more download at most."""

_SHARDS, _PIECES, _BLOCK, _STAGGER, _OFFSET = range(5)
"""Purposes in the keys of random numbers."""


def sample_address(stream: Any, index: Any, occurrence: Any = 0) -> Any:
    """Pack the identity of a sample into one non-negative int64.

    Args:
        stream: index of the stream in the configuration, below 1,024.
        index: position of the sample in its stream, below 2^40.
        occurrence: how often the sample came before in the same epoch (repeated streams), below 8,192.

    Returns:
        The address: distinct for distinct arguments; an int64 tensor if any argument is one.
    """
    return (stream << (NUM_OCCURRENCE_BITS + NUM_INDEX_BITS)) | (occurrence << NUM_INDEX_BITS) | index


@dataclass(frozen=True, kw_only=True)
class StreamShape:
    """Numbers of samples of a stream, for the order."""

    name: str
    samples_per_shard: Integers
    draws: int
    """Samples of an epoch before it is cut to whole global batches: see `stream_shapes`."""

    @property
    def num_samples(self) -> int:
        """Samples of the stream."""
        return int(self.samples_per_shard.sum())


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """Settings of the order; the fields are explained in `config.data`."""

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
        """Description of the shuffled units."""
        if not self.shuffle:
            return "none"
        return "shard" if self.shuffle_block_size is None else f"block of {self.shuffle_block_size}"

    @property
    def num_lanes(self) -> int:
        """L: parts of the global batch that read shards of their own."""
        return math.gcd(self.global_batch_size // self.unit_size, self.num_canonical_nodes)


def order_settings(config: DataConfig, seed: int) -> OrderSettings:
    """Settings of the order of samples."""
    return OrderSettings(
        seed=seed,
        global_batch_size=config.global_batch_size,
        num_canonical_nodes=config.num_canonical_nodes,
        mixing=config.mixing,
        group_size=config.group_size,
        shuffle=config.shuffle is not Shuffling.none,
        shuffle_block_size=config.shuffle_block_size if config.shuffle is Shuffling.block else None,
    )


class Slots(NamedTuple):
    """Samples in slots: int64 arrays of one shape."""

    stream: Integers
    index: Integers
    occurrence: Integers

    def addresses(self) -> Integers:
        """The samples' `sample_address`es."""
        return sample_address(self.stream, self.index, self.occurrence)


def stream_shapes(
    streams: "Sequence[StreamConfig | StreamLocation]", samples_per_shard: Sequence[Integers]
) -> list[StreamShape]:
    """Shapes of streams for the order.

    Args:
        streams: streams with proportions (shares of the mix; an epoch is as long as all streams together), or with
            repeats (how often each sample comes; None is once).
        samples_per_shard: int64 [K] of each stream.
    """
    totals = [int(sizes.sum()) for sizes in samples_per_shard]
    if all(stream.proportion is None for stream in streams):
        repeats = [1.0 if stream.repeat is None else stream.repeat for stream in streams]
        draws = [round(total * repeat) for total, repeat in zip(totals, repeats, strict=True)]
    else:
        shares = np.cumsum([stream.proportion or 0.0 for stream in streams])
        ends = [round(sum(totals) * share / shares[-1]) for share in shares.tolist()]
        draws = np.diff([0, *ends]).tolist()
    return [
        StreamShape(name=stream.name, samples_per_shard=sizes, draws=num)
        for stream, sizes, num in zip(streams, samples_per_shard, draws, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """The random numbers that shuffle a stream. Keys are two 64-bit words; see `raw_words`."""

    seed: int
    stream: int
    """Index of the stream."""

    block_size: int | None
    """Samples of a lane's pass that are shuffled together; None shuffles within each shard."""

    def shards(self) -> tuple[int, int]:
        """Key of the order of shards, which is the same in every epoch."""
        return self.seed | _SHARDS << 32, self.stream << 32

    def key(self, purpose: int, epoch: int) -> tuple[int, int]:
        """Key of what is drawn anew in every epoch."""
        return self.seed | purpose << 32, epoch | self.stream << 32


class ShardAxis:
    """The samples of a stream on one axis of positions 0 <= position < N, shard after shard in a seeded order.

    Args:
        samples_per_shard: int64 [K], in the order of the index.
        shuffle: shuffles the shards; None keeps their order.
    """

    def __init__(self, samples_per_shard: Integers, shuffle: Shuffle | None) -> None:
        sizes = np.asarray(samples_per_shard, np.int64)
        self.shards = np.arange(len(sizes))
        if shuffle is not None:
            self.shards = permutation(len(sizes), shuffle.shards(), (0, 0, 0))
        # Shard number k of the axis starts at position bounds[k], and at sample first_samples[k] of the stream.
        self.first_samples = (np.cumsum(sizes) - sizes)[self.shards]
        self.bounds = np.concatenate([[0], np.cumsum(sizes[self.shards])])

    def pieces(self, first: int, last: int) -> tuple[Integers, Integers, Integers]:
        """Cut the positions first <= position < last at the shards.

        Returns:
            Shard, first sample in the stream, and number of samples of each piece: int64 [K] each.
        """
        if first == last:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        begin = np.searchsorted(self.bounds, first, side="right") - 1
        end = np.searchsorted(self.bounds, last, side="left")
        starts, stops = self.bounds[begin:end].clip(min=first), self.bounds[begin + 1 : end + 1].clip(max=last)
        samples = self.first_samples[begin:end] + starts - self.bounds[begin:end]
        return self.shards[begin:end], samples, stops - starts


class Pieces(NamedTuple):
    """Parts of shards in the order in which a lane reads them: int64 arrays of one length."""

    shard: Integers
    num_samples: Integers
    first: Integers
    """Samples of the stream that the lane has read when it begins to need the shard."""
    last: Integers
    """Samples of the stream that the lane has read when it needs the shard no longer."""


class LanePass:
    """One pass of a lane over its part of a stream: a permutation of the window, computed block by block.

    Args:
        lanes: the stream, as all lanes read it in an epoch.
        lane: number of the lane.
        number: number of the pass.
    """

    def __init__(self, lanes: "StreamLanes", lane: int, number: int) -> None:
        shuffle, epoch, address = lanes.shuffle, lanes.epoch, (number, lane)
        self.number, self._shuffle, self._epoch, self._address = number, shuffle, epoch, address
        self.begin, end = lanes.ends[number : number + 2, lane].tolist()
        self.num_used = end - self.begin
        # The pieces of shards in the window, in an order drawn for (epoch, stream, pass, lane).
        window = lanes.windows[number, lane : lane + 2].tolist()
        self.shards, self.samples, sizes = lanes.axis.pieces(*window)
        if shuffle is not None:
            chosen = permutation(len(sizes), shuffle.key(_PIECES, epoch), (*address, 0))
            self.shards, self.samples, sizes = self.shards[chosen], self.samples[chosen], sizes[chosen]
            # Each lane begins within a shard or block, so that the lanes need new shards at different times.
            word = int(raw_words(1, shuffle.key(_STAGGER, epoch), (*address, 0))[0])
            if shuffle.block_size is None and len(sizes) >= MIN_PIECES_TO_CUT:
                cut = word // 2 % max(1, int(sizes[0]))  # A shard may be empty.
                sizes = self._cut_first(sizes, cut, head_first=word % 2 == 1)
        # Piece k is at the places starts[k] <= place < ends[k] of the pass.
        total = window[1] - window[0]
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        # Block j, which is shuffled by itself, is at edges[j] <= place < edges[j + 1]: one piece each, or stretches of
        # block_size places of which the first is shorter: 0, w, w + block_size, w + 2 block_size ... total.
        self.edges = np.append(self.starts, total)
        if shuffle is not None and shuffle.block_size is not None:
            first = 1 + word % shuffle.block_size
            self.edges = np.unique(np.array([0, *range(first, total, shuffle.block_size), total]))
        self._known = (-1, np.zeros(0, np.int64))

    def _cut_first(self, sizes: Integers, cut: int, *, head_first: bool) -> Integers:
        """Cut the first piece in a head of `cut` samples and a tail, and move one of them to the end of the pass.

        Returns:
            The new sizes of the pieces, one more than before.
        """
        head, tail = (self.samples[0], cut), (self.samples[0] + cut, sizes[0] - cut)
        first, last = (head, tail) if head_first else (tail, head)
        self.shards = np.append(self.shards, self.shards[0])
        self.samples = np.append(self.samples, last[0])
        sizes = np.append(sizes, last[1])
        self.samples[0], sizes[0] = first
        return sizes

    def block_of(self, place: int) -> int:
        """Number of the block that holds a place of the pass."""
        return int(np.searchsorted(self.edges, place, side="right")) - 1

    def block(self, number: int) -> Integers:
        """Indices in the stream of the samples of a block, in the order of reading; the last block is kept."""
        if self._known[0] != number:
            self._known = (number, self._make_block(number))
        return self._known[1]

    def _make_block(self, number: int) -> Integers:
        first, last = self.edges[number : number + 2]
        # The pieces that overlap the block, each cut to it.
        begin = np.searchsorted(self.ends, first, side="right")
        end = np.searchsorted(self.starts, last, side="left")
        starts = self.starts[begin:end].clip(min=first)
        sizes = self.ends[begin:end].clip(max=last) - starts
        # In piece k, the sample at offset i of the block is samples[k] + (first + i - starts[k]): i plus a shift that
        # is constant within the piece. (cumsum(sizes) - sizes is the offset in the block at which the piece begins.)
        shifts = self.samples[begin:end] + starts - self.starts[begin:end] - (np.cumsum(sizes) - sizes)
        indices = np.repeat(shifts, sizes) + np.arange(last - first)
        if self._shuffle is None:
            return indices
        return indices[permutation(len(indices), self._shuffle.key(_BLOCK, self._epoch), (*self._address, number))]

    def pieces(self) -> Pieces:
        """The shards in the order of reading, up to the last sample that the epoch reads."""
        # A shard is needed from the beginning of the block in which its piece begins to the end of the one it ends in.
        first = self.edges[np.searchsorted(self.edges, self.starts, side="right") - 1]
        last = self.edges[np.searchsorted(self.edges, self.ends, side="left")].clip(max=self.num_used)
        kept = first < self.num_used
        sizes = (self.ends - self.starts)[kept]
        return Pieces(self.shards[kept], sizes, first[kept] + self.begin, last[kept] + self.begin)


class StreamLanes:
    """Samples of one stream that all lanes read in one epoch.

    Args:
        axis: the stream, of N samples.
        totals: int64 [L], samples of the stream that each lane reads in the epoch.
        shuffle: how it is shuffled; None reads in order.
        epoch: number of the epoch.
    """

    def __init__(self, axis: ShardAxis, totals: Integers, shuffle: Shuffle | None, epoch: int) -> None:
        self.num_read = int(totals.sum())
        self.axis, self.shuffle, self.epoch = axis, shuffle, epoch
        num_samples = int(axis.bounds[-1])
        num_passes = -(-self.num_read // num_samples)
        self.windows = np.zeros((num_passes, len(totals) + 1), np.int64)
        self.ends = np.zeros((num_passes + 1, len(totals)), np.int64)
        if num_passes:
            # The draws of an epoch are a sequence of lanes, balanced by `totals`. Draws p N ... (p + 1) N are pass p.
            # In pass p, lane l owns windows[p, l] <= position < windows[p, l + 1], as many positions as it has draws in
            # the pass, so that a pass holds every sample once. The last pass is cut off at the end of the epoch:
            # ends[p, l] counts the draws of lane l before pass p.
            dealt = BalancedSequence(totals)
            positions = np.arange(num_passes + 1) * num_samples
            self.windows = np.diff(dealt.cumulative(positions), axis=0)
            self.ends = np.diff(dealt.cumulative(positions.clip(max=self.num_read)), axis=1)
        self._current: dict[int, LanePass] = {}

    def sequence(self, lane: int, first: int, last: int) -> Integers:
        """Indices and occurrences of the samples first ... last - 1 that a lane reads of the stream: int64 [2, N]."""
        result = np.empty((2, last - first), np.int64)
        position = first
        while position < last:  # One block of one pass at a time.
            one = self._pass_at(lane, position)
            inside = position - one.begin
            number = one.block_of(inside)
            begin = int(one.edges[number])
            stop = min(last - one.begin, int(one.edges[number + 1]), one.num_used)
            chosen = slice(position - first, one.begin + stop - first)
            result[0, chosen], result[1, chosen] = one.block(number)[inside - begin : stop - begin], one.number
            position = one.begin + stop
        return result

    def pieces(self, lane: int) -> Pieces:
        """The shards that a lane reads, in order."""
        passes = [LanePass(self, lane, number).pieces() for number in range(len(self.windows))]
        return Pieces(*(np.concatenate(column) for column in zip(*passes, strict=True))) if passes else _NO_PIECES

    def _pass_at(self, lane: int, position: int) -> LanePass:
        known = self._current.get(lane)
        if known is None or not known.begin <= position < known.begin + known.num_used:
            number = int(np.searchsorted(self.ends[:, lane], position, side="right")) - 1
            known = self._current[lane] = LanePass(self, lane, number)
        return known


_NO_PIECES = Pieces(*(np.zeros(0, np.int64) for _ in range(4)))


class GlobalOrder:
    """The global order: an `EpochOrder` for each epoch.

    Raises:
        ConfigurationError: a stream gives less than a batch (or group, or sample), or more than can be counted.
    """

    def __init__(self, streams: Sequence[StreamShape], settings: OrderSettings) -> None:
        self.streams, self.settings = list(streams), settings
        size, unit = settings.global_batch_size, settings.unit_size
        if size % unit:
            raise ConfigurationError(f"data.group_size is {unit}, which does not divide data.global_batch_size {size}")
        self.num_lanes = settings.num_lanes
        # A unit is what one label of the balanced sequence stands for: a sample, a group, or a whole global batch, of
        # which each lane holds `lane_unit` samples. `smallest` is what a stream gives at the least.
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
        draws = "".join(f"{stream.draws}|" for stream in self.streams)
        return {
            "version of the order": ORDER_VERSION,
            "seed": settings.seed,
            "data.global_batch_size": settings.global_batch_size,
            "data.num_canonical_nodes": settings.num_canonical_nodes,
            "data.mixing": settings.mixing.value,
            "data.group_size": settings.group_size,
            "data.shuffle": settings.shuffling,
            "number of data.streams": len(self.streams),
            SHARDS_OF_STREAMS: hash_shards([stream.samples_per_shard for stream in self.streams]),
            "proportion and repeat of data.streams": hashlib.sha256(draws.encode()).hexdigest()[:16],
        }


def hash_shards(samples_per_shard: Iterable[Integers]) -> str:
    """Hash the sizes of the shards of each stream, int64 [K] each, for the fingerprint."""
    digest = hashlib.sha256()
    for sizes in samples_per_shard:
        digest.update(np.asarray(sizes, "<i8").tobytes() + b"|")
    return digest.hexdigest()[:16]


def describe_changes(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Describe the differences between two orders, from their fingerprints; empty if they are the same."""
    return [
        f"{name} (was {there.get(name)}, is {here.get(name)})"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


class EpochOrder:
    """The order of one epoch, whose number is below 2^32."""

    def __init__(self, whole: GlobalOrder, epoch: int) -> None:
        self.whole, self.num_steps = whole, whole.num_steps
        seed, shuffle = whole.settings.seed, whole.settings.shuffle
        offset = int(raw_words(1, (seed | _OFFSET << 32, epoch), (0, 0, 0))[0] >> np.uint64(32)) if shuffle else 0
        self._labels = BalancedSequence(whole.units, offset)
        # Lane l holds the units l, l + L, l + 2 L ... of the sequence; with `bucket`, every lane a part of each unit.
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
        """Samples of each stream that this epoch drops, since it is cut to whole global batches (and groups)."""
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
        width = whole.lane_units_per_step * whole.lane_unit  # Slots of a lane in a step.
        last = whole.settings.global_batch_size if last is None else last
        lanes = range(first // width, -(-last // width))
        result = np.empty((3, stop - start, len(lanes), whole.lane_units_per_step, whole.lane_unit), np.int64)
        read = self._read_before(start)
        units = range(start * whole.lane_units_per_step, stop * whole.lane_units_per_step)
        for column, lane in enumerate(lanes):
            # The stream of each unit of the lane, then the lane's next samples of each stream, in the stream's units.
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


class RankOrder:
    """The samples of one rank step by step, computed in stretches of steps; several threads may ask."""

    def __init__(self, order: GlobalOrder, *, rank: int, num_ranks: int) -> None:
        self.order = order
        self._mine = order.rank_range(rank, num_ranks)
        self.steps_per_chunk = -(-MIN_CHUNK // len(self._mine))
        self._epochs: dict[int, EpochOrder] = {}
        self._chunks: dict[tuple[int, int], Slots] = {}
        self._lock = Lock()

    def slots(self, epoch: int, step: int) -> Slots:
        """Samples of a step, in slot order: int64 arrays [B / num_ranks]."""
        number, inside = divmod(step, self.steps_per_chunk)
        with self._lock:
            chunk = self._chunks.get((epoch, number))
            if chunk is None:
                chunk = self._chunks[epoch, number] = self._compute(epoch, number)
                if len(self._chunks) > _NUM_CHUNKS:
                    del self._chunks[next(iter(self._chunks))]
        return Slots(*(array[inside] for array in chunk))

    def _compute(self, epoch: int, number: int) -> Slots:
        if epoch not in self._epochs:
            self._epochs = {known: self._epochs[known] for known in self._epochs if abs(known - epoch) == 1}
            self._epochs[epoch] = self.order.epoch(epoch)
        start = number * self.steps_per_chunk
        stop = min(start + self.steps_per_chunk, self.order.num_steps)
        return self._epochs[epoch].slots(start, stop, self._mine.start, self._mine.stop)


_NUM_CHUNKS = 3
"""Stretches that are kept, for threads of which one is ahead of another."""
