"""The way of the data, beside its limits: ratios of runs in turn, above 1 where ours is faster.

Ratios of processor time (`ratio_cpu`) are disturbed less by other work on the machine than those by the clock.
"""

import concurrent.futures
import io
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from diffusion import storage
from diffusion.config.data import DataConfig, Representation, StreamConfig
from diffusion.datasets.images import decode_rgb
from diffusion.datasets.loader import train_loader
from diffusion.formats.shards import read_index, write_index
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.prepare import prepare
from diffusion.preparation.sources.base import MANY

NUM_TOKENS = 77


def in_turns(limit: Callable[[], Any], ours: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Compare two ways of the same work, after a round that is not counted.

    Returns:
        `ratio` and `ratio_cpu`: rate of ours over the limit, by the clock and by processor time, medians of the ratios
        of neighbours; `limit_seconds` and `seconds`: the best round of each.
    """
    limit()
    ours()
    rows = [(*_seconds(limit), *_seconds(ours)) for _ in range(rounds)]
    return {
        "ratio": statistics.median(row[0] / row[2] for row in rows),
        "ratio_cpu": statistics.median(row[1] / row[3] for row in rows),
        "limit_seconds": min(row[0] for row in rows),
        "seconds": min(row[2] for row in rows),
    }


def _seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of the processors."""
    clock, cpu = time.perf_counter(), _cpu_seconds()
    run()
    return time.perf_counter() - clock, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    return time.process_time() + sum(os.times()[2:4])  # Of this process, and of children that ended.


# Preparation


def measure_preparing(*, num_images: int = 4000, side: int = 512, rounds: int = 3) -> dict[str, Any]:
    """Compare `prepare` (scan, select, write; one worker) to a loop that decodes each JPEG of a folder and copies it.

    Partitions have the size that they have in a large source.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, root, numbers = Path(folder, "source"), Path(folder), itertools.count()
        write_images(source, num_images, side)

        def bare() -> None:
            with (root / "copy").open("wb") as file:
                for path in sorted(source.glob("*.jpg")):
                    data = path.read_bytes()
                    decode_rgb(data)
                    file.write(data)

        def ours() -> None:
            out = str(root / f"prepared-{next(numbers)}")
            config = PrepareConfig(sources=[str(source)], out=out, workers=1, partition_size=MANY)
            prepare(config, report=False)

        found = in_turns(bare, ours, rounds)
    return {**found, "num_images": num_images, "side": side}


# Loading


def measure_latent_loading(*, num_samples: int = 8192, batch_size: int = 256, rounds: int = 3) -> dict[str, Any]:
    """Compare an epoch of latents (4 x 32 x 32, means) and token ids with a stock StreamingDataset, without workers."""
    columns = {"latent_mean": "ndarray:float16:4,32,32", "token_ids": f"ndarray:int32:1,{NUM_TOKENS}", "key": "str"}
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with _mds(root / "train" / "b", columns) as writer:
            for number in range(num_samples):
                latent = generator.standard_normal((4, 32, 32), np.float32).astype(np.float16)
                token_ids = generator.integers(0, 49408, (1, NUM_TOKENS)).astype(np.int32)
                writer.write({"latent_mean": latent, "token_ids": token_ids, "key": f"{number:08}"})
        config = _data_config(root / "train", Representation.latents, 256, batch_size)
        ours = train_loader(config, seed=0, tokenize=None, with_logvar=False)
        dataset = StreamingDataset(local=str(root / "train" / "b"), shuffle=True, batch_size=batch_size)
        stock = DataLoader(dataset, batch_size=batch_size, drop_last=True)
        return {**in_turns(lambda: _exhaust(stock), lambda: _exhaust(ours), rounds), "num_samples": num_samples}


def measure_image_loading(
    *, num_samples: int = 256, side: int = 320, resolution: int = 256, batch_size: int = 32, rounds: int = 3
) -> dict[str, Any]:
    """Compare an epoch of JPEG images with Pillow's decoder and resampling on bytes in memory.

    Captions are not tokenized: they become zeros.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_images(root / "source", num_samples, side)
        images = [path.read_bytes() for path in sorted((root / "source").glob("*.jpg"))]
        with _mds(root / "train" / "b", {"image": "bytes", "captions": "json", "key": "str"}) as writer:
            for number, data in enumerate(images):
                writer.write({"image": data, "captions": ["an image"], "key": f"{number:08}"})
        config = _data_config(root / "train", Representation.images, resolution, batch_size)
        loader = train_loader(config, seed=0, tokenize=lambda captions: np.zeros((len(captions), NUM_TOKENS), np.int32))
        used = images[: len(loader) * batch_size]

        def bare() -> None:
            for data in used:
                image = Image.open(io.BytesIO(data)).convert("RGB")
                np.asarray(image.resize((resolution, resolution), Image.Resampling.LANCZOS))

        ours = in_turns(bare, lambda: _exhaust(loader), rounds)
    return {**ours, "num_samples": num_samples, "side": side, "resolution": resolution}


def _mds(folder: Path, columns: dict[str, str]) -> MDSWriter:
    return MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=2**23)


