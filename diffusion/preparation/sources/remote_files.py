"""Files behind a URL, read as if they were on this machine: listed in one order, opened, and read by ranges.

`s3://` is read through boto3, `http://` and `https://` through requests, and `gs://`, `hf://`, `az://` and `abfs://`
through fsspec (with gcsfs, huggingface_hub and adlfs). Only S3 and the web are tested against servers, fsspec against
its `memory://`. Credentials come from the environment only, as each library reads them; they are never part of a
source, and no message shows a URL's user, password or query.
"""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from diffusion.datasets.images import MAX_BYTES
from diffusion.errors import DataError
from diffusion.preparation.records import Reason, Refused, file_state, read_bytes, read_image
from diffusion.preparation.sources.remote_stores import RemoteFile, Store, shown, store_of

BLOCK_BYTES = 8 * 2**20
"""Most bytes that are asked for at once."""

_REQUESTS = 16

T = TypeVar("T")


def is_url(place: str) -> bool:
    """Return whether a place is a URL, not a path."""
    return "://" in place


def check_url(url: str) -> None:
    """Refuse a URL that holds credentials, or whose scheme is not known.

    Raises:
        DataError: It does.
        MachineError: The package for its scheme is not installed.
    """
    host = url.partition("://")[2].partition("/")[0]
    if "@" in host:
        raise DataError(
            f"{shown(url)}: the URL holds a user or password, which would reach logs; leave it out and give "
            "credentials in the environment (AWS_ACCESS_KEY_ID and so on, or ~/.netrc for web servers)"
        )
    store_of(url)


def join(root: str, below: str) -> str:
    """Join a folder, path or URL, and the name of something below it."""
    if not below:
        return root
    return f"{root.rstrip('/')}/{below}" if is_url(root) else os.path.join(root, below)  # noqa: PTH118


def parent_of(place: str) -> str:
    """Return the folder that a file lies in."""
    return place.rpartition("/")[0] if is_url(place) else str(Path(place).parent)


def list_files(url: str) -> dict[str, RemoteFile]:
    """List the files below a remote folder, in the order in which a local copy of it would be walked.

    That is: the files of a folder sorted by name, then its folders; hidden ones are left out. The order in which the
    store lists them is of no consequence.

    Returns:
        For each path below the folder, the file.

    Raises:
        DataError: There is no such bucket.
        MachineError: The store does not answer, or not to these credentials.
    """
    root = url.rstrip("/") + "/"
    found = {file.url.removeprefix(root): file for file in store_of(url).find(root)}
    visible = (name for name in found if not any(part.startswith(".") or not part for part in name.split("/")))
    return {name: found[name] for name in sorted(visible, key=_walk_order)}


def _walk_order(name: str) -> list[tuple[int, str]]:
    """Return what sorts the files of a folder before its folders."""
    *folders, file = name.split("/")
    return [*((1, folder) for folder in folders), (0, file)]


def exists(place: str) -> bool:
    """Return whether there is a file.

    Raises:
        DataError: The bucket does not exist.
        MachineError: The store does not answer, or not to these credentials.
    """
    if not is_url(place):
        return Path(place).is_file()
    try:
        store_of(place).look(place)
    except FileNotFoundError:
        return False
    return True


def state_of(place: str) -> str:
    """Return what changes when a file does, for fingerprints: size and time, or a version; `gone` if there is none."""
    if not is_url(place):
        return file_state(place)
    try:
        file = store_of(place).look(place)
    except FileNotFoundError:
        return "gone"
    return f"{file.size} {file.version}"


def each(function: Callable[[str], T], places: Sequence[str]) -> list[T]:
    """Call a function for each of several places, for remote ones with a few requests at a time; results in order."""
    if not any(map(is_url, places)):
        return [function(place) for place in places]
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(function, places))


def open_file(place: str, *, buffer_bytes: int | None = None) -> BinaryIO:
    """Open a local or remote file for reading.

    Args:
        place: Path or URL.
        buffer_bytes: Bytes that a remote file is read ahead, None for BLOCK_BYTES; 0 for none, where the caller reads
            in large pieces.

    Raises:
        OSError: There is no such file, or it may not be read.
        MachineError: The store does not answer, now or in a later read.
        DataError: A later read finds that the file was changed.
    """
    if not is_url(place):
        return open(place, "rb")  # noqa: PTH123
    store = store_of(place)
    file = RangeFile(store, store.look(place))
    if buffer_bytes is None:
        buffer_bytes = BLOCK_BYTES
    return io.BufferedReader(file, buffer_bytes) if buffer_bytes else file  # pyright: ignore[reportReturnType]


def read_file(place: str) -> bytes:
    """Read a whole, small local or remote file; errors as for `open_file`."""
    return store_of(place).read_whole(place, MAX_BYTES) if is_url(place) else read_bytes(place)


def read_remote_image(place: str, key: str) -> bytes | Refused:
    """Read an image file; a refusal if it is not there or may not be read.

    Raises:
        MachineError: The disk, the network or the store fails, or the package for the URL is not installed.
    """
    if not is_url(place):
        return read_image(place, key)
    try:
        check_url(place)
        return store_of(place).read_whole(place, MAX_BYTES)
    except FileNotFoundError:
        return Refused(key, Reason.MISSING_IMAGE, "there is no such file")
    except PermissionError:
        return Refused(key, Reason.UNREADABLE, "no permission to read the file")
    except DataError as error:
        return Refused(key, Reason.UNREADABLE, str(error))


class RangeFile(io.RawIOBase):
    """A remote file that is read by ranges: nothing is downloaded that is not asked for, nothing is kept.

    Args:
        store: Where it is.
        file: What the store says about it.
    """

    def __init__(self, store: Store, file: RemoteFile) -> None:
        super().__init__()
        self._store, self._file, self._position = store, file, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what one request yields; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._position + BLOCK_BYTES, self._file.size)
        if stop <= self._position:
            return 0
        data = self._store.read(self._file, self._position, stop)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return exactly `size` bytes unless the file ends, which Arrow relies on."""
        rest = max(0, self._file.size - self._position)
        data = bytearray(rest if size is None or size < 0 else min(size, rest))
        filled = 0
        while filled < len(data):
            filled += self.readinto(memoryview(data)[filled:])
        return bytes(data)
