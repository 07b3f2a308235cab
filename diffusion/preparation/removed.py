"""Removed images: their keys, which later scans reject, and their positions, which training does not use."""

import json
from collections.abc import Iterable
from pathlib import Path

from diffusion import storage
from diffusion.datasets.manifest import REMOVED_SAMPLES
from diffusion.errors import DataError
from diffusion.preparation.layout import REMOVED
from diffusion.preparation.metadata import hash_key


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


def read_removed(dataset: str) -> frozenset[str]:
    """Read the hashes of the removed keys of a data set (path or s3://); none if nothing was removed."""
    uri = storage.join(dataset, REMOVED)
    return frozenset(storage.read_json(uri) if storage.exists(uri) else ())


def add_removed(dataset: str, keys: Iterable[str]) -> None:
    """Add keys to those that later scans reject."""
    known = read_removed(dataset)
    hashes = known.union(map(hash_key, keys))
    if hashes != known:
        storage.write_json(storage.join(dataset, REMOVED), sorted(hashes))


def read_marks(dataset: str) -> dict[str, list[int]]:
    """Read the indices of the removed samples by `<split>/<bucket>`; empty if nothing was removed."""
    uri = storage.join(dataset, REMOVED_SAMPLES)
    return storage.read_json(uri) if storage.exists(uri) else {}
