"""What the order of samples means for a fleet of machines, worked out without starting any of them.

Whether every world reads the same global batches is tested by reading them as its ranks and loader workers would. What
a node downloads and has to keep follows from the pieces of shards that its lanes read, of which there are few: nothing
here lays out an epoch.

Shape letters: P pieces.
"""

import hashlib
import json
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffusion.datasets.balanced import Integers
from diffusion.datasets.sample_order import EpochOrder, GlobalOrder, OrderSettings, RankOrder, StreamShape
from diffusion.errors import DataError

WINDOW_SECONDS = 60.0
"""Length of the stretches of which the busiest gives the peak of the downloads."""


@dataclass(frozen=True, kw_only=True)
class FleetStream:
    """A stream's samples and bytes per shard, and what it gives to an epoch."""

    shape: StreamShape
    bytes_per_shard: Integers


@dataclass(frozen=True, kw_only=True)
class World:
    """Machines."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self.num_nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes} x {self.ranks_per_node}"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the nodes of a world download and keep in one epoch; of several nodes, the one with the most."""

    world: str
    num_ranks: int
    shards_in_use: int
    """Shards of which at least one sample is read."""

    shards_fetched: int
    """By all nodes together, if a node keeps what it still needs and nothing else."""

    relative: float
    """`shards_fetched` / `shards_in_use`: 1 is the minimum."""

    shards_per_node: int
    cache_bytes: int
    """Bytes of the shards that a node needs at once."""

    first_bytes: int
    """Bytes that a node needs for the first step."""

    bytes_per_second: float
    """Mean over the epoch, per node."""

    peak_bytes_per_second: float
    """In the busiest minute after the first."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the order costs one loader worker of a rank that continues in the middle of an epoch, on one core."""

    world: str
    order_seconds: float
    """From the samples per shard to the order of the epoch."""

    first_batch_seconds: float
    """... and from there to the addresses of the rank's first batch."""

    peak_bytes: int
    """Of memory, in both together."""

    samples_per_second: float
    """Addresses that it then makes."""


