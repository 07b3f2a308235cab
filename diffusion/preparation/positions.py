"""Positions: which sample of a data set has which key.

Prepared data: `positions/TASK.parquet` has a row per sample that a write task wrote, and the shards that it made.
Encoded data: `positions/<split>/<bucket>/SHARD.parquet` has the hash of the key of each sample of a shard.
"""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from diffusion import storage
from diffusion.formats.data_set import POSITIONS, check_folder
from diffusion.formats.shards import SampleDecoder, Shard, read_shard
from diffusion.preparation.layout import positions_name, read_schema, read_table, write_table
from diffusion.preparation.metadata import key_hash
from diffusion.storage import MissingFileError

POSITIONS_SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "part": pa.int32(),  # partition, and row in its metadata
        "row": pa.int32(),
        "split": pa.string(),
        "bucket": pa.string(),
        "shard": pa.string(),  # basename of the uncompressed shard, as it was first written
        "index": pa.int32(),  # in the shard
    }
)
"""Columns of `positions/TASK.parquet`, a row per sample in the order of writing. The file's `entries` are a JSON list
of {split, bucket, entry}: the index entries of the task's shards in order."""

_MAKING = threading.Lock()
"""Held while a shard, which may be large, is in memory."""

TaskShard = tuple[str, Shard]
"""`<split>/<bucket>`, and a shard in it."""


def shards_as_metadata(shards: Iterable[TaskShard]) -> dict[str, str]:
    """Return the shards of a task as the metadata of the file of its positions."""
    entries = [dict(zip(("split", "bucket"), name.split("/"), strict=True), entry=one.entry) for name, one in shards]
    return {"entries": json.dumps(entries)}


def shards_of_metadata(metadata: Mapping[bytes, bytes]) -> list[TaskShard]:
    """Return the shards of a task from the metadata of the file of its positions."""
    entries = json.loads(metadata[b"entries"])
    return [(check_folder(f"{one['split']}/{one['bucket']}"), Shard.of(one["entry"])) for one in entries]


def read_task_shards(out: str, tasks: Iterable[int]) -> Iterator[list[TaskShard]]:
    """Read the shards of each task."""

    def read(task: int) -> list[TaskShard]:
        return shards_of_metadata(read_schema(storage.join(out, POSITIONS, positions_name(task))).metadata)

    return storage.concurrent_map(read, tasks)


def shard_stem(name: str) -> str:
    """Name of a shard without revision and endings: `shard.00003.00001`."""
    return re.sub(r"(\.r\d+)?\.mds.*$", "", name)


def task_of(name: str) -> int:
    """Number of the write task that wrote a shard."""
    return int(name.split(".")[1])


def write_keys(dataset: str, folder: str, shard: Shard, keys: Iterable[str]) -> None:
    """Write the keys of an encoded shard in `<split>/<bucket>`, hashed; empty ones are of erased samples."""
    write_key_hashes(dataset, folder, shard, [key_hash(key) if key else None for key in keys])


def write_key_hashes(dataset: str, folder: str, shard: Shard, hashes: Iterable[int | None]) -> None:
    """Write the hashes of the keys of an encoded shard in `<split>/<bucket>`, null for erased samples."""
    table = pa.table({"key_hash": pa.array(hashes, pa.uint64())})
    write_table(storage.join(dataset, POSITIONS, folder, f"{shard_stem(shard.raw.name)}.parquet"), table)


def read_key_hashes(dataset: str, folder: str, shard: Shard) -> Any:
    """Read the hashes of the keys of an encoded shard, null for erased samples: uint64 [N], an array of Arrow.

    Data of earlier versions has none yet: they are made of the shard, once.
    """
    uri = storage.join(dataset, POSITIONS, folder, f"{shard_stem(shard.raw.name)}.parquet")
    try:
        return read_table(uri)["key_hash"]
    except MissingFileError:
        decode = SampleDecoder(shard.format, ["key"])
        with _MAKING:
            samples = read_shard(storage.join(dataset, folder), shard)
            keys = [decode(sample)["key"] for sample in samples]
            del samples
        write_keys(dataset, folder, shard, keys)
        return read_table(uri)["key_hash"]
