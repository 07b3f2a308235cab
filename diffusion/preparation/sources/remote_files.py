"""Sources behind a URL, read through `diffusion.storage` as if they were on this machine.

Credentials come from the environment; they are never part of a source.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from diffusion import storage
from diffusion.datasets.images import MAX_BYTES
from diffusion.errors import DataError
from diffusion.preparation.records import Reason, Refused, file_state, read_bytes, read_image
from diffusion.storage import MissingFileError, StoredFile, check_uri, is_url, shown, stat

_REQUESTS = 16

T = TypeVar("T")


def check_url(url: str) -> None:
    """Raise a DataError if a URL holds credentials, or if its scheme is not known."""
    host = url.partition("://")[2].partition("/")[0]
    if "@" in host:
        raise DataError(
            f"{shown(url)}: the URL holds a user or password, which would reach logs; leave it out and give "
            "credentials in the environment (AWS_ACCESS_KEY_ID and so on, or ~/.netrc for web servers)"
        )
    check_uri(url)


def join(root: str, below: str) -> str:
    """Join a folder, path or URL, and the name of something below it."""
    if not below:
        return root
    return storage.join(root, below) if is_url(root) else os.path.join(root, below)  # noqa: PTH118


def parent_of(place: str) -> str:
    """Return the folder of a file."""
    return place.rpartition("/")[0] if is_url(place) else str(Path(place).parent)


def list_files(url: str) -> dict[str, StoredFile]:
    """List the files below a remote folder, in the order in which a local copy of it would be walked.

    That is: the files of a folder sorted by name, then its folders; without hidden ones. The order in which the store
    lists them is of no consequence.

    Returns:
        For each path below the folder, the file.

    Raises:
        DataError: There is no such bucket.
        MachineError: The store does not answer, or not to these credentials.
    """
    found = storage.list_files(url)
    visible = (name for name in found if not any(part.startswith(".") or not part for part in name.split("/")))
    return {name: found[name] for name in sorted(visible, key=_walk_order)}


def _walk_order(name: str) -> list[tuple[int, str]]:
    """Return what sorts the files of a folder before its folders."""
    *folders, file = name.split("/")
    return [*((1, folder) for folder in folders), (0, file)]


def state_of(place: str) -> str:
    """Return what changes when a file does, for fingerprints: size and time, or a version; `gone` if there is none."""
    if not is_url(place):
        return file_state(place)
    try:
        file = stat(place)
    except MissingFileError:
        return "gone"
    return f"{file.size} {file.version}"


def each(function: Callable[[str], T], places: Sequence[str]) -> list[T]:
    """Call a function for each of several places, for remote ones with a few requests at a time; results in order."""
    if not any(map(is_url, places)):
        return [function(place) for place in places]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(function, places))


def open_file(place: str, *, buffer_bytes: int | None = None) -> BinaryIO:
    """Open a local or remote file for reading, as `storage.open_file` does.

    Raises:
        OSError: There is no such file, or it may not be read.
        MachineError: The store does not answer, now or in a later read.
        DataError: A later read finds that the file was changed.
    """
    if not is_url(place):
        return open(place, "rb")  # noqa: PTH123
    return storage.open_file(place, buffer_bytes=buffer_bytes)


def read_file(place: str) -> bytes:
    """Read a whole, small local or remote file; errors as for `open_file`."""
    return storage.read(place, stop=MAX_BYTES + 1) if is_url(place) else read_bytes(place)


def read_remote_image(place: str, key: str) -> bytes | Refused:
    """Read an image file; a refusal if it is missing or may not be read.

    Raises:
        MachineError: The disk, the network or the store fails, or the package for the URL is not installed.
    """
    if not is_url(place):
        return read_image(place, key)
    try:
        check_url(place)
        return read_file(place)
    except FileNotFoundError:
        return Refused(key, Reason.MISSING_IMAGE, "there is no such file")
    except PermissionError:
        return Refused(key, Reason.UNREADABLE, "no permission to read the file")
    except DataError as error:
        return Refused(key, Reason.UNREADABLE, str(error))
