"""Tables of a prepared data set: columns of the metadata, names of files, and parquet."""

import io
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion import storage
from diffusion.formats.data_set import SCORES_RECORD

CAPTIONS = "captions"
"""Folder below `scores` with the captions that a captioner wrote."""

GENERATED_CAPTIONS = "generated_captions"
"""Column beside the captions of a captioner, and entry of a sample's metadata: indices of those it wrote."""

LOCATION = ("file", "version", "offset", "length", "row_group", "row")
"""Columns that make a `Location`."""

SCHEMA = pa.schema(
    {
        "key": pa.string(),  # name of the source, slash, path in the source; unique
        "key_hash": pa.uint64(),  # xxh3_64 of the key: order and validation split are made of it
        "file": pa.string(),  # path below the source
        "version": pa.string(),  # of the file: changes with its content
        "offset": pa.int64(),  # `Location`, as the three below; null where it does not apply
        "length": pa.int64(),
        "row_group": pa.int32(),
        "row": pa.int64(),
        "bytes": pa.int64(),  # of the image file; null, like all below but the last two, where there is none
        "format": pa.string(),  # by the file's signature: jpeg, png, ...
        "width": pa.int32(),  # pixels, upright (EXIF), as height
        "height": pa.int32(),
        "xxh128": pa.string(),  # XXH3 of the file's bytes, 32 hexadecimal digits
        "phash": pa.uint64(),  # perceptual hash
        "sharpness": pa.float64(),  # variance of the Laplacian
        "captions": pa.list_(pa.string()),
        "metadata": pa.string(),  # JSON object: whatever else the source knew
        "reason": pa.string(),  # why it is rejected, empty if it is not
        "detail": pa.string(),  # of the rejection, in a few words
    }
)
"""Columns of `metadata/NUMBER.parquet`. The row's number in the file and the file's number identify an image."""

RESERVED = (*SCHEMA.names, CAPTIONS, GENERATED_CAPTIONS, "source", "generation", "split", "bucket", "part",
            "row_number", "shorter_side", "aspect_ratio", "caption_length")  # fmt: skip
"""Names that a column below `scores` cannot have; case does not matter."""


def part_name(number: int) -> str:
    """Name the file of a partition."""
    return f"{number:06d}.parquet"


def positions_name(task: int) -> str:
    """Name the file with the positions of a task's samples."""
    return f"{task:05d}.parquet"


def file_numbers(folder: str) -> set[int]:
    """List the partitions, or tasks, whose finished file is in a folder."""
    return {int(name[:-8]) for name in storage.list_files(folder) if re.fullmatch(r"\d+\.parquet", name)}


def read_scores_record(out: str) -> dict[str, Any]:
    """Read `scores.json`: for each column below `scores` what determines it, beside the images."""
    return storage.read_json(storage.join(out, SCORES_RECORD), {})


def read_table(uri: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, or some columns of it, by one request."""
    file = pq.ParquetFile(pa.BufferReader(storage.read(uri)))
    return file.read(columns=columns, use_threads=False)  # At half the cost of pq.read_table.


def read_schema(uri: str) -> pa.Schema:
    """Read the schema of a parquet file with its metadata, by a request of its end."""
    with storage.open_file(uri, buffer_bytes=0) as file:
        return pq.read_schema(file)


def write_table(uri: str, table: pa.Table) -> None:
    """Write a parquet file, whole or not at all; the same table gives the same bytes."""
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    storage.write(uri, content.getvalue())


def local_copies(folder: str, names: Collection[str], target: Path) -> Path:
    """Return where files of a folder lie on this machine: in `target`, whose copies stay, if they are remote."""
    if not storage.is_url(folder):
        return Path(folder).absolute()
    new = [name for name in names if not (target / name).exists()]
    for _ in storage.concurrent_map(lambda name: storage.download(storage.join(folder, name), target / name), new):
        pass
    return target
