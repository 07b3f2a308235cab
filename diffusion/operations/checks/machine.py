"""Checks of one machine: cores, memory, file handles, and the disk for checkpoints."""

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.operations.checks.check import Check, Job, Stage
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, warning

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a container (cgroup v2)."""

WRITTEN_BYTES = 64 * 2**20
"""Size of the file that measures the speed of a disk."""

SPARE_SHM = SPARE_FILES = 2.0
"""Recommended multiple of the needed shared memory and file handles."""

WORKERS_PER_CORE = 4
"""Loader workers per core above which they only take turns."""

LONG_CHECKPOINT = 300.0
"""Seconds above which writing a checkpoint takes too long."""

FILES_PER_RANK, FILES_PER_WORKER, FILES_PER_BATCH, FILES_PER_PEER = 256, 12, 6, 2
"""File handles: of a rank's libraries and logs, for each loader worker, for each batch that it holds ready (one per
tensor), and for each connection to a rank."""

RANK_BYTES, WORKER_BYTES = 1.0e9, 0.15e9
"""Memory of a rank's process without the model, and of a loader worker without shared pages (estimates)."""

_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Memory of a container that the kernel reclaims when it is needed: copies of files."""


# Demand of a run


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Demand of a run, of one node unless said otherwise."""

    num_ranks: int
    num_workers: int
    """Loader processes."""

    shm_bytes: int
    """Batches that loader workers hold ready."""

    num_files: int
    """File handles of one rank."""

    memory_bytes: float
    """Processes, and the model's state for training on the CPU or checkpoints in the background (estimate)."""

    gpu_bytes: float | None
    """Memory of one GPU; None without GPUs."""

    gpu_bytes_with_reserve: float | None
    """The same with a reserve for workspaces and fragmentation."""

    checkpoint_bytes: int
    """Largest checkpoint."""

    storage_bytes: int | None
    """All checkpoints that stay; None if their number is unknown."""


