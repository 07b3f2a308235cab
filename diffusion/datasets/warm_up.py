"""Which shards a node must not give up when it fetches what the next epoch begins with."""

from collections.abc import Sequence

import numpy as np

from diffusion.datasets.balanced import Integers
from diffusion.datasets.batching import EpochOrder

LAG = 16
"""Batches by which a loader worker of a node may be behind another one."""


def shards_of_steps(
    order: EpochOrder,
    steps: range,
    ranks: range,
    num_ranks: int,
    *,
    first_samples: Sequence[int],
    first_of_shards: Sequence[int],
) -> Integers:
    """Shards that the ranks of a node read in some steps.

    Args:
        order: the epoch.
        steps: the steps; those outside of the epoch are left out.
        ranks: of the node.
        num_ranks: world size.
        first_samples: Streaming's number of the first sample of each stream.
        first_of_shards: and of each shard.

    Returns:
        int64 [K], sorted.
    """
    first, last = max(0, steps.start), min(steps.stop, order.num_steps)
    slots = [order.whole.rank_range(rank, num_ranks) for rank in (ranks[0], ranks[-1])]
    read = order.slots(first, max(first, last), slots[0].start, slots[1].stop)
    samples = np.asarray(first_samples)[read.stream] + read.index
    return np.unique(np.searchsorted(first_of_shards, samples, side="right") - 1)
