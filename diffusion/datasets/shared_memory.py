"""Which shared memory of a machine a data set uses, and what is cleaned of those whose processes are gone.

Streaming 0.13 numbers the data sets of a machine: number 12 has the memory `/dev/shm/000012_locals` (and others) and
the lock files `000012_barrier_filelock` and `000012_cache_filelock` in the folder for temporary files. It looks for a
free number by opening the memory of all numbers below, and never closes it; two jobs that look at the same time take
the same one; and what a killed job leaves is not removed, or is removed under a job that lives. So numbers are given
out here:

- A number in use has a folder `/dev/shm/000012_diffusion`. Every process that has the data set open holds a shared lock
  on the file `owner` in it, which the kernel releases when the last of them has ended, however it did. A number whose
  lock is free belongs to nobody, and all that has it is removed. Other numbers are never touched.
- The folder is Streaming's folder for temporary files while the data set is constructed. Streaming takes a number whose
  lock file is there as used, without opening its memory, so lock files of the numbers below lead it to the number
  that was chosen. Its own lock files end there, too.
- The data set's memory is closed when it is collected, and removed by the last process that does so. Python's resource
  tracker does not know it: it would remove by name, at a time when the number may have been given out again.
"""

import atexit
import fcntl
import itertools
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory as BuiltinSharedMemory
from pathlib import Path
from typing import Any

from streaming import StreamingDataset
from streaming.base.constant import BARRIER_FILELOCK, SHM_TO_CLEAN, TICK
from streaming.base.shared import SharedMemory
from streaming.base.shared import memory as _memory_module
from streaming.base.world import World
from torch import distributed

from diffusion.distributed import agree
from diffusion.errors import DataError

logger = logging.getLogger(__name__)

PLACE = Path("/dev/shm")
"""Where Linux keeps POSIX shared memory."""

OWNER = "owner"

REMOVED = "diffusion_removed_"
"""Beginning of the names of folders whose numbers are free again; none begins with a number."""

CREATION_SECONDS = 60.0
"""How long a process may take to give memory that it has created its size."""

ENDING_SECONDS = 30.0
"""How long the processes of a job that was killed may take to end and to release its cache."""

_process = uuid.uuid4().hex
"""Tells the data sets of this process from those of others, also where processes of two containers have one number."""


def _be_another_process() -> None:
    global _process
    _process = uuid.uuid4().hex


os.register_at_fork(after_in_child=_be_another_process)


class MemoryNumber:
    """A number that this process uses: its memory, its lock files and its share of the lock.

    Args:
        number: the number, whose folder exists.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.folder = _folder(number)
        self.unshared: frozenset[str] = frozenset()
        """Caches that no other data set has open; known to the process that claimed the number."""

        self._process = os.getpid()
        self._memories: list[SharedMemory] = []
        self._owner: int | None = os.open(self.folder / OWNER, os.O_RDWR)
        fcntl.flock(self._owner, fcntl.LOCK_SH)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Let Streaming, constructing a data set, take this number."""
        before = tempfile.tempdir
        tempfile.tempdir = str(self.folder)
        try:
            with whole_memory():
                yield
        finally:
            tempfile.tempdir = before

    def adopt(self, memory: SharedMemory) -> None:
        """Take care of memory that Streaming has opened, instead of its exit handler and of the resource tracker."""
        if any(memory is known for known in self._memories):
            return
        self._memories.append(memory)
        atexit.unregister(memory.cleanup)
        if memory.created_shms:
            resource_tracker.unregister(f"/{memory.shm.name}", "shared_memory")

    def adopt_all(self, dataset: StreamingDataset) -> None:
        """Adopt the memory that Streaming has opened for a data set, as far as that is constructed."""
        parts = vars(dataset)
        if "_locals_shm" in parts:
            self.adopt(parts["_locals_shm"])
        if "_shared_barrier" in parts:
            self.adopt(parts["_shared_barrier"]._arr.shm)
        for name in ("_next_epoch", "_cache_usage"):
            if name in parts:
                self.adopt(parts[name].arr.shm)
        for name in ("_shard_states", "_shard_access_times"):
            if name in parts:
                self.adopt(parts[name].shm)

    def replace(self, old: SharedMemory | None, new: SharedMemory) -> None:
        """Adopt memory that was opened again, and close what it was opened as before."""
        self.adopt(new)
        if old is not None and old is not new:
            self._memories.remove(old)
            _close(old)

    def read(self, name: str) -> bytes | None:
        """Content of one of the number's memories, without opening it as memory; None where it does not exist."""
        try:
            return _memory(self.number, name).read_bytes()
        except FileNotFoundError:
            return None

    def release(self) -> None:
        """Close the memory, and remove it if no other process has it open. Without effect in a forked child."""
        if self._owner is None or os.getpid() != self._process:
            return
        for memory in self._memories:
            _close(memory)
        self._memories = []
        try:
            if _lock(self._owner):
                _remove(self.number)
        finally:
            os.close(self._owner)
            self._owner = None


@contextmanager
def whole_memory() -> Iterator[None]:
    """Let Streaming open only memory that has its size: that which another rank is just creating cannot be mapped."""
    module: Any = _memory_module
    before = module.BuiltinSharedMemory
    module.BuiltinSharedMemory = _open_memory
    try:
        yield
    finally:
        module.BuiltinSharedMemory = before


