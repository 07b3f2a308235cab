"""Checks of the GPUs of this machine by NVML and the kernel log; NVML is optional."""

import math
import os
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml

from diffusion.operations.checks.check import Check, Job, Stage
from diffusion.operations.checks.machine import Demand, find_demand
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, warning

T = TypeVar("T")

SLOWDOWNS = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "too hot",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake of the power supply",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware protection",
}
"""Reasons of NVML for lower clocks that are faults."""

FOREIGN_BYTES = 2e9
"""Memory of other processes on a GPU that is reported; less is a display, or a context."""

XID_FAULTS = {
    48: "uncorrectable memory error",
    62: "controller fault",
    64: "damaged memory could not be replaced",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many corrected memory errors",
    95: "uncontained memory error",
    119: "no answer from its system processor",
    120: "fault of its system processor",
}
"""Xid errors that are defects of the machine, by NVIDIA's list."""

XID_PROGRAMS = frozenset({13, 31, 43, 45, 68, 69})
"""Xid errors that programs cause as well."""

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?\s*(.*)")


# NVML


@dataclass(frozen=True, kw_only=True)
class GpuProbe:
    """State of one GPU."""

    name: str
    """Number and model, such as `GPU 3 (NVIDIA H100)`."""

    total_bytes: int | None
    """Memory; None if NVML does not report it."""

    free_bytes: int | None
    foreign_bytes: int | None
    """Memory of processes outside of the job; None if their IDs are of another namespace, as in most containers."""

    uncorrected_errors: int | None
    """Uncorrectable memory errors since the driver was loaded; None without ECC."""

    remapping_failed: bool
    """Whether damaged memory could not be replaced by spare rows."""

    slowdowns: tuple[str, ...]
    """Faults that lower its clocks."""


def probe_gpus(job: Job, nvml: Any = pynvml) -> list[GpuProbe]:
    """Probe the visible GPUs; none without NVML."""
    with _opened(nvml) as is_open:
        if not is_open:
            return []
        handles = _optional(nvml, lambda: visible_handles(nvml), [])
        own = job_processes()
        return [_probe(nvml, number, handle, own) for number, handle in enumerate(handles)]


@contextmanager
def _opened(nvml: Any) -> Iterator[bool]:
    """Open NVML and return whether that succeeded."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        nvml.nvmlShutdown()


def visible_handles(nvml: Any) -> list[Any]:
    """Return the handles of the GPUs in CUDA_VISIBLE_DEVICES, in its order; NVML is open."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, map(str.strip, visible.split(","))):
        get = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        try:
            handles.append(get(int(name) if name.isdigit() else name))
        except nvml.NVMLError:
            break  # CUDA ignores what follows an invalid name, too.
    return handles


def job_processes() -> set[int]:
    """Return the IDs of this process, its launcher and all descendants of the launcher."""
    this = psutil.Process()
    parent = this.parent()
    root = parent if parent is not None and "LOCAL_WORLD_SIZE" in os.environ else this
    return {root.pid, this.pid, *(child.pid for child in root.children(recursive=True))}


def _probe(nvml: Any, number: int, handle: Any, own: Collection[int]) -> GpuProbe:
    name = _optional(nvml, lambda: nvml.nvmlDeviceGetName(handle), "")
    memory = _optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
    processes = _optional(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    reasons = _optional(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
    rows = _optional(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle), None)
    is_known = all(Path(f"/proc/{process.pid}").exists() for process in processes)
    foreign = sum(process.usedGpuMemory or 0 for process in processes if process.pid not in own)
    return GpuProbe(
        name=f"GPU {number} ({name.decode() if isinstance(name, bytes) else name})",
        total_bytes=memory.total if memory is not None else None,
        free_bytes=memory.free if memory is not None else None,
        foreign_bytes=foreign if is_known else None,
        uncorrected_errors=_optional(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds), None),
        remapping_failed=bool(rows[3]) if rows is not None else False,
        slowdowns=tuple(text for reason, text in SLOWDOWNS.items() if reasons & getattr(nvml, reason)),
    )


def _optional(nvml: Any, read: Callable[[], T], default: Any) -> T:
    """Return a value of NVML, or a default if the GPU or the user's rights do not provide it."""
    try:
        return read()
    except nvml.NVMLError:
        return default


class GpuMeter:
    """Utilisation of the visible GPUs between two readings.

    Args:
        nvml: the module `pynvml`.
    """

    def __init__(self, nvml: Any = pynvml) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        try:
            nvml.nvmlInit()
            self._handles = visible_handles(nvml)
        except nvml.NVMLError:
            return
        self._since = [0] * len(self._handles)

    def read(self) -> tuple[float, float] | None:
        """Return the share of the time in which a kernel ran, and the used share of the memory: means over the GPUs.

        The time is that since the last reading, as far as the driver remembers it; None without GPUs. The memory is
        that of the GPUs that report it, NaN if none does.
        """
        if not self._handles:
            return None
        busy = [self._busy(number) for number in range(len(self._handles))]
        used = [share for share in map(self._used, self._handles) if share is not None]
        return sum(busy) / len(busy), sum(used) / len(used) if used else math.nan

    def _used(self, handle: Any) -> float | None:
        memory = _optional(self._nvml, lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return memory.used / memory.total if memory is not None else None

    def _busy(self, number: int) -> float:
        """Return the mean of the driver's samples since the last reading, or its current value."""
        nvml, handle = self._nvml, self._handles[number]
        try:
            _, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._since[number])
        except nvml.NVMLError:
            samples = []
        new = [sample for sample in samples if sample.timeStamp > self._since[number]]
        if new:
            self._since[number] = max(sample.timeStamp for sample in new)
            return sum(sample.sampleValue.uiVal for sample in new) / len(new) / 100
        return _optional(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, 0.0)


