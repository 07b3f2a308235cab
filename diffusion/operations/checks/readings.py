"""What this machine has: cores, memory, shared memory, file handles, disks, and what dead runs have left."""

import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from diffusion.config.schema import Config
from diffusion.operations.checks.gpus import GpuReading, read_gpus

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits (cgroup v2)."""

PROBE_BYTES = 64 * 2**20
"""What is written to measure the speed of a disk."""

_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Of a container's memory: copies of what is on a disk, which the kernel gives up when memory is needed."""

_LEFTOVER = re.compile(r"\d{6}_|torch_\d+_")


@dataclass(frozen=True, kw_only=True)
class DiskReading:
    """The file system of a folder that is to be written to."""

    folder: Path
    device: int
    """Number of the file system."""

    total_bytes: int
    free_bytes: int
    is_writable: bool
    """Whether the folder, or the lowest one above it that exists, can be written to."""

    held_bytes: int = 0
    """Bytes of files that the folder holds."""


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Shared memory that no process has open."""

    name: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class MachineReading:
    """One machine."""

    host: str
    num_cores: int
    """Cores that the job may use, by affinity and by the container's quota."""

    memory_bytes: int
    available_bytes: int
    """Memory that can be taken, by the machine and by the container's limit."""

    shm_bytes: int
    shm_free_bytes: int
    file_limit: int
    """File handles that a process may have (soft limit)."""

    file_limit_max: int
    """What it may raise that to (hard limit)."""

    gpus: tuple[GpuReading, ...] = ()


def read_machine() -> MachineReading:
    """Read this machine; takes milliseconds."""
    memory = psutil.virtual_memory()
    shm = psutil.disk_usage(str(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, available = _container_memory()
    return MachineReading(
        host=socket.gethostname(),
        num_cores=num_cores(),
        memory_bytes=min(memory.total, limit or memory.total),
        available_bytes=min(memory.available, available if available is not None else memory.available),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        file_limit=soft,
        file_limit_max=hard,
        gpus=tuple(read_gpus(job_processes())),
    )


def num_cores() -> int:
    """Cores that this process may use: its affinity, and the quota of its container."""
    allowed = len(os.sched_getaffinity(0))
    quota = _words(CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, round(int(quota[0]) / int(quota[1]))))
    return allowed


def _container_memory() -> tuple[int | None, int | None]:
    """Limit of the container's memory and what is left of it; None where there is none."""
    limit, used = _words(CGROUP / "memory.max"), _words(CGROUP / "memory.current")
    if not (limit and used and limit[0].isdigit()):
        return None, None
    words = _words(CGROUP / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    left = int(limit[0]) - int(used[0]) + sum(int(stat.get(name, 0)) for name in _RECLAIMABLE)
    return int(limit[0]), min(max(0, left), int(limit[0]))  # The files are not of the same moment.


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def job_processes() -> set[int]:
    """Ids of this process, of its launcher and of all processes that the launcher started."""
    this = psutil.Process()
    parent = this.parent()
    root = parent if parent is not None and "LOCAL_WORLD_SIZE" in os.environ else this
    return {root.pid, this.pid, *(child.pid for child in root.children(recursive=True))}


def checkpoint_folder(config: Config) -> Path:
    """Where checkpoints are written on this machine, before they go to a store if they do."""
    place = config.output_folder if checkpoint_key(config) == "output_folder" else config.trainer.checkpoint_folder
    assert place is not None
    return Path(place).expanduser()


def checkpoint_key(config: Config) -> str:
    """Key of the configuration that `checkpoint_folder` is from."""
    place = config.trainer.checkpoint_folder
    return "output_folder" if place is None or "://" in place else "trainer.checkpoint_folder"


def read_disk(folder: Path, *, with_content: bool = False) -> DiskReading:
    """Read the file system that a folder is on, or would be on.

    Args:
        folder: need not exist.
        with_content: whether to add up the files that it holds, too.
    """
    there = existing(folder)
    usage = shutil.disk_usage(there)
    return DiskReading(
        folder=folder,
        device=there.stat().st_dev,
        total_bytes=usage.total,
        free_bytes=usage.free,
        is_writable=os.access(there, os.W_OK | os.X_OK) and there.is_dir(),
        held_bytes=sum(_sizes(folder)) if with_content and folder.is_dir() else 0,
    )


def existing(folder: Path) -> Path:
    """A folder, or the lowest one above it that exists."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _sizes(folder: Path) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # It has just been removed.
                continue


def count_uncompiled() -> tuple[int, int]:
    """How many of this process's Python modules have no bytecode on the disk, and how many modules there are."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    compiled = [spec.cached for spec in specs if spec is not None and spec.has_location and spec.cached]
    return sum(not os.path.exists(path) for path in compiled), len(compiled)  # noqa: PTH110


def measure_write_speed(folder: Path, num_bytes: int = PROBE_BYTES) -> float:
    """Write a temporary file to a folder (or the lowest one above it that exists) and wait until it is on the disk.

    Returns:
        Bytes per second.

    Raises:
        OSError: it cannot be written to, or is full.
    """
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=existing(folder)) as file:
        began = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def find_leftovers(place: Path = SHARED_MEMORY) -> list[Leftover]:
    """Find shared memory of this user, made by Streaming or PyTorch, that no process has open.

    Looks at the memory and files of all processes: takes about a millisecond for each.
    """
    own = [path for path in _listed(place) if _LEFTOVER.match(path.name) and _is_own(path)]
    if not own:
        return []
    used = _used_files(place)
    numbers = {Path(name).parent.name.partition("_")[0] for name in used if Path(name).parent != place}
    found = []
    for path in own:
        number = path.name.partition("_")[0]
        if str(path) not in used and number not in numbers:
            with suppress(FileNotFoundError):  # Its job has just ended and removed it.
                num_bytes = sum(_sizes(path)) if path.is_dir() else path.stat().st_size
                found.append(Leftover(name=path.name, num_bytes=num_bytes))
    return found


def _is_own(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _listed(place: Path) -> Sequence[Path]:
    return sorted(place.iterdir()) if place.is_dir() else []


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # The file has just been closed.
        return ""


def _used_files(place: Path) -> set[str]:
    """Files below a folder that some process has mapped or open."""
    used: set[str] = set()
    for process in psutil.process_iter():
        folder = Path("/proc", str(process.pid))
        try:
            maps = (folder / "maps").read_text()
            used.update(line[line.index("/") :] for line in maps.splitlines() if f" {place}/" in line)
            links = list((folder / "fd").iterdir())
        except OSError:  # It has ended, or belongs to somebody else.
            continue
        used.update(target for target in map(_target, links) if target.startswith(f"{place}/"))
    return used
