"""Lease of a run folder: one start of a run at a time, on any host.

A lock of the kernel is not enough: not every shared file system passes it on to other hosts, and it does not name its
holder. So rank 0 writes and renews a file, and every rank checks that it still belongs to its own start.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed

from diffusion.distributed import agree, has_process_group, rank
from diffusion.errors import MachineError
from diffusion.operations import timeouts
from diffusion.operations.processes import ProcessRecord, is_alive

log = logging.getLogger(__name__)

LEASE_FILE = "lease.json"
"""File in the run folder during a start of the run."""

_RECORD_BYTES = 512
"""Constant size of the file: a renewal needs no space on a full disk."""

_HOST = socket.gethostname()
_PROC = Path("/proc/self/ns/pid")
_NAMESPACE = str(_PROC.readlink()) if _PROC.is_symlink() else ""


@dataclass(frozen=True, kw_only=True)
class Holder(ProcessRecord):
    """Rank 0 of the start that holds the lease, since the time of its acquisition."""

    namespace: str
    """Namespace of the process IDs: containers may share a host name, but not the processes."""

    token: str
    """Random identity of the start."""


class Lease:
    """Lease of a start, as seen by one of its ranks; rank 0 has the open file and renews it."""

    def __init__(self, path: Path, holder: Holder, descriptor: int | None) -> None:
        self._path, self._holder, self._descriptor = path, holder, descriptor
        self._num_renewals = 0
        self._is_confirmed, self._confirmed_at = descriptor is not None, time.monotonic()

    def renew(self) -> None:
        """Renew the lease on rank 0; on all ranks, check that it still belongs to this start.

        Raises:
            MachineError: another start has taken it over.
        """
        try:
            if self._descriptor is not None:
                self._num_renewals += 1
                _write(self._descriptor, self._holder, self._num_renewals)
            holder, _ = _read(self._path)
        except OSError as error:
            log.warning("the lease %s cannot be renewed: %s", self._path, error.strerror)
            return
        if holder is not None and holder.token == self._holder.token:
            self._is_confirmed, self._confirmed_at = True, time.monotonic()
        elif holder is not None and self._is_confirmed:  # An unshared folder of another node may contain an old one.
            raise MachineError(
                f"process {holder.pid} on {holder.host} has started this run again and taken over its lease "
                f"{self._path}, which was not renewed for a while: this start ends"
            )

    def check(self) -> None:
        """Check for another start if the last renewal is too long ago, as after a suspension of this process.

        Raises:
            MachineError: another start has taken over the lease.
        """
        if time.monotonic() - self._confirmed_at > timeouts.LEASE / 2:
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
    """Hold the lease of a run folder; called by all ranks.

    A lease of a dead process of this host is taken over at once, any other one after its expiry.

    Raises:
        MachineError: another start of the run is active, or the folder cannot be written.
    """
    path, descriptor = folder / LEASE_FILE, None
    holders = [Holder(host=_HOST, namespace=_NAMESPACE, pid=os.getpid(), time=time.time(), token=secrets.token_hex(8))]

    def acquire() -> None:
        nonlocal descriptor
        try:
            descriptor = _acquire(path, holders[0])
        except OSError as error:
            raise MachineError(f"the lease {path} cannot be written: {error.strerror}") from error

    agree(lambda: acquire() if rank() == 0 else None, takes_long=True)
    if has_process_group():
        torch.distributed.broadcast_object_list(holders)
    lease = Lease(path, holders[0], descriptor)
    try:
        yield lease
    finally:
        lease.release()


def _acquire(path: Path, own: Holder) -> int:
    """Create the file; if it exists, wait for its expiry or the proof that its holder is alive."""
    content, unchanged_since = b"", time.monotonic()
    while True:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            _write(descriptor, own, 0)
            return descriptor
        before, (holder, content) = content, _read(path)
        if content != before:
            unchanged_since = time.monotonic()
        has_expired = time.monotonic() - unchanged_since > timeouts.LEASE
        if holder is None:  # It is being created or removed, or damaged.
            if has_expired:
                _remove(path, content)
        elif (holder.host, holder.namespace) == (_HOST, _NAMESPACE):
            if is_alive(holder):
                raise _already_running(path, holder)
            _remove(path, content)
        elif has_expired:
            _remove(path, content)
        elif content != before and before:  # It was renewed.
            raise _already_running(path, holder)
        elif content != before:
            message = "process %d on %s holds %s: waiting up to %.0f s for its next renewal"
            log.warning(message, holder.pid, holder.host, path, timeouts.LEASE)
        time.sleep(0.5)


def _already_running(path: Path, holder: Holder) -> MachineError:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.time))
    return MachineError(
        f"the run {path.parent} is running already: process {holder.pid} on {holder.host}, since {began}. End that one "
        "(SIGTERM saves it) or wait for its end; or set another run_name or output_folder"
    )


def _remove(path: Path, content: bytes) -> None:
    """Remove an expired lease, but not the one with which another start has replaced it meanwhile."""
    aside = path.with_name(f"{LEASE_FILE}.{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if aside.read_bytes() == content:
            aside.unlink()
        else:
            aside.rename(path)


def _write(descriptor: int, holder: Holder, num_renewals: int) -> None:
    content = json.dumps({**asdict(holder), "count": num_renewals}).encode()
    os.pwrite(descriptor, content.ljust(_RECORD_BYTES - 1) + b"\n", 0)
    os.fsync(descriptor)  # Other hosts see it then.


def _read(path: Path) -> tuple[Holder | None, bytes]:
    """Read a lease: its holder, None without a complete one, and the bytes of the file."""
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