# Checks


def check_gpus(gpus: Sequence[GpuProbe]) -> Verdict:
    """Check that NVML reports the memory of the GPUs."""
    unknown = [gpu.name for gpu in gpus if gpu.total_bytes is None or gpu.free_bytes is None]
    if unknown or not gpus:
        what = f"NVML does not report the state of {', '.join(unknown) or 'the GPUs'}"
        return warning(what, "run nvidia-smi to see why")
    return ok(f"{len(gpus)} with at least {size_text(min(gpu.free_bytes or 0 for gpu in gpus))} free")


def check_gpu_memory(gpus: Sequence[GpuProbe], demand: Demand) -> Iterator[Verdict]:
    """Check that the run fits into the GPUs, and that other processes leave room."""
    needed, with_reserve = demand.gpu_bytes or 0.0, demand.gpu_bytes_with_reserve or 0.0
    remedy = (
        "lower trainer.device_train_microbatch_size (run.py --dry-run says what fits), set trainer.parallelism=fsdp "
        "and trainer.reshard_after_forward, or take more GPUs"
    )
    for gpu in gpus:
        if gpu.total_bytes is None or gpu.free_bytes is None:
            continue
        what = f"{gpu.name} has {size_text(gpu.total_bytes)} of memory, {size_text(needed)} are needed"
        if with_reserve > gpu.total_bytes:
            yield (problem if needed > gpu.total_bytes else warning)(what, remedy)
        if gpu.foreign_bytes is not None and gpu.foreign_bytes > FOREIGN_BYTES:
            yield (problem if needed > gpu.free_bytes else warning)(
                f"other processes hold {size_text(gpu.foreign_bytes)} on {gpu.name}",
                "end them (nvidia-smi shows them), or choose other GPUs with CUDA_VISIBLE_DEVICES",
                check="GPU in use",
            )


def check_gpu_errors(gpus: Sequence[GpuProbe]) -> Iterator[Verdict]:
    """Check the GPUs for memory errors."""
    for gpu in gpus:
        if gpu.remapping_failed:
            what = f"{gpu.name} has damaged memory that spare rows cannot replace"
            yield problem(what, "remove it from the job and have it exchanged")
        elif gpu.uncorrected_errors:
            what = f"{gpu.name} had {gpu.uncorrected_errors} uncorrectable memory errors"
            yield warning(what, "reset it or restart the machine; exchange it if they recur")


def check_gpu_clocks(gpus: Sequence[GpuProbe]) -> Iterator[Verdict]:
    """Check the GPUs for clocks that faults lower."""
    for gpu in gpus:
        if gpu.slowdowns:
            what = f"{gpu.name} is slowed down: {', '.join(gpu.slowdowns)}"
            yield warning(what, "check cooling and power supply: one slow GPU slows down all")


def probe_kernel_log(job: Job) -> str | None:
    """Read the kernel log since the start of the machine; None without the right to."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def check_xids(kernel_log: str | None) -> Verdict:
    """Check the kernel log for Xid errors of NVIDIA's driver."""
    if kernel_log is None:
        return ok("unknown: the kernel log cannot be read")
    xids = {(gpu, int(number)) for gpu, number, _ in _XID.findall(kernel_log)}
    if faults := sorted((gpu, number) for gpu, number in xids if number in XID_FAULTS):
        found = ", ".join(f"{gpu} (Xid {number}, {XID_FAULTS[number]})" for gpu, number in faults)
        remedy = "remove the machine from the job and restart it; if the error recurs, have the GPU exchanged"
        return problem(f"since its start the driver reported {found}", remedy)
    if others := sorted({number for _, number in xids} - XID_FAULTS.keys() - XID_PROGRAMS):
        what = f"since its start the driver reported Xid {', '.join(map(str, others))}"
        return warning(what, "look the numbers up in NVIDIA's list; restart the machine if training fails")
    return ok("no defect of a GPU in the kernel log")


_ALWAYS, _AT_START = tuple(Stage), (Stage.start, Stage.doctor)
_NOT_AT_START = (Stage.host, Stage.doctor)

CHECKS = [
    Check(name="GPUs", needs=(probe_gpus,), function=check_gpus, stages=_AT_START, needs_gpu=True),
    Check(
        name="GPU memory",
        needs=(probe_gpus, find_demand),
        function=check_gpu_memory,
        stages=_AT_START,
        needs_gpu=True,
    ),
    Check(name="GPU errors", needs=(probe_gpus,), function=check_gpu_errors, stages=_ALWAYS, needs_gpu=True),
    Check(name="GPU clocks", needs=(probe_gpus,), function=check_gpu_clocks, stages=_ALWAYS, needs_gpu=True),
    Check(name="Xid errors", needs=(probe_kernel_log,), function=check_xids, stages=_NOT_AT_START, needs_gpu=True),
]
