"""How the lanes of the global order read one stream: which samples each owns, and in what order it takes them.

A lane owns a contiguous part of the stream's shards, in an order of shards that only the seed shuffles. It goes through
its part in passes: the pieces of shards in a new order each time, shuffled within blocks.

Shape letters: L lanes, K passes, N samples.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from diffusion.datasets.balanced import BalancedSequence, Integers, permutation, raw_words

MIN_PIECES_TO_CUT = 4
"""Pieces in a lane's pass from which on one of them is read in two parts, which costs another download at most."""

_SHARDS, _PIECES, _BLOCK, _STAGGER = range(4)


class Pieces(NamedTuple):
    """Parts of shards in the order in which a lane reads them: int64 arrays of one length."""

    shard: Integers
    num_samples: Integers
    first: Integers
    """Samples that the lane has read of the stream when it begins to need the shard."""
    last: Integers
    """... and when it has done with it."""


@dataclass(frozen=True, kw_only=True)
class Shuffle:
    """What shuffles a stream."""

    seed: int
    stream: int
    """Its number."""

    block_size: int | None
    """Samples of a lane's pass that are shuffled together; None shuffles within each shard."""

    def shards(self) -> tuple[int, int]:
        """Key of the order of shards, which is the same in every epoch."""
        return self.seed | _SHARDS << 32, self.stream << 32

    def key(self, purpose: int, epoch: int) -> tuple[int, int]:
        """Key of what is different in every epoch."""
        return self.seed | purpose << 32, epoch | self.stream << 32


class ShardAxis:
    """The samples of a stream, one shard after the other.

    Args:
        samples_per_shard: int64, samples of the shards in the stream's order.
        shuffle: shuffles the shards; None leaves them as they are.
    """

    def __init__(self, samples_per_shard: Integers, shuffle: Shuffle | None) -> None:
        sizes = np.asarray(samples_per_shard, np.int64)
        self.shards = np.arange(len(sizes))
        if shuffle is not None:
            self.shards = permutation(len(sizes), shuffle.shards(), (0, 0, 0))
        self.first_samples = (np.cumsum(sizes) - sizes)[self.shards]
        self.bounds = np.concatenate([[0], np.cumsum(sizes[self.shards])])

    def pieces(self, first: int, last: int) -> tuple[Integers, Integers, Integers]:
        """Cut first <= position < last at the shards: their numbers, first samples in the stream, and sizes."""
        if first == last:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
        begin = np.searchsorted(self.bounds, first, side="right") - 1
        end = np.searchsorted(self.bounds, last, side="left")
        starts, stops = self.bounds[begin:end].clip(min=first), self.bounds[begin + 1 : end + 1].clip(max=last)
        samples = self.first_samples[begin:end] + starts - self.bounds[begin:end]
        return self.shards[begin:end], samples, stops - starts


