"""Downloads and cache of the nodes of a fleet, from the order of samples.

They follow from the pieces of shards that a node's lanes read. No epoch is laid out, and no machine is started.

Shape letters: P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffusion.datasets.balanced import Integers
from diffusion.datasets.sample_order import EpochOrder, StreamShape

WINDOW_SECONDS = 60.0
"""Length of the intervals of which the busiest gives the peak of the downloads."""


@dataclass(frozen=True, kw_only=True)
class FleetStream:
    """A stream's samples and bytes per shard."""

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
    """Downloads and cache in one epoch; per node: of the node with the most."""

    shards_in_use: int
    """Shards of which at least one sample is read."""

    shards_fetched: int
    """Downloads of all nodes together, if a node keeps what it still needs and nothing else."""

    shards_per_node: int
    cache_bytes: int
    """Bytes of the shards that a node needs at once."""

    first_bytes: int
    """Bytes that a node needs for the first step."""

    bytes_per_second: float
    """Mean over the epoch, per node."""

    peak_bytes_per_second: float
    """In the busiest minute after the first."""


def traffic(streams: Sequence[FleetStream], epoch: EpochOrder, world: World, *, images_per_second: float) -> Traffic:
    """Compute downloads and cache of the nodes of a world in an epoch; the throughput is that of all of them."""
    num_lanes = epoch.whole.num_lanes
    step_seconds = epoch.whole.settings.global_batch_size / images_per_second
    width = max(1.0, WINDOW_SECONDS / step_seconds)
    used: list[set[int]] = [set() for _ in streams]
    nodes = []
    for node in range(world.num_nodes):
        # A lane that two nodes share is read by both.
        lanes = range(node * num_lanes // world.num_nodes, -(-(node + 1) * num_lanes // world.num_nodes))
        stays = [_stays(epoch, number, lanes) for number in range(len(streams))]
        for shards, (shard, _, _) in zip(used, stays, strict=True):
            shards.update(shard.tolist())
        sizes = [stream.bytes_per_shard[shard] for stream, (shard, _, _) in zip(streams, stays, strict=True)]
        size = np.concatenate(sizes)
        first, last = (np.concatenate([stay[i] for stay in stays]) for i in (1, 2))
        late = first >= width
        windows = np.bincount((first[late] / width).astype(np.int64), weights=size[late], minlength=1)
        changes = np.concatenate([size, -size])[np.argsort(np.concatenate([first, last]), kind="stable")]
        peak = int(np.cumsum(changes).max(initial=0))
        nodes.append((len(size), int(size.sum()), peak, int(size[first < 1].sum()), windows.max()))
    counts, sums, peaks, firsts, busiest = zip(*nodes, strict=True)
    return Traffic(
        shards_in_use=sum(len(shards) for shards in used),
        shards_fetched=sum(counts),
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
