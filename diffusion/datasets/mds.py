"""MDS folders (the format of mosaicml-streaming): their indexes, the samples of a shard, and writing them.

A shard file begins with the number of samples n and n + 1 offsets (uint32); sample i lies between offsets i and i + 1.
The index lists the shards. What is written here a stock `StreamingDataset` reads, and any MDS folder can be read.

Streaming's own `with MDSWriter(...)` writes a valid index even when its block raised, and its shards have their final
names from the start. Here a folder gets its name when everything in it is on the disk. Streaming's readers open the
file and decode all columns for each sample (44 us for a latent, here 11 us).
"""

import hashlib
import itertools
import json
import os
import shutil
import struct
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from diffusion.datasets.balanced import Integers
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import PARTIAL, atomic_folder, atomic_path, hash_file, read_json, write_atomically

if TYPE_CHECKING:
    from streaming import MDSWriter

INDEX = "index.json"
DEFAULT_SHARD_BYTES = 256 * 2**20
DEFAULT_HASHES = ("xxh64",)
_BUFFER_BYTES = 2**20

MAX_OPEN = 256
"""Shard files that a process keeps open."""


# Reading: which shard holds a sample, and its columns.


class ShardFile(NamedTuple):
    """A file of a shard, as the index describes it."""

    name: str
    num_bytes: int
    hashes: Mapping[str, str]


