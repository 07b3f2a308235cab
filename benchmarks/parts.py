"""Rows of `python -m benchmarks`: steps of the Trainer with their parts, operators, and the data; the machine of a row.

`run` stands for arguments of `run_config`: `architecture`, `resolution`, `batch_size` and `overrides`.
"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pynvml
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.version import cuda as cuda_version

from benchmarks import data
from benchmarks.rows import Row
from benchmarks.runs import Turn, run_config, run_trainer
from diffusion.config.data import ImageSize
from diffusion.distributed import world_size
from diffusion.operations.checks.nodes import measure_device, time_runs
from diffusion.planning.plan import training_flops

WITH_AVERAGE = "algorithms.ema={start: 1ba, decays: [0.9999]}"

REPEATS = 10
"""Calls of an operator between two waits for the device."""


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
    is_gpu = device.type == "cuda"
    steps: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
    for side, size in ((side, size) for side in resolutions for size in sizes):
        precision = "trainer.precision=" + ("amp_bf16" if is_gpu else "fp32")
        run: dict[str, Any] = {
            "architecture": "stable_diffusion_2" if is_gpu else "tiny",
            "overrides": [f"trainer.device={'gpu' if is_gpu else 'cpu'}", precision, *overrides],
            "resolution": side,
            "batch_size": size * world_size(),
        }
        blocks = {"num_blocks": 2 if quick else 10, "block": 5 if is_gpu and not quick else 1}
        steps.append((f"trainer/{side}/{size}", measure_trainer, {**run, **blocks}))
        steps.append((f"parts/{side}/{size}", measure_parts, {**run, "num_steps": 4 if quick else 12}))
    shards = {"num_shards": 40, "shard_samples": 1000} if quick else {"num_shards": 80_000}
    rows: dict[str, list[tuple[str, Callable[..., Any], dict[str, Any]]]] = {
        "step": steps,
        "load": [
            ("load latents", data.measure_latent_loading, {"num_samples": 1024 if quick else 8192}),
            ("load images", data.measure_image_loading, {"num_samples": 32 if quick else 256}),
        ],
        "open": [(f"open/{number}", data.measure_opening, {**shards, "num_streams": number}) for number in (1, 40)],
        "prepare": [("prepare", data.measure_preparing, {"num_images": 50 if quick else 4000})],
    }
    return [Row(name=row, measure=measure, parameters=settings) for row, measure, settings in rows[name]]


def measure_trainer(*, num_blocks: int, block: int, **run: Any) -> dict[str, Any]:
    """Time the Trainer's steps on all ranks, in blocks, with a wait for the device after each; as `_speed`."""
    found = run_trainer("StepClock", {"block": block}, num_steps=(num_blocks + 2) * block, **run)
    return _speed(found["seconds"][1:], **run)


def measure_turn(*, turn: dict[str, str], num_steps: int, **run: Any) -> dict[str, Any]:
    """Time the Trainer's steps alone on the GPU, and profile the last one; as `_speed` and `Turn.result`."""
    arguments = {**turn, "warm_up": 2, "num_steps": num_steps, "block": 5, "num_profiled": 1}
    found = run_trainer("Turn", arguments, num_steps=Turn.FIRST + 2 + num_steps + 1, **run)
    found |= _speed(found["seconds"], **run)
    if torch.cuda.is_initialized():
        found["idle"] = 1 - found["busy_ms"] / 1000 / found["seconds"]
    return found


def measure_parts(*, num_steps: int, overrides: Sequence[str], **run: Any) -> dict[str, Any]:
    """Time the parts of the Trainer's step, with an average of the weights; see `PartClock`."""
    overrides = [*overrides, WITH_AVERAGE]
    return run_trainer("PartClock", {"skip": 2}, num_steps=num_steps, overrides=overrides, **run) | _gpu_memory()


def _speed(seconds: Sequence[float], **run: Any) -> dict[str, Any]:
    """Summarise the seconds per step of each block.

    Returns:
        `seconds` (median), `deviation` (half the range between the first and third quartile, over the median),
        `images_per_second` (of all GPUs), `num_gpus`, `microbatch_size`, `tflops` (of one GPU; operations of the U-Net,
        forward and backward pass, nothing recomputed), memory of the GPU.
    """
    config, num_gpus = run_config(**run), world_size()
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
    size, resolution = config.data.global_batch_size, config.data.resolution
    flops = training_flops(config, ImageSize(resolution, resolution))
    assert flops is not None
    return {
        "seconds": median,
        "deviation": (high - low) / 2 / median,
        "images_per_second": size / median,
        "num_gpus": num_gpus,
        "microbatch_size": size // num_gpus,
        "tflops": size / num_gpus / median * flops / 1e12,
        **_gpu_memory(),
    }


def _gpu_memory() -> dict[str, int]:
    """Most bytes of the GPU that this process has used and reserved so far; nothing on a CPU."""
    if not torch.cuda.is_initialized():
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}


def measure_rates(device: torch.device) -> dict[str, Any]:
    """Time a matrix product, a copy, and masked attention at a transformer's shape.

    Returns:
        As `measure_device`; `attention`: milliseconds forward and backward in bf16, 16 images of 512 px in 1,024 tokens
        beside 231 of text, 28 heads of 64, by kernel and form of the mask, or an error.
    """
    sizes = (16, 28, 1024, 231) if device.type == "cuda" else (1, 1, 16, 7)
    found: dict[str, Any] = {}
    for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH") if device.type == "cuda" else ("MATH",):
        for form in ("none", "broadcast", "expanded"):
            if (backend, form) == ("MATH", "expanded"):
                continue
            name = f"{backend.removesuffix('_ATTENTION').lower()}, mask {form}"
            try:
                found[name] = _time_attention(device, getattr(SDPBackend, backend), form, *sizes)
            except RuntimeError as error:
                found[name] = str(error)[:200]
    return {**asdict(measure_device(device)), "attention": found}


def _time_attention(
    device: torch.device, backend: SDPBackend, form: str, batch_size: int, num_heads: int, num_image: int, num_text: int
) -> list[float]:
    num_keys = num_image + num_text
    shapes = [(batch_size, num_heads, num, 64) for num in (num_image, num_keys, num_keys)]
    leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    mask = None
    if form != "none":
        mask = (torch.rand(batch_size, 1, 1, num_keys, device=device) < 0.8).contiguous()
        mask[..., :num_image] = True
        if form == "expanded":
            mask = mask.expand(-1, num_heads, num_image, -1).contiguous()
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        gradient = torch.randn_like(attended)
        forward = _seconds(lambda: F.scaled_dot_product_attention(*leaves, attn_mask=mask), device)
    backward = _seconds(lambda: torch.autograd.grad(attended, leaves, gradient, retain_graph=True), device)
    return [1000 * forward, 1000 * backward]


def _seconds(run: Callable[[], Tensor | tuple[Tensor, ...]], device: torch.device) -> float:
    """Seconds of a call, the best of five rounds."""
    return min(time_runs(lambda: [run() for _ in range(REPEATS)], device, 5)) / REPEATS


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
