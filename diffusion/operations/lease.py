"""The lease of a run folder: one start of a run at a time, whatever host it is on.

A lock of the operating system is not enough: a file system that several hosts share may not pass it on, and does not
name its holder. So rank 0 keeps a file and renews it, and every rank looks whether it is still that of its own start.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed

from diffusion.distributed import agree, has_process_group, rank
from diffusion.errors import MachineError
from diffusion.operations.stacks import is_alive

log = logging.getLogger(__name__)

LEASE = "lease.json"
"""In the run folder while a start of the run is active."""

RENEWAL_SECONDS = 10.0
"""Between two renewals."""

LEASE_SECONDS = 90.0
"""A lease of another host that is not renewed for so long has run out."""

_RECORD_BYTES = 512
"""Size of the file, which never changes: a renewal needs no room on a disk that is full."""

_PAUSE_SECONDS = 0.5
"""Between two looks at the lease of another start."""

_HOST = socket.gethostname()
_PROC = Path("/proc/self/ns/pid")
_NAMESPACE = str(_PROC.readlink()) if _PROC.is_symlink() else ""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The start of a run that has the lease."""

    host: str
    namespace: str
    """Of the process IDs: containers may have one host name and other processes."""

    pid: int
    time: float
    """When it took the lease, in seconds since 1970 by its clock."""

    token: str
    """Its own."""


class Lease:
    """A lease as a rank of its start sees it.

    Args:
        path: the file.
        holder: rank 0 of the start.
        descriptor: the file, open on rank 0, which renews it.
    """

    def __init__(self, path: Path, holder: Holder, descriptor: int | None) -> None:
        self._path, self._holder, self._descriptor = path, holder, descriptor
        self._count, self._is_seen, self._seen_at = 0, descriptor is not None, time.monotonic()

    def renew(self) -> None:
        """Renew the lease, on rank 0, and look whether another start has taken it.

        Raises:
            MachineError: another start has.
        """
        try:
            if self._descriptor is not None:
                self._count += 1
                _write(self._descriptor, self._holder, self._count)
            holder, _ = _read(self._path)
        except OSError as error:
            log.warning("the lease %s cannot be renewed: %s", self._path, error.strerror)
            return
        if holder is not None and holder.token == self._holder.token:
            self._is_seen, self._seen_at = True, time.monotonic()
        elif holder is not None and self._is_seen:  # A node's own folder may hold an old one.
            raise MachineError(
                f"process {holder.pid} on {holder.host} has started this run again, and taken over its lease "
                f"{self._path}, which was not renewed for a while: this start ends"
            )

    def check(self) -> None:
        """Look for another start, if nobody has for a while, as after a suspension of this process.

        Raises:
            MachineError: there is one.
        """
        if time.monotonic() - self._seen_at > LEASE_SECONDS / 2:
            self.renew()

    def release(self) -> None:
        """Give the lease back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            with suppress(OSError):
                if (holder := _read(self._path)[0]) is not None and holder.token == self._holder.token:
                    self._path.unlink()


@contextmanager
def leased(folder: Path) -> Iterator[Lease]:
    """Hold the lease of a run folder. To be called by all ranks.

    The lease of a process of this host that is dead is taken over at once; another one when it has run out.

    Raises:
        MachineError: another start of the run is active, or the folder cannot be written.
    """
    path, descriptor = folder / LEASE, None
    holders = [Holder(host=_HOST, namespace=_NAMESPACE, pid=os.getpid(), time=time.time(), token=secrets.token_hex(8))]

    def take() -> None:
        nonlocal descriptor
        try:
            descriptor = _take(path, holders[0])
        except OSError as error:
            raise MachineError(f"the lease {path} cannot be written: {error.strerror}") from error

    agree(lambda: take() if rank() == 0 else None, takes_long=True)
    if has_process_group():
        torch.distributed.broadcast_object_list(holders)
    lease = Lease(path, holders[0], descriptor)
    try:
        yield lease
    finally:
        lease.release()


def _take(path: Path, own: Holder) -> int:
    """Create the file when there is none, or none that counts."""
    seen, since, pause = b"", time.monotonic(), threading.Event()
    while True:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            _write(descriptor, own, 0)
            return descriptor
        holder, content = _read(path)
        is_here = holder is not None and (holder.host, holder.namespace) == (_HOST, _NAMESPACE)
        if is_here and holder is not None and not is_alive(holder):
            _remove(path, content)
            continue
        if content != seen:
            if holder is not None and seen:
                raise _at_work(path, holder)
            seen, since = content, time.monotonic()
            if holder is not None:
                what = "process %d on %s had %s: waiting for up to %.0f s for a sign that it is still running"
                log.warning(what, holder.pid, holder.host, path, LEASE_SECONDS)
        if time.monotonic() - since > LEASE_SECONDS:
            if is_here and holder is not None:
                raise _at_work(path, holder)
            _remove(path, content)
            continue
        pause.wait(_PAUSE_SECONDS)


def _at_work(path: Path, holder: Holder) -> MachineError:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.time))
    return MachineError(
        f"the run {path.parent} is running already: process {holder.pid} on {holder.host}, since {began}. End that one "
        "(SIGTERM saves it) or wait for its end; or set another run_name or output_folder"
    )


def _remove(path: Path, content: bytes) -> None:
    """Remove a lease that has run out; one that another start has put in its place meanwhile comes back."""
    aside = path.with_name(f"{LEASE}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if aside.read_bytes() == content:
            aside.unlink()
        else:
            aside.rename(path)


def _write(descriptor: int, holder: Holder, count: int) -> None:
    content = json.dumps({**asdict(holder), "count": count}).encode()
    os.pwrite(descriptor, content.ljust(_RECORD_BYTES - 1) + b"\n", 0)
    os.fsync(descriptor)  # Other hosts see it then.


def _read(path: Path) -> tuple[Holder | None, bytes]:
    """Who holds a lease, None if nobody does or it is being written; and the bytes of the file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None, b""
    try:
        fields = json.loads(content)
        del fields["count"]
        return Holder(**fields), content
    except (ValueError, TypeError, KeyError):
        return None, content
