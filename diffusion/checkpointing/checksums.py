"""Checksums of the files of a sharded checkpoint, in `checksums.json` beside them."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import xxhash

from diffusion.checkpointing.layout import CHECKSUMS
from diffusion.errors import DataError
from diffusion.files import write_atomically

_BLOCK = 1 << 22
_NUM_THREADS = 8


@dataclass(frozen=True)
class Checksum:
    """What a file was when it was written."""

    xxh64: str
    """Hexadecimal."""

    num_bytes: int


class HashingFile(BufferedWriter):
    """A new file whose checksum is made of what is written to it, before the disk has seen it.

    Args:
        path: the file, which is written from its beginning to its end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "w"))
        self._digest = xxhash.xxh64()
        self._num_bytes = 0

    def write(self, buffer: Any, /) -> int:
        """Write bytes."""
        self._digest.update(buffer)
        written = super().write(buffer)
        self._num_bytes += written
        return written

    @property
    def checksum(self) -> Checksum:
        """Of everything so far."""
        return Checksum(self._digest.hexdigest(), self._num_bytes)


def checksum_of(content: bytes) -> Checksum:
    """The checksum of bytes in memory."""
    return Checksum(xxhash.xxh64(content).hexdigest(), len(content))


def write_checksums(folder: Path, checksums: dict[str, Checksum]) -> None:
    """Store the checksums of a folder's files by name."""
    content = {name: asdict(checksum) for name, checksum in sorted(checksums.items())}
    write_atomically(folder / CHECKSUMS, json.dumps(content, indent=1).encode())


def read_checksums(folder: Path) -> dict[str, Checksum] | None:
    """Checksums by file name; None where none were written.

    Raises:
        DataError: they are damaged.
    """
    path = folder / CHECKSUMS
    try:
        content = json.loads(path.read_bytes())
        return {str(name): Checksum(str(entry["xxh64"]), int(entry["num_bytes"])) for name, entry in content.items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def check_checksums(folder: Path, files: Iterable[str]) -> None:
    """Read files entirely and compare them with their checksums; without checksums, do nothing.

    It takes as long as reading the files does: xxh64 is faster than disks are. Several files are read at once.

    Args:
        folder: a sharded checkpoint.
        files: names of its files, each of which must have a checksum.

    Raises:
        DataError: a file is not what was written.
    """
    stored = read_checksums(folder)
    if stored is None:
        return
    names = sorted(set(files))
    if without := [name for name in names if name not in stored]:
        raise DataError(f"{folder / CHECKSUMS} has no checksum of {without[0]}")
    with ThreadPoolExecutor(min(_NUM_THREADS, max(len(names), 1))) as pool:
        found = pool.map(lambda name: _read_checksum(folder / name), names)
        for name, checksum in zip(names, found, strict=True):
            if checksum != stored[name]:
                raise DataError(f"{folder / name} does not have its checksum: bytes of it have changed")


def _read_checksum(path: Path) -> Checksum:
    digest, num_bytes = xxhash.xxh64(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                num_bytes += len(block)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return Checksum(digest.hexdigest(), num_bytes)
