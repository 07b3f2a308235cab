"""MDS folders (the format of mosaicml-streaming): their indexes, the samples of a shard, and writing them.

A shard file begins with the number of samples n and n + 1 offsets (uint32); sample i lies between offsets i and i + 1.
The index lists the shards. What is written here a stock `StreamingDataset` reads, and any MDS folder can be read.

Streaming's `MDSWriter` gives shards their names before they are whole, and brings torch along: half a gigabyte and
several seconds for each worker. Its readers open the file and decode all columns for each sample (44 us for a latent,
here 11 us).
"""

import functools
import hashlib
import itertools
import json
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffusion import storage
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import hash_file, new_hash

T = TypeVar("T")

INDEX = "index.json"
DEFAULT_SHARD_BYTES = 256 * 2**20
DEFAULT_HASHES = ("xxh64",)

STREAMED = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zstd": "zstd"}
"""Compressions of shards that Arrow reads as a stream, by the name that Streaming gives them."""

MAX_OPEN = 256
"""Shard files that a process keeps open."""


# Reading: which shard holds a sample, and its columns.


class ShardFile(NamedTuple):
    """A file of a shard, as the index describes it."""

    name: str
    num_bytes: int
    hashes: Mapping[str, str]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "ShardFile":
        """Make one of its description in an index; a ValueError if it is not below the folder."""
        name = str(entry["basename"])
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{name} is not below the folder")
        return cls(name, int(entry["bytes"]), entry.get("hashes") or {})

    @property
    def entry(self) -> dict[str, Any]:
        """Description in an index."""
        return {"basename": self.name, "bytes": self.num_bytes, "hashes": self.hashes}

    def digest(self, kind: str | None = None) -> tuple[str, str] | None:
        """Return kind and value of the hash to compare with: of a kind, else xxh64, else the first by name, if any.

        Raises:
            DataError: the index gives no hash of that kind.
        """
        if kind is not None and kind not in self.hashes:
            known = ", ".join(sorted(self.hashes)) or "none"
            raise DataError(f"the index gives no {kind} of {self.name} ({known}): set data.validate_hash=null")
        kind = kind or ("xxh64" if "xxh64" in self.hashes else min(self.hashes, default=None))
        return None if kind is None else (kind, self.hashes[kind])

    def find_damage(self, folder: Path, kind: str | None = None) -> str | None:
        """Compare size and hash of the file in a folder with the index; return the difference, or None.

        Raises:
            OSError: the file is missing, or cannot be read.
        """
        path = folder / self.name
        if (size := path.stat().st_size) != self.num_bytes:
            return f"{path} has {size} bytes instead of {self.num_bytes}"
        digest = self.digest(kind)
        if digest is not None and hash_file(path, digest[0]) != digest[1]:
            return f"{path} is damaged: its {digest[0]} is not that of the index"
        return None


@dataclass(frozen=True)
class ShardFormat:
    """Encoding of the samples of a shard, and settings of its writing; most shards of a stream share one object."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    """MDS type of each column."""
    sizes: tuple[int | None, ...]
    """Bytes of each column; None (or 0) where they vary."""
    compression: str | None = None
    """A compression that Streaming knows, or None."""
    hashes: tuple[str, ...] = DEFAULT_HASHES
    """Names of the hashes of each shard in the index, sorted."""
    shard_bytes: int | None = DEFAULT_SHARD_BYTES
    """Size above which a new shard is begun; None (of other tools) is no limit."""

    @classmethod
    def of(cls, columns: Mapping[str, str], **options: Any) -> "ShardFormat":
        """Return the format in which shards with columns of some MDS types are written: by name."""
        names = sorted(columns)
        encodings = [columns[name] for name in names]
        return cls(tuple(names), tuple(encodings), tuple(map(encoded_size, encodings)), **options)

    def check(self) -> None:
        """Raise a ConfigurationError unless shards can be written so."""
        if self.shard_bytes is None or not 0 < self.shard_bytes < 2**31:  # MDS counts with 32 bits.
            raise ConfigurationError(
                f"shard size: {self.shard_bytes} bytes; it must be above 0 and below {2**31} (2 GiB)"
            )
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

    @cached_property
    def columns(self) -> dict[str, str]:
        """MDS type of each column."""
        return dict(zip(self.names, self.encodings, strict=True))

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The part of an index entry that all shards share."""
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(self.hashes),
            "size_limit": self.shard_bytes,
            "column_names": list(self.names),
            "column_encodings": list(self.encodings),
            "column_sizes": list(self.sizes),
        }

    @cached_property
    def header(self) -> bytes:
        """Bytes between the offsets and the samples."""
        return json.dumps(self.entry, sort_keys=True).encode()

    def num_bytes(self, num_samples: int) -> int:
        """Return the bytes of a shard beside those of its samples."""
        return 4 + 4 * (num_samples + 1) + len(self.header)


