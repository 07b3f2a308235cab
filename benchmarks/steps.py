"""Training steps: their speed, and their losses, with each set of options.

`run` stands for arguments of `run_config`: `architecture`, `resolution`, `batch_size` and `overrides`.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.utils import dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.runs import PlainLoop, Turn, run_config, run_trainer
from diffusion.config.data import ImageSize
from diffusion.config.schema import Config
from diffusion.operations.checks.nodes import synchronize, time_runs
from diffusion.planning.plan import training_flops

WITH_AVERAGE = "algorithms.ema={start: 1ba, decays: [0.9999]}"


def measure_loop(
    device: torch.device, *, num_blocks: int, block: int, num_kernels: int = 0, **run: Any
) -> dict[str, Any]:
    """Time the steps of a plain loop in blocks, with a wait for the device after each.

    Returns:
        As `_speed`; `first_seconds` (of the first step, compilation included) and `kernels` (name, calls and
        milliseconds of a step, the longest of a profile of two more steps), or `profile_error`.
    """
    config = run_config(**run)
    step = PlainLoop(config, device)
    first = seconds_of(step, device)
    blocks = time_runs(lambda: [step() for _ in range(block)], device, num_blocks)
    found = {**_speed(config, [seconds / block for seconds in blocks]), "first_seconds": first}
    if num_kernels:
        try:
            found["kernels"] = _longest_kernels(step, device, num_kernels)
        except RuntimeError as error:  # Where the profiler does not work, the times count all the same.
            found["profile_error"] = str(error)
    return found


def measure_trainer(device: torch.device, *, num_blocks: int, block: int, **run: Any) -> dict[str, Any]:
    """Time the Trainer's steps on all ranks; as `measure_loop`."""
    found = run_trainer("StepClock", {"block": block}, num_steps=(num_blocks + 2) * block, **run)
    return _speed(run_config(**run), found["seconds"][1:])


def measure_turn(device: torch.device, *, turn: dict[str, str], num_steps: int, **run: Any) -> dict[str, Any]:
    """Time the Trainer's steps alone on the GPU, and profile the last one; as `_speed` and `Turn.result`."""
    arguments = {**turn, "warm_up": 2, "num_steps": num_steps, "block": 5, "num_profiled": 1}
    found = run_trainer("Turn", arguments, num_steps=Turn.FIRST + 2 + num_steps + 1, **run)
    del found["stall_seconds"]
    found |= _speed(run_config(**run), found["seconds"])
    if device.type == "cuda":
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        found["idle"] = 1 - found["busy_ms"] / 1000 / found["seconds"]
    return found


def measure_parts(device: torch.device, *, num_steps: int, **run: Any) -> dict[str, Any]:
    """Time the parts of the Trainer's step, with an average of the weights; see `PartClock`."""
    return run_trainer("PartClock", {"skip": 2}, num_steps=num_steps, **_more(run, WITH_AVERAGE))


def measure_stall(device: torch.device, *, num_steps: int, **run: Any) -> dict[str, Any]:
    """Save checkpoints with an average in the background, one in the middle and one at the end.

    Returns:
        `stall_seconds`: for how long training waited for each; `seconds`: of a step, the median.
    """
    saving = ["trainer.async_checkpoints=true", "trainer.keep_checkpoints=1"]
    run = _more(run, WITH_AVERAGE, f"trainer.save_interval={num_steps // 2}ba", *saving)
    found = run_trainer("StepClock", {"block": 1}, num_steps=num_steps, **run)
    return {"stall_seconds": found["stall_seconds"], "seconds": statistics.median(found["seconds"])}


def measure_synchronisations(device: torch.device, **run: Any) -> dict[str, Any]:
    """Count the calls in two steps of the Trainer that stop the host; see `SynchronisationWatch`."""
    return run_trainer("SynchronisationWatch", {}, num_steps=6, **run)


def measure_losses(device: torch.device, *, num_steps: int, **run: Any) -> dict[str, Any]:
    """Losses of each step, from the same weights on the same draws as all rows of this kind with this batch size."""
    step = PlainLoop(run_config(**run), device)
    losses = torch.stack([step() for _ in range(num_steps)]).tolist()
    return {"losses": losses, "first_loss": losses[0], "last_loss": losses[-1]}


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Measure the duration of a run, the wait for the device included."""
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _more(run: dict[str, Any], *overrides: str) -> dict[str, Any]:
    return {**run, "overrides": [*run["overrides"], *overrides]}


def _speed(config: Config, seconds: Sequence[float]) -> dict[str, Any]:
    """Summarise the seconds per step of each block.

    Returns:
        `seconds` (median), `deviation` (half the range between the first and third quartile, over the median),
        `images_per_second` (of all GPUs), `num_gpus`, `microbatch_size`, `tflops` (of one GPU; operations of the U-Net,
        forward and backward pass, nothing recomputed).
    """
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
    size, resolution, num_gpus = config.data.global_batch_size, config.data.resolution, dist.get_world_size()
    flops = training_flops(config, ImageSize(resolution, resolution))
    assert flops is not None
    return {
        "seconds": median,
        "deviation": (high - low) / 2 / median,
        "images_per_second": size / median,
        "num_gpus": num_gpus,
        "microbatch_size": size // num_gpus,
        "tflops": size / num_gpus / median * flops / 1e12,
    }


def _longest_kernels(step: Callable[[], Any], device: torch.device, number: int) -> list[list[Any]]:
    """Profile two steps: name, calls and milliseconds per step of the longest kernels (operators on a CPU)."""
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        step()
        step()
        synchronize(device)
    attribute = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: getattr(event, attribute), reverse=True)
    return [[event.key[:120], event.count / 2, getattr(event, attribute) / 2000] for event in events[:number]]
