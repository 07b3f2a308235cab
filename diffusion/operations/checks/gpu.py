"""Checks of the GPUs of this machine by NVML, and their utilisation; NVML is optional."""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pynvml
import torch

from diffusion.config.fields import size_text
from diffusion.operations.checks.verdicts import Verdict, ok, problem, warning

FOREIGN_BYTES = 2e9
"""Memory of other processes on a GPU that is reported; less is a display, or a context."""


def computes_bf16() -> bool:
    """Return whether there are GPUs with bfloat16; emulation by the library does not count."""
    return torch.cuda.device_count() > 0 and torch.cuda.is_bf16_supported(including_emulation=False)


def gpu_handles(nvml: Any = pynvml, num_gpus: int | None = None) -> dict[str, Any]:
    """Open NVML and return the handles of the GPUs in CUDA_VISIBLE_DEVICES by their names; none without NVML.

    The ranks of this node use the first `num_gpus` of them; None is all.
    """
    try:
        nvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = map(str, range(nvml.nvmlDeviceGetCount())) if visible is None else map(str.strip, visible.split(","))
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
            for name in itertools.islice(filter(None, names), num_gpus)
        ]
    except nvml.NVMLError:
        return {}
    return {
        f"GPU {i} ({_optional(nvml, '', nvml.nvmlDeviceGetName, handle)})": handle for i, handle in enumerate(handles)
    }


def _optional(nvml: Any, default: Any, read: Callable[..., Any], *arguments: Any) -> Any:
    """Return a value of NVML, or a default if the GPU or the user's rights do not provide it."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return default


def check_gpu_memory(needed: float, nvml: Any = pynvml, num_gpus: int | None = None) -> Iterator[Verdict]:
    """Check that `needed` bytes fit into each used GPU, and that other processes leave room."""
    gpus = gpu_handles(nvml, num_gpus)
    min_free, unknown = math.inf, []
    for name, handle in gpus.items():
        memory = _optional(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
        if memory is None:
            unknown.append(name)
            continue
        min_free = min(min_free, memory.free)
        if needed > memory.total:
            yield problem(
                "GPU memory",
                f"{name} has {size_text(memory.total)} of memory, {size_text(needed)} are needed",
                "lower trainer.device_train_microbatch_size (run.py --dry-run says what fits), set "
                "trainer.parallelism=fsdp and trainer.reshard_after_forward, or take more GPUs",
            )
        foreign = _foreign_bytes(nvml, handle)
        if foreign > FOREIGN_BYTES:
            what = f"other processes hold {size_text(foreign)} on {name}"
            remedy = "end them (nvidia-smi shows them), or choose other GPUs with CUDA_VISIBLE_DEVICES"
            yield (problem if needed > memory.free else warning)("GPU in use", what, remedy)
    if unknown or not gpus:
        what = f"NVML does not report the state of {', '.join(unknown) or 'the GPUs'}"
        yield warning("GPUs", what, "run nvidia-smi to see why")
    else:
        yield ok("GPUs", f"{len(gpus)} with at least {size_text(min_free)} free")


def _foreign_bytes(nvml: Any, handle: Any) -> int:
    """Return the memory of processes outside of the job; 0 if their IDs are of another namespace, as in containers."""
    this = psutil.Process()
    parent = this.parent()
    launcher = parent if parent is not None and "LOCAL_WORLD_SIZE" in os.environ else this
    own = {launcher.pid, this.pid, *(child.pid for child in launcher.children(recursive=True))}
    processes = _optional(nvml, [], nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if not all(Path(f"/proc/{process.pid}").exists() for process in processes):
        return 0
    return sum(process.usedGpuMemory or 0 for process in processes if process.pid not in own)


def check_gpu_errors(nvml: Any = pynvml, num_gpus: int | None = None) -> Iterator[Verdict]:
    """Check the used GPUs for memory errors that the hardware could not correct."""
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    for name, handle in gpu_handles(nvml, num_gpus).items():
        rows = _optional(nvml, None, nvml.nvmlDeviceGetRemappedRows, handle)
        errors = _optional(nvml, 0, nvml.nvmlDeviceGetTotalEccErrors, handle, *kinds)
        if rows is not None and rows[3]:
            what = f"{name} has damaged memory that spare rows cannot replace"
            yield problem("GPU errors", what, "remove it from the job and have it exchanged")
        elif errors:
            what = f"{name} had {errors} uncorrectable memory errors since the driver was loaded"
            yield warning("GPU errors", what, "reset it or restart the machine; exchange it if they recur")


class GpuMeter:
    """Utilisation of the used GPUs between two readings, by NVML."""

    def __init__(self, nvml: Any = pynvml, num_gpus: int | None = None) -> None:
        self._nvml = nvml
        self._handles = list(gpu_handles(nvml, num_gpus).values())
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
        memory = _optional(self._nvml, None, self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return memory.used / memory.total if memory is not None else None

    def _busy(self, number: int) -> float:
        """Return the mean of the driver's samples since the last reading, or its current value."""
        nvml, handle, since = self._nvml, self._handles[number], self._since[number]
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, samples = _optional(nvml, (0, []), nvml.nvmlDeviceGetSamples, handle, kind, since)
        new = [sample for sample in samples if sample.timeStamp > since]
        if new:
            self._since[number] = max(sample.timeStamp for sample in new)
            return sum(sample.sampleValue.uiVal for sample in new) / len(new) / 100
        current = _optional(nvml, None, nvml.nvmlDeviceGetUtilizationRates, handle)
        return current.gpu / 100 if current is not None else 0.0
