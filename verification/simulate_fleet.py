"""Simulate fleets: verify that all read the same global batches, and compute downloads and caches of their nodes.

    python -m verification.simulate_fleet --synthetic 790e6 --streams 7
    python -m verification.simulate_fleet DATA/train/256-512 DATA/train/512-768 --worlds 1x8 16x8

Reads the index.json of MDS folders, or synthesises streams. Exit code 1 if the batches of two worlds differ.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from diffusion.config.data import Mixing, legal_world_sizes
from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, RankOrder, StreamShape
from diffusion.errors import ConfigurationError
from diffusion.formats.shards import read_index
from diffusion.launch import CommandParser, run_command
from diffusion.planning.downloads import FleetStream, World, traffic
from diffusion.reports.tables import text_table

WORLDS = ("1x8", "2x4", "2x8", "4x8", "16x2", "8x8", "4x16", "16x8", "8x16")
IMAGES_PER_GPU_SECOND = 100.0
SMALL_BATCHES = 40
"""Global batches of the small set whose epochs are compared whole."""

NUM_STRETCHES = STRETCH_STEPS = 4
"""Random stretches of the large set that are compared, and their steps."""


def parse_world(text: str) -> World:
    """Read NODESxRANKS."""
    nodes, _, ranks = text.partition("x")
    return World(num_nodes=int(nodes), ranks_per_node=int(ranks))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = CommandParser(prog="simulate_fleet", description=description)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="MDS folders, one per stream")
    parser.add_argument("--synthetic", type=float, metavar="N", help="total samples of synthetic streams")
    parser.add_argument("--streams", type=int, default=7, help="number of synthetic streams (default: 7)")
    parser.add_argument("--sample-kb", type=float, default=8.6, help="kB of a synthetic sample (default: 8.6, latents)")
    parser.add_argument("--shard-mb", type=int, default=256, help="MiB of a synthetic shard (default: 256)")
    worlds = [parse_world(world) for world in WORLDS]
    worlds_help = f"nodes x ranks per node (default: {' '.join(WORLDS)})"
    parser.add_argument("--worlds", nargs="+", type=parse_world, default=worlds, metavar="NxR", help=worlds_help)
    parser.add_argument("--global-batch-size", type=int, default=2048)
    parser.add_argument("--num-canonical-nodes", type=int, default=128)
    parser.add_argument("--mixing", type=Mixing, choices=[mixing.value for mixing in Mixing], default=Mixing.mixed)
    parser.add_argument("--group-size", type=int, default=None)
    parser.add_argument("--shuffle-block-size", type=int, default=None, help="default: shuffle within each shard")
    options = parser.parse_args(arguments)
    if bool(options.folders) == (options.synthetic is not None):
        parser.error("give either folders or --synthetic N")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the batches of all worlds and print their downloads."""
    options = parse_arguments(arguments)
    began = time.perf_counter()
    settings = OrderSettings(
        seed=17,
        global_batch_size=options.global_batch_size,
        num_canonical_nodes=options.num_canonical_nodes,
        mixing=options.mixing,
        group_size=options.group_size,
        shuffle_block_size=options.shuffle_block_size,
    )
    streams = [read_stream(folder) for folder in options.folders]
    if options.synthetic is not None:
        num, sample_bytes = int(options.synthetic), round(options.sample_kb * 1000)
        streams = synthetic_streams(
            num, options.streams, sample_bytes=sample_bytes, shard_bytes=options.shard_mb * 2**20
        )
    order = GlobalOrder([stream.shape for stream in streams], settings)
    legal = legal_world_sizes(settings.global_batch_size, settings.unit_size)
    worlds = [world for world in options.worlds if world.num_ranks in legal]
    if not worlds:
        raise ConfigurationError(f"--worlds: none has a legal number of ranks: {', '.join(map(str, legal))}")
    print("\n".join(describe(order, streams)))
    stretches, whole = compare_stretches(order, worlds), compare_whole_epochs(settings, worlds, len(streams))
    print("\n".join(["", *text_table([HEAD, *rows(order, streams, worlds, stretches, whole)])]))
    is_equal = len(set(stretches)) == len(set(whole)) == 1
    seconds = time.perf_counter() - began
    print(f"global batches are {'equal in all worlds' if is_equal else 'DIFFERENT'}; {seconds:.0f} s")
    if not is_equal:
        raise SystemExit(1)