def _open_memory(name: str, create: bool = False, size: int = 0) -> BuiltinSharedMemory:
    if not create:
        deadline = time.monotonic() + CREATION_SECONDS
        pause = threading.Event()
        with suppress(FileNotFoundError):
            while not (PLACE / name).stat().st_size and time.monotonic() < deadline:
                pause.wait(TICK)
    return BuiltinSharedMemory(name, create, size)


def claim_number(caches: Sequence[str], originals: Sequence[str] = ()) -> MemoryNumber:
    """Choose a free number, the same for all ranks of a node; to be called by all ranks.

    What belongs to processes that have ended is removed first.

    Args:
        caches: folders that this data set fills from a remote.
        originals: folders that it reads where they are, as others may.

    Raises:
        DataError: another job that is running fills one of the folders.
    """
    world = World.detect()
    is_leader = world.is_local_leader
    claimed = agree(lambda: _claim(caches, originals) if is_leader else None)
    if not (distributed.is_available() and distributed.is_initialized()):
        assert claimed is not None, "the process group must exist before data is opened on several ranks"
        return claimed
    numbers: list[tuple[int, int] | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(numbers, (world.node, claimed.number) if claimed else None)
    by_node = dict(pair for pair in numbers if pair is not None)
    # With all ranks: a leader that ends early leaves the number to those who share it.
    return agree(lambda: claimed or MemoryNumber(by_node[world.node]))


def take_away(cache: Path, to: Path) -> bool:
    """Rename a cache, so that it can be removed while no job uses or takes it; whether that was possible."""
    with _turn():
        if any(str(cache) in (*owner["caches"], *owner.get("originals", ())) for owner in _remove_dead()):
            return False
        cache.rename(to)
    return True


def remove_unused(path: Path) -> None:
    """Remove shared memory that no process has open, with the numbers of all jobs that have ended."""
    with _turn():
        _remove_dead()
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _claim(caches: Sequence[str], originals: Sequence[str]) -> MemoryNumber:
    deadline = time.monotonic() + ENDING_SECONDS
    pause = threading.Event()
    while True:
        with _turn():
            in_use = _remove_dead()
            user = next((owner for owner in in_use if _is_in_conflict(owner, caches)), None)
            if user is None:
                number = _take_next(caches, originals)
                number.unshared = frozenset(caches).difference(*(owner["caches"] for owner in in_use))
                return number
        if time.monotonic() > deadline:
            shared = sorted(set(caches) & set(user["caches"]))
            raise DataError(
                f"{shared[0]} is filled by another job that is running (process {user['pid']}): end that one, or give "
                "this one a folder of its own (data.local)"
            )
        pause.wait(0.5)


@contextmanager
def _turn() -> Iterator[None]:
    """Let one process of this user at a time look and choose."""
    descriptor = os.open(PLACE / f"diffusion_{os.getuid()}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_in_conflict(owner: dict, caches: Sequence[str]) -> bool:
    return owner["process"] != _process and not set(caches).isdisjoint(owner["caches"])


def _take_next(caches: Sequence[str], originals: Sequence[str]) -> MemoryNumber:
    number = next(number for number in itertools.count() if _is_free(number))
    folder = _folder(number)
    folder.mkdir(mode=0o700)
    owner = {"process": _process, "pid": os.getpid(), "caches": list(caches), "originals": list(originals)}
    (folder / OWNER).write_text(json.dumps(owner))
    for below in range(number):
        (folder / f"{below:06}_{BARRIER_FILELOCK}").touch()
    return MemoryNumber(number)


def _is_free(number: int) -> bool:
    return not _folder(number).exists() and not any(_memory(number, name).exists() for name in SHM_TO_CLEAN)


def _remove_dead() -> list[dict]:
    """Remove what belongs to numbers that no process uses; return the owners of the others of this user."""
    for leftover in PLACE.glob(f"{REMOVED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    owners = []
    for folder in sorted(PLACE.glob("[0-9]*_diffusion")):
        number = int(folder.name.partition("_")[0])
        try:
            descriptor = os.open(folder / OWNER, os.O_RDWR)
        except PermissionError:
            continue
        except FileNotFoundError:  # Its process was killed while it took the number, or while it gave it back.
            _remove(number)
            continue
        try:
            if _lock(descriptor):
                logger.info("removing shared memory %06d of a job that has ended", number)
                _remove(number)
            else:
                owners.append(json.loads(Path(f"/proc/self/fd/{descriptor}").read_text()))
        finally:
            os.close(descriptor)
    return owners


def _lock(descriptor: int) -> bool:
    """Whether no other process has the lock; then this one has it alone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(number: int) -> None:
    """Remove the memory, and last the folder, which makes the number free: at once, as it may be given out again."""
    for name in SHM_TO_CLEAN:
        _memory(number, name).unlink(missing_ok=True)
    removed = PLACE / f"{REMOVED}{uuid.uuid4().hex}"
    with suppress(OSError):  # It is gone, or another user's.
        _folder(number).rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _folder(number: int) -> Path:
    return PLACE / f"{number:06}_diffusion"


def _memory(number: int, name: str) -> Path:
    return PLACE / f"{number:06}_{name}"


def _close(memory: SharedMemory) -> None:
    try:
        memory.shm.close()
    except BufferError:
        logger.debug("%s is still in use in this process", memory.shm.name)