class Shard(NamedTuple):
    """An entry of an index."""

    num_samples: int
    raw: ShardFile
    packed: ShardFile | None
    """The compressed form of a shard."""
    format: ShardFormat

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Shard":
        """Make one of an entry of an index.

        Raises:
            ValueError, KeyError, TypeError: it is none of MDS, version 2.
        """
        if (entry["version"], entry["format"]) != (2, "mds"):
            raise ValueError(f"a shard has format {entry['format']}, version {entry['version']}, not mds, version 2")
        columns = (tuple(entry[f"column_{what}"]) for what in ("names", "encodings", "sizes"))
        others = entry.get("compression"), tuple(entry.get("hashes") or ()), entry.get("size_limit")
        packed = ShardFile.of(entry["zip_data"]) if entry.get("zip_data") else None
        return cls(int(entry["samples"]), ShardFile.of(entry["raw_data"]), packed, _shared_format(*columns, *others))

    @property
    def entry(self) -> dict[str, Any]:
        """Entry of an index."""
        packed = self.packed and self.packed.entry
        return {"samples": self.num_samples, "raw_data": self.raw.entry, "zip_data": packed, **self.format.entry}

    @property
    def stored(self) -> ShardFile:
        """The file that is there: of the compressed form if there is one."""
        return self.packed or self.raw

    @property
    def files(self) -> list[ShardFile]:
        """The uncompressed form, and the compressed one if there is one."""
        return [self.raw] if self.packed is None else [self.raw, self.packed]

    @property
    def cached_bytes(self) -> int:
        """Bytes that it takes in a cache: of both forms of a compressed shard, which exist together for a moment."""
        return sum(file.num_bytes for file in self.files)


_shared_format = functools.lru_cache(maxsize=64)(ShardFormat)


@dataclass(frozen=True, kw_only=True)
class BucketEntry:
    """One MDS folder, `<split>/<bucket>`."""

    num_samples: int
    num_shards: int
    num_bytes: int
    """Bytes of the shards, uncompressed."""
    sha256: str
    """Hash of the folder's index, which holds the hashes of the shards: equal for equal content."""


