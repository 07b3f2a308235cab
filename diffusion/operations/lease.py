"""Leases: one start of a run at a time, one writer of a data set, one watcher for each checkpoint, on any host.

A lock of the kernel is not enough: not every shared file system passes it on to other hosts, and it does not name its
holder. So a process creates and renews a file, or an object of S3, and others take it over when it is not renewed any
more. Of a run, rank 0 does so, and every rank checks that the file in the run folder still belongs to its own start.

An object is written on condition that its version is the known one, or that there is none. In a store that ignores
conditions two starts of the same moment may both hold a lease; the next renewal ends one of them.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion import storage
from diffusion.distributed import USER_ERROR_EXIT_CODE, agree, broadcast, is_first_rank, local_rank
from diffusion.errors import BusyError, MachineError, UserError, explained_writes
from diffusion.files import file_system_time, unique_partial
from diffusion.formats.run_folder import LEASE
from diffusion.operations import timeouts
from diffusion.operations.processes import ProcessRecord, is_alive, own_record
from diffusion.storage import FIRST_CONTACT, Access, ChangedFileError, MissingFileError

log = logging.getLogger(__name__)

_RECORD_BYTES = 512
"""Constant size of the file: a renewal needs no space on a full disk."""

_SETTLING = 0.5
"""Seconds between the takeover of a file and a look whether it was the last one of the same moment."""

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


class _FileRecord:
    """File that stays open while its lease is held; its constant size needs no space on a full disk.

    Each method may raise an OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __str__(self) -> str:
        return str(self._path)

    def read(self) -> bytes | None:
        """Read the content; None if there is none."""
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    def take(self, content: bytes, previous: bytes | None) -> bool:
        """Write a content in place of the one that was read last; return False if that has changed meanwhile."""
        path = self._path if previous is None else unique_partial(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        self.renew(content)
        if previous is not None:
            path.replace(self._path)
            time.sleep(_SETTLING)  # Another process may have replaced it at the same moment.
        if self.read() == content:
            return True
        os.close(self._descriptor)
        return False

    def renew(self, content: bytes) -> None:
        """Write the next content of the same lease, after `read`."""
        assert self._descriptor is not None
        os.pwrite(self._descriptor, content, 0)
        os.fsync(self._descriptor)  # Other hosts see it then.

    def remove(self) -> None:
        """Remove the own content, after `read`."""
        assert self._descriptor is not None
        os.close(self._descriptor)
        self._path.unlink()


class _ObjectRecord:
    """Object of S3 with the methods of `_FileRecord`; each may raise a UserError.

    It is written and removed on condition that its version is the one that was read or written last.
    """

    def __init__(self, uri: str, access: Access | None) -> None:
        self._uri, self._access = uri, access
        self._version: str | None = None

    def __str__(self) -> str:
        return storage.shown(self._uri)

    def read(self) -> bytes | None:
        try:
            content, self._version = storage.read_version(self._uri, self._access)
        except MissingFileError:
            content, self._version = None, None
        return content

    def take(self, content: bytes, previous: bytes | None) -> bool:
        try:
            self.renew(content)
        except (ChangedFileError, MissingFileError):
            return self.read() == content  # It is there when the answer to the first attempt was lost.
        return True

    def renew(self, content: bytes) -> None:
        self._version = storage.replace(self._uri, content, self._version, self._access)

    def remove(self) -> None:
        assert self._version is not None
        with suppress(ChangedFileError, MissingFileError):
            storage.delete_version(self._uri, self._version, self._access)


_Record = _FileRecord | _ObjectRecord
"""Stored content of a lease."""


class Lease:
    """Lease of this process, or of another one of its job, which renews it."""

    def __init__(self, record: _Record, holder: Holder, *, is_own: bool) -> None:
        self.holder = holder
        self._record, self._is_own = record, is_own
        self._num_renewals = 0
        self._is_confirmed, self._confirmed_at = is_own, time.monotonic()

    def renew(self) -> None:
        """Check that the lease still belongs to this job, and renew it in the process that holds it.

        A MachineError says that another process has taken it over.
        """
        try:
            holder = _holder_of(self._record.read())
            is_held = holder is not None and holder.token == self.holder.token
            if is_held and self._is_own:
                self._num_renewals += 1
                self._record.renew(_content(self.holder, self._num_renewals))
        except (OSError, UserError) as error:
            log.warning("the lease %s cannot be renewed: %s", self._record, error)
            return
        if is_held:
            self._is_confirmed, self._confirmed_at = True, time.monotonic()
        elif holder is not None and self._is_confirmed:  # An unshared folder of another node may contain an old one.
            raise MachineError(
                f"process {holder.pid} on {holder.host} has taken over the lease {self._record}, which was not renewed "
                "for a while: this process ends"
            )

    def await_visible(self, folder: Path | str) -> None:
        """Wait until this process finds the lease, too; a MachineError if it does not share the folder with rank 0."""
        deadline = time.monotonic() + timeouts.VISIBLE
        while not self._is_confirmed:
            if time.monotonic() > deadline:
                raise MachineError(
                    f"{_HOST} does not find the lease of {self.holder.host} in {folder}: the hosts do not share it. "
                    "Set output_folder, or trainer.checkpoint_folder, to a folder that they share; or "
                    "trainer.checkpoint_folder to an object store"
                )
            self.renew()
            if not self._is_confirmed:
                time.sleep(timeouts.POLL)

    def check(self) -> None:
        """Renew the lease if the last renewal is too long ago, as after a suspension of this process."""
        if time.monotonic() - self._confirmed_at > timeouts.LEASE / 2:
            self.renew()

    def release(self) -> None:
        """Give the lease back, if this process holds it."""
        if self._is_own:
            self._is_own = False
            with suppress(OSError, UserError):
                holder = _holder_of(self._record.read())
                if holder is not None and holder.token == self.holder.token:
                    self._record.remove()


class Applicant:
    """Asks again and again for a lease, a file or an object of S3 by its URI, and observes its holder meanwhile."""

    def __init__(self, location: Path | str, access: Access | None = None) -> None:
        self.record: _Record = _FileRecord(location) if isinstance(location, Path) else _ObjectRecord(location, access)
        """Stored content of the lease."""

        self._content: bytes | None = None
        self._unchanged_since = time.monotonic()
        self.holder: Holder | None = None
        """Holder of the lease at the last attempt."""

        self.is_held = False
        """True if the holder is known to be alive: as a process of this host, or because it has renewed the lease."""

    def acquire(self) -> Lease | None:
        """Acquire the lease, or return None while its holder may be alive.

        A lease of a dead process of this host is taken over at once, any other one after its expiry.

        Raises:
            OSError: the file cannot be written.
            UserError: the object cannot be written.
        """
        own = Holder(**own_record(), namespace=_NAMESPACE, token=secrets.token_hex(8))
        while True:
            before, self._content = self._content, self.record.read()
            if self._content != before:
                self._unchanged_since = time.monotonic()
            self.holder = _holder_of(self._content)
            if self._content is None:
                is_over = True
            elif self.holder is not None and _is_here(self.holder):
                self.is_held = is_alive(self.holder)
                is_over = not self.is_held
            else:  # Without a holder it is being created, or damaged.
                self.is_held = self.holder is not None and before not in (None, self._content)
                is_over = time.monotonic() - self._unchanged_since > timeouts.LEASE
            if not is_over:
                return None
            if self.record.take(_content(own, 0), self._content):
                return Lease(self.record, own, is_own=True)


def active_holder(location: Path | str) -> Holder | None:
    """Return the holder of a lease that is alive: a process of this host, or one that has renewed the lease lately.

    The lease is a file, or an object of S3 by its URI.
    """
    holder = _holder_of(Applicant(location).record.read())
    if holder is None:
        return None
    if _is_here(holder):
        return holder if is_alive(holder) else None
    with suppress(FileNotFoundError):
        if isinstance(location, Path):
            now, written = file_system_time(location.parent), location.stat().st_mtime
        else:
            now, written = time.time(), storage.stat(location).time
        if now - (written or 0.0) < 2 * timeouts.LEASE:
            return holder
    return None


@contextmanager
def renewed(lease: Lease, then: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Renew a lease in a thread during the block, and do something else after each renewal.

    The process ends when another one has taken the lease over.
    """
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(timeouts.RENEWAL):
            try:
                lease.renew()
                then()
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


@contextmanager
def held(lease: Lease) -> Iterator[None]:
    """Renew a lease as `renewed` does during the block, and give it back at its end."""
    try:
        with renewed(lease):
            yield
    finally:
        lease.release()


@contextmanager
def leased(folder: Path | str, access: Access | None = None, *, is_shared: bool = True) -> Iterator[Lease]:
    """Hold the lease of a run folder, or of one of checkpoints (also `s3://bucket/prefix`), on rank 0; called by all
    ranks.

    Raises:
        MachineError: another start of the run is active, the folder cannot be written to, or other hosts do not see
            what rank 0 writes there though it is to be shared.
    """
    path = folder / LEASE if isinstance(folder, Path) else storage.join(folder, LEASE)
    applicant, activity = Applicant(path, access), "the run is running already"
    remedy = (
        "End that one (SIGTERM saves it) or wait for its end; or set another run_name, output_folder or "
        "trainer.checkpoint_folder"
    )
    own = agree(lambda: await_lease(applicant, activity, remedy) if is_first_rank() else None, takes_long=True)
    holder = broadcast(own and own.holder)
    assert holder is not None
    found = own or Lease(applicant.record, holder, is_own=False)
    try:
        if is_shared:
            agree(lambda: found.await_visible(folder) if local_rank() == 0 else None, takes_long=True)
        yield found
    finally:
        found.release()


@contextmanager
def leased_checkpoints(location: str | None, *, timeout: float) -> Iterator[None]:
    """Hold and renew the lease of `trainer.checkpoint_folder`, which may be that of starts with other run folders.

    There is none for a folder in the run folder (None). Requests to a store are repeated for `timeout` seconds,
    `FIRST_CONTACT` at most.
    """
    if location is None:
        yield
        return
    folder = location if storage.is_url(location) else Path(location).expanduser()
    access = Access(seconds=min(timeout, FIRST_CONTACT))
    with leased(folder, access) as lease, renewed(lease) if is_first_rank() else nullcontext():
        yield


def await_lease(applicant: Applicant, activity: str, remedy: str) -> Lease:
    """Acquire a lease, after its expiry if need be.

    The activity of another holder, and the remedy against it, are for the message.

    Raises:
        BusyError: its holder is alive.
        MachineError: it cannot be written.
    """
    is_waiting = False
    with explained_writes(f"the lease {applicant.record}"):
        while (lease := applicant.acquire()) is None:
            if (holder := applicant.holder) is not None and applicant.is_held:
                began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.time))
                other = f"process {holder.pid} on {holder.host} holds {applicant.record}, since {began}"
                raise BusyError(f"{activity}: {other}. {remedy}")
            if not is_waiting:
                is_waiting = True
                whose = (
                    "no process (being written, or damaged)"
                    if holder is None
                    else f"process {holder.pid} on {holder.host}"
                )
                log.warning("%s holds %s: waiting up to %.0f s for a renewal", whose, applicant.record, timeouts.LEASE)
            time.sleep(0.5)
    return lease


def _is_here(holder: Holder) -> bool:
    return (holder.host, holder.namespace) == (_HOST, _NAMESPACE)


def _content(holder: Holder, num_renewals: int) -> bytes:
    content = json.dumps({**asdict(holder), "count": num_renewals}).encode()
    return content.ljust(_RECORD_BYTES - 1) + b"\n"


def _holder_of(content: bytes | None) -> Holder | None:
    """Return the holder that a content names; None without a complete one."""
    try:
        return Holder.of(json.loads(content or b""))
    except (ValueError, TypeError, AttributeError):
        return None
