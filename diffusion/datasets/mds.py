"""MDS folders: written whole or not at all, and a look at what one holds.

Streaming's own `with MDSWriter(...)` writes a valid index even when its block raised, and shards lie in their final
place from the start. Here a folder gets its name only when everything in it is on the disk.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.datasets.manifest import read_json, sync
from diffusion.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from streaming import MDSWriter

PARTIAL = ".partial"
"""Suffix of the name of a folder that is being written."""

INDEX = "index.json"
DEFAULT_SHARD_BYTES = 256 * 2**20
DEFAULT_HASHES = ("xxh64",)


@dataclass(frozen=True, kw_only=True)
class MDSIndex:
    """What the index of an MDS folder says.

    Attributes:
        num_samples: Samples of all shards.
        num_shards: Shard files.
        num_bytes: Bytes of all shards, uncompressed.
        columns: MDS type of each column.
        sha256: Hash of the index, which holds the hashes of the shards: equal for equal content.
    """

    num_samples: int
    num_shards: int
    num_bytes: int
    columns: dict[str, str]
    sha256: str


def check_shard_bytes(shard_bytes: int) -> None:
    """Raise a ConfigurationError unless shards can have that size: MDS counts with 32 bits."""
    if not 0 < shard_bytes < 2**31:
        raise ConfigurationError(f"shard size: {shard_bytes} bytes; it must be above 0 and below {2**31} (2 GiB)")


@contextmanager
def write_mds(
    folder: Path,
    columns: Mapping[str, str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    hashes: tuple[str, ...] = DEFAULT_HASHES,
    compression: str | None = None,
) -> Iterator["MDSWriter"]:
    """Write an MDS folder that appears under its name only when it is whole.

    Until then it is `<folder>.partial`; what an earlier, interrupted run left there is removed. If the block raises,
    nothing is left.

    Args:
        folder: The folder to be; it must not exist.
        columns: MDS type of each column.
        shard_bytes: Size above which a new shard is begun.
        hashes: Names of the hashes of each shard in the index, sorted.
        compression: A compression that Streaming knows, or None.

    Yields:
        A writer; call `write(sample)`, nothing else.

    Raises:
        ConfigurationError: The size of shards is out of range.
        DataError: The folder exists.
        OSError: The disk is full, or the place cannot be written to.
    """
    from streaming import MDSWriter  # takes seconds: a command's mistakes are to be told before

    check_shard_bytes(shard_bytes)
    if folder.exists():
        raise DataError(f"{folder} exists; remove it or write to another folder")
    partial = folder.with_name(folder.name + PARTIAL)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    writer = MDSWriter(
        columns=dict(columns),
        out=str(partial.absolute()),
        hashes=list(hashes),
        size_limit=shard_bytes,
        compression=compression,
    )
    try:
        yield writer
        writer.finish()
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        partial.rename(folder)
        sync(folder.parent)
    except BaseException:
        writer.cancel_future_jobs()
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_index(folder: Path) -> MDSIndex:
    """Read the index of an MDS folder.

    Raises:
        DataError: The folder has no index, or one that is damaged, or its shards differ from it in size or are missing.
    """
    index = read_json(folder / INDEX)
    try:
        shards = index["shards"]
        num_samples = sum(shard["samples"] for shard in shards)
        num_bytes = sum(shard["raw_data"]["bytes"] for shard in shards)
        stored = [shard["zip_data"] or shard["raw_data"] for shard in shards]
        files = [(folder / data["basename"], data["bytes"]) for data in stored]
        columns = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True)) if shards else {}
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(
            f"{folder / INDEX} is not the index of an MDS folder ({error!r}); write the folder anew"
        ) from error
    for file, size in files:
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise DataError(f"{file} {state}; fetch or write the folder anew")
    sha256 = hashlib.sha256((folder / INDEX).read_bytes()).hexdigest()
    return MDSIndex(num_samples=num_samples, num_shards=len(files), num_bytes=num_bytes, columns=columns, sha256=sha256)


def remove_mds(folder: Path) -> None:
    """Remove a tree of MDS folders, whole or partial, if it is there; indexes go first, so that no rest looks whole."""
    if not folder.exists():
        return
    for index in sorted(folder.rglob(INDEX)):
        os.remove(index)  # noqa: PTH107
    shutil.rmtree(folder)
