"""Checks of one machine: memory, and the disk for checkpoints."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from diffusion.config.fields import size_text
from diffusion.config.schema import Config
from diffusion.config.training import Device, Parallelism
from diffusion.distributed import CGROUP, local_world_size, world_size
from diffusion.errors import MachineError
from diffusion.operations.checks.gpu import check_gpu_errors, check_gpu_memory
from diffusion.operations.checks.verdicts import Level, Verdict, log_and_raise, ok, on_each_machine, problem, warning
from diffusion.storage import is_url

SHM = Path("/dev/shm")

RANK_BYTES, WORKER_BYTES = 1.0e9, 0.15e9
"""Memory of a rank's process without the model, and of a loader worker without shared pages (estimates)."""

_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Memory of a container that the kernel reclaims when it is needed: copies of files."""


def check_machines(config: Config, device: Device) -> None:
    """Raise a MachineError on all ranks if a machine lacks something for training. To be called by all ranks."""
    log_and_raise(on_each_machine(lambda: check_machine(config, device)), MachineError)


def check_machine(config: Config, device: Device) -> Iterator[Verdict]:
    """Compare this machine with the demand of a run on the ranks of this job."""
    demand = find_demand(config, device, num_ranks=world_size(), ranks_per_node=local_world_size())
    yield check_memory(available_memory(), demand)
    yield check_shared_memory(psutil.disk_usage(str(SHM)).free if SHM.is_dir() else 0, demand)
    yield check_output_space(checkpoint_folder(config), demand)
    if demand.gpu_bytes is not None:
        yield from check_gpu_memory(demand.gpu_bytes, num_gpus=local_world_size())
        yield from check_gpu_errors(num_gpus=local_world_size())


# Demand of a run


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Demand of a run, of one node unless said otherwise."""

    shm_bytes: int
    """Batches that loader workers hold ready."""

    memory_bytes: float
    """Processes; the model that each rank builds and initial weights, or the whole checkpoint that each rank of DDP
    reads to resume, or the state for training on the CPU or checkpoints in the background (estimate)."""

    gpu_bytes: float | None
    """Memory of one GPU; None without GPUs."""

    checkpoint_bytes: int
    """Largest checkpoint."""

    storage_bytes: int | None
    """Checkpoints, unless they go to a store, and averages that stay on this machine; None if a number is unknown."""


def find_demand(config: Config, device: Device, *, num_ranks: int, ranks_per_node: int) -> Demand:
    """Compute the demand of a run from its configuration."""
    # These take many seconds, and the checks before each start need none of them.
    from diffusion.planning.memory import WEIGHT_BYTES, parameter_counts, plan_memory, state_bytes
    from diffusion.planning.storage import plan_checkpoints, waiting_bytes

    data, counts = config.data, parameter_counts(config)
    checkpoints = plan_checkpoints(config, counts)
    workers = data.num_workers * (2 if config.validation is not None else 1)
    holds_state = device is Device.cpu or config.trainer.async_checkpoints
    frozen, network = (WEIGHT_BYTES * number for number in (counts.frozen, counts.trained + counts.fixed))
    built = frozen + network * (1 if config.init_from is None else 2)  # Whole on each rank, also where it is sharded.
    held = state_bytes(config, counts, num_ranks) if holds_state else 0
    loaded = checkpoints.largest_bytes if config.trainer.parallelism is Parallelism.ddp else 0
    in_memory = max(built, loaded, held + (frozen if device is Device.cpu else 0))
    stored = [
        0 if is_url(config.trainer.checkpoint_folder or "") else checkpoints.kept_bytes,
        checkpoints.average_bytes,
    ]
    return Demand(
        shm_bytes=ranks_per_node * waiting_bytes(config, data.global_batch_size // num_ranks),
        memory_bytes=ranks_per_node * (RANK_BYTES + workers * WORKER_BYTES + in_memory),
        gpu_bytes=plan_memory(config, counts, num_ranks).gpu_bytes if device is Device.gpu else None,
        checkpoint_bytes=checkpoints.largest_bytes,
        storage_bytes=None if None in stored else sum(filter(None, stored)),
    )


# Memory


def available_memory() -> int:
    """Return the bytes of memory that are available, by the machine and by the container's limit."""
    available = psutil.virtual_memory().available
    limit, used = _words(CGROUP / "memory.max"), _words(CGROUP / "memory.current")
    if not (limit and used and limit[0].isdigit()):
        return available
    words = _words(CGROUP / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    left = int(limit[0]) - int(used[0]) + sum(int(stat.get(name, 0)) for name in _RECLAIMABLE)
    return min(available, max(0, left), int(limit[0]))  # The files are not read at the same moment.


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def check_memory(available: int, demand: Demand) -> Verdict:
    """Check that there is memory for the processes and their models."""
    what = f"{size_text(available)} of memory are available, about {size_text(demand.memory_bytes)} are needed"
    if available < demand.memory_bytes:
        return warning(
            "memory", what, "lower data.num_workers, start fewer ranks, or end other processes on the machine"
        )
    return ok("memory", what)


def check_shared_memory(free: int, demand: Demand) -> Verdict:
    """Check that there is shared memory for the batches that loader workers hold ready."""
    what = f"{SHM} has {size_text(free)} free, batches take {size_text(demand.shm_bytes)}"
    if free < demand.shm_bytes or free == 0:
        remedy = "give the container more (docker run --shm-size, or --ipc=host), or lower data.prefetch_factor"
        return problem("shared memory", what, remedy)
    return ok("shared memory", what)


# Disk for checkpoints


def checkpoint_folder(config: Config) -> Path:
    """Return the folder of checkpoints on this machine, also of those that go to a store."""
    folder = config.trainer.checkpoint_folder
    return Path(config.output_folder if folder is None or is_url(folder) else folder).expanduser()


def existing(folder: Path) -> Path:
    """Return a folder, or the lowest existing one above it."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110 -- False without permission


def check_output_folder(folder: Path) -> Verdict:
    """Check that a folder, or the lowest existing one above it, can be written: a disk may be full or read-only."""
    try:
        with tempfile.TemporaryFile(dir=existing(folder)) as file:
            file.write(os.urandom(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        remedy = "free space, or choose another output_folder (or trainer.checkpoint_folder)"
        return problem("output folder", f"{folder} cannot be written: {error.strerror}", remedy)
    return ok("output folder", f"{folder} can be written")


def check_output_space(folder: Path, demand: Demand) -> Verdict:
    """Check that there is space for the checkpoints."""
    written, free = check_output_folder(folder), shutil.disk_usage(existing(folder)).free
    if written.level is Level.problem:
        return written
    what = f"{folder} has {size_text(free)} free, a checkpoint takes {size_text(demand.checkpoint_bytes)}"
    remedy = (
        "free space, choose another output_folder (or trainer.checkpoint_folder), or keep fewer "
        "(trainer.keep_checkpoints, algorithms.ema.power.snapshot_interval)"
    )
    if free < demand.checkpoint_bytes:
        return problem("output folder", what, remedy)
    needed = demand.storage_bytes
    if needed is not None and free < needed and free + file_bytes(folder) < needed:
        return warning("output folder", f"{what} and all that stay, with stored averages, {size_text(needed)}", remedy)
    return ok("output folder", what)


def file_bytes(folder: Path) -> int:
    """Add up the files in a folder; slow on a network disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).lstat().st_size
            except FileNotFoundError:  # Removed meanwhile.
                continue
    return total