def find_demand(job: Job) -> Demand:
    """Compute the demand of a run from its configuration."""
    # These take many seconds, and the checks before each start need none of them.
    from diffusion.datasets.mds import MAX_OPEN
    from diffusion.planning.memory import USABLE_MEMORY
    from diffusion.planning.plan import plan_run
    from diffusion.planning.storage import waiting_bytes

    config, data = job.config, job.config.data
    plan = plan_run(replace(config, plan=replace(config.plan, num_gpus=None)), world_size=job.world_size)
    state = plan.memory.state_bytes
    workers = data.num_workers * (2 if config.validation is not None else 1)
    in_memory = state if job.device is Device.cpu or config.trainer.async_checkpoints else 0
    gpu_bytes = plan.memory.gpu_bytes if job.device is Device.gpu else None
    return Demand(
        num_ranks=job.ranks_per_node,
        num_workers=job.ranks_per_node * data.num_workers,
        shm_bytes=job.ranks_per_node * waiting_bytes(config, data.global_batch_size // job.world_size),
        num_files=FILES_PER_RANK
        + MAX_OPEN
        + workers * (FILES_PER_WORKER + data.prefetch_factor * FILES_PER_BATCH)
        + job.world_size * FILES_PER_PEER,
        memory_bytes=job.ranks_per_node * (RANK_BYTES + workers * WORKER_BYTES + in_memory),
        gpu_bytes=gpu_bytes,
        gpu_bytes_with_reserve=gpu_bytes / USABLE_MEMORY if gpu_bytes is not None else None,
        checkpoint_bytes=plan.checkpoints.largest_bytes,
        storage_bytes=plan.checkpoints.kept_bytes,
    )


# Cores, memory, file handles


@dataclass(frozen=True, kw_only=True)
class MachineProbe:
    """Resources of this machine."""

    num_cores: int
    """Cores that the job may use, by affinity and by the container's quota."""

    memory_bytes: int
    available_bytes: int
    """Available memory, by the machine and by the container's limit."""

    shm_bytes: int
    shm_free_bytes: int
    file_limit: int
    """File handles per process (soft limit)."""

    file_limit_max: int
    """Hard limit."""


def probe_machine(job: Job) -> MachineProbe:
    """Probe this machine, in milliseconds."""
    memory, shared = psutil.virtual_memory(), Path("/dev/shm")
    shm = psutil.disk_usage(str(shared)) if shared.is_dir() else None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, available = _container_memory()
    return MachineProbe(
        num_cores=num_cores(),
        memory_bytes=min(memory.total, limit or memory.total),
        available_bytes=min(memory.available, available if available is not None else memory.available),
        shm_bytes=shm.total if shm else 0,
        shm_free_bytes=shm.free if shm else 0,
        file_limit=soft,
        file_limit_max=hard,
    )


def num_cores() -> int:
    """Return the number of cores that this process may use, by affinity and by the container's quota."""
    allowed = len(os.sched_getaffinity(0))
    quota = _words(CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0].isdigit():
        allowed = min(allowed, max(1, round(int(quota[0]) / int(quota[1]))))
    return allowed


def _container_memory() -> tuple[int | None, int | None]:
    """Return the memory limit of the container and what is left of it; None without a limit."""
    limit, used = _words(CGROUP / "memory.max"), _words(CGROUP / "memory.current")
    if not (limit and used and limit[0].isdigit()):
        return None, None
    words = _words(CGROUP / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    left = int(limit[0]) - int(used[0]) + sum(int(stat.get(name, 0)) for name in _RECLAIMABLE)
    return int(limit[0]), min(max(0, left), int(limit[0]))  # The files are not read at the same moment.


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def check_cores(machine: MachineProbe, demand: Demand) -> Verdict:
    """Check that there are cores for the loader workers."""
    cores = "1 core" if machine.num_cores == 1 else f"{machine.num_cores} cores"
    what = f"{cores} for {demand.num_ranks} ranks and {demand.num_workers} loader workers"
    if demand.num_workers > WORKERS_PER_CORE * machine.num_cores:
        return warning(what, "lower data.num_workers, or give the job more cores")
    return ok(what)


def check_memory(machine: MachineProbe, demand: Demand) -> Verdict:
    """Check that there is memory for the processes and, on the CPU, for the model."""
    what = (
        f"{size_text(machine.available_bytes)} of {size_text(machine.memory_bytes)} memory are available, "
        f"about {size_text(demand.memory_bytes)} are needed"
    )
    if machine.available_bytes < demand.memory_bytes:
        return warning(what, "lower data.num_workers, or end other processes on the machine")
    return ok(what)


def check_shared_memory(machine: MachineProbe, demand: Demand) -> Verdict:
    """Check that there is shared memory for the batches that loader workers hold ready."""
    what = (
        f"/dev/shm has {size_text(machine.shm_free_bytes)} of {size_text(machine.shm_bytes)} free, "
        f"batches take {size_text(demand.shm_bytes)}"
    )
    remedy = "give the container more (docker run --shm-size, or --ipc=host), or lower data.prefetch_factor"
    if machine.shm_free_bytes < demand.shm_bytes or machine.shm_free_bytes == 0:
        return problem(what, remedy)
    return warning(what, remedy) if machine.shm_free_bytes < SPARE_SHM * demand.shm_bytes else ok(what)


def check_file_limit(machine: MachineProbe, demand: Demand) -> Verdict:
    """Check that a rank may open enough files."""
    what = f"a process may open {machine.file_limit} files, a rank needs about {demand.num_files}"
    recommended = int(SPARE_FILES * demand.num_files)
    remedy = f"ulimit -n {max(recommended, min(65536, machine.file_limit_max))} before the start"
    if machine.file_limit < demand.num_files:
        return problem(what, remedy)
    return warning(what, remedy) if machine.file_limit < recommended else ok(what)


# Disk for checkpoints


@dataclass(frozen=True, kw_only=True)
class DiskProbe:
    """File system of a folder."""

    folder: Path
    device: int
    """Number of the file system."""

    free_bytes: int
    is_writable: bool
    """Whether the folder, or the lowest existing one above it, can be written."""

    held_bytes: int = 0
    """Bytes of the files in the folder."""


@dataclass(frozen=True, kw_only=True)
class WriteProbe:
    """Result of writing a file to the disk for checkpoints."""

    folder: Path
    bytes_per_second: float = 0.0
    error: str = ""


def checkpoint_folder(config: Config) -> Path:
    """Return the folder of checkpoints on this machine, also of those that go to a store."""
    folder = config.trainer.checkpoint_folder
    return Path(folder if folder is not None and "://" not in folder else config.output_folder).expanduser()


def probe_disk(folder: Path, *, with_content: bool = False) -> DiskProbe:
    """Probe the file system of a folder, which need not exist.

    Args:
        folder: the folder.
        with_content: whether to add up its files.
    """
    existing = _existing(folder)
    with_content = with_content and folder.is_dir()
    return DiskProbe(
        folder=folder,
        device=existing.stat().st_dev,
        free_bytes=shutil.disk_usage(existing).free,
        is_writable=os.access(existing, os.W_OK | os.X_OK) and existing.is_dir(),
        held_bytes=sum(_file_sizes(folder)) if with_content else 0,
    )


def _existing(folder: Path) -> Path:
    """Return a folder, or the lowest existing one above it."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _file_sizes(folder: Path) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from _file_sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:  # Removed meanwhile.
                continue


def probe_output_disk(job: Job) -> DiskProbe:
    """Probe the disk for checkpoints."""
    disk, needed = probe_disk(checkpoint_folder(job.config)), job.probe(find_demand).storage_bytes
    if needed is not None and disk.free_bytes < needed:
        return probe_disk(disk.folder, with_content=True)  # Slow on a network disk, and seldom needed.
    return disk


def probe_output_writing(job: Job) -> WriteProbe:
    """Write to the disk for checkpoints."""
    folder = checkpoint_folder(job.config)
    try:
        return WriteProbe(folder=folder, bytes_per_second=measure_write_speed(folder))
    except OSError as error:
        return WriteProbe(folder=folder, error=error.strerror or str(error))


def measure_write_speed(folder: Path, num_bytes: int = WRITTEN_BYTES) -> float:
    """Write and sync a temporary file in a folder, or the lowest existing one above it.

    Returns:
        Bytes per second.

    Raises:
        OSError: it cannot be written, or is full.
    """
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=_existing(folder)) as file:
        began = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def check_output_folder(written: WriteProbe) -> Verdict:
    """Check that checkpoints can be written."""
    if written.error:
        remedy = "free space, or choose another output_folder (or trainer.checkpoint_folder)"
        return problem(f"{written.folder} cannot be written: {written.error}", remedy)
    return ok(f"{written.folder} is written at {size_text(written.bytes_per_second)}/s")


def check_output_space(disk: DiskProbe, demand: Demand) -> Verdict:
    """Check that there is space for the checkpoints."""
    kept, checkpoint = demand.storage_bytes, size_text(demand.checkpoint_bytes)
    what = f"{disk.folder} has {size_text(disk.free_bytes)} free, a checkpoint takes {checkpoint}"
    if kept is not None:
        what += f" and all that stay {size_text(kept)}"
    remedy = (
        "free space, choose another output_folder (or trainer.checkpoint_folder), or keep fewer "
        "(trainer.keep_checkpoints)"
    )
    if not disk.is_writable:
        return problem(f"{disk.folder} cannot be written", remedy)
    if disk.free_bytes < demand.checkpoint_bytes:
        return problem(what, remedy)
    return warning(what, remedy) if kept is not None and disk.free_bytes + disk.held_bytes < kept else ok(what)


def check_output_speed(written: WriteProbe, demand: Demand) -> Iterator[Verdict]:
    """Check that checkpoints are written fast enough."""
    if written.error:
        yield check_output_folder(written)
        return
    seconds, speed = demand.checkpoint_bytes / written.bytes_per_second, size_text(written.bytes_per_second)
    what = f"{written.folder} is written at {speed}/s: a checkpoint takes about {seconds:,.0f} s"
    remedy = "choose a faster disk, or write during training (trainer.async_checkpoints)"
    yield warning(what, remedy) if seconds > LONG_CHECKPOINT else ok(what)


_AT_START = (Stage.start, Stage.doctor)

CHECKS = [
    Check(name="CPU cores", needs=(probe_machine, find_demand), function=check_cores, stages=_AT_START),
    Check(name="memory", needs=(probe_machine, find_demand), function=check_memory, stages=_AT_START),
    Check(name="shared memory", needs=(probe_machine, find_demand), function=check_shared_memory, stages=_AT_START),
    Check(name="open files", needs=(probe_machine, find_demand), function=check_file_limit, stages=_AT_START),
    Check(name="output folder", needs=(probe_output_writing,), function=check_output_folder, stages=(Stage.host,)),
    Check(name="output folder", needs=(probe_output_disk, find_demand), function=check_output_space, stages=_AT_START),
    Check(name="output speed", needs=(probe_output_writing, find_demand), function=check_output_speed),
]
