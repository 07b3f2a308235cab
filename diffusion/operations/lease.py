"""Leases: one start of a run at a time, and one watcher for each checkpoint, on any host.

A lock of the kernel is not enough: not every shared file system passes it on to other hosts, and it does not name its
holder. So a process creates and renews a file, and others take it over when it is not renewed any more. Of a run, rank
0 does so, and every rank checks that the file still belongs to its own start.
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

from diffusion.distributed import USER_ERROR_EXIT_CODE, agree, broadcast, rank
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
    """Process that holds a lease, since the time of its acquisition; of a run, rank 0."""

    namespace: str
    """Namespace of the process IDs: containers may share a host name, but not the processes."""

    token: str
    """Random identity of the lease."""


class Lease:
    """Lease of this process or, without an open file, of rank 0 of its job, which renews it."""

    def __init__(self, path: Path, holder: Holder, descriptor: int | None) -> None:
        self.holder = holder
        self._path, self._descriptor = path, descriptor
        self._num_renewals = 0
        self._is_confirmed, self._confirmed_at = descriptor is not None, time.monotonic()

    def renew(self) -> None:
        """Renew the lease in the process that has its file; in all, check that it still belongs to this job.

        Raises:
            MachineError: another process has taken it over.
        """
        try:
            if self._descriptor is not None:
                self._num_renewals += 1
                _write(self._descriptor, self.holder, self._num_renewals)
            holder, _ = _read(self._path)
        except OSError as error:
            log.warning("the lease %s cannot be renewed: %s", self._path, error.strerror)
            return
        if holder is not None and holder.token == self.holder.token:
            self._is_confirmed, self._confirmed_at = True, time.monotonic()
        elif holder is not None and self._is_confirmed:  # An unshared folder of another node may contain an old one.
            raise MachineError(
                f"process {holder.pid} on {holder.host} has taken over the lease {self._path}, which was not renewed "
                "for a while: this process ends"
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
                if (holder := _read(self._path)[0]) is not None and holder.token == self.holder.token:
                    self._path.unlink()


class Applicant:
    """Asks for a lease again and again, and observes its holder meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content, self._unchanged_since = b"", time.monotonic()
        self.holder: Holder | None = None
        """Holder of the lease at the last attempt."""

        self.is_held = False
        """Whether the holder is known to be alive: as a process of this host, or because it has renewed the lease."""

    def acquire(self) -> Lease | None:
        """Acquire the lease, or return None while its holder may be alive.

        A lease of a dead process of this host is taken over at once, any other one after its expiry.

        Raises:
            OSError: the file cannot be written.
        """
        while True:
            with suppress(FileExistsError):
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                own = {"pid": os.getpid(), "time": time.time(), "token": secrets.token_hex(8)}
                lease = Lease(self._path, Holder(host=_HOST, namespace=_NAMESPACE, **own), descriptor)
                _write(descriptor, lease.holder, 0)
                return lease
            before, (self.holder, self._content) = self._content, _read(self._path)
            if self._content != before:
                self._unchanged_since = time.monotonic()
            if self.holder is not None and _is_here(self.holder):
                self.is_held = is_alive(self.holder)
                is_over = not self.is_held
            else:  # Without a holder it is being created or removed, or damaged.
                self.is_held = self.holder is not None and before not in (b"", self._content)
                is_over = time.monotonic() - self._unchanged_since > timeouts.LEASE
            if not is_over:
                return None
            _remove(self._path, self._content)


def active_holder(path: Path) -> Holder | None:
    """Return the holder of a lease that is alive: a process of this host, or one that has renewed the lease lately."""
    holder, _ = _read(path)
    if holder is None:
        return None
    if _is_here(holder):
        return holder if is_alive(holder) else None
    with suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime < 2 * timeouts.LEASE:
            return holder
    return None


@contextmanager
def held(lease: Lease) -> Iterator[None]:
    """Renew a lease in a thread during the block, and give it back at its end.

    The process ends when another one has taken the lease over.
    """
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(timeouts.RENEWAL):
            try:
                lease.renew()
            except MachineError as error:
                log.critical("%s", error)
                os._exit(USER_ERROR_EXIT_CODE)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lease.release()


@contextmanager
def leased(folder: Path) -> Iterator[Lease]:
    """Hold the lease of a run folder; called by all ranks.

    Raises:
        MachineError: another start of the run is active, or the folder cannot be written.
    """
    path, lease = folder / LEASE_FILE, None

    def acquire() -> None:
        nonlocal lease
        try:
            lease = _await_lease(path)
        except OSError as error:
            raise MachineError(f"the lease {path} cannot be written: {error.strerror}") from error

    agree(lambda: acquire() if rank() == 0 else None, takes_long=True)
    holder = broadcast(lease.holder if lease is not None else None)
    assert holder is not None
    lease = lease or Lease(path, holder, None)
    try:
        yield lease
    finally:
        lease.release()


def _await_lease(path: Path) -> Lease:
    """Acquire a lease, after its expiry if need be, or prove that its holder is alive."""
    applicant, is_waiting = Applicant(path), False
    while (lease := applicant.acquire()) is None:
        if (holder := applicant.holder) is not None:
            if applicant.is_held:
                raise _already_running(path, holder)
            if not is_waiting:
                is_waiting = True
                message = "process %d on %s holds %s: waiting up to %.0f s for its next renewal"
                log.warning(message, holder.pid, holder.host, path, timeouts.LEASE)
        time.sleep(0.5)
    return lease


def _already_running(path: Path, holder: Holder) -> MachineError:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.time))
    return MachineError(
        f"the run {path.parent} is running already: process {holder.pid} on {holder.host}, since {began}. End that one "
        "(SIGTERM saves it) or wait for its end; or set another run_name or output_folder"
    )


def _is_here(holder: Holder) -> bool:
    return (holder.host, holder.namespace) == (_HOST, _NAMESPACE)


def _remove(path: Path, content: bytes) -> None:
    """Remove an expired lease, but not the one with which another start has replaced it meanwhile."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
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