def read_stream(folder: Path) -> FleetStream:
    """Read the samples and bytes per shard of an MDS folder.

    Raises:
        DataError: there is no index that can be read.
    """
    index = read_index(folder)
    shape = StreamShape(name=folder.name, samples_per_shard=index.samples_per_shard, draws=index.num_samples)
    return FleetStream(shape=shape, bytes_per_shard=np.array([one.stored.num_bytes for one in index.shards], np.int64))


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


def compare_stretches(order: GlobalOrder, worlds: Sequence[World]) -> list[str]:
    """Hash random stretches of the second epoch, for each world, beginning anew at each."""
    num_steps = min(STRETCH_STEPS, order.num_steps)
    starts = np.random.default_rng(0).integers(0, order.num_steps - num_steps + 1, NUM_STRETCHES).tolist()
    return [
        "".join(
            hash_steps(order, world, epoch=1, start=start, stop=start + num_steps, num_workers=1 + i % 3)
            for i, start in enumerate(starts)
        )
        for world in worlds
    ]


def compare_whole_epochs(settings: OrderSettings, worlds: Sequence[World], num_streams: int) -> list[str]:
    """Hash two epochs of small streams of the same number, for each world, with another number of workers in each."""
    num_samples = SMALL_BATCHES * settings.global_batch_size
    shapes = [one.shape for one in synthetic_streams(num_samples, num_streams, sample_bytes=1, shard_bytes=500)]
    shapes[1:2] = [replace(shape, draws=2 * shape.draws) for shape in shapes[1:2]]
    order = GlobalOrder(shapes, settings)
    return [
        "".join(
            hash_steps(order, world, epoch=epoch, start=0, stop=order.num_steps, num_workers=1 + (i + epoch) % 3)
            for epoch in range(2)
        )
        for i, world in enumerate(worlds)
    ]


def describe(order: GlobalOrder, streams: Sequence[FleetStream]) -> list[str]:
    """Table of the streams, and of what an epoch drops."""
    lines = [f"{order.num_steps:,} steps of {order.settings.global_batch_size} in an epoch; {order.num_lanes} lanes"]
    table = [("stream", "samples", "shards", "GB", "dropped")]
    for stream, num in zip(streams, order.epoch(0).dropped, strict=True):
        shape, size = stream.shape, stream.bytes_per_shard
        table.append((shape.name, f"{shape.num_samples:,}", f"{len(size):,}", f"{size.sum() / 1e9:,.0f}", str(num)))
    return [*lines, *text_table(table)]


HEAD = ("nodes x ranks", "batches", "shards/node", "fetched/min", "cache GB", "first GB", "MB/s/node", "peak MB/s")


def rows(
    order: GlobalOrder,
    streams: Sequence[FleetStream],
    worlds: Sequence[World],
    stretches: Sequence[str],
    whole: Sequence[str],
) -> list[tuple[str, ...]]:
    """One row per world."""
    table = []
    for world, stretch, epochs in zip(worlds, stretches, whole, strict=True):
        row = traffic(streams, order.epoch(0), world, images_per_second=IMAGES_PER_GPU_SECOND * world.num_ranks)
        table.append((
            str(world), f"{stretch[:4]} {epochs[:4]}", f"{row.shards_per_node:,}",
            f"{row.shards_fetched / row.shards_in_use:.3f}", f"{row.cache_bytes / 1e9:,.1f}",
            f"{row.first_bytes / 1e9:,.1f}", f"{row.bytes_per_second / 1e6:,.1f}",
            f"{row.peak_bytes_per_second / 1e6:,.1f}",
        ))  # fmt: skip
    return table


if __name__ == "__main__":
    sys.exit(run_command(main))
