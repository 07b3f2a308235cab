"""The rows of `benchmarks/__main__.py`, and the description of the machine that each carries."""

import functools
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import pynvml
import torch
from composer.utils import dist
from torch.version import cuda as cuda_version

from benchmarks import data, steps
from benchmarks.rows import Row


def part_rows(
    name: str,
    device: torch.device,
    resolutions: Sequence[int],
    sizes: Sequence[int],
    overrides: Sequence[str],
    *,
    quick: bool = False,
) -> list[Row]:
    """Make the rows of a part: Stable Diffusion 2 on a GPU, the tiny architecture on a CPU.

    Resolutions in pixels and sizes of a rank's microbatch are those of `step`. `quick` shows that it runs, not how
    fast.
    """
    if name == "step":
        is_gpu = device.type == "cuda"
        precision = "trainer.precision=" + ("amp_bf16" if is_gpu else "fp32")
        run: dict[str, Any] = {"architecture": "stable_diffusion_2" if is_gpu else "tiny"}
        run["overrides"] = [f"trainer.device={'gpu' if is_gpu else 'cpu'}", precision, *overrides]
        blocks = {"num_blocks": 2 if quick else 10, "block": 5 if is_gpu and not quick else 1}
        rows = []
        for side, size in ((side, size) for side in resolutions for size in sizes):
            each = {**run, "resolution": side, "batch_size": size * dist.get_world_size()}
            rows.append(_row(f"trainer/{side}/{size}", steps.measure_trainer, device, **each, **blocks))
            rows.append(_row(f"parts/{side}/{size}", steps.measure_parts, device, **each, num_steps=4 if quick else 12))
        return rows
    shards = {"num_shards": 40, "shard_samples": 1000} if quick else {"num_shards": 80_000}
    rows_of: dict[str, list[tuple[str, Callable[..., Any], dict[str, Any]]]] = {
        "load": [
            ("load latents", data.measure_latent_loading, {"num_samples": 1024 if quick else 8192}),
            ("load images", data.measure_image_loading, {"num_samples": 32 if quick else 256}),
        ],
        "open": [(f"open/{number}", data.measure_opening, {**shards, "num_streams": number}) for number in (1, 40)],
        "prepare": [("prepare", data.measure_preparing, {"num_images": 50 if quick else 4000})],
    }
    return [Row(name=row, measure=measure, parameters=settings) for row, measure, settings in rows_of[name]]


def _row(name: str, measure: Callable[..., Any], device: torch.device, **parameters: Any) -> Row:
    return Row(name=name, measure=functools.partial(_measure, measure, device), parameters=parameters)


def _measure(measure: Callable[..., dict[str, Any]], device: torch.device, /, **parameters: Any) -> dict[str, Any]:
    """Measure, and add the memory of a GPU."""
    result = measure(device, **parameters)
    if device.type == "cuda":
        result |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return result


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what computes on it, without a CUDA context."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if device.type == "cpu":
        name = platform.processor() or platform.machine()
        return {"device": f"{os.cpu_count()} x {name}, {torch.get_num_threads()} threads", "type": "cpu", **found}
    pynvml.nvmlInit()
    found |= {"device": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)), "type": "cuda"}
    cudnn: Any = torch.backends.cudnn
    found |= {"cuda": cuda_version, "cudnn": cudnn._cudnn.getVersionInt(), "triton": version("triton")}
    return {**found, "driver": pynvml.nvmlSystemGetDriverVersion()}