def read_stream(folder: Path, draws: int | None = None) -> FleetStream:
    """Read the samples and bytes per shard of an MDS folder.

    Raises:
        DataError: there is no index that can be read.
    """
    try:
        shards = json.loads((folder / "index.json").read_text(encoding="utf-8"))["shards"]
        samples = np.array([shard["samples"] for shard in shards], np.int64)
        files = [shard.get("zip_data") or shard["raw_data"] for shard in shards]
        sizes = np.array([file["bytes"] for file in files], np.int64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no index.json of an MDS folder that can be read: {error}") from error
    num = int(samples.sum()) if draws is None else draws
    return FleetStream(shape=StreamShape(name=folder.name, samples_per_shard=samples, draws=num), bytes_per_shard=sizes)


def synthetic_streams(
    num_samples: int, num_streams: int, *, sample_bytes: int, shard_bytes: int = 2**28
) -> list[FleetStream]:
    """Make streams of which each has two thirds of the samples of the one before."""
    shares = (2 / 3) ** np.arange(num_streams)
    ends = np.round(num_samples * np.cumsum(shares) / shares.sum()).astype(np.int64)
    per_shard = max(1, shard_bytes // sample_bytes)
    streams = []
    for number, num in enumerate(np.diff(ends, prepend=0).tolist()):
        sizes = np.full(-(-num // per_shard), per_shard, np.int64)
        sizes[-1] = num - per_shard * (len(sizes) - 1)
        shape = StreamShape(name=f"bucket-{number}", samples_per_shard=sizes, draws=num)
        streams.append(FleetStream(shape=shape, bytes_per_shard=sizes * sample_bytes))
    return streams


def make_order(streams: Sequence[FleetStream], settings: OrderSettings) -> GlobalOrder:
    """The order of the streams."""
    return GlobalOrder([stream.shape for stream in streams], settings)


def hash_steps(order: GlobalOrder, world: World, *, epoch: int, start: int, stop: int, num_workers: int) -> str:
    """Hash the global batches of some steps, as the loader workers of a world read them when they begin there.

    Every worker makes the order of the epoch anew, as it does after a start.
    """
    num_steps = stop - start
    share = order.settings.global_batch_size // world.num_ranks
    batches = np.empty((num_steps, world.num_ranks, share), np.int64)
    for rank in range(world.num_ranks):
        for worker in range(min(num_workers, num_steps)):
            samples = RankOrder(order, rank=rank, num_ranks=world.num_ranks)
            for step in range(worker, num_steps, num_workers):
                batches[step, rank] = samples.slots(epoch, start + step).addresses()
    # A batch is a set: which rank reads a sample must not matter.
    return hashlib.sha256(np.sort(batches.reshape(num_steps, -1)).tobytes()).hexdigest()


def traffic(streams: Sequence[FleetStream], epoch: EpochOrder, world: World, *, images_per_second: float) -> Traffic:
    """Work out what the nodes of a world download and keep.

    Args:
        streams: the streams of the order.
        epoch: order of an epoch.
        world: the machines.
        images_per_second: of all of them together.
    """
    num_lanes = epoch.whole.num_lanes
    step_seconds = epoch.whole.settings.global_batch_size / images_per_second
    width = max(1.0, WINDOW_SECONDS / step_seconds)
    used: list[set[int]] = [set() for _ in streams]
    nodes = []
    for node in range(world.num_nodes):
        # A lane that two nodes share (more nodes than lanes) is read by both.
        lanes = range(node * num_lanes // world.num_nodes, -(-(node + 1) * num_lanes // world.num_nodes))
        stays = [_stays(epoch, number, lanes) for number in range(len(streams))]
        for shards, (shard, _, _) in zip(used, stays, strict=True):
            shards.update(shard.tolist())
        sizes = [stream.bytes_per_shard[shard] for stream, (shard, _, _) in zip(streams, stays, strict=True)]
        size = np.concatenate(sizes)
        first, last = (np.concatenate([stay[i] for stay in stays]) for i in (1, 2))
        late = size[first >= width], (first[first >= width] / width).astype(np.int64)
        windows = np.bincount(late[1], weights=late[0]) if len(late[0]) else np.zeros(1)
        begins = first < 1
        nodes.append((len(size), int(size.sum()), _peak(first, last, size), int(size[begins].sum()), windows.max()))
    counts, sums, peaks, firsts, busiest = zip(*nodes, strict=True)
    in_use = sum(len(shards) for shards in used)
    return Traffic(
        world=str(world),
        num_ranks=world.num_ranks,
        shards_in_use=in_use,
        shards_fetched=sum(counts),
        relative=sum(counts) / in_use,
        shards_per_node=max(counts),
        cache_bytes=max(peaks),
        first_bytes=max(firsts),
        bytes_per_second=max(sums) / (epoch.num_steps * step_seconds),
        peak_bytes_per_second=float(max(busiest)) / (width * step_seconds),
    )


def _stays(epoch: EpochOrder, stream: int, lanes: range) -> tuple[Integers, np.ndarray, np.ndarray]:
    """Shards that a node reads, and the steps in which each stay of one in its cache begins and ends: [P] each.

    A shard whose next use begins before the last one ends is kept and counts once.
    """
    whole = epoch.whole
    per_step = epoch.streams[stream].num_read / whole.num_lanes / epoch.num_steps
    pieces = [epoch.streams[stream].pieces(lane) for lane in lanes]
    shard = np.concatenate([one.shard for one in pieces])
    first = np.concatenate([one.first for one in pieces]) / per_step
    last = np.concatenate([one.last for one in pieces]) / per_step
    order = np.lexsort((first, shard))
    shard, first, last = shard[order], first[order], last[order]
    # The latest end so far of the same shard: shards are set apart by more than an epoch, then one running maximum.
    apart = shard * (2.0 * epoch.num_steps)
    latest = np.maximum.accumulate(last + apart)
    begins = np.ones(len(shard), bool)
    begins[1:] = first[1:] + apart[1:] > latest[:-1]
    ends = np.append(np.flatnonzero(begins)[1:], len(shard)) - 1
    return shard[begins], first[begins], latest[ends] - apart[ends]


def _peak(first: np.ndarray, last: np.ndarray, size: Integers) -> int:
    """Largest sum of the sizes between their begin and their end."""
    times = np.concatenate([first, last])
    changes = np.concatenate([size, -size])[np.argsort(times, kind="stable")]
    return int(np.cumsum(changes).max()) if len(changes) else 0


def measure_cost(streams: Sequence[FleetStream], settings: OrderSettings, world: World, *, num_samples: int) -> Cost:
    """Measure what the order costs the first loader worker of a rank in the middle of the second epoch.

    Args:
        streams: the streams.
        settings: what the order depends on.
        world: the machines.
        num_samples: samples over which the speed is measured.
    """

    def begin() -> tuple[float, float, RankOrder]:
        began = time.perf_counter()
        order = make_order(streams, settings)
        samples = RankOrder(order, rank=world.num_ranks // 2, num_ranks=world.num_ranks)
        order.epoch(1)
        made = time.perf_counter()
        samples.slots(1, order.num_steps // 2)
        return made - began, time.perf_counter() - made, samples

    order_seconds, first_batch_seconds, samples = begin()
    first, num_steps = samples.order.num_steps // 2, samples.order.num_steps
    share = settings.global_batch_size // world.num_ranks
    steps = range(first, min(num_steps, first + -(-num_samples // share)))
    began = time.perf_counter()
    for step in steps:
        samples.slots(1, step).addresses()
    seconds = time.perf_counter() - began
    tracemalloc.start()
    begin()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Cost(
        world=str(world),
        order_seconds=order_seconds,
        first_batch_seconds=first_batch_seconds,
        peak_bytes=peak,
        samples_per_second=len(steps) * share / seconds,
    )