def _exhaust(loader: Any) -> None:
    for _ in loader:
        pass


def _data_config(root: Path, representation: Representation, resolution: int, batch_size: int) -> DataConfig:
    return DataConfig(
        local=str(root),
        streams=[StreamConfig(name="b")],
        representation=representation,
        resolution=resolution,
        global_batch_size=batch_size,
        num_canonical_nodes=8,
        num_workers=0,
    )


# The first batch


def measure_opening(num_shards: int, num_streams: int, shard_samples: int = 10_000) -> dict[str, Any]:
    """Open the data of one rank of 128 in a fresh process, and read its first batch of 16 samples.

    The shards are divided among the streams. They are links to one real shard, so that only the indexes have the size
    of real ones.

    Returns:
        `seconds` and `cpu_seconds` until the first batch, without imports; `mebibytes` by which the process grew at
        most; `requests` to the remote.
    """
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder, "shard")
        _write_shard(shard, shard_samples)
        for number in range(num_streams):
            _write_links(Path(folder, "remote", f"s{number}"), shard, num_shards // num_streams)
        fresh = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
            found = pool.submit(_open, Path(folder), num_streams).result()
    return {"shards": num_shards, "streams": num_streams, **found}


def _open(folder: Path, num_streams: int) -> dict[str, Any]:
    requests: list[str] = []
    download = storage.download

    def count(uri: str, path: Path, **options: Any) -> None:
        requests.append(uri)
        download(uri, path, **options)

    config = _data_config(folder / "cache", Representation.latents, 32, 128 * 16)
    config.remote = str(folder / "remote")
    config.streams = [StreamConfig(name=f"s{number}") for number in range(num_streams)]
    os.environ |= {"RANK": "5", "WORLD_SIZE": "128", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    storage.download = count
    before = _memory("VmRSS")
    clock, cpu = time.perf_counter(), time.process_time()
    loader: Any = train_loader(config, seed=0, tokenize=None)
    next(iter(loader))
    found = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu}
    found |= {"mebibytes": (_memory("VmHWM") - before) / 2**20, "requests": len(requests)}
    loader.dataset.close()
    return found


def _write_shard(folder: Path, num_samples: int) -> None:
    """Write equal samples as one shard with its index."""
    latent = np.zeros((4, 4, 4), np.float16)
    columns = dict.fromkeys(["latent_mean", "latent_logvar"], "ndarray:float16:4,4,4")
    columns |= {"token_ids": f"ndarray:int32:1,{NUM_TOKENS}", "key": "str"}
    sample = {"latent_mean": latent, "latent_logvar": latent, "token_ids": np.zeros((1, NUM_TOKENS), np.int32)}
    with _mds(folder, columns) as writer:
        for _ in range(num_samples):
            writer.write({**sample, "key": "k"})


def _write_links(folder: Path, shard: Path, num_shards: int) -> None:
    """Write a stream of equal shards: links to one that is there, and an index of all."""
    (one,) = read_index(shard).shards
    name = one.raw.name
    links = [one._replace(raw=one.raw._replace(name=f"{n:06}-{name}")) for n in range(num_shards)]
    folder.mkdir(parents=True)
    for link in links:
        (folder / link.raw.name).symlink_to(shard / name)
    write_index(folder, links)


def _memory(key: str) -> int:
    """Bytes by a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def write_images(folder: Path, num: int, side: int) -> None:
    """Write JPEG images of smooth noise, 16 different ones repeated, each with a caption of its own."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(16):
        small = generator.integers(0, 256, (side // 16, side // 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC), np.int16)
        noisy = smooth + generator.normal(0, 6, smooth.shape).astype(np.int16)
        drawn.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    for number in range(num):
        drawn[number % len(drawn)].save(folder / f"{number:06}.jpg", quality=90)
        (folder / f"{number:06}.txt").write_text(f"image {number}", encoding="utf-8")
