"""Files and folders that appear under their names only when they are whole, and locks between processes.

Nothing else in this package writes a file beside its name and renames it, or takes a lock of the kernel.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from diffusion.errors import DataError

PARTIAL = ".partial"
"""Ending of the names of files and folders that are being written."""

_BUFFER_BYTES = 2**20
_LOCK_PAUSE_SECONDS = 0.05


@contextmanager
def atomic_path(
    path: Path, *, partial: Path | None = None, exist_ok: bool = True, durable: bool = True
) -> Iterator[Path]:
    """Write a file or a folder that appears under its name when the block has ended.

    If the block raises, nothing is left. What a killed process left under the partial name is removed at the start.

    Args:
        path: the file or folder. An existing file is replaced, an existing folder is not, unless it is empty.
        partial: the path until then, in the same file system; None is `.NAME.partial` beside it. `unique_partial` where
            several processes may write the same path.
        exist_ok: replace an existing file; if not, an existing file or folder stays and the new one is dropped.
        durable: wait for the disk, so that the content is whole after a crash of the machine too.

    Yields:
        The partial path, at which the block makes the file or folder.
    """
    partial = partial or path.with_name(f".{path.name}{PARTIAL}")
    _remove(partial)
    try:
        yield partial
        if path.exists() and not exist_ok:
            return
        if durable:
            for content in [*partial.rglob("*"), partial] if partial.is_dir() else [partial]:
                sync(content)
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        _remove(partial)


def unique_partial(path: Path) -> Path:
    """Name a path beside another for its unfinished form, which no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{PARTIAL}")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write or replace a file that is whole or as before, also after a crash of the machine; text as UTF-8."""
    with atomic_path(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


def csv_text(text: str) -> str:
    """Quote a text that a spreadsheet would run as a formula, with an apostrophe."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as `write_atomically` does; NaN and infinity, which are not JSON, are a ValueError."""
    write_atomically(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a DataError if it does not exist, cannot be read, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged, it is not JSON: {error}") from error


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file of JSON lines; a last line that a kill has cut off is ended first."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.writelines(json.dumps(row).encode() + b"\n" for row in rows)


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Rows of a file of JSON lines, one at a time; None for a damaged line. No file has no rows."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # Also of bytes that are not UTF-8.
                row = None
            yield row if isinstance(row, dict) else None


def new_hash(kind: str) -> Any:
    """Begin a hash: `xxh64` or another one of xxhash, or one of hashlib."""
    return getattr(xxhash, kind)() if hasattr(xxhash, kind) else hashlib.new(kind)


def file_mode(path: Path) -> int:
    """Return the mode of a file or folder, 0 if there is none; `Path.exists` of Python 3.14 hides a failed disk."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def hash_file(path: Path, kind: str) -> str:
    """Return a hash of a file in hexadecimal; the file is read in pieces."""
    digest = new_hash(kind)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
    return digest.hexdigest()


def file_system_time(folder: Path) -> float:
    """Read the clock that dates the files of a folder, which may be another host's, in seconds since 1970.

    It dates a file that is made for that. The clock of this host stands in for it where none can be made.
    """
    path = unique_partial(folder / "clock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.touch()
        try:
            return path.stat().st_mtime
        finally:
            path.unlink()
    except OSError:
        return time.time()


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # CIFS and some FUSE file systems cannot do it for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def lock(path: Path, *, shared: bool = False, timeout: float | None = None) -> Iterator[int]:
    """Hold a lock on a file or folder during the block, as `open_lock` takes it.

    A child that this process forks within the block does not hold the lock: it may outlive this process.
    """
    descriptor = open_lock(path, shared=shared, timeout=timeout)
    _of_this_process.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _of_this_process:
            _of_this_process.remove(descriptor)
            os.close(descriptor)


def open_lock(path: Path, *, shared: bool = False, timeout: float | None = None) -> int:
    """Take a lock on a file or folder (flock), which the kernel releases when its holder ends, for whatever reason.

    Args:
        path: a file, created if it does not exist, or an existing folder.
        shared: several holders at a time, none of them exclusive.
        timeout: seconds to wait for other holders; None waits for ever, 0 not at all.

    Returns:
        A descriptor. The lock is held until it is closed here and in all processes that have inherited it.

    Raises:
        TimeoutError: another process, or another descriptor of this one, holds the lock.
        OSError: the file cannot be opened, or its file system has no locks.
    """
    access = os.O_RDONLY if shared or path.is_dir() else os.O_RDWR
    descriptor = os.open(path, access if path.is_dir() else access | os.O_CREAT, 0o644)
    kind, deadline = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + (timeout or 0.0)
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind if timeout is None else kind | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError as error:
                if timeout is None or time.monotonic() >= deadline:
                    raise TimeoutError(f"{path} is locked by another process") from error
            threading.Event().wait(_LOCK_PAUSE_SECONDS)
    except BaseException:
        os.close(descriptor)
        raise


_of_this_process: set[int] = set()
"""Descriptors of the locks of `lock`."""


def _close_in_child() -> None:
    while _of_this_process:
        os.close(_of_this_process.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
