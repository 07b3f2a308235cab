"""Preparation at the size of the recipe, with metadata that are made up.

python -m benchmarks.preparation select 10000000 [--folder FOLDER]
python -m benchmarks.preparation driver 79000 [--engine ray]
python -m benchmarks.preparation mixing
"""

import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, StreamShape
from diffusion.formats.data_set import METADATA, SCORES
from diffusion.launch import CommandParser, run_command
from diffusion.preparation.config import (
    BucketsConfig,
    ConditionConfig,
    DuplicatesConfig,
    Engine,
    FiltersConfig,
    PrepareConfig,
)
from diffusion.preparation.records import Partition


def measure_select(num_rows: int, *, folder: Path | None = None) -> dict[str, Any]:
    """Measure `select` on made-up metadata: filters, `where`, exact and near duplicates, buckets, split, order.

    Args:
        num_rows: images; 5 % of them are copies of others, and 3 % nearly so.
        folder: for the metadata (some 110 bytes per image, and as much while it runs), kept and used again; None is a
            temporary one.

    Returns:
        `seconds` and `peak_gib` (resident memory) of the process, `kept`, and rejected images by reason.
    """
    from diffusion.preparation.layout import part_name

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
    from diffusion.preparation.select import select

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
    import duckdb
    import pyarrow.parquet as pq

    from diffusion.preparation.layout import SCHEMA, part_name

    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute(_MACROS)
        for part, start in enumerate(range(0, num_rows, rows_per_part)):
            numbers = {"start": start, "stop": min(start + rows_per_part, num_rows), "num_rows": num_rows}
            table = connection.sql(_ROWS, params=numbers).to_arrow_table()
            metadata, scores = table.drop_columns("aesthetic").cast(SCHEMA), table.select(["aesthetic"])
            for folder, content in ((out / SCORES / "aesthetic", scores), (out / METADATA, metadata)):
                folder.mkdir(parents=True, exist_ok=True)
                columns: Any = ["format", "reason"]
                pq.write_table(content, folder / part_name(part), compression="zstd", use_dictionary=columns)


_MACROS = """
SET enable_progress_bar = false;
CREATE MACRO draw(number, purpose) AS hash(hash(number, purpose));  -- 64 bits. One hash alone is linear in the purpose.
CREATE MACRO uniform(number, purpose) AS draw(number, purpose) / 18446744073709551616.0;
CREATE MACRO normal(number, purpose) AS
    sqrt(-2 * ln(1 - uniform(number, purpose))) * cos(2 * pi() * uniform(number, purpose || ' turn'));
CREATE MACRO side(number, purpose) AS (exp(6.7 + 0.45 * normal(number, purpose)) + 1)::INTEGER;
CREATE MACRO flip(number, purpose) AS 1::UBIGINT << (draw(number, purpose) % 64);  -- A bit.
CREATE TABLE captions AS  -- Of 1 to 40 words.
    SELECT caption, string_agg(if(word % 7 = 0, 'longer-word', 'w') || word, ' ') AS text
    FROM (SELECT caption, floor(uniform(40 * caption + place, 'word') ** 3 * 3000)::INTEGER AS word
        FROM range(300000) captions(caption), range(40) places(place)
        WHERE place <= exp(2.2 + 0.6 * normal(caption, 'length')))
    GROUP BY caption;
"""

_ROWS = """
WITH rows AS (
    SELECT number, uniform(number, 'copy') < 0.08 AS is_copy, is_copy AND uniform(number, 'near') < 3 / 8 AS is_near,
        if(is_copy, (uniform(number, 'of') * $num_rows)::BIGINT, number) AS content
    FROM range($start, $stop) numbers(number)
), images AS (
    SELECT *, draw(content, 'look') AS look, draw(if(is_near, number, content), 'bytes') AS digest,
        side(content, 'width') // if(is_near, 2, 1) AS width, side(content, 'height') // if(is_near, 2, 1) AS height,
        xor(draw((look >> 32) & 1023, 'cluster'), draw(content, 'noise') & draw(content, 'more')) AS in_cluster,
        if(look % 5 = 0, in_cluster, look) AS seen  -- In a cluster a quarter of the bits differ.
    FROM rows
)
SELECT format('web/{}.tar/{:010d}', number // 10000, number) AS key, draw(number, 'key') AS key_hash,
    format('{}.tar', number // 10000) AS file, 'a9c2-1700000000' AS version, number * 100000 AS "offset",
    NULL AS length, NULL AS row_group, NULL AS "row", width::BIGINT * height // 6 AS bytes, 'jpeg' AS format,
    width, height, format('{:016x}{:016x}', digest, hash(digest)) AS xxh128,
    if(is_near, xor(xor(xor(seen, flip(number, 1)), flip(number, 2)), flip(number, 3)), seen) AS phash,
    round(exp(4 + normal(number, 'sharpness')), 3) AS sharpness, [text] AS captions,
    format('{{"url": "https://images.example.com/{:010d}.jpg", "language": "{}", "pwatermark": {}}}', number,
        if(uniform(number, 'language') < 0.1, 'de', 'en'), round(uniform(number, 'watermark') ** 3, 4)) AS metadata,
    if(uniform(number, 'reason') < 0.01, 'undecodable', '') AS reason, '' AS detail,
    (5.4 + 0.8 * normal(number, 'aesthetic'))::FLOAT AS aesthetic
FROM images JOIN captions ON caption = draw(number, 'caption') % 300000
ORDER BY number
"""


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
    from diffusion.preparation.select import WINDOWS_PER_TASK

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
    parser = CommandParser(description=__doc__)
    parser.add_argument("what", choices=["select", "driver", "mixing"])
    parser.add_argument("number", type=int, nargs="?", default=1_000_000, help="of rows, or of partitions")
    parser.add_argument("--folder", type=Path, help="for the metadata of select; kept")
    parser.add_argument("--engine", type=Engine, default=Engine.processes, help="of driver")
    options = parser.parse_args()
    if options.what == "driver":
        from benchmarks.driver import measure_driver

        print(json.dumps(measure_driver(options.number, options.engine)))
    elif options.what == "mixing":
        print("\n".join(map(json.dumps, measure_mixing())))
    else:
        print(json.dumps(measure_select(options.number, folder=options.folder)))


if __name__ == "__main__":
    raise SystemExit(run_command(main))
