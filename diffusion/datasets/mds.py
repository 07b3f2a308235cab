"""MDS folders: written whole or not at all, and a look at what one holds.

Streaming's own `with MDSWriter(...)` writes a valid index even when its block raised, and shards lie in their final
place from the start. Here a folder gets its name only when everything in it is on the disk.
"""

import hashlib
import itertools
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from diffusion.errors import ConfigurationError, DataError
from diffusion.files import PARTIAL, atomic_folder, atomic_path, hash_file, read_json, write_atomically

if TYPE_CHECKING:
    from streaming import MDSWriter

"""Suffix of the name of a folder that is being written."""

INDEX = "index.json"
DEFAULT_SHARD_BYTES = 256 * 2**20
DEFAULT_HASHES = ("xxh64",)
_BUFFER_BYTES = 2**20


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


@dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """How shards are written.

    Attributes:
        columns: MDS type of each column.
        shard_bytes: Size above which a new shard is begun.
        hashes: Names of the hashes of each shard in the index, sorted.
        compression: A compression that Streaming knows, or None.
    """

    columns: Mapping[str, str]
    shard_bytes: int = DEFAULT_SHARD_BYTES
    hashes: tuple[str, ...] = DEFAULT_HASHES
    compression: str | None = None

    def check(self) -> None:
        """Raise a ConfigurationError unless shards can be written so."""
        check_shard_bytes(self.shard_bytes)
        if self.hashes != DEFAULT_HASHES:
            from streaming.base.hashing import get_hashes, is_hash

            if list(self.hashes) != sorted(set(self.hashes)) or not all(map(is_hash, self.hashes)):
                raise ConfigurationError(
                    f"hashes: {list(self.hashes)}; they must be sorted, without repetition, and of: "
                    f"{', '.join(sorted(get_hashes()))}"
                )
        if self.compression is not None:
            from streaming.base.compression import get_compressions, is_compression

            if self.compression.partition(":")[0] == "gz" or not is_compression(self.compression):
                known = sorted({name.partition(":")[0] for name in get_compressions()} - {"gz"})
                raise ConfigurationError(
                    f"compression: {self.compression!r}; it must be one of {', '.join(known)}, with a level as in "
                    "zstd:3 or without (gz stores the time, so that no two runs write the same)"
                )

    def writer(self, folder: Path) -> "MDSWriter":
        """Open Streaming's writer on a folder."""
        from streaming import MDSWriter  # takes seconds: a command's mistakes are to be told before

        return MDSWriter(
            columns=dict(self.columns),
            out=str(folder.absolute()),
            hashes=list(self.hashes),
            size_limit=self.shard_bytes,
            compression=self.compression,
        )


@dataclass(frozen=True)
class ShardTemplate:
    """What the shards of a format have in common, as Streaming's writer has it.

    That brings torch along: half a gigabyte and several seconds for each worker, so prepared data is written without.

    Attributes:
        header: Bytes between the offsets and the samples.
        entry: The part of an index entry that all shards share.
    """

    header: bytes
    entry: dict[str, Any]

    @classmethod
    def of(cls, shards: ShardFormat) -> "ShardTemplate":
        """Make it."""
        names = sorted(shards.columns)
        entry = {
            "version": 2,
            "format": "mds",
            "compression": shards.compression,
            "hashes": list(shards.hashes),
            "size_limit": shards.shard_bytes,
            "column_names": names,
            "column_encodings": [shards.columns[name] for name in names],
            "column_sizes": [_encoded_size(shards.columns[name]) for name in names],
        }
        return cls(json.dumps(entry, sort_keys=True).encode(), entry)

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes of a shard beside those of its samples."""
        return 4 + 4 * (num_samples + 1) + len(self.header)


def _encoded_size(kind: str) -> int | None:
    """Return the bytes of each value of a type; None where they vary."""
    if kind in _ENCODERS:
        return 4 if kind == "int32" else None
    from streaming.base.format.mds.encodings import get_mds_encoded_size

    return get_mds_encoded_size(kind)


def encode_sample(sample: Mapping[str, Any], columns: Mapping[str, str]) -> bytes:
    """Return the bytes of a sample in a shard: the sizes of the columns that have none of their own, then the columns.

    Args:
        sample: Value of each column.
        columns: Their types, of `bytes`, `str`, `json` and `int32`.
    """
    sizes, data = [], []
    for name in sorted(columns):
        data.append(_ENCODERS[columns[name]](sample[name]))
        if columns[name] != "int32":
            sizes.append(len(data[-1]))
    return struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(data)


def decode_sample(data: bytes, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns that `encode_sample` encoded."""
    num_sized = sum(kind != "int32" for kind in columns.values())
    sizes = iter(struct.unpack_from(f"<{num_sized}I", data))
    sample, at = {}, 4 * num_sized
    for name in sorted(columns):
        size = 4 if columns[name] == "int32" else next(sizes)
        sample[name] = _DECODERS[columns[name]](data[at : at + size])
        at += size
    return sample


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "bytes": bytes,
    "str": str.encode,
    "json": lambda value: json.dumps(value).encode(),
    "int32": lambda value: struct.pack("<i", value),
}
_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "int32": lambda data: struct.unpack("<i", data)[0],
}