class Layout(NamedTuple):
    """How the samples of a shard are encoded; most shards of a stream share one object."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    """MDS type of each column."""
    sizes: tuple[int | None, ...]
    """Bytes of each column; None (or 0) where they vary."""
    compression: str | None

    @classmethod
    def of(cls, columns: Mapping[str, str], compression: str | None = None) -> "Layout":
        """The layout in which shards with columns of some MDS types are written: by name."""
        names = sorted(columns)
        encodings = [columns[name] for name in names]
        return cls(tuple(names), tuple(encodings), tuple(map(_encoded_size, encodings)), compression)


class Shard(NamedTuple):
    """An entry of an index."""

    num_samples: int
    raw: ShardFile
    packed: ShardFile | None
    """The compressed form of a shard."""
    layout: Layout

    @property
    def cached_bytes(self) -> int:
        """Bytes that it takes in a cache: of both forms of a compressed shard, which exist together for a moment."""
        return self.raw.num_bytes + (self.packed.num_bytes if self.packed is not None else 0)


class ShardIndex:
    """The index of an MDS folder, in about 800 bytes a shard: 64 MB for the 80,000 shards of 790 million samples.

    Args:
        shards: its entries.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self.samples_per_shard = np.array([shard.num_samples for shard in shards], np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        self._bounds = np.cumsum(self.samples_per_shard) - self.samples_per_shard
        self._first_samples: list[int] = self._bounds.tolist()

    def cached_bytes(self) -> Integers:
        """Bytes that each shard takes in a cache: int64 [K]."""
        return np.array([shard.cached_bytes for shard in self.shards], np.int64)

    def locate(self, index: int) -> tuple[int, int]:
        """Shard that holds a sample of the stream, and index of the sample in the shard."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"{index} of {self.num_samples} samples")
        shard = bisect_right(self._first_samples, index) - 1
        return shard, index - self._first_samples[shard]

    def shards_of(self, indices: Integers) -> Integers:
        """Shards that hold samples of the stream: int64 [N] -> int64 [N]."""
        return np.searchsorted(self._bounds, indices, side="right") - 1


def read_shard_index(path: Path) -> ShardIndex:
    """Read an index.

    Raises:
        DataError: it cannot be read, or is not that of an MDS folder.
        ValueError, KeyError, TypeError: it is damaged.
    """
    layouts: dict[Layout, Layout] = {}

    def compact(value: dict[str, Any]) -> Any:
        """Replace each entry as soon as it is parsed: dictionaries would take ten times the memory."""
        if "basename" in value:
            name = PurePosixPath(value["basename"])
            if name.is_absolute() or ".." in name.parts:
                raise ValueError(f"{value['basename']} is not below the folder")
            return ShardFile(value["basename"], int(value["bytes"]), value["hashes"])
        if "raw_data" not in value:
            return value
        if (value["version"], value["format"]) != (2, "mds"):
            raise ValueError(f"a shard has format {value['format']}, version {value['version']}, not mds, version 2")
        names, encodings, sizes = (tuple(value[f"column_{what}"]) for what in ("names", "encodings", "sizes"))
        layout = Layout(names, encodings, sizes, value["compression"])
        return Shard(int(value["samples"]), value["raw_data"], value["zip_data"], layouts.setdefault(layout, layout))

    with path.open(encoding="utf-8") as file:
        content = json.load(file, object_hook=compact)
    shards = content["shards"]
    if not all(isinstance(shard, Shard) for shard in shards):
        raise ValueError("an entry is not that of a shard")
    index = ShardIndex(shards)
    if index.num_samples == 0:
        raise DataError(f"{path} holds no samples: take the stream out of the configuration, or write it again")
    return index


_OFFSETS = struct.Struct("<2I")


class ShardFiles:
    """Reads samples of shard files, and keeps the last `max_open` files open."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: dict[str, int] = {}

    def read(self, path: str, index: int) -> bytes:
        """Read the bytes of a sample.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged.
        """
        descriptor = self._open.get(path)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while len(self._open) >= self._max_open:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = descriptor
        begin, end = _OFFSETS.unpack(_exactly(os.pread(descriptor, 8, 4 * (1 + index)), 8))
        if begin > end:
            raise ValueError(f"it begins at byte {begin} and ends at byte {end}")
        return _exactly(os.pread(descriptor, end - begin, begin), end - begin)

    def forget(self, path: str) -> None:
        """Close a file."""
        if path in self._open:
            os.close(self._open.pop(path))

    def close(self) -> None:
        """Close all files; they are opened again when they are needed."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes instead of {size}: the file is cut off")
    return data


class SampleDecoder:
    """Decodes columns of a sample: the sizes (uint32) of the columns without a fixed one, then the columns.

    Args:
        layout: of the shard.
        wanted: columns to decode; None is all.

    Raises:
        DataError: a wanted column can hold code (`pkl`).
    """

    def __init__(self, layout: Layout, wanted: Collection[str] | None = None) -> None:
        self._columns = [
            (name, size or None, _decoder(encoding) if wanted is None or name in wanted else None)
            for name, encoding, size in zip(layout.names, layout.encodings, layout.sizes, strict=True)
        ]
        self._sizes = struct.Struct(f"<{sum(size is None for _, size, _ in self._columns)}I")

    def __call__(self, data: bytes) -> dict[str, Any]:
        """Decode a sample.

        Returns:
            Values by column; arrays are read-only.

        Raises:
            ValueError: the bytes are damaged.
        """
        try:
            sizes = iter(self._sizes.unpack_from(data))
        except struct.error as error:
            raise ValueError(f"{len(data)} bytes are too few: {error}") from error
        start = self._sizes.size
        sample = {}
        for name, size, decode in self._columns:
            size = next(sizes) if size is None else size
            if decode is not None:
                sample[name] = decode(data, start, size)
            start += size
        if start != len(data):
            raise ValueError(f"its columns take {start} bytes, but it has {len(data)}")
        return sample


def _decoder(encoding: str) -> Callable[[bytes, int, int], Any]:
    """Return a function of (bytes, start, size) for a column: arrays of a fixed shape directly, others by Streaming."""
    kind, _, rest = encoding.partition(":")
    dtype_name, _, shape_text = rest.partition(":")
    if kind != "ndarray" or not shape_text:
        decode = _DECODERS.get(encoding) or _streaming_decoder(encoding)
        return lambda data, start, size: decode(data[start : start + size])
    dtype = np.dtype(dtype_name).newbyteorder("<")
    shape = tuple(int(number) for number in shape_text.split(","))
    count = int(np.prod(shape))
    return lambda data, start, size: np.frombuffer(data, dtype, count, start).reshape(shape)


def _streaming_decoder(encoding: str) -> Callable[[bytes], Any]:
    from streaming.base.format.mds.encodings import is_mds_encoding_safe, mds_decode

    if not is_mds_encoding_safe(encoding):
        raise DataError(f"a column has the type {encoding}, which can run code: write the data set without it")
    return lambda data: mds_decode(encoding, data)


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "json": json.loads,
    "int32": lambda data: struct.unpack("<i", data)[0],
}
"""Of the columns of prepared data; Streaming's take seconds to import."""


# Writing, and what an index says.


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
        from streaming import MDSWriter  # takes seconds: a command's mistakes are reported before

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
        layout = Layout.of(shards.columns, shards.compression)
        entry = {
            "version": 2,
            "format": "mds",
            "compression": shards.compression,
            "hashes": list(shards.hashes),
            "size_limit": shards.shard_bytes,
            "column_names": list(layout.names),
            "column_encodings": list(layout.encodings),
            "column_sizes": list(layout.sizes),
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


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "bytes": bytes,
    "str": str.encode,
    "json": lambda value: json.dumps(value).encode(),
    "int32": lambda value: struct.pack("<i", value),
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


def choose_hash(hashes: Mapping[str, str]) -> tuple[str, str] | None:
    """Kind and value of the hash that a file is compared with: xxh64, else the first by name; None without any."""
    kind = "xxh64" if "xxh64" in hashes else min(hashes, default=None)
    return None if kind is None else (kind, hashes[kind])


def find_wrong_hash(path: Path, hashes: Mapping[str, str]) -> str | None:
    """Compare a file with the hash that the index gives of it.

    Args:
        path: The file.
        hashes: What the index gives; nothing is compared where that is nothing.

    Returns:
        The name of a hash that differs, or None.

    Raises:
        OSError: The file cannot be read.
    """
    digest = choose_hash(hashes)
    return digest[0] if digest is not None and hash_file(path, digest[0]) != digest[1] else None


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
