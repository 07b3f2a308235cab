"""What a rank needs before its first batch: seconds, memory and requests, counted with synthetic indexes.

    python -m benchmarks.opening --shards 80000 --streams 1

A stream's shards are links to one real shard, so that only the indexes have the size of the real ones. The rank is one
of 128 with 16 samples each, in a fresh process with an empty cache. Imports are not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter

from diffusion import storage
from diffusion.config.data import DataConfig, Representation, StreamConfig
from diffusion.datasets.loader import train_loader
from diffusion.datasets.mds import INDEX, read_shards

SAMPLES = 10_000
"""Of a shard."""

WORLD_SIZE, RANK_BATCH_SIZE = 128, 16


def measure_opening(num_shards: int, num_streams: int) -> dict[str, Any]:
    """Open the data of one rank in a fresh process, and read its first batch.

    Args:
        num_shards: of all streams together.
        num_streams: that they are divided over.

    Returns:
        `seconds` and `cpu_seconds` until the first batch, `open_seconds` of them until the data set is open,
        `mebibytes` by which the process grew at most, and `requests` to the remote.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_streams):
            _write_stream(Path(folder, "remote", f"s{number}"), num_shards // num_streams)
        command = [sys.executable, "-m", "benchmarks.opening", "--measure", folder, "--streams", str(num_streams)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"shards": num_shards, "streams": num_streams, **json.loads(output)}


def _measure(folder: Path, num_streams: int) -> dict[str, Any]:
    requests: list[str] = []
    download = storage.download

    def count(uri: str, path: Path, **options: Any) -> None:
        requests.append(uri)
        download(uri, path, **options)

    config = DataConfig(
        remote=str(folder / "remote"),
        local=str(folder / "cache"),
        streams=[StreamConfig(name=f"s{number}") for number in range(num_streams)],
        representation=Representation.latents,
        resolution=32,
        global_batch_size=WORLD_SIZE * RANK_BATCH_SIZE,
        num_workers=0,
    )
    os.environ |= {"RANK": "5", "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    storage.download = count
    before = _memory("VmRSS")
    began, began_cpu = time.perf_counter(), time.process_time()
    try:
        loader = train_loader(config, seed=0, tokenize=None, rank_batch_size=RANK_BATCH_SIZE)
        opened = time.perf_counter() - began
        batch = next(iter(loader))
    finally:
        storage.download = download
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    peak = _memory("VmHWM")
    assert len(batch["sample"]) == RANK_BATCH_SIZE
    loader.dataset.close()  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "open_seconds": opened,
        "mebibytes": (peak - before) / 2**20,
        "requests": len(requests),
    }


def _write_stream(folder: Path, num_shards: int) -> None:
    """Write a stream of equal shards: one file, links to it, and an index of all."""
    latent = np.zeros((4, 4, 4), np.float16)
    columns = dict.fromkeys(["latent_mean", "latent_logvar"], "ndarray:float16:4,4,4")
    columns |= {"token_ids": "ndarray:int32:1,77", "key": "str"}
    sample: Mapping[str, Any] = {"latent_mean": latent, "latent_logvar": latent, "key": "k"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=2**28) as writer:
        for _ in range(SAMPLES):
            writer.write({**sample, "token_ids": np.zeros((1, 77), np.int32)})
    (entry,) = read_shards(folder)
    name = entry["raw_data"]["basename"]
    entries = [entry | {"raw_data": entry["raw_data"] | {"basename": f"{n:06}-{name}"}} for n in range(num_shards)]
    for shard in entries:
        (folder / shard["raw_data"]["basename"]).symlink_to(name)
    (folder / INDEX).write_text(json.dumps({"version": 2, "shards": entries}))


def _memory(key: str) -> int:
    """Bytes by a line of /proc/self/status; getrusage counts those of the process that started this one, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    """Print the measurement as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=80_000, metavar="K", help="of all streams together")
    parser.add_argument("--streams", type=int, default=1, metavar="S")
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(_measure(options.measure, options.streams)), flush=True)
        os._exit(0)  # What is fetched ahead need not end.
    print(json.dumps(measure_opening(options.shards, options.streams)))


if __name__ == "__main__":
    main()
