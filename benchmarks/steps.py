"""Speed of training steps with each set of options.

`run` stands for arguments of `run_config`: `architecture`, `resolution`, `batch_size` and `overrides`.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from composer.utils import dist

from benchmarks.runs import Turn, run_config, run_trainer
from diffusion.config.data import ImageSize
from diffusion.config.schema import Config
from diffusion.planning.plan import training_flops

WITH_AVERAGE = "algorithms.ema={start: 1ba, decays: [0.9999]}"


def measure_trainer(device: torch.device, *, num_blocks: int, block: int, **run: Any) -> dict[str, Any]:
    """Time the Trainer's steps on all ranks, in blocks, with a wait for the device after each; as `_speed`."""
    found = run_trainer("StepClock", {"block": block}, num_steps=(num_blocks + 2) * block, **run)
    return _speed(run_config(**run), found["seconds"][1:])


def measure_turn(device: torch.device, *, turn: dict[str, str], num_steps: int, **run: Any) -> dict[str, Any]:
    """Time the Trainer's steps alone on the GPU, and profile the last one; as `_speed` and `Turn.result`."""
    arguments = {**turn, "warm_up": 2, "num_steps": num_steps, "block": 5, "num_profiled": 1}
    found = run_trainer("Turn", arguments, num_steps=Turn.FIRST + 2 + num_steps + 1, **run)
    found |= _speed(run_config(**run), found["seconds"])
    if device.type == "cuda":
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        found["idle"] = 1 - found["busy_ms"] / 1000 / found["seconds"]
    return found


def measure_parts(device: torch.device, *, num_steps: int, **run: Any) -> dict[str, Any]:
    """Time the parts of the Trainer's step, with an average of the weights; see `PartClock`."""
    return run_trainer("PartClock", {"skip": 2}, num_steps=num_steps, **_more(run, WITH_AVERAGE))


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
