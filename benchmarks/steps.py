"""Training steps: their speed, and their losses, with each set of options."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.step_runs import BareStep, ObjectiveStep, PlainLoop, run_config, run_trainer, seconds_of
from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture
from diffusion.config.schema import Config
from diffusion.operations.checks.device import synchronize, time_runs
from diffusion.planning.plan import training_flops

CONTENDERS = {"bare": BareStep, "loop": PlainLoop}


def measure_step(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    microbatch_size: int,
    overrides: Sequence[str],
    contender: str,
    num_blocks: int,
    block: int,
    num_kernels: int,
) -> dict[str, Any]:
    """Time the steps of a bare U-Net, or of a plain loop.

    Args:
        device: Where.
        architecture: Of the model, with random weights.
        resolution: Side of the images in pixels.
        microbatch_size: Images of a step.
        overrides: `key.sub=value` of the configuration.
        contender: `bare` or `loop`.
        num_blocks: Timed, after one that is not.
        block: Steps between two waits for the device.
        num_kernels: Longest kernels of a profile of two more steps; 0 is no profile.

    Returns:
        As `_speed`; `first_seconds` (of the first step, compilation included) and `kernels` (name, calls and
        milliseconds of a step), or `profile_error`.
    """
    config = _config(architecture, resolution, microbatch_size, overrides)
    step = CONTENDERS[contender](config, device)
    first = seconds_of(step, device)
    blocks = time_runs(lambda: [step() for _ in range(block)], device, num_blocks)
    found = {**_speed(config, [seconds / block for seconds in blocks]), "first_seconds": first}
    if num_kernels:
        try:
            found["kernels"] = _longest_kernels(step, device, num_kernels)
        except RuntimeError as error:  # Where the profiler does not work, the times count all the same.
            found["profile_error"] = str(error)
    return found


def measure_trainer(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    microbatch_size: int,
    overrides: Sequence[str],
    num_blocks: int,
    block: int,
) -> dict[str, Any]:
    """Time the Trainer's steps; as `measure_step`, on all ranks."""
    size = microbatch_size * dist.get_world_size()
    found = run_trainer(
        Architecture(architecture),
        resolution=resolution,
        batch_size=size,
        num_steps=(num_blocks + 2) * block,
        overrides=overrides,
        callback="StepClock",
        arguments={"block": block},
    )
    return _speed(_config(architecture, resolution, size, overrides), found["seconds"][1:])


def measure_parts(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    microbatch_size: int,
    overrides: Sequence[str],
    num_steps: int,
) -> dict[str, Any]:
    """Time the parts of the Trainer's step, with an average of the weights; see `PartClock`."""
    return run_trainer(
        Architecture(architecture),
        resolution=resolution,
        batch_size=microbatch_size * dist.get_world_size(),
        num_steps=num_steps,
        overrides=[*overrides, "algorithms.ema={start: 1ba, decays: [0.9999]}"],
        callback="PartClock",
        arguments={},
    )


def measure_stall(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    microbatch_size: int,
    overrides: Sequence[str],
    num_steps: int,
) -> dict[str, Any]:
    """Save checkpoints with an average in the background, one in the middle and one at the end.

    Returns:
        `stall_seconds`: for how long training waited for each; `seconds`: of a step, the median.
    """
    saving = [
        "trainer.async_checkpoints=true",
        f"trainer.save_interval={num_steps // 2}ba",
        "trainer.keep_checkpoints=1",
    ]
    found = run_trainer(
        Architecture(architecture),
        resolution=resolution,
        batch_size=microbatch_size,
        num_steps=num_steps,
        overrides=[*overrides, "algorithms.ema={start: 1ba, decays: [0.9999]}", *saving],
        callback="StepClock",
        arguments={"block": 1},
    )
    return {"stall_seconds": found["stall_seconds"], "seconds": statistics.median(found["seconds"])}


def measure_ratio(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    microbatch_size: int,
    overrides: Sequence[str],
    num_steps: int,
) -> dict[str, Any]:
    """Time the Trainer's step and a plain loop's, one after the other in one process, on the same U-Net.

    Returns:
        `ratio` (the Trainer's time over the loop's: the median of the ratios of neighbours), `trainer_seconds` and
        `loop_seconds` (medians; CPU time on a CPU).
    """
    precision = [override for override in overrides if override.startswith("trainer.precision=")]
    settings: dict[str, Any] = {"resolution": resolution, "batch_size": microbatch_size}
    found = run_trainer(
        Architecture(architecture),
        num_steps=num_steps + 2,
        overrides=overrides,
        callback="TurnsWithLoop",
        arguments={"architecture": architecture, **settings, "overrides": precision},
        **settings,
    )
    pairs = list(zip(found["trainer"], found["loop"], strict=True))[1:]
    return {
        "ratio": statistics.median(trainer / plain for trainer, plain in pairs),
        "trainer_seconds": statistics.median(trainer for trainer, _ in pairs),
        "loop_seconds": statistics.median(plain for _, plain in pairs),
    }


def measure_losses(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    batch_size: int,
    overrides: Sequence[str],
    num_steps: int,
) -> dict[str, Any]:
    """Train from the same weights on the same draws as all other rows of this kind with this batch size.

    Returns:
        `losses`: of each step.
    """
    step = ObjectiveStep(_config(architecture, resolution, batch_size, overrides), device)
    losses = torch.stack([step() for _ in range(num_steps)]).tolist()
    return {"losses": losses, "first_loss": losses[0], "last_loss": losses[-1]}


def _config(architecture: str, resolution: int, batch_size: int, overrides: Sequence[str]) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        return run_config(
            Path(folder),
            Architecture(architecture),
            resolution=resolution,
            batch_size=batch_size,
            num_steps=1,
            overrides=overrides,
        )


def _speed(config: Config, seconds: Sequence[float]) -> dict[str, Any]:
    """Summarise the seconds per step of each block.

    Returns:
        `seconds` (median), `deviation` (half the range between the first and third quartile, over the median),
        `images_per_second` (of all GPUs), `num_gpus`, `tflops` (of one GPU; operations of the U-Net, forward and
        backward pass, nothing recomputed).
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