class ShardIndex:
    """The index of an MDS folder, in about 800 bytes a shard: 64 MB for the 80,000 shards of 790 million samples.

    Args:
        content: content of the file.

    Raises:
        ValueError, KeyError, TypeError, OverflowError, RecursionError: it is damaged.
    """

    def __init__(self, content: bytes) -> None:
        # Each entry becomes a shard at once, since dictionaries would take ten times the memory.
        parsed = json.loads(content, object_hook=lambda value: Shard.of(value) if "raw_data" in value else value)
        self.shards: list[Shard] = parsed["shards"]
        if not all(isinstance(shard, Shard) for shard in self.shards):
            raise ValueError("an entry is not that of a shard")
        self.samples_per_shard = np.array([shard.num_samples for shard in self.shards], np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        self._bounds = np.cumsum(self.samples_per_shard) - self.samples_per_shard
        self._first_samples: list[int] = self._bounds.tolist()
        self.summary = BucketEntry(
            num_samples=self.num_samples,
            num_shards=len(self.shards),
            num_bytes=sum(shard.raw.num_bytes for shard in self.shards),
            sha256=hashlib.sha256(content).hexdigest(),
        )

    def locate(self, index: int) -> tuple[int, int]:
        """Shard that holds a sample of the stream, and index of the sample in the shard."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"{index} of {self.num_samples} samples")
        shard = bisect_right(self._first_samples, index) - 1
        return shard, index - self._first_samples[shard]

    def shards_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shards that hold samples of the stream: int64 [N] -> int64 [N]."""
        return np.searchsorted(self._bounds, indices, side="right") - 1


_OFFSETS = struct.Struct("<2I")


class ShardFiles:
    """Reads samples of shard files, and keeps the last `MAX_OPEN` files open."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def read(self, path: str, index: int) -> bytes:
        """Read the bytes of a sample, several times while a network file system fails.

        Raises:
            FileNotFoundError: there is no such file.
            UnavailableError: the file cannot be read.
            ValueError: it is damaged.
        """

        def read_once() -> bytes:
            descriptor, begin, end = self._find(path, index)
            return _exactly(os.pread(descriptor, end - begin, begin), end - begin)

        return self._repeat(path, read_once)

    def read_column(self, path: str, index: int, layout: ShardFormat, column: str) -> Any:
        """Read one column of a sample, without the bytes of the others; errors as for `read`."""
        return self._repeat(path, lambda: self._read_column(path, index, layout, column))

    def _repeat(self, path: str, read: Callable[[], T]) -> T:
        """Read, and after a failure with the file opened again: a stale handle stays stale."""

        def read_anew() -> T:
            self.forget(path)
            return read()

        try:
            return read()
        except FileNotFoundError:
            raise
        except OSError:
            return storage.retry(path, read_anew)

    def _read_column(self, path: str, index: int, layout: ShardFormat, column: str) -> Any:
        descriptor, start, _ = self._find(path, index)
        sizes = struct.Struct(f"<{sum(not size for size in layout.sizes)}I")
        varying = iter(sizes.unpack(_exactly(os.pread(descriptor, sizes.size, start), sizes.size)))
        start += sizes.size
        for name, encoding, fixed in zip(layout.names, layout.encodings, layout.sizes, strict=True):
            size = fixed or next(varying)
            if name == column:
                return _decoder(encoding)(_exactly(os.pread(descriptor, size, start), size), 0, size)
            start += size
        raise KeyError(column)

    def _find(self, path: str, index: int) -> tuple[int, int, int]:
        """Open file, first byte and end of a sample."""
        descriptor = self._open.get(path)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while len(self._open) >= MAX_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = descriptor
        begin, end = _OFFSETS.unpack(_exactly(os.pread(descriptor, 8, 4 * (1 + index)), 8))
        if begin > end:
            raise ValueError(f"it begins at byte {begin} and ends at byte {end}")
        return descriptor, begin, end

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

    def __init__(self, layout: ShardFormat, wanted: Collection[str] | None = None) -> None:
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
"""Decoders of the columns of prepared data; Streaming's take seconds to import."""


# Writing, and what an index says.


def encode_sample(sample: Mapping[str, Any], columns: Mapping[str, str]) -> bytes:
    """Return the bytes of a sample in a shard: the sizes of the columns that have none of their own, then the columns.

    Values and MDS types are given by column.
    """
    sizes, data = [], []
    for name in sorted(columns):
        data.append(_encode(columns[name], sample[name]))
        if encoded_size(columns[name]) is None:
            sizes.append(len(data[-1]))
    return b"".join([struct.pack(f"<{len(sizes)}I", *sizes), *data])


def encoded_size(kind: str) -> int | None:
    """Return the bytes of each value of an MDS type; None where they vary."""
    if kind in _ENCODERS:
        return 4 if kind == "int32" else None
    from streaming.base.format.mds.encodings import get_mds_encoded_size

    return get_mds_encoded_size(kind)


def _encode(kind: str, value: Any) -> bytes:
    if kind in _ENCODERS:
        return _ENCODERS[kind](value)
    from streaming.base.format.mds.encodings import mds_encode

    return mds_encode(kind, value)


_ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "bytes": bytes,
    "str": str.encode,
    "json": lambda value: json.dumps(value).encode(),
    "int32": lambda value: struct.pack("<i", value),
}


def shard_name(number: int, *, part: int = 0) -> str:
    """Name an uncompressed shard of a folder; `part` is a number among the files that it was cut into."""
    return f"shard.{number:05}{f'.p{part}' if part else ''}.mds"


def encode_shard(samples: Sequence[bytes], name: str, shards: ShardFormat) -> tuple[bytes, Shard]:
    """Make a shard of samples from `encode_sample`; `name` is that of the uncompressed file.

    Returns:
        Content of its file (`stored`), and its entry for the index.
    """
    starts = list(itertools.accumulate(map(len, samples), initial=shards.num_bytes(len(samples))))
    content = b"".join([struct.pack(f"<{len(starts) + 1}I", len(samples), *starts), shards.header, *samples])
    raw, packed = _described(content, name, shards.hashes), None
    if shards.compression:
        from streaming.base.compression import compress, get_compression_extension

        name = f"{name}.{get_compression_extension(shards.compression)}"
        content = compress(shards.compression, content)
        packed = _described(content, name, shards.hashes)
    return content, Shard(len(samples), raw, packed, shards)


