"""Checks of one machine: each a function from readings to a verdict."""

from collections.abc import Sequence

from diffusion.operations.checks.demand import Demand
from diffusion.operations.checks.gpus import GpuReading, check_faults
from diffusion.operations.checks.readings import DiskReading, Leftover, MachineReading
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, warning
from diffusion.planning.plan import USABLE_MEMORY

SPARE_SHM = 2.0
"""Shared memory that should be free, over what the batches in it take."""

SPARE_FILES = 2.0
"""File handles that should be allowed, over what is needed."""

WORKERS_PER_CORE = 4
"""Loader workers per core above which they only take turns."""

FOREIGN_BYTES = 2e9
"""Memory of other processes on a GPU that is worth a word; less is a display, or a context."""

SLOW_DISK = 50e6
"""Bytes per second below which a disk is slow."""

SPARE_MODULES = 0.1
"""Share of the modules that may be compiled at each start."""

LONG_CHECKPOINT = 300.0
"""Seconds that a checkpoint may take to be written."""

CLOCK_SKEW = 60.0
"""Seconds by which a file may be newer than now."""


def check_machine_reading(reading: MachineReading, demand: Demand) -> list[Verdict]:
    """All checks of what a machine has."""
    return [
        check_cores(reading, demand),
        check_memory(reading, demand),
        check_shared_memory(reading, demand),
        check_file_limit(reading, demand),
        *check_gpus(reading.gpus, demand),
    ]


def check_cores(reading: MachineReading, demand: Demand) -> Verdict:
    """Are there cores for the loader workers?"""
    cores = "1 core" if reading.num_cores == 1 else f"{reading.num_cores} cores"
    what = f"{cores} for {demand.num_ranks} ranks and {demand.num_workers} loader workers"
    if demand.num_workers > WORKERS_PER_CORE * reading.num_cores:
        return warning("CPU cores", what, "lower data.num_workers, or give the job more cores")
    return ok("CPU cores", what)


def check_memory(reading: MachineReading, demand: Demand) -> Verdict:
    """Is there memory for processes and, on the CPU, for the model?"""
    what = (
        f"{size_text(reading.available_bytes)} of {size_text(reading.memory_bytes)} memory are available, "
        f"about {size_text(demand.memory_bytes)} are needed"
    )
    if reading.available_bytes < demand.memory_bytes:
        return warning("memory", what, "lower data.num_workers, or end other processes on the machine")
    return ok("memory", what)


def check_shared_memory(reading: MachineReading, demand: Demand) -> Verdict:
    """Is there shared memory for the batches that loader workers hold ready?"""
    what = (
        f"/dev/shm has {size_text(reading.shm_free_bytes)} of {size_text(reading.shm_bytes)} free, "
        f"batches in it take {size_text(demand.shm_bytes)}"
    )
    remedy = "give the container more (docker run --shm-size, or --ipc=host), or lower data.prefetch_factor"
    if reading.shm_free_bytes < demand.shm_bytes or reading.shm_free_bytes == 0:
        return problem("shared memory", what, remedy)
    if reading.shm_free_bytes < SPARE_SHM * demand.shm_bytes:
        return warning("shared memory", what, remedy)
    return ok("shared memory", what)


def check_file_limit(reading: MachineReading, demand: Demand) -> Verdict:
    """May a rank open as many files as it will?"""
    what = f"a process may open {reading.file_limit} files, a rank needs about {demand.num_files}"
    wanted = int(SPARE_FILES * demand.num_files)
    remedy = f"ulimit -n {max(wanted, min(65536, reading.file_limit_max))} before the start"
    if reading.file_limit < demand.num_files:
        return problem("open files", what, remedy)
    return warning("open files", what, remedy) if reading.file_limit < wanted else ok("open files", what)


def check_gpus(gpus: Sequence[GpuReading], demand: Demand) -> list[Verdict]:
    """Are the GPUs free, large enough and without faults? Nothing to say of a run on the CPU."""
    if demand.gpu_bytes is None:
        return []
    if not gpus:
        text = "NVML does not answer: state and use of the GPUs are not known"
        return [warning("GPUs", text, "run nvidia-smi to see why")]
    verdicts = [verdict for gpu in gpus for verdict in _check_gpu(gpu, demand.gpu_bytes)]
    least = min(gpu.free_bytes or 0 for gpu in gpus)
    return verdicts or [ok("GPUs", f"{len(gpus)} with at least {size_text(least)} free")]