class LanePass:
    """One pass of a lane over its part of a stream.

    Args:
        axis: the stream.
        window: the lane's part of the axis, (first position, position after the last).
        shuffle: how it is shuffled; None reads in order.
        epoch: number of the epoch.
        address: number of the pass, and of the lane.
        begin: samples that the lane has read of the stream before.
        num_used: samples of this pass that the epoch needs.
    """

    def __init__(
        self,
        axis: ShardAxis,
        window: tuple[int, int],
        shuffle: Shuffle | None,
        *,
        epoch: int,
        address: tuple[int, int],
        begin: int,
        num_used: int,
    ) -> None:
        self.number, self.begin, self.num_used = address[0], begin, num_used
        self._shuffle, self._epoch, self._address = shuffle, epoch, address
        self.shards, self.samples, sizes = axis.pieces(*window)
        if shuffle is not None:
            chosen = permutation(len(sizes), shuffle.key(_PIECES, epoch), (*address, 0))
            self.shards, self.samples, sizes = self.shards[chosen], self.samples[chosen], sizes[chosen]
            # Lanes begin new shards or blocks, and download, at different times.
            word = int(raw_words(1, shuffle.key(_STAGGER, epoch), (*address, 0))[0])
            if shuffle.block_size is None and len(sizes) >= MIN_PIECES_TO_CUT:
                sizes = self._cut_first(sizes, word // 2 % int(sizes[0]), head_first=word % 2 == 1)
        total = window[1] - window[0]
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.edges = np.append(self.starts, total)
        if shuffle is not None and shuffle.block_size is not None:
            first = 1 + word % shuffle.block_size
            self.edges = np.unique(np.array([0, *range(first, total, shuffle.block_size), total]))
        self._known = (-1, np.zeros(0, np.int64))

    def _cut_first(self, sizes: Integers, place: int, *, head_first: bool) -> Integers:
        """Cut the first piece at a place and move its head, or its tail, to the end; return the new sizes."""
        head, tail = (self.samples[0], place), (self.samples[0] + place, sizes[0] - place)
        first, last = (head, tail) if head_first else (tail, head)
        self.shards = np.append(self.shards, self.shards[0])
        self.samples = np.append(self.samples, last[0])
        sizes = np.append(sizes, last[1])
        self.samples[0], sizes[0] = first
        return sizes

    def block_of(self, position: int) -> int:
        """Number of the block that holds a position of the pass."""
        return int(np.searchsorted(self.edges, position, side="right")) - 1

    def block(self, number: int) -> Integers:
        """Indices in the stream of the samples of a block, in the order in which they are read."""
        if self._known[0] != number:
            self._known = (number, self._make_block(number))
        return self._known[1]

    def _make_block(self, number: int) -> Integers:
        first, last = self.edges[number : number + 2]
        begin = np.searchsorted(self.ends, first, side="right")
        end = np.searchsorted(self.starts, last, side="left")
        starts = self.starts[begin:end].clip(min=first)
        sizes = self.ends[begin:end].clip(max=last) - starts
        shifts = self.samples[begin:end] + starts - self.starts[begin:end] - (np.cumsum(sizes) - sizes)
        indices = np.repeat(shifts, sizes) + np.arange(last - first)
        if self._shuffle is None:
            return indices
        return indices[permutation(len(indices), self._shuffle.key(_BLOCK, self._epoch), (*self._address, number))]

    def pieces(self) -> Pieces:
        """The shards in the order of reading, as far as they are read."""
        first = self.edges[np.searchsorted(self.edges, self.starts, side="right") - 1]
        last = self.edges[np.searchsorted(self.edges, self.ends, side="left")].clip(max=self.num_used)
        kept = first < self.num_used
        sizes = (self.ends - self.starts)[kept]
        return Pieces(self.shards[kept], sizes, first[kept] + self.begin, last[kept] + self.begin)


class StreamLanes:
    """What all lanes read of one stream in one epoch.

    Args:
        axis: the stream.
        totals: int64 [L], samples that each lane reads.
        shuffle: how it is shuffled; None reads in order.
        epoch: number of the epoch.
    """

    def __init__(self, axis: ShardAxis, totals: Integers, shuffle: Shuffle | None, epoch: int) -> None:
        self.num_read = int(totals.sum())
        self._axis, self._shuffle, self._epoch = axis, shuffle, epoch
        num_samples = int(axis.bounds[-1])
        num_passes = -(-self.num_read // num_samples)
        self._windows = np.zeros((num_passes, len(totals) + 1), np.int64)
        self._ends = np.zeros((num_passes + 1, len(totals)), np.int64)
        if num_passes:
            # Each pass is dealt to the lanes as evenly as their totals ask for, and holds every sample once.
            dealt = BalancedSequence(totals)
            positions = np.arange(num_passes + 1) * num_samples
            self._windows = np.diff(dealt.cumulative(positions), axis=0)
            self._ends = np.diff(dealt.cumulative(positions.clip(max=self.num_read)), axis=1)
        self._current: dict[int, LanePass] = {}

    def sequence(self, lane: int, first: int, last: int) -> Integers:
        """What a lane reads, from its sample number `first` to before `last`: indices and occurrences, int64 [2, N]."""
        result = np.empty((2, last - first), np.int64)
        position = first
        while position < last:
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
        passes = [self._pass(lane, number).pieces() for number in range(len(self._windows))]
        return Pieces(*(np.concatenate(column) for column in zip(*passes, strict=True))) if passes else _NO_PIECES

    def _pass_at(self, lane: int, position: int) -> LanePass:
        known = self._current.get(lane)
        if known is None or not known.begin <= position < known.begin + known.num_used:
            number = int(np.searchsorted(self._ends[:, lane], position, side="right")) - 1
            known = self._current[lane] = self._pass(lane, number)
        return known

    def _pass(self, lane: int, number: int) -> LanePass:
        begin, end = self._ends[number : number + 2, lane].tolist()
        first, last = self._windows[number, lane : lane + 2].tolist()
        return LanePass(
            self._axis,
            (first, last),
            self._shuffle,
            epoch=self._epoch,
            address=(number, lane),
            begin=begin,
            num_used=end - begin,
        )


_NO_PIECES = Pieces(*(np.zeros(0, np.int64) for _ in range(4)))
