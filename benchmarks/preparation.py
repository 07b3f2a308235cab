"""Preparation at the size of the recipe, with metadata that are made up.

python -m benchmarks.preparation select 10000000 [--folder FOLDER]
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diffusion.preparation.config import BucketsConfig, ConditionConfig, DuplicatesConfig, FiltersConfig, PrepareConfig
from diffusion.preparation.metadata import METADATA, SCHEMA, SCORES, part_name
from diffusion.preparation.records import Partition
from diffusion.preparation.select import mix, select

_WORDS = 3000
_CAPTIONS = 300_000
_CLUSTERS = 2000


def measure_select(num_rows: int, *, rows_per_part: int | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Measure `select` on made-up metadata: filters, `where`, exact and near duplicates, buckets, split, order.

    Args:
        num_rows: images; 5 % of them are copies of others, and 3 % nearly so.
        rows_per_part: images of a partition; None: 2,000 to 250,000, by the number of images.
        folder: for the metadata (some 110 bytes per image, and as much while it runs), kept and used again; None is a
            temporary one.

    Returns:
        `seconds` and `peak_gib` (resident memory) of the process, `kept`, and rejected images by reason.
    """
    rows_per_part = rows_per_part or min(max(num_rows // 400, 2000), 250_000)
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
    partitions = [
        SimpleNamespace(number=i, source=0, generation=0, partition=Partition(id=str(i))) for i in range(num_parts)
    ]
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
    num, looks = len(rows), mix(content, 0, "look")
    digest = mix(np.where(is_near, rows, content), 0, "bytes")
    width, height = (sizes[mix(content, 0, side) >> np.uint64(48)] for side in ("width", "height"))
    halved = np.where(is_near, 2, 1)
    undecodable = random.random(num) < 0.01
    centres = mix(np.arange(_CLUSTERS, dtype=np.uint64), 0, "cluster")
    noise = mix(content, 1, "noise") & mix(content, 2, "noise")  # A quarter of the bits.
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
        mix(rows, 0, "key"),
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["select"])
    parser.add_argument("num_rows", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--folder", type=Path, help="for the metadata; kept")
    options = parser.parse_args()
    print(json.dumps(measure_select(options.num_rows, folder=options.folder)))


if __name__ == "__main__":
    main()
