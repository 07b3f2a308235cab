"""Whether the cache on a machine is large enough: for what is needed at once, and for what is to be kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusion.config.data import DataConfig
from diffusion.config.quantities import parse_size
from diffusion.datasets.sample_order import GlobalOrder
from diffusion.operations.checks.readings import DiskReading
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, warning
from diffusion.planning.fleet import FleetStream, World, traffic

BATCHES_AHEAD = 8
"""Batches that a worker downloads ahead where `data.predownload` is null."""

SHARDS_AT_LEAST = 4
"""Largest shards that Streaming insists on having room for."""


@dataclass(frozen=True, kw_only=True)
class CacheDemand:
    """What a node keeps in its cache, in bytes."""

    live_bytes: int
    """Shards that it needs at once, and the indexes, which count as well."""

    ahead_bytes: int
    """Shards that its loader workers fetch before they are needed."""

    largest_shard: int
    node_bytes: int
    """All shards that it reads in an epoch: what stays without a limit."""

    bytes_per_image: float
    """Downloaded by a node for each image of the global batch, with an empty cache."""


def find_cache_demand(
    streams: Sequence[FleetStream], order: GlobalOrder, data: DataConfig, world: World, *, index_bytes: int = 0
) -> CacheDemand:
    """Work out what a node has to keep.

    Args:
        streams: shards of the streams of the order, with the bytes that each takes in a cache.
        order: the order of samples.
        data: the configuration's section `data`.
        world: the machines.
        index_bytes: of the indexes of all streams.
    """
    row = traffic(streams, order.epoch(0), world, images_per_second=1.0)
    largest = max(int(stream.bytes_per_shard.max()) for stream in streams)
    num_images = order.num_steps * data.global_batch_size
    share = data.global_batch_size // world.num_ranks
    workers = max(1, data.num_workers)
    steps_ahead = workers * (data.predownload or BATCHES_AHEAD * share) / share
    fetched = row.bytes_per_second * num_images
    total = sum(int(stream.bytes_per_shard.sum()) for stream in streams)
    return CacheDemand(
        live_bytes=row.cache_bytes + index_bytes,
        ahead_bytes=round(fetched * min(1.0, steps_ahead / order.num_steps)) + largest,
        largest_shard=largest,
        node_bytes=min(total, round(fetched)),
        bytes_per_image=row.bytes_per_second,
    )


def check_cache_limit(limit: str | None, demand: CacheDemand, without_remote: Sequence[str]) -> Verdict:
    """Does the limit leave room for the shards that are needed at once?

    Args:
        limit: `data.cache_limit`.
        demand: what a node keeps.
        without_remote: names of streams whose folder is the original.
    """
    if limit is None:
        return ok("cache limit", "none")
    if without_remote:
        what = f"data.cache_limit is {limit}, but {', '.join(without_remote)} has no remote: the only copy"
        return problem("cache limit", f"{what} would be deleted", "set data.cache_limit=null, or give data.remote")
    size = parse_size(limit, "data.cache_limit")
    least = max(demand.live_bytes, SHARDS_AT_LEAST * demand.largest_shard)
    good = demand.live_bytes + max(demand.ahead_bytes, SHARDS_AT_LEAST * demand.largest_shard)
    what = (
        f"data.cache_limit is {limit}; a node needs {size_text(least)} at once and fetches "
        f"{size_text(demand.ahead_bytes)} ahead"
    )
    remedy = (
        f"set it to {size_text(good).replace(' ', '').lower()} or more, write smaller shards, or lower "
        "data.num_canonical_nodes (which makes it another order)"
    )
    if size < least:
        return problem("cache limit", f"{what}: shards would be deleted before they are read, again and again", remedy)
    if size < good:
        return warning("cache limit", f"{what}: shards may be deleted before they are read", remedy)
    return ok("cache limit", what)


def check_cache_space(disk: DiskReading, demand: CacheDemand, limit: str | None, held_bytes: int) -> Verdict:
    """Does the disk hold what the cache is to hold?

    Args:
        disk: file system of the cache.
        demand: what a node keeps.
        limit: `data.cache_limit`.
        held_bytes: what the cache holds already.
    """
    wanted = demand.node_bytes
    if limit is not None:
        wanted = min(wanted, parse_size(limit, "data.cache_limit"))
    missing = max(0, wanted - held_bytes)
    what = (
        f"{disk.folder} has {size_text(disk.free_bytes)} free, and {size_text(missing)} are still to be downloaded to "
        "this node"
    )
    if not disk.is_writable:
        return problem("cache space", f"{disk.folder} cannot be written to", "choose another data.local")
    if disk.free_bytes < missing:
        good = demand.live_bytes + max(demand.ahead_bytes, SHARDS_AT_LEAST * demand.largest_shard)
        remedy = "free space or choose another data.local"
        if disk.free_bytes + held_bytes > good:
            remedy += f", or set data.cache_limit to at least {size_text(good).replace(' ', '').lower()}"
        return problem("cache space", what, remedy)
    return ok("cache space", what)
