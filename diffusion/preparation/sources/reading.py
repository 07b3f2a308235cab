"""Files of sources: names, listing, reading within limits.

Only regular files are opened, and of a local folder only files that lie in it: links that lead out are not followed.
Credentials come from the environment; they are never part of a source.
"""

import errno
import functools
import json
import logging
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import BinaryIO, NamedTuple

from diffusion import storage
from diffusion.errors import DataError, MachineError, printable
from diffusion.preparation.records import Reason, has_surrogates
from diffusion.storage import is_url, shown

logger = logging.getLogger(__name__)

_LOCAL_BUFFER = 2**20
_DESCRIPTORS = "/proc/self/fd"
_OF_THE_FILE = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EINVAL)
_NO_FILE = "a pipe, a socket or a device, no file"
LEADS_OUT = "the table's path leads out of its folder; write it relative to the table"
_LINK_LEADS_OUT = (
    "a link that leads out of the source's folder, which is not followed; copy the files, as cp -rL does (of the hub's "
    "cache, download with --local-dir)"
)


class UnfitFileError(Exception):
    """A file is not read: why, as a rejection has it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Entry(NamedTuple):
    """A file of a listing."""

    name: str
    """Path below the folder, with forward slashes; bytes that are not UTF-8 as surrogates."""
    size: int
    version: str
    """Changes with the content."""
    problem: str = ""
    """Why it cannot be read; empty if it can."""


# Names


def file_of(name: str) -> str:
    """Write a file name for a `Location`: as it is, or as JSON where it is not UTF-8 or looks like that."""
    return json.dumps(name) if has_surrogates(name) or (name[:1] == name[-1:] == '"') else name


def name_of(file: str) -> str:
    """Return the name that `file_of` wrote."""
    return json.loads(file) if file[:1] == file[-1:] == '"' else file


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, where `**` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(matches(parts[start:], pattern[1:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:])


# Listing


def list_folder(root: str) -> Iterator[Entry]:
    """List the files below a folder as a stream, in no order; hidden files and folders are skipped.

    Raises:
        DataError: there is no such bucket.
        MachineError: the folder cannot be listed, or the store does not answer.
    """
    if not is_url(root):
        yield from _list_local(root)
        return
    prefix = root.rstrip("/") + "/"
    for file in storage.iterate_files(root):
        name = file.uri.removeprefix(prefix)
        if not any(part.startswith(".") or not part for part in name.split("/")):
            yield Entry(name, file.size, f"{file.size} {file.version}")


def _list_local(root: str) -> Iterator[Entry]:
    top, folders = os.path.realpath(root), [(root, "")]
    while folders:
        folder, below = folders.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = f"{below}{entry.name}"
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, f"{name}/"))
                    elif not entry.is_symlink():
                        yield _entry(name, entry.stat())
                    elif not os.path.isdir(entry.path):  # noqa: PTH112 - false where it is denied
                        yield stat_file(entry.path, top, name)
                    elif is_outside(entry.path, top):  # Inside the source, the folder itself is listed.
                        _warn_of_link(printable(entry.path))
        except OSError as error:
            where = printable(str(error.filename or folder))
            raise MachineError(f"cannot list {where}: {error.strerror}; fix that or take the folder out") from error


@functools.lru_cache
def _warn_of_link(path: str) -> None:
    logger.warning("%s leads out of the source's folder, and is not followed; name its target as a source", path)


def _entry(name: str, status: os.stat_result) -> Entry:
    problem = "" if stat.S_ISREG(status.st_mode) else _NO_FILE
    return Entry(name, status.st_size, f"{status.st_size} {status.st_mtime_ns}", problem)


def stat_file(uri: str, top: str | None = None, name: str = "") -> Entry:
    """Return the entry of one file; `top` is the real path of the folder that it must not lead out of."""
    if is_url(uri):
        file = storage.stat(uri)
        return Entry(name, file.size, f"{file.size} {file.version}")
    try:
        if top is not None and is_outside(uri, top):
            return Entry(name, 0, "", _LINK_LEADS_OUT)
        return _entry(name, os.stat(uri))  # noqa: PTH116
    except OSError as error:
        return Entry(name, 0, "", error.strerror or "unreadable")


def is_outside(path: str, top: str) -> bool:
    """Return whether a local path, with its links followed, lies outside a folder, of which `top` is the real path."""
    return not os.path.realpath(path).startswith(top.rstrip("/") + "/")


# Reading


def read_file(uri: str, limit: int, root: str | None = None) -> bytes:
    """Read a listed file of at most `limit` bytes; no link may lead out of the local folder `root`, if one is given.

    Raises:
        UnfitFileError: it does not exist, may not be read, is no regular file, is larger, or leads out of the folder.
        MachineError: the disk or the network fails, or a store denies access.
    """
    with _unfit(uri):
        if is_url(uri):
            data = storage.read(uri, stop=limit + 1)
        else:
            with _open_local(uri, root) as file:  # Buffered: it reads on after a short read, whose error would be lost.
                size = os.fstat(file.fileno()).st_size
                if size > limit:
                    raise UnfitFileError(Reason.TOO_LARGE, f"{size} bytes are more than {limit}")
                data = file.read(size + 1)
    if len(data) > limit:
        raise UnfitFileError(Reason.TOO_LARGE, f"more than {limit} bytes")
    return data


def _open_local(path: str, root: str | None) -> BinaryIO:
    """Open a regular file; a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnfitFileError(Reason.UNREADABLE, _NO_FILE)
        # By the descriptor, on Linux: links may replace parts of the path at any time.
        opened = f"{_DESCRIPTORS}/{descriptor}" if os.path.isdir(_DESCRIPTORS) else path  # noqa: PTH112
        if root is not None and is_outside(opened, os.path.realpath(root)):
            raise UnfitFileError(Reason.UNREADABLE, _LINK_LEADS_OUT)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb", _LOCAL_BUFFER)


def open_file(uri: str, root: str | None = None, *, buffer_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading, in ranges of 8 MiB (or `buffer_bytes`) if it is remote.

    A link must not lead out of the local folder `root`, if one is given. Errors are those of `read_file`.
    """
    with _unfit(uri):
        if is_url(uri):
            return storage.open_file(uri, buffer_bytes=buffer_bytes)
        return _open_local(uri, root)


@contextmanager
def _unfit(uri: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        raise UnfitFileError(Reason.MISSING_IMAGE, "there is no such file") from error
    except OSError as error:
        if isinstance(error, MachineError | DataError):
            raise
        if error.errno in _OF_THE_FILE:
            raise UnfitFileError(Reason.UNREADABLE, os.strerror(error.errno or 0)) from error
        raise MachineError(f"cannot read {printable(shown(uri))}: {error.strerror}") from error


def leads_out(path: str) -> bool:
    """Check whether a path in a table leads out of the table's folder."""
    name = posixpath.normpath(path)
    return name.startswith(("../", "/")) or name == ".."


def read_below(folder: str, path: str, limit: int) -> bytes:
    """Read the file that a row of a table names, as `read_file` does.

    A relative path begins in `folder`, that of the table, and an absolute one with it. Neither the path nor a link may
    lead out of it.
    """
    name = path.removeprefix(f"{folder.rstrip('/')}/")
    if is_url(name) or name.startswith("//"):
        detail = "the row holds a URL, which is not fetched; download the images first, for example with img2dataset"
        raise UnfitFileError(Reason.MISSING_IMAGE, detail)
    if leads_out(name):
        raise UnfitFileError(Reason.UNREADABLE, LEADS_OUT)
    return read_file(storage.join(folder, posixpath.normpath(name)), limit, folder)
