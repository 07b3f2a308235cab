"""Removed images: hashes by which later scans and selections reject them and their copies, and their positions.

`removed.json` is a sorted list of hashes in hexadecimal: of keys (`removal_hash`) and of the bytes of images
(xxh3_128), 32 digits each, and perceptual hashes, 16 digits each.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion import storage
from diffusion.errors import DataError
from diffusion.formats.data_set import REMOVED


def read_keys(path: Path) -> set[str]:
    """Read a file of keys, one per line; blank lines are skipped.

    A line is a key as it is, spaces and all. One that is a JSON string, `"..."`, stands for the text in it: so keys are
    written that hold a line break or begin with a quotation mark.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a file with one key per line") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}; give a file with one key per line") from error
    return {_parse_line(line.rstrip("\r")) for line in lines if line.strip()}


def _parse_line(line: str) -> str:
    try:
        return str(json.loads(line)) if line.startswith('"') else line
    except ValueError:
        return line


MAX_DISTANCE = 4
"""Maximum number of the 64 bits of the perceptual hash in which an image differs from a removed one that it is like."""


class Removed(frozenset[str]):
    """Content of `removed.json`."""

    @classmethod
    def read(cls, dataset: str) -> "Removed":
        """Read that of a data set (path or s3://); empty if nothing was removed."""
        return cls(storage.read_json(storage.join(dataset, REMOVED), ()))

    @cached_property
    def phashes(self) -> NDArray[np.uint64]:
        """Perceptual hashes: uint64 [N]."""
        return np.array([int(one, 16) for one in sorted(self) if len(one) == 16], np.uint64)

    def has_copy(self, row: Mapping[str, Any]) -> bool:
        """Check whether an image, by its row of the metadata, has the bytes of a removed one or is like it."""
        if row.get("xxh128") in self:
            return True
        phash = row.get("phash")
        return phash is not None and bool((np.bitwise_count(self.phashes ^ np.uint64(phash)) <= MAX_DISTANCE).any())

    def is_like(self, phash: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Check which perceptual hashes are near to that of a removed image: uint64 [N] -> bool [N]."""
        found = np.zeros(len(phash), bool)
        for removed in self.phashes:
            found |= np.bitwise_count(phash ^ removed) <= MAX_DISTANCE
        return found


def add_removed(dataset: str, hashes: Iterable[str]) -> Removed:
    """Add hashes to those that later scans and selections reject; return all."""
    known = Removed.read(dataset)
    new = Removed(known.union(hashes))
    if new != known:
        storage.write_json(storage.join(dataset, REMOVED), sorted(new))
    return new
