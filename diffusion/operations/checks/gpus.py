"""What NVML says about the GPUs of this machine; nothing where there is no NVIDIA driver."""

import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from diffusion.operations.checks.verdicts import Verdict, problem, warning

T = TypeVar("T")

SLOWDOWNS = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "it is too hot",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power supply asks for it",
    "nvmlClocksThrottleReasonHwSlowdown": "the hardware protects itself",
}
"""Reasons of NVML for lower clocks that are faults, and what they mean."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU."""

    name: str
    """Number and model, such as `GPU 3 (NVIDIA H100)`."""

    total_bytes: int | None
    """Of its memory; None where NVML does not say."""

    free_bytes: int | None
    foreign_bytes: int | None
    """Memory that processes outside of the job hold; None where a process has no id here, as in most containers."""

    uncorrected_errors: int | None
    """Errors of its memory that could not be corrected, since the driver was loaded; None without ECC."""

    remapping_failed: bool
    """Whether damaged memory could not be replaced by spare rows."""

    slowdowns: tuple[str, ...]
    """Why its clocks are lowered, if they are by a fault."""


@contextmanager
def _opened(nvml: Any) -> Iterator[bool]:
    """Open NVML, if there is one."""
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
    """NVML's handles of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. NVML must be open."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for name in filter(None, map(str.strip, visible.split(","))):
        get = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
        try:
            handles.append(get(int(name) if name.isdigit() else name))
        except nvml.NVMLError:
            break  # Like CUDA, which takes no notice of what follows an invalid name.
    return handles


def read_gpus(job: Collection[int] = (), nvml: Any = pynvml) -> list[GpuReading]:
    """Read the GPUs that this process may use.

    Args:
        job: process ids of the job, whose memory is not foreign.
        nvml: the module `pynvml`.
    """
    with _opened(nvml) as is_open:
        if not is_open:
            return []
        handles = _attempt(nvml, lambda: visible_handles(nvml), [])
        return [_read(nvml, number, handle, job) for number, handle in enumerate(handles)]


def _read(nvml: Any, number: int, handle: Any, job: Collection[int]) -> GpuReading:
    name = _attempt(nvml, lambda: nvml.nvmlDeviceGetName(handle), "")
    memory = _attempt(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle), None)
    processes = _attempt(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    reasons = _attempt(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
    rows = _attempt(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(handle), None)
    return GpuReading(
        name=f"GPU {number} ({name.decode() if isinstance(name, bytes) else name})",
        total_bytes=memory.total if memory is not None else None,
        free_bytes=memory.free if memory is not None else None,
        foreign_bytes=_foreign_bytes(processes, job),
        uncorrected_errors=_attempt(nvml, lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds), None),
        remapping_failed=bool(rows[3]) if rows is not None else False,
        slowdowns=tuple(text for reason, text in SLOWDOWNS.items() if reasons & getattr(nvml, reason)),
    )


def _foreign_bytes(processes: Collection[Any], job: Collection[int]) -> int | None:
    """Memory of processes outside of the job; None where ids are of another namespace, and the job is not found."""
    if not all(Path(f"/proc/{process.pid}").exists() for process in processes):
        return None
    return sum(process.usedGpuMemory or 0 for process in processes if process.pid not in job)


def _attempt(nvml: Any, read: Callable[[], T], otherwise: Any) -> T:
    """What NVML says, or a value where this GPU (or the user's rights) does not provide it."""
    try:
        return read()
    except nvml.NVMLError:
        return otherwise


def check_faults(gpu: GpuReading) -> list[Verdict]:
    """What is wrong with a GPU, whatever it is to do."""
    verdicts = []
    if gpu.remapping_failed:
        what = f"{gpu.name} has damaged memory that cannot be replaced by spare rows"
        verdicts.append(problem("GPU errors", what, "take it out of the job and have it exchanged"))
    elif gpu.uncorrected_errors:
        what = f"{gpu.name} had {gpu.uncorrected_errors} memory errors that could not be corrected"
        verdicts.append(warning("GPU errors", what, "reset it or restart the machine; if they come back, exchange it"))
    if gpu.slowdowns:
        what = f"{gpu.name} is slowed down: {', '.join(gpu.slowdowns)}"
        verdicts.append(warning("GPU clocks", what, "check cooling and power supply: one slow GPU slows down all"))
    return verdicts


class GpuMeter:
    """Utilisation of the visible GPUs between two readings. Without NVML it reads nothing.

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
        """Share of the time in which a kernel ran, and share of the memory in use, as means over the GPUs.

        The time is that since the last reading, as far as the driver remembers it; None without GPUs. The memory is
        that of the GPUs that answer, and not a number without any.
        """
        if not self._handles:
            return None
        busy = [self._busy(number) for number in range(len(self._handles))]
        used = [share for share in map(self._used, self._handles) if share is not None]
        return sum(busy) / len(busy), sum(used) / len(used) if used else math.nan

    def _used(self, handle: Any) -> float | None:
        memory = _attempt(self._nvml, lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return memory.used / memory.total if memory is not None else None

    def _busy(self, number: int) -> float:
        """Mean of the samples that the driver has taken since the last reading, or its present value."""
        nvml, handle = self._nvml, self._handles[number]
        try:
            _, samples = nvml.nvmlDeviceGetSamples(handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, self._since[number])
        except nvml.NVMLError:
            samples = []
        new = [sample for sample in samples if sample.timeStamp > self._since[number]]
        if new:
            self._since[number] = max(sample.timeStamp for sample in new)
            return sum(sample.sampleValue.uiVal for sample in new) / len(new) / 100
        return _attempt(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, 0.0)