def write_shard(
    target: Path,
    number: int,
    samples: Sequence[bytes],
    template: ShardTemplate,
    *,
    partial: Path,
    revision: int = 0,
    part: int = 0,
) -> dict[str, Any]:
    """Write one shard of an MDS folder, which appears there only when it is whole.

    Args:
        target: The MDS folder; it exists.
        number: Number of the shard in it.
        samples: Encoded.
        template: What its shards have in common.
        partial: File that it is written to first, on the same disk; left there by a process that is killed.
        revision: How often the shard was written anew under a new name.
        part: Number among the files that a shard of this number was cut into.

    Returns:
        The shard's entry for the index of the folder.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    starts = list(itertools.accumulate(map(len, samples), initial=template.num_bytes(len(samples))))
    content = [struct.pack(f"<{len(starts) + 1}I", len(samples), *starts), template.header, *samples]
    compression, hashes = template.entry["compression"], template.entry["hashes"]
    name = f"shard.{number:05}{f'.p{part}' if part else ''}{f'.r{revision}' if revision else ''}.mds"
    raw_data, zip_data = _described(content, name, hashes), None
    if compression:
        from streaming.base.compression import compress, get_compression_extension

        name = f"{name}.{get_compression_extension(compression)}"
        content = [compress(compression, b"".join(content))]
        zip_data = _described(content, name, hashes)
    with atomic_path(target / name, partial=partial), partial.open("wb", buffering=_BUFFER_BYTES) as file:
        file.writelines(content)
    return {"samples": len(samples), "raw_data": raw_data, "zip_data": zip_data, **template.entry}


def _described(content: Sequence[bytes], name: str, hashes: Iterable[str]) -> dict[str, Any]:
    """Return name, size and hashes of a file as the index holds them."""
    return {
        "basename": name,
        "bytes": sum(map(len, content)),
        "hashes": {kind: _hash(kind, content) for kind in hashes},
    }


def _hash(kind: str, content: Sequence[bytes]) -> str:
    """Return a hash of one of Streaming's kinds."""
    if kind == "xxh64":
        digest = xxhash.xxh64()
        for part in content:
            digest.update(part)
        return digest.hexdigest()
    from streaming.base.hashing import get_hash

    return get_hash(kind, b"".join(content))


def find_wrong_hash(path: Path, hashes: Mapping[str, str], kind: str | None = None) -> str | None:
    """Compare a file with the hash that the index gives of it.

    Args:
        path: The file.
        hashes: What the index gives; nothing is compared where that is nothing.
        kind: The hash that is compared; None is xxh64, else the first by name.

    Returns:
        The name of a hash that differs, or None.

    Raises:
        OSError: The file cannot be read.
    """
    kind = kind or ("xxh64" if "xxh64" in hashes else min(hashes, default=None))
    return kind if kind is not None and hash_file(path, kind) != hashes[kind] else None


def check_shard(folder: Path, entry: Mapping[str, Any]) -> None:
    """Compare the file of a shard with the hash that the index gives of it.

    Args:
        folder: The MDS folder.
        entry: The shard's entry in the index.

    Raises:
        DataError: The file is missing or damaged.
    """
    stored = entry["zip_data"] or entry["raw_data"]
    file = folder / stored["basename"]
    try:
        kind = find_wrong_hash(file, stored["hashes"])
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); copy or write the folder anew") from error
    if kind:
        raise DataError(f"{file} is damaged: its {kind} is not that of the index; copy or write the folder anew")


def write_index(folder: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the index of an MDS folder as Streaming does, atomically.

    Args:
        folder: The folder.
        entries: What `write_shard` returned, in the order of the shards.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    write_atomically(folder / INDEX, json.dumps({"version": 2, "shards": list(entries)}, sort_keys=True))


@contextmanager
def open_shard(folder: Path, entry: Mapping[str, Any]) -> Iterator[Any]:
    """Open one shard; a compressed one is unpacked to a temporary folder.

    Args:
        folder: The MDS folder.
        entry: The shard's entry in the index.

    Yields:
        A reader: `reader[i]` gives the columns of sample i.

    Raises:
        DataError: The shard is missing.
    """
    from streaming.base.compression import decompress
    from streaming.base.format import reader_from_json

    stored = entry["zip_data"] or entry["raw_data"]
    if not (folder / stored["basename"]).is_file():
        raise DataError(f"{folder / stored['basename']} is missing; fetch or write the folder anew")
    if entry["zip_data"] is None:
        yield reader_from_json(str(folder), None, dict(entry))
        return
    with tempfile.TemporaryDirectory() as unpacked:
        content = decompress(entry["compression"], (folder / stored["basename"]).read_bytes())
        Path(unpacked, entry["raw_data"]["basename"]).write_bytes(content)
        yield reader_from_json(unpacked, None, {**entry, "compression": None, "zip_data": None})


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
    shards = ShardFormat(columns=columns, shard_bytes=shard_bytes, hashes=hashes, compression=compression)
    check_shard_bytes(shard_bytes)
    if folder.exists():
        raise DataError(f"{folder} exists; remove it or write to another folder")
    with atomic_folder(folder, partial=folder.with_name(folder.name + PARTIAL)) as partial:
        writer = shards.writer(partial)
        try:
            yield writer
            writer.finish()
        except BaseException:
            writer.cancel_future_jobs()
            raise


def read_shards(folder: Path) -> list[dict[str, Any]]:
    """Read the entries of the shards in the index of an MDS folder.

    Raises:
        DataError: The folder has no index, or one that is damaged.
    """
    index = read_json(folder / INDEX)
    if not isinstance(index, dict) or not isinstance(index.get("shards"), list):
        raise DataError(f"{folder / INDEX} is not the index of an MDS folder; write the folder anew")
    return index["shards"]


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