def _check_gpu(gpu: GpuReading, needed: float) -> list[Verdict]:
    if gpu.total_bytes is None or gpu.free_bytes is None:
        return [warning("GPUs", f"{gpu.name}: NVML does not say what memory it has", "run nvidia-smi to see why")]
    verdicts = []
    what = f"{gpu.name} has {size_text(gpu.total_bytes)} of memory, {size_text(needed)} are needed"
    remedy = (
        "lower trainer.device_train_microbatch_size (run.py --dry-run says what fits), set trainer.parallelism=fsdp "
        "and trainer.reshard_after_forward, or take more GPUs"
    )
    if needed > gpu.total_bytes:
        verdicts.append(problem("GPU memory", what, remedy))
    elif needed > USABLE_MEMORY * gpu.total_bytes:
        verdicts.append(warning("GPU memory", what, remedy))
    if gpu.foreign_bytes is not None and gpu.foreign_bytes > FOREIGN_BYTES:
        what = f"other processes hold {size_text(gpu.foreign_bytes)} on {gpu.name}"
        is_full = needed > gpu.free_bytes
        remedy = "end them (nvidia-smi shows them), or choose other GPUs with CUDA_VISIBLE_DEVICES"
        verdicts.append((problem if is_full else warning)("GPU in use", what, remedy))
    return [*verdicts, *check_faults(gpu)]


def check_output_space(disk: DiskReading, demand: Demand, key: str = "output_folder") -> Verdict:
    """Is there space for the checkpoints in the folder that `key` names?"""
    kept = demand.storage_bytes
    what = (
        f"{disk.folder} has {size_text(disk.free_bytes)} free, a checkpoint takes {size_text(demand.checkpoint_bytes)}"
        + (f" and all that stay {size_text(kept)}" if kept is not None else "")
    )
    if not disk.is_writable:
        return problem("output folder", f"{disk.folder} cannot be written to", f"choose another {key}")
    remedy = f"free space, choose another {key}, or keep fewer (trainer.keep_checkpoints)"
    if disk.free_bytes < demand.checkpoint_bytes:
        return problem("output folder", what, remedy)
    if kept is not None and disk.free_bytes + disk.held_bytes < kept:
        return warning("output folder", what, remedy)
    return ok("output folder", what)


def check_output_speed(folder: str, bytes_per_second: float, demand: Demand) -> Verdict:
    """Are checkpoints written fast enough?"""
    seconds = demand.checkpoint_bytes / bytes_per_second
    what = f"{folder} is written at {size_text(bytes_per_second)}/s: a checkpoint takes about {seconds:,.0f} s"
    if seconds > LONG_CHECKPOINT:
        remedy = "choose a faster disk, or write while training goes on (trainer.async_checkpoints)"
        return warning("output speed", what, remedy)
    return ok("output speed", what)


def check_cache_speed(folder: str, bytes_per_second: float, needed: float | None) -> Verdict:
    """Is a cache written fast enough?

    Args:
        folder: the cache.
        bytes_per_second: measured.
        needed: bytes per second that a node downloads; None where the run's throughput is not known.
    """
    what = f"{folder} is written at {size_text(bytes_per_second)}/s"
    if needed is not None:
        what += f", and a node downloads {size_text(needed)}/s"
    if bytes_per_second < (SLOW_DISK if needed is None else 2 * needed):
        return warning("cache speed", what, "put data.local on a faster disk")
    return ok("cache speed", what)


def check_leftovers(leftovers: Sequence[Leftover], shm_bytes: int) -> Verdict:
    """Have dead runs left shared memory behind?"""
    if not leftovers:
        return ok("leftovers", "no shared memory of dead runs in /dev/shm")
    total = sum(leftover.num_bytes for leftover in leftovers)
    names = ", ".join(leftover.name for leftover in leftovers[:4]) + (" ..." if len(leftovers) > 4 else "")
    what = f"{len(leftovers)} objects of {size_text(total)} in /dev/shm belong to no process: {names}"
    if total > shm_bytes / 100:
        return warning("leftovers", what, "delete them")
    return ok("leftovers", what)


def check_bytecode(uncompiled: int, num_modules: int, *, is_forbidden: bool) -> Verdict:
    """Is the bytecode of what is imported kept?

    Args:
        uncompiled: modules that have none on the disk.
        num_modules: that this process has imported.
        is_forbidden: whether Python was told not to write any.
    """
    what = f"{num_modules - uncompiled} of {num_modules} Python modules have bytecode"
    if uncompiled > SPARE_MODULES * num_modules:
        remedy = (
            "start once without PYTHONDONTWRITEBYTECODE" if is_forbidden else "let one start write to site-packages"
        )
        return warning("bytecode", f"{what}: each start compiles the others, which takes as long again", remedy)
    return ok("bytecode", what)


def check_clock(now: float, newest: float | None) -> Verdict:
    """Is the clock behind the data?

    Args:
        now: seconds since 1970.
        newest: time of the newest file of the data set; None where there is none on this machine.
    """
    if newest is not None and newest > now + CLOCK_SKEW:
        what = f"the clock is {newest - now:,.0f} s behind the newest file of the data set"
        return warning("clock", what, "set it (chronyc makestep): object stores refuse requests of a wrong time")
    return ok("clock", "not behind the data set")
