"""Simulate the start of a job: what its ranks request from the store, open, read and hold until their first batch.

    python -m verification.simulate_start --shards 25000 --streams 4 --world 16x8

Each rank is a process of its own, and each node has an empty cache. A few ranks of a node run at a time. The store is a
server that counts; its shards have the samples of real ones, but few bytes. Imports are not counted.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil

from diffusion.config.data import DataConfig, Representation, StreamConfig
from diffusion.formats.data_set import MANIFEST
from diffusion.formats.shards import INDEX, Shard, ShardFormat, encode_sample, encode_shard, shard_name
from diffusion.launch import CommandParser, run_command
from diffusion.planning.downloads import World
from diffusion.reports.tables import text_table
from verification.simulate_fleet import parse_world

if TYPE_CHECKING:
    from diffusion.datasets.streams import Files

ROOT = "s3://store/data/train"
SHARD_SAMPLES = 10_000
RANK_BATCH_SIZE = 16
NUM_PROCESSES = 2
CREDENTIALS = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"), "any")
FORKED = multiprocessing.get_context("forkserver")
"""Processes are forks of one without threads, which has imported what a rank needs."""
IMPORTED = ["diffusion.datasets.loader", "diffusion.operations.checks.data", "boto3.session", "boto3.s3.transfer"]
KINDS = {"manifests and marks": ".json", "indexes": INDEX, "shards": ".mds"}


class Start(NamedTuple):
    """What a rank did until its first batch."""

    seconds: float
    cpu_seconds: float
    mebibytes: float
    """By which its process grew at most."""
    opened: int
    """Files."""
    read_bytes: int
    """From files of its node."""
    check_seconds: float
    """Of them for the check of the cache, by the first rank of a node."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = CommandParser(prog="simulate_start", description=description)
    parser.add_argument("--shards", type=int, default=25_000, help="of all streams (default: 25000)")
    parser.add_argument("--streams", type=int, default=4, help="default: 4")
    world_help = "nodes x ranks per node (default: 16x8)"
    parser.add_argument("--world", type=parse_world, default=parse_world("16x8"), metavar="NxR", help=world_help)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start all ranks, and print what they did."""
    options = parse_arguments(arguments)
    logging.disable(logging.WARNING)
    starts, counts = simulate(options.shards, options.streams, options.world)
    print("\n".join(text_table(request_rows(counts, options.world))))
    print("\n".join(["", *text_table(rank_rows(starts, options.world))]))


def simulate(num_shards: int, num_streams: int, world: World) -> tuple[list[Start], dict[str, list[int]]]:
    """Start all ranks of a world; return what each did, and the requests and bytes of the store by file name."""
    from diffusion.datasets.streams import locate_streams, read_files

    FORKED.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder, serve(num_shards, num_streams) as endpoint:
        os.environ |= CREDENTIALS
        streams = [StreamConfig(name=f"s{number}", endpoint_url=endpoint) for number in range(num_streams)]
        files = read_files(locate_streams(ROOT, "unused", streams))  # By rank 0 for all.
        starts: list[Start] = []
        for node in range(world.num_nodes):
            ranks = range(node * world.ranks_per_node, (node + 1) * world.ranks_per_node)
            with (
                tempfile.TemporaryDirectory(dir=folder) as cache,
                FORKED.Pool(NUM_PROCESSES, maxtasksperchild=1) as pool,
            ):
                work = [(rank, world, cache, streams, files) for rank in ranks]
                starts += pool.starmap(start_rank, work, chunksize=1)
                pool.close()  # A process that has just begun may lose SIGTERM: Composer has a handler for it.
                pool.join()
        with urllib.request.urlopen(f"{endpoint}/counts") as answer:
            return starts, json.load(answer)


def start_rank(rank: int, world: World, cache: str, streams: list[StreamConfig], files: "Files") -> Start:
    """Be a rank until its first batch."""
    from diffusion.datasets.loader import train_loader
    from diffusion.operations.checks.data import check_cache

    local_rank = rank % world.ranks_per_node
    numbers = (rank, local_rank, world.num_ranks, world.ranks_per_node)
    variables = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ |= CREDENTIALS | {name: str(number) for name, number in zip(variables, numbers, strict=True)}
    config = DataConfig(
        local=cache,
        remote=ROOT,
        streams=streams,
        representation=Representation.latents,
        resolution=16,
        global_batch_size=RANK_BATCH_SIZE * world.num_ranks,
        num_workers=0,
    )
    opened: list[Any] = []
    sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == "open" else None)
    process = psutil.Process()
    memory, read, num_opened = process.memory_info().rss, process.io_counters().read_chars, len(opened)
    clock, cpu = time.perf_counter(), time.process_time()
    loader: Any = train_loader(config, seed=0, tokenize=None, with_logvar=False, files=files)
    checked = time.perf_counter()
    if local_rank == 0:
        list(check_cache(loader.dataset, config))
    checked = time.perf_counter() - checked
    next(iter(loader))
    loader.dataset.close()
    return Start(
        seconds=time.perf_counter() - clock,
        cpu_seconds=time.process_time() - cpu,
        mebibytes=(peak_memory() - memory) / 2**20,
        opened=len(opened) - num_opened,
        read_bytes=process.io_counters().read_chars - read,
        check_seconds=checked,
    )


def peak_memory() -> int:
    """Bytes that this process held at most."""
    _, _, rest = Path("/proc/self/status").read_text().partition("VmHWM:")
    return int(rest.split()[0]) * 1024


# The store


@contextlib.contextmanager
def serve(num_shards: int, num_streams: int) -> Iterator[str]:
    """Serve a data set of equal shards from another process; yield the address."""
    address = FORKED.SimpleQueue()
    process = FORKED.Process(target=run_store, args=(num_shards, num_streams, address))
    process.start()
    try:
        yield address.get()
    finally:
        process.kill()
        process.join()


def run_store(num_shards: int, num_streams: int, address: Any) -> None:
    """Answer GETs of objects, and of `/counts` with the requests and bytes by name, until this process is killed."""
    objects = {MANIFEST: b"{}"}
    shard_content, shard = make_shard()
    entry, raw = shard.entry, shard.raw.entry
    for number in range(num_streams):
        mine = range(num_shards * number // num_streams, num_shards * (number + 1) // num_streams)
        entries = [entry | {"raw_data": raw | {"basename": shard_name(i)}} for i in mine]
        objects[f"s{number}/{INDEX}"] = json.dumps({"version": 2, "shards": entries}).encode()
    counts: dict[str, list[int]] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.removeprefix("/store/data/").removeprefix("train/")
            is_above = self.path == f"/store/data/{MANIFEST}" or "/" in name
            content = shard_content if name.endswith(".mds") else objects.get(name) if is_above else None
            if self.path == "/counts":
                content = json.dumps(counts).encode()
            count = counts.setdefault(self.path, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + len(content or b"")
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", '"0"')
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A rank has ended, and its connections with it."""

    server = Server(("127.0.0.1", 0), Handler)
    address.put(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()


def make_shard() -> tuple[bytes, Shard]:
    """Make a shard of tiny latents: its bytes, and its entry in an index."""
    columns = {"latent_mean": "ndarray:float16:4,2,2", "token_ids": "ndarray:int32:1,8", "key": "str"}
    values = {"latent_mean": np.zeros((4, 2, 2), np.float16), "token_ids": np.zeros((1, 8), np.int32), "key": "k"}
    samples = [encode_sample(values, columns)] * SHARD_SAMPLES
    return encode_shard(samples, shard_name(0), ShardFormat.of(columns))


# The tables


def request_rows(counts: dict[str, list[int]], world: World) -> list[tuple[str, ...]]:
    """Requests to the store, a row for each kind of file."""
    rows: list[tuple[str, ...]] = [("requests of all ranks", "number", "per node", "MB")]
    left = dict(counts)
    for kind, ending in reversed(KINDS.items()):
        found = [left.pop(path) for path in list(left) if path.endswith(ending)]
        num, size = (sum(count[i] for count in found) for i in (0, 1))
        rows.append((kind, f"{num:,}", f"{num / world.num_nodes:,.1f}", f"{size / 1e6:,.1f}"))
    return rows


def rank_rows(starts: Sequence[Start], world: World) -> list[tuple[str, ...]]:
    """What a rank did, median and largest, of the first ranks of nodes and of the others."""
    rows: list[tuple[str, ...]] = [("of a rank, median (largest)", "first of a node", "others")]
    names = {
        "seconds": 1.0,
        "cpu_seconds": 1.0,
        "mebibytes": 1.0,
        "opened": 1.0,
        "read_bytes": 1e-6,
        "check_seconds": 1.0,
    }
    labels = (
        "seconds",
        "CPU seconds",
        "MiB of memory",
        "files opened",
        "MB read from the node's disk",
        "seconds of checks",
    )
    for (name, factor), label in zip(names.items(), labels, strict=True):
        values = [getattr(start, name) * factor for start in starts]
        first = values[:: world.ranks_per_node]
        others = [value for i, value in enumerate(values) if i % world.ranks_per_node]
        cells = (f"{statistics.median(some):,.1f} ({max(some):,.1f})" if some else "" for some in (first, others))
        rows.append((label, *cells))
    return rows


if __name__ == "__main__":
    sys.exit(run_command(main))
