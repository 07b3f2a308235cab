"""Simulate fleets: verify that all read the same global batches, and compute downloads and caches of their nodes.

    python scripts/simulate_fleet.py --synthetic 790e6 --streams 7 --out runs/fleet
    python scripts/simulate_fleet.py DATA/train/256-512 DATA/train/512-768 --worlds 1x8 16x8

Reads the index.json of MDS folders, or synthesises streams. Prints a table; --out also writes fleet.json and fleet.png.
Exit code 1 if the batches of two worlds differ.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from diffusion.config.data import Mixing, legal_world_sizes
from diffusion.datasets.sample_order import GlobalOrder, OrderSettings
from diffusion.errors import UserError
from diffusion.planning.fleet import (
    Cost,
    FleetStream,
    Traffic,
    World,
    hash_steps,
    make_order,
    measure_cost,
    read_stream,
    synthetic_streams,
    traffic,
)
from diffusion.reports.tables import text_table

WORLDS = ("1x8", "2x4", "2x8", "4x8", "16x2", "8x8", "4x16", "16x8", "8x16")
SMALL_BATCHES = 40
"""Global batches of the small set whose epochs are compared whole."""


def parse_world(text: str) -> World:
    """Read NODESxRANKS."""
    nodes, _, ranks = text.partition("x")
    return World(num_nodes=int(nodes), ranks_per_node=int(ranks))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
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
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--images-per-second", type=float, default=100.0, help="of one GPU (default: 100)")
    parser.add_argument("--stretches", type=int, default=4, help="number of compared random stretches (default: 4)")
    parser.add_argument("--stretch-steps", type=int, default=4, help="steps of a stretch (default: 4)")
    parser.add_argument("--out", type=Path, help="folder for fleet.json and fleet.png")
    options = parser.parse_args(arguments)
    if bool(options.folders) == (options.synthetic is not None):
        parser.error("give either folders or --synthetic N")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = parse_arguments(arguments)
    try:
        return simulate(options)
    except UserError as error:
        print(f"simulate_fleet: {error}", file=sys.stderr)
        return 2


def simulate(options: argparse.Namespace) -> int:
    """Compare the batches, work out the traffic, measure the cost; print and write them."""
    began = time.perf_counter()
    settings = OrderSettings(
        seed=options.seed,
        global_batch_size=options.global_batch_size,
        num_canonical_nodes=options.num_canonical_nodes,
        mixing=options.mixing,
        group_size=options.group_size,
        shuffle_block_size=options.shuffle_block_size,
    )
    sample_bytes = round(options.sample_kb * 1000)
    streams = [read_stream(folder) for folder in options.folders]
    if options.synthetic is not None:
        streams = synthetic_streams(
            int(options.synthetic), options.streams, sample_bytes=sample_bytes, shard_bytes=options.shard_mb * 2**20
        )
    order = make_order(streams, settings)
    legal = legal_world_sizes(settings.global_batch_size, settings.unit_size)
    worlds = [world for world in options.worlds if world.num_ranks in legal]
    print("\n".join(describe(order, streams)))

    stretches = compare_stretches(order, worlds, options.stretches, options.stretch_steps)
    whole = compare_whole_epochs(settings, worlds, len(streams))
    is_equal = all(len(set(hashes)) == 1 for hashes in (stretches, whole))
    epoch = order.epoch(0)
    rows = [
        traffic(streams, epoch, world, images_per_second=options.images_per_second * world.num_ranks)
        for world in worlds
    ]
    costs = [measure_cost(streams, settings, world, num_samples=200_000) for world in worlds]
    print("\n".join(table(rows, costs, stretches, whole)))
    print(
        f"global batches are {'equal in all worlds' if is_equal else 'DIFFERENT'}; {time.perf_counter() - began:.0f} s"
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {
            "settings": {key: str(value) for key, value in vars(options).items()},
            "num_steps": order.num_steps,
            "dropped": epoch.dropped,
            "equal": is_equal,
            "traffic": [asdict(row) for row in rows],
            "cost": [asdict(cost) for cost in costs],
        }
        (options.out / "fleet.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        plot(rows, options.out / "fleet.png")
    return 0 if is_equal else 1


def describe(order: GlobalOrder, streams: Sequence[FleetStream]) -> list[str]:
    """Say what the streams are, and what an epoch leaves out."""
    dropped = order.epoch(0).dropped
    lines = [f"{order.num_steps:,} steps of {order.settings.global_batch_size} in an epoch; {order.num_lanes} lanes"]
    rows = [("stream", "samples", "shards", "GB", "drawn", "dropped")]
    for stream, num in zip(streams, dropped, strict=True):
        shape, size = stream.shape, stream.bytes_per_shard
        gigabytes = f"{size.sum() / 1e9:,.0f}"
        rows.append((shape.name, f"{shape.num_samples:,}", f"{len(size):,}", gigabytes, f"{shape.draws:,}", str(num)))
    return [*lines, *text_table(rows)]


def compare_stretches(order: GlobalOrder, worlds: Sequence[World], num: int, num_steps: int) -> list[str]:
    """Hash random stretches of the second epoch, for each world, beginning anew at each."""
    num_steps = min(num_steps, order.num_steps)
    starts = np.random.default_rng(0).integers(0, order.num_steps - num_steps + 1, num).tolist()
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
    streams = synthetic_streams(num_samples, num_streams, sample_bytes=1, shard_bytes=500)
    shapes = [
        replace(one.shape, draws=one.shape.draws * (2 if number == 1 else 1)) for number, one in enumerate(streams)
    ]
    order = GlobalOrder(shapes, settings)
    return [
        "".join(
            hash_steps(order, world, epoch=epoch, start=0, stop=order.num_steps, num_workers=1 + (i + epoch) % 3)
            for epoch in range(2)
        )
        for i, world in enumerate(worlds)
    ]


def table(rows: Sequence[Traffic], costs: Sequence[Cost], stretches: Sequence[str], whole: Sequence[str]) -> list[str]:
    """Return the lines of the table, one per world."""
    head = ("nodes x ranks", "batches", "shards/node", "fetched/min", "cache GB", "first GB", "MB/s/node", "peak MB/s",
            "resume s", "worker MB", "node GB*")  # fmt: skip
    lines: list[tuple[str, ...]] = [head]
    for row, cost, stretch, epochs in zip(rows, costs, stretches, whole, strict=True):
        ranks_per_node = row.num_ranks // int(row.world.split(" ")[0])
        lines.append((
            row.world, f"{stretch[:4]} {epochs[:4]}", f"{row.shards_per_node:,}", f"{row.relative:.3f}",
            f"{row.cache_bytes / 1e9:,.1f}", f"{row.first_bytes / 1e9:,.1f}", f"{row.bytes_per_second / 1e6:,.1f}",
            f"{row.peak_bytes_per_second / 1e6:,.1f}", f"{cost.order_seconds + cost.first_batch_seconds:.3f}",
            f"{cost.peak_bytes / 1e6:,.0f}", f"{cost.peak_bytes * ranks_per_node * 8 / 1e9:,.2f}",
        ))  # fmt: skip
    return ["", *text_table(lines), "* of 8 loader workers on each rank"]


def plot(rows: Sequence[Traffic], path: Path) -> None:
    """Draw what a node fetches, keeps and downloads, by world."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    names, places = [row.world for row in rows], range(len(rows))
    for axis, title, values in zip(
        axes,
        ("shards fetched by all nodes / minimum", "cache needed per node, GB", "downloads per node, MB/s"),
        (
            [row.relative for row in rows],
            [row.cache_bytes / 1e9 for row in rows],
            [row.bytes_per_second / 1e6 for row in rows],
        ),
        strict=True,
    ):
        axis.bar(places, values)
        axis.set_title(title)
        axis.set_xticks(places, names, rotation=60)
    axes[0].set_ylim(1.0 - 0.005, None)
    peaks = [row.peak_bytes_per_second / 1e6 for row in rows]
    axes[2].plot(places, peaks, "k_", markersize=12, label="busiest minute")
    axes[2].legend()
    figure.supxlabel("nodes x ranks per node")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
