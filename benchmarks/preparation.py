"""Preparation at the size of the recipe, with metadata that are made up.

python -m benchmarks.preparation select 10000000 [--folder FOLDER]
python -m benchmarks.preparation driver 79000 [--engine ray]
python -m benchmarks.preparation mixing
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, StreamShape
from diffusion.formats.data_set import METADATA, SCORES
from diffusion.preparation import scan
from diffusion.preparation.config import (
    BucketsConfig,
    ConditionConfig,
    DuplicatesConfig,
    Engine,
    FiltersConfig,
    PrepareConfig,
)
from diffusion.preparation.engine import Workers
from diffusion.preparation.layout import SCHEMA, part_name
from diffusion.preparation.records import Location, Partition, Partitions, Reason, Rejected
from diffusion.preparation.select import WINDOWS_PER_TASK, select, splitmix64
from diffusion.preparation.sources import Source

_WORDS = 3000
_CAPTIONS = 300_000
_CLUSTERS = 2000


def measure_select(num_rows: int, *, folder: Path | None = None) -> dict[str, Any]:
    """Measure `select` on made-up metadata: filters, `where`, exact and near duplicates, buckets, split, order.

    Args:
        num_rows: images; 5 % of them are copies of others, and 3 % nearly so.
        folder: for the metadata (some 110 bytes per image, and as much while it runs), kept and used again; None is a
            temporary one.

    Returns:
        `seconds` and `peak_gib` (resident memory) of the process, `kept`, and rejected images by reason.
    """
    rows_per_part = min(max(num_rows // 400, 2000), 250_000)
    numbers = range(-(-num_rows // rows_per_part))
    with tempfile.TemporaryDirectory() as temporary:
        out = folder or Path(temporary)
        if not (out / METADATA / part_name(numbers[-1])).exists():
            _write_metadata(out, num_rows, rows_per_part)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            measured = process.submit(_select, str(out), len(numbers)).result()
    return {"num_rows": num_rows, "num_parts": len(numbers), **measured}


def _select(out: str, num_parts: int) -> dict[str, Any]:
    filters = FiltersConfig(
        min_shorter_side=256,
        max_aspect_ratio=3.0,
        min_caption_words=2,
        max_caption_characters=300,
        keywords=["stock photo", "w17", "w99 w3"],
        languages=["en"],
        min_aesthetic=4.0,
        conditions=[ConditionConfig(column="pwatermark", max=0.8)],
    )
    config = PrepareConfig(
        sources=[],
        out=out,
        scratch=out,
        validation_fraction=0.01,
        filters=filters,
        where="sharpness > 2 and coalesce(pwatermark, 0) < 0.7",
        buckets=BucketsConfig(preset="sdxl", upscale=True, min_samples=100),
        duplicates=DuplicatesConfig(),
    )
    for file in Path(out).glob("selection/*"):
        file.unlink()
    start, cpu = time.perf_counter(), time.process_time()
    partitions = [Partition(number=i) for i in range(num_parts)]
    scan: Any = SimpleNamespace(sources=[SimpleNamespace(name="web")], partitions=partitions, settings={})
    selection = select(out, config, scan)
    return {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "kept": selection.kept,
        "reasons": selection.reasons,
        "tasks": len(selection.tasks),
    }


def _write_metadata(out: Path, num_rows: int, rows_per_part: int) -> None:
    """Write metadata and aesthetic scores. What copies have in common follows from the number of the first."""
    captions = _captions()
    sizes = np.sort(np.random.default_rng(1).lognormal(6.7, 0.45, 2**16)).astype(np.int32) + 1
    for folder in (out / METADATA, out / SCORES / "aesthetic"):
        folder.mkdir(parents=True, exist_ok=True)
    for part, start in enumerate(range(0, num_rows, rows_per_part)):
        random = np.random.default_rng([2, part])
        rows = np.arange(start, min(start + rows_per_part, num_rows), dtype=np.uint64)
        content = rows.copy()
        is_copy = random.random(len(rows)) < 0.08
        content[is_copy] = random.integers(0, num_rows, is_copy.sum(), dtype=np.uint64)
        is_near = is_copy & (random.random(len(rows)) < 3 / 8)
        table = pa.table(_columns(rows, content, is_near, captions, sizes, random), schema=SCHEMA)
        scores = pa.table({"aesthetic": random.normal(5.4, 0.8, len(rows)).astype(np.float32)})
        for path, content in ((out / SCORES / "aesthetic", scores), (out / METADATA, table)):
            pq.write_table(content, path / part_name(part), compression="zstd", use_dictionary=["format", "reason"])  # pyright: ignore


def _columns(
    rows: NDArray[np.uint64],
    content: NDArray[np.uint64],
    is_near: NDArray[np.bool_],
    captions: pa.Array,
    sizes: NDArray[np.int32],
    random: np.random.Generator,
) -> list[Any]:
    num, looks = len(rows), splitmix64(content, 0, "look")
    digest = splitmix64(np.where(is_near, rows, content), 0, "bytes")
    width, height = (sizes[splitmix64(content, 0, side) >> np.uint64(48)] for side in ("width", "height"))
    halved = np.where(is_near, 2, 1)
    undecodable = random.random(num) < 0.01
    centres = splitmix64(np.arange(_CLUSTERS, dtype=np.uint64), 0, "cluster")
    noise = splitmix64(content, 1, "noise") & splitmix64(content, 2, "noise")  # A quarter of the bits.
    in_cluster = looks % np.uint64(5) == 0
    phash = np.where(in_cluster, centres[looks >> np.uint64(32) & np.uint64(1023)] ^ noise, looks)
    for _ in range(3):
        bit = np.uint64(1) << random.integers(0, 64, num, dtype=np.uint64)
        phash = np.where(is_near, phash ^ bit, phash)
    names = pc.call_function("utf8_lpad", [pa.array(rows).cast(pa.string())], pc.PadOptions(10, "0"))
    files = pa.array((rows // np.uint64(10_000)).astype(np.int64)).cast(pa.string())
    watermark = pa.array((random.random(num) ** 3).round(4)).cast(pa.string())
    language = pa.array(np.array(["en"] * 9 + ["de"])[random.integers(0, 10, num)])
    url = _join("https://images.example.com/", names, ".jpg")
    metadata = ['{"url": "', url, '", "language": "', language, '", "pwatermark": ', watermark, "}"]
    hexadecimal = pa.py_buffer(np.stack([digest, ~digest], axis=1).tobytes().hex().encode())
    offsets = pa.py_buffer((np.arange(num + 1) * 32).astype(np.int32))
    lists = pa.ListArray.from_arrays(
        np.arange(num + 1, dtype=np.int32), captions.take(pa.array(random.integers(0, _CAPTIONS, num)))
    )
    values = [
        _join("web/", files, ".tar/", names),
        splitmix64(rows, 0, "key"),
        _join(files, ".tar"),
        pa.repeat("a9c2-1700000000", num),
        rows.astype(np.int64) * 100_000,
        pa.nulls(num, pa.int64()),
        pa.nulls(num, pa.int32()),
        pa.nulls(num, pa.int64()),
        width.astype(np.int64) * height // halved // 6,
        pa.repeat("jpeg", num),
        width // halved.astype(np.int32),
        height // halved.astype(np.int32),
        pa.StringArray.from_buffers(num, offsets, hexadecimal),
        phash,
        random.lognormal(4, 1, num).round(3),
        lists,
        _join(*metadata),
        np.where(undecodable, "undecodable", ""),
        pa.repeat("", num),
    ]
    return [
        pa.array(value, kind) if isinstance(value, np.ndarray) else value
        for value, kind in zip(values, SCHEMA.types, strict=True)
    ]


def _join(*texts: pa.Array | str) -> pa.Array:
    """Join texts, row by row."""
    return pc.call_function("binary_join_element_wise", [*texts, ""])


def _captions() -> pa.Array:
    """Captions of 1 to about 40 words."""
    random = np.random.default_rng(3)
    words = np.array([f"w{i}" if i % 7 else f"longer-word{i}" for i in range(_WORDS)])
    lengths = np.minimum(random.lognormal(2.2, 0.6, _CAPTIONS).astype(int) + 1, 40)
    chosen = words[(random.random(lengths.sum()) ** 3 * _WORDS).astype(int)]
    return pa.array([" ".join(some) for some in np.split(chosen, np.cumsum(lengths)[:-1])])


@dataclass(frozen=True, kw_only=True)
class _EmptySource(Source):
    """Tars whose reading is replaced: each is one rejection."""

    kind: ClassVar[str] = "empty"
    num_partitions: int

    def partitions(self, known: Sequence[str] = (), only: object = None) -> Partitions:
        """List partitions like those of tars of 10,000 images."""
        return Partitions(
            new=(
                Partition(file=f"{n:05}.tar", version=f"{n} etag", num_bytes=10**9) for n in range(self.num_partitions)
            )
        )

    def scan(self, partition: Partition) -> Iterator[Rejected]:
        """Reject one image."""
        location = Location(file=partition.file, version=partition.version)
        yield Rejected(f"empty/{partition.file}", Reason.DAMAGED_FILE, location)


def measure_driver(num_partitions: int, engine: Engine = Engine.processes) -> dict[str, float]:
    """Scan partitions without images; return CPU seconds and peak memory (MB) of this process, which is the driver."""
    began, cpu = time.monotonic(), time.process_time()
    source = _EmptySource(name="empty", root="/empty", num_partitions=num_partitions)
    with tempfile.TemporaryDirectory() as out, patch.object(scan, "open_sources", lambda *_: [source]):
        config = PrepareConfig(sources=["/empty"], out=out)
        found = scan.scan_sources(config, workers=Workers(engine=engine, number=2))
        assert len(list(Path(out, "metadata").iterdir())) == len(found.partitions) == num_partitions
    return {
        "partitions": num_partitions,
        "driver CPU s": time.process_time() - cpu,
        "driver ms/partition": (time.process_time() - cpu) / num_partitions * 1e3,
        "wall s": time.monotonic() - began,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def measure_mixing(
    *,
    num_partitions: int = 4000,
    images_per_partition: int = 10_000,
    image_bytes: int = 100_000,
    shard_bytes: int = 256 * 2**20,
    shares: Sequence[float] = (0.55, 0.3, 0.1, 0.05),
    windows: Sequence[int | None] = (1, 4, 16, 64, None),
    batch_size: int = 2048,
    num_steps: int = 20,
    seed: int = 17,
) -> list[dict[str, Any]]:
    """Count from how many partitions of the sources the images of a shard and of a global batch come.

    Nothing is written: images are counted, all of the same size, and dealt to buckets of some shares at random. A
    window is a number of partitions, or None for a full shuffle. Global batches are spread over an epoch.

    Returns:
        For each window its partitions and GiB, number of shards, and distinct partitions: of a shard (mean over the
        images), and of a global batch with `shuffle: shard` and `shuffle: block` at their defaults.
    """
    results = []
    for window in windows:
        generator = np.random.default_rng(seed)
        shards = _deal(
            generator,
            num_partitions,
            images_per_partition,
            window or num_partitions,
            shares,
            shard_bytes // image_bytes,
        )
        sizes = [np.array([len(one) for one in of_bucket], np.int64) for of_bucket in shards]
        labels = [np.concatenate(of_bucket) for of_bucket in shards]
        distinct = [len(np.unique(one)) * len(one) for of_bucket in shards for one in of_bucket]
        result: dict[str, Any] = {
            "window": window or "full shuffle",
            "window_gib": round((window or num_partitions) * images_per_partition * image_bytes / 2**30, 1),
            "shards": sum(map(len, shards)),
            "partitions_of_shard": round(sum(distinct) / sum(map(len, labels)), 1),
        }
        for name, block in (("shard", None), ("block", 2**18)):
            settings = OrderSettings(
                seed=seed, global_batch_size=batch_size, num_canonical_nodes=128, shuffle_block_size=block
            )
            streams = [
                StreamShape(name=str(i), samples_per_shard=size, draws=int(size.sum())) for i, size in enumerate(sizes)
            ]
            order = GlobalOrder(streams, settings)
            epoch, counts = order.epoch(0), []
            for step in np.linspace(0, order.num_steps - 1, num_steps).astype(int).tolist():
                slots = epoch.slots(step, step + 1)
                pairs = zip(slots.stream.ravel().tolist(), slots.index.ravel().tolist(), strict=True)
                counts.append(len({int(labels[stream][index]) for stream, index in pairs}))
            result[f"partitions_of_batch_{name}"] = round(float(np.mean(counts)), 1)
        results.append(result)
    return results


def _deal(
    generator: np.random.Generator,
    num_partitions: int,
    images_per_partition: int,
    window: int,
    shares: Sequence[float],
    per_shard: int,
) -> list[list[NDArray[np.int32]]]:
    """Cut shards as `write` does; for each bucket the partitions of the images of each shard."""
    shards: list[list[NDArray[np.int32]]] = [[] for _ in shares]
    rests = [np.empty(0, np.int32) for _ in shares]
    order = generator.permutation(num_partitions).astype(np.int32)
    groups = [order[start : start + window] for start in range(0, num_partitions, window)]
    for number, group in enumerate(groups):
        images = generator.permutation(np.repeat(group, images_per_partition))
        bucket = generator.choice(len(shares), len(images), p=np.array(shares))
        for i in range(len(shares)):
            rests[i] = np.concatenate([rests[i], images[bucket == i]])
            while len(rests[i]) > per_shard:
                shards[i].append(rests[i][:per_shard])
                rests[i] = rests[i][per_shard:]
        is_end = (number + 1) % WINDOWS_PER_TASK == 0 or number == len(groups) - 1
        while sum(map(len, rests)) > (0 if is_end else len(images)):
            largest = max(range(len(shares)), key=lambda i: len(rests[i]))
            shards[largest].append(rests[largest])
            rests[largest] = np.empty(0, np.int32)
    return shards


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["select", "driver", "mixing"])
    parser.add_argument("number", type=int, nargs="?", default=1_000_000, help="of rows, or of partitions")
    parser.add_argument("--folder", type=Path, help="for the metadata of select; kept")
    parser.add_argument("--engine", type=Engine, default=Engine.processes, help="of driver")
    options = parser.parse_args()
    if options.what == "driver":
        print(json.dumps(measure_driver(options.number, options.engine)))
    elif options.what == "mixing":
        print("\n".join(map(json.dumps, measure_mixing())))
    else:
        print(json.dumps(measure_select(options.number, folder=options.folder)))


if __name__ == "__main__":
    from benchmarks import preparation  # Ray pickles the classes of `__main__` by value, which takes 2 GB.

    preparation.main()
