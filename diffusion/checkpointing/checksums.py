"""Checksums (xxh64, hexadecimal) of the files of a sharded checkpoint, in `checksums.json` beside them."""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import xxhash

from diffusion.checkpointing.layout import CHECKSUMS
from diffusion.errors import DataError
from diffusion.files import hash_file, write_json

_KIND = "xxh64"
_NUM_THREADS = 8


class HashingFile(BufferedWriter):
    """A new file whose checksum is computed from what is written, before the disk has it.

    Args:
        path: the file, which is written from its beginning to its end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(FileIO(path, "w"))
        self._digest = xxhash.xxh64()

    def write(self, buffer: Any, /) -> int:
        """Write bytes."""
        self._digest.update(buffer)
        return super().write(buffer)

    @property
    def checksum(self) -> str:
        """The checksum of the bytes so far."""
        return self._digest.hexdigest()


def checksum_of(content: bytes) -> str:
    """Compute the checksum of bytes in memory."""
    return xxhash.xxh64(content).hexdigest()


def write_checksums(folder: Path, checksums: dict[str, str]) -> None:
    """Write the checksums of a folder's files, by name."""
    write_json(folder / CHECKSUMS, {name: {_KIND: checksum} for name, checksum in sorted(checksums.items())})


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Read the checksums of a folder's files, by name; None where none were written.

    Raises:
        DataError: they are damaged.
    """
    path = folder / CHECKSUMS
    try:
        return {str(name): str(entry[_KIND]) for name, entry in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def check_checksums(folder: Path, files: Iterable[str]) -> None:
    """Read files entirely, several at a time, and compare them with their checksums, if any were written.

    Args:
        folder: a sharded checkpoint.
        files: names of its files, each of which must have a checksum.

    Raises:
        DataError: a file has changed.
    """
    stored = read_checksums(folder)
    if stored is None:
        return
    names = sorted(set(files))
    if missing := [name for name in names if name not in stored]:
        raise DataError(f"{folder / CHECKSUMS} has no checksum of {missing[0]}")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for name, checksum in zip(names, pool.map(lambda name: _checksum_of_file(folder / name), names), strict=True):
            if checksum != stored[name]:
                raise DataError(f"{folder / name} does not have its checksum: its bytes have changed")


def _checksum_of_file(path: Path) -> str:
    try:
        return hash_file(path, _KIND)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
