"""Samples from MDS files: read from files that stay open, and only the columns that are wanted.

Streaming opens the file for each sample, reads its place, reads the sample, and decodes all columns; that takes about
as long as everything else that is done with a latent.
"""

import os
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from streaming.base.format.mds.encodings import mds_decode

MAX_OPEN = 256
"""Files that a process keeps open."""

_PLACE = struct.Struct("<2I")


class ShardFiles:
    """Reads samples of shards, and keeps the files that were opened last open.

    Args:
        max_open: files that stay open; 0 where files may be removed to make room, which open ones would keep occupied.
    """

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
        if descriptor is not None:
            return _read(descriptor, index)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if self._max_open:
            while len(self._open) >= self._max_open:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = descriptor
            return _read(descriptor, index)
        try:
            return _read(descriptor, index)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Close all files; they are opened again when they are needed."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _read(descriptor: int, index: int) -> bytes:
    """Read a sample of a file that begins with the number of samples and the place of each."""
    begin, end = _PLACE.unpack(_whole(os.pread(descriptor, 8, 4 * (1 + index)), 8))
    if begin > end:
        raise ValueError(f"it begins at byte {begin} and ends at byte {end}")
    return _whole(os.pread(descriptor, end - begin, begin), end - begin)


def _whole(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes instead of {size}: the file is cut off")
    return data


@dataclass(frozen=True)
class _Column:
    """One column: its name, and what makes its value of a sample's bytes from a place on."""

    name: str
    size: int | None
    """Bytes; None where each sample says."""

    decode: Callable[[bytes, int, int], Any] | None
    """Of the sample's bytes, the place and the size; None for a column that is not wanted."""


class SampleDecoder:
    """Makes the columns of a sample from its bytes.

    Args:
        names: of the columns, as the index has them.
        encodings: MDS types of the columns.
        sizes: bytes of each column; None (or 0) where it varies.
        wanted: columns to decode; None is all.
    """

    def __init__(
        self,
        names: Sequence[str],
        encodings: Sequence[str],
        sizes: Sequence[int | None],
        wanted: Collection[str] | None = None,
    ) -> None:
        self._columns = [
            _Column(name, size or None, _decoder(encoding) if wanted is None or name in wanted else None)
            for name, encoding, size in zip(names, encodings, sizes, strict=True)
        ]
        self._sizes = struct.Struct(f"<{sum(column.size is None for column in self._columns)}I")

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
        place = self._sizes.size
        sample = {}
        for column in self._columns:
            size = column.size if column.size is not None else next(sizes)
            if column.decode is not None:
                sample[column.name] = column.decode(data, place, size)
            place += size
        if place != len(data):
            raise ValueError(f"its columns take {place} bytes, but it has {len(data)}")
        return sample


def _decoder(encoding: str) -> Callable[[bytes, int, int], Any]:
    """What decodes a column: arrays of a fixed shape directly, others by Streaming."""
    kind, _, rest = encoding.partition(":")
    name, _, text = rest.partition(":")
    if kind == "bytes":
        return lambda data, place, size: data[place : place + size]
    if kind != "ndarray" or not text:
        return lambda data, place, size: mds_decode(encoding, data[place : place + size])
    dtype = np.dtype(name).newbyteorder("<")
    shape = tuple(int(number) for number in text.split(","))
    count = int(np.prod(shape))
    return lambda data, place, size: np.frombuffer(data, dtype, count, place).reshape(shape)