def _described(content: bytes, name: str, hashes: Iterable[str]) -> ShardFile:
    return ShardFile(name, len(content), {kind: _hash_of(content, kind) for kind in hashes})


def _hash_of(content: bytes, kind: str) -> str:
    digest = new_hash(kind)
    digest.update(content)
    return digest.hexdigest()


def read_shard(folder: Path | str, shard: Shard) -> list[bytes]:
    """Read a shard of an MDS folder (path or s3://): its samples as `encode_sample` made them.

    Raises:
        DataError: the file is missing or damaged.
        MachineError: it cannot be read.
    """
    file = shard.stored
    uri = storage.join(str(folder), file.name)
    content = storage.read(uri)
    digest = file.digest()
    if len(content) != file.num_bytes or (digest is not None and _hash_of(content, digest[0]) != digest[1]):
        raise DataError(f"{storage.shown(uri)} is damaged, it is not what the index describes; write the folder anew")
    if shard.format.compression:
        content = decompress(content, shard, uri)
    (count,) = struct.unpack_from("<I", content)
    starts = struct.unpack_from(f"<{count + 1}I", content, 4)
    return [content[start:end] for start, end in itertools.pairwise(starts)]


def decompress(content: bytes, shard: Shard, uri: str) -> bytes:
    """Decompress the file of a shard, at a URI; a DataError if it is damaged, or not as long as the index says."""
    kind, num_bytes = str(shard.format.compression), shard.raw.num_bytes
    try:
        if codec := STREAMED.get(kind.partition(":")[0]):
            import pyarrow as pa

            content = pa.CompressedInputStream(pa.BufferReader(content), codec).read(num_bytes + 1)
        else:  # Snappy makes at most some twenty bytes of one.
            from streaming.base import compression

            content = compression.decompress(kind, content)
    except MemoryError:
        raise
    except Exception as error:  # Each library has its own.
        raise DataError(f"{storage.shown(uri)} cannot be decompressed ({type(error).__name__}: {error})") from error
    if len(content) != num_bytes:
        found = "more" if len(content) > num_bytes else f"{len(content)} bytes"
        raise DataError(f"{storage.shown(uri)} holds {found} instead of {num_bytes} bytes")
    return content


def write_index(folder: Path | str, shards: Iterable[Shard]) -> None:
    """Write the index of an MDS folder, a path or an s3:// URI, as Streaming does."""
    content = ", ".join(json.dumps(shard.entry, sort_keys=True) for shard in shards)
    storage.write(storage.join(str(folder), INDEX), f'{{"shards": [{content}], "version": 2}}'.encode())


def read_index(folder: Path | str) -> ShardIndex:
    """Read the index of an MDS folder, a path or an s3:// URI.

    Raises:
        DataError: the folder has no index, or one that is damaged.
        MachineError: it cannot be read.
    """
    uri = storage.join(str(folder), INDEX)
    content = storage.read(uri)
    try:
        return ShardIndex(content)
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{storage.shown(uri)} is damaged or not the index of an MDS folder ({error!r}); write the folder anew"
        ) from error


def check_sizes(
    folder: Path | str, shards: Iterable[Shard], files: Mapping[str, storage.StoredFile] | None = None
) -> None:
    """Raise a DataError if the file of a shard is missing, or has another size.

    The `files` of the folder are listed if they are not given.
    """
    found = storage.list_files(str(folder)) if files is None else files
    for name, size, _ in (shard.stored for shard in shards):
        if name not in found or found[name].size != size:
            state = f"has {found[name].size} bytes instead of {size}" if name in found else "is missing"
            raise DataError(f"{storage.join(str(folder), name)} {state}; fetch or write the folder anew")


def shards_with_indices(shards: Iterable[Shard], indices: Sequence[int] = ()) -> Iterator[tuple[int, Shard, list[int]]]:
    """Cut sorted indices of samples of a folder by shard.

    Yields:
        Index of the first sample of a shard, the shard, and the indices that lie in it, counted from there.
    """
    first = 0
    for shard in shards:
        stop = first + shard.num_samples
        yield first, shard, [i - first for i in indices[bisect_left(indices, first) : bisect_left(indices, stop)]]
        first = stop
