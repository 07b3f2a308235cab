"""Speed of a training step: each way to make it, with each option added to those before it."""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from diffusion.benchmarks.moved_bytes import count_moved_bytes
from diffusion.benchmarks.step_runs import (
    BareStep,
    ObjectiveStep,
    PlainLoop,
    free_memory,
    run_config,
    run_trainer,
)
from diffusion.config.data import PictureSize
from diffusion.config.model import Architecture
from diffusion.config.schema import Config
from diffusion.health.device import Machine, measure_machine, time_runs
from diffusion.planning.network import training_flops

STOCK = [
    "model.low_precision_norms=false",
    *(f"performance.{name}=false" for name in ("channels_last", "fused_norms", "fused_projections", "cudnn_benchmark")),
    "performance.compilation=none",
]
"""The U-Net as diffusers builds it."""


@dataclass(frozen=True)
class Option:
    """Something that makes a step faster."""

    name: str
    overrides: tuple[str, ...]
    needs_gpu: bool = False


OPTIONS = (
    Option("bf16 autocast", ("trainer.precision=amp_bf16",), needs_gpu=True),
    Option("cuDNN's benchmark", ("performance.cudnn_benchmark=true",), needs_gpu=True),
    Option("low-precision norms", ("model.low_precision_norms=true",)),
    Option("channels last", ("performance.channels_last=true",)),
    Option("fused norms", ("performance.fused_norms=true",), needs_gpu=True),
    Option("fused projections", ("performance.fused_projections=true",)),
    Option("compiled blocks", ("performance.compilation=blocks",), needs_gpu=True),
    Option("compiled as a whole", ("performance.compilation=unet",), needs_gpu=True),
)
"""In the order in which they are added."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to make a step, at one size."""

    name: str
    resolution: int
    num_gpus: int
    microbatch_size: int
    seconds: float
    """Of a step, the median of blocks."""

    deviation: float
    """Half the range between the first and third quartile, over the median."""

    images_per_second: float
    """Of all GPUs."""

    tflops: float
    """Of one GPU."""

    mfu: float | None
    """Of the data sheet."""

    matmul_share: float
    """Of the measured rate of matrix products."""

    limit_share: float
    """Of the rate at which products run as measured, and everything else of the stock U-Net at the rate of a copy."""

    peak_bytes: int | None


def measure_steps(
    *,
    architecture: Architecture,
    resolutions: Sequence[int],
    microbatch_sizes: Sequence[int],
    device: torch.device,
    trainer_overrides: Sequence[str] = (),
    num_blocks: int = 10,
    block: int = 5,
) -> dict[str, Any]:
    """Time every way to make a step at every size.

    Args:
        architecture: of the model, with random weights.
        resolutions: sides of the pictures.
        microbatch_sizes: per GPU; one microbatch is a step.
        device: of this process; with several ranks the Trainer alone is measured.
        trainer_overrides: `key.sub=value` of the Trainer's runs.
        num_blocks: timed, after one that is not.
        block: steps between two waits for the device.

    Returns:
        `rows` (fields of `Row`), `parts` (seconds of each part of the Trainer's step), the machine and the settings.
    """
    on_gpu = device.type == "cuda"
    # One thread is measured by what it takes itself: other processes would make the machine look slower than it is.
    machine = measure_machine(device, time.perf_counter if on_gpu or torch.get_num_threads() > 1 else time.process_time)
    num_gpus = dist.get_world_size()
    if num_gpus > 1:
        dist.initialize_dist("gpu" if on_gpu else "cpu")
    rows: list[Row] = []
    parts: dict[str, Any] = {}
    for resolution in resolutions:
        for size in microbatch_sizes:
            where: dict[str, Any] = {"resolution": resolution, "batch_size": size * num_gpus}
            for name, kind, options in contenders(on_gpu) if num_gpus == 1 else []:
                free_memory()
                config = _config(architecture, options, **where)
                seconds = _times_of_steps(kind(config, device), device, num_blocks, block)
                peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
                rows.append(_row(name, config, seconds, peak, machine, num_gpus))
            full = [f"trainer.precision={'amp_bf16' if on_gpu else 'fp32'}", *trainer_overrides]
            run = {**where, "num_steps": (num_blocks + 2) * block, "overrides": full}
            found = run_trainer(architecture, callback="StepClock", arguments={"block": block}, **run)
            config = _config(architecture, full, **where)
            rows.append(_row("trainer", config, found["seconds"][1:], found["peak_bytes"], machine, num_gpus))
            averaged = [*full, "algorithms.ema={start: 1ba, decays: [0.9999]}"]
            parts[f"{resolution} px, {size}"] = run_trainer(
                architecture, callback="PartClock", arguments={}, **{**run, "overrides": averaged}
            )
    return {
        "architecture": architecture.value,
        "device": asdict(machine),
        "rows": [asdict(row) for row in rows],
        "parts": parts,
    }


def contenders(on_gpu: bool) -> list[tuple[str, Callable[[Config, torch.device], Callable[[], Any]], list[str]]]:
    """Names, kinds and overrides of what is measured beside the Trainer."""
    rungs = ladder(on_gpu)
    stock = rungs[1 if on_gpu else 0][1]
    return [*((name, BareStep, overrides) for name, overrides in rungs), ("loop", PlainLoop, stock)]


def ladder(on_gpu: bool) -> list[tuple[str, list[str]]]:
    """Names and overrides of the bare step: stock in fp32, then with one option more each."""
    overrides = [*STOCK, "trainer.precision=fp32"]
    rungs = [("bare, stock fp32", overrides)]
    for option in OPTIONS:
        if on_gpu or not option.needs_gpu:
            overrides = [*overrides, *option.overrides]
            rungs.append((f"bare + {option.name}", overrides))
    return rungs


def measure_ratio(
    *,
    architecture: Architecture,
    resolution: int,
    batch_size: int,
    device: torch.device,
    trainer_overrides: Sequence[str] = (),
    num_steps: int = 20,
) -> dict[str, Any]:
    """Time the Trainer's step and a plain loop's, one after the other in one process, on the same U-Net.

    Returns:
        `ratio` (the Trainer's time over the loop's: the median of the ratios of neighbours), `trainer_seconds` and
        `loop_seconds` (medians; CPU time on a CPU), and the settings.
    """
    overrides = [f"trainer.precision={'amp_bf16' if device.type == 'cuda' else 'fp32'}"]
    settings: dict[str, Any] = {"resolution": resolution, "batch_size": batch_size}
    loop = {"architecture": architecture.value, **settings, "overrides": overrides}
    found = run_trainer(
        architecture,
        callback="TurnsWithLoop",
        arguments=loop,
        num_steps=num_steps + 2,
        overrides=[*overrides, *trainer_overrides],
        **settings,
    )
    pairs = list(zip(found["trainer"], found["loop"], strict=True))[1:]
    return {
        "ratio": statistics.median(trainer / plain for trainer, plain in pairs),
        "trainer_seconds": statistics.median(trainer for trainer, _ in pairs),
        "loop_seconds": statistics.median(plain for _, plain in pairs),
        "architecture": architecture.value,
        "num_steps": len(pairs),
        **settings,
    }


def measure_parity(
    *, architecture: Architecture, resolution: int, batch_size: int, device: torch.device, num_steps: int = 100
) -> dict[str, Any]:
    """Train with each option, from the same weights on the same draws, and compare losses with fp32.

    Returns:
        By option the largest and the last relative difference of the loss over so many steps.
    """
    losses = {}
    for name, overrides in ladder(device.type == "cuda"):
        config = _config(architecture, overrides, resolution=resolution, batch_size=batch_size)
        step = ObjectiveStep(config, device)
        losses[name] = torch.stack([step() for _ in range(num_steps)]).cpu()
        del step
        free_memory()
    reference = next(iter(losses.values()))
    differences = {name: ((found - reference) / reference).abs() for name, found in losses.items()}
    return {
        "largest": {name: difference.max().item() for name, difference in differences.items()},
        "last": {name: difference[-1].item() for name, difference in differences.items()},
        "first_and_last_loss": [reference[0].item(), reference[-1].item()],
        "num_steps": num_steps,
    }


def _config(architecture: Architecture, overrides: Sequence[str], *, resolution: int, batch_size: int) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"resolution": resolution, "batch_size": batch_size, "num_steps": 1}
        return run_config(Path(folder), architecture, overrides=overrides, **settings)


def _times_of_steps(step: Callable[[], Any], device: torch.device, num_blocks: int, block: int) -> list[float]:
    """Seconds per step of each block."""

    def steps() -> None:
        for _ in range(block):
            step()

    return [seconds / block for seconds in time_runs(steps, device, num_blocks)]


def _row(name: str, config: Config, seconds: Sequence[float], peak: int | None, machine: Machine, num_gpus: int) -> Row:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else (median, median, median)
    size, resolution = config.data.global_batch_size, config.data.resolution
    counted = training_flops(config, PictureSize(resolution, resolution))
    assert counted is not None
    rate = size / num_gpus / median * counted
    moved = count_moved_bytes(config.model.architecture, resolution).other
    limit = 1 / (counted / machine.matmul_flops + moved / machine.copy_bytes_per_second)
    return Row(
        name=name,
        resolution=resolution,
        num_gpus=num_gpus,
        microbatch_size=size // num_gpus,
        seconds=median,
        deviation=(high - low) / 2 / median,
        images_per_second=size / median,
        tflops=rate / 1e12,
        mfu=rate / machine.datasheet_flops if machine.datasheet_flops is not None else None,
        matmul_share=rate / machine.matmul_flops,
        limit_share=size / num_gpus / median / limit,
        peak_bytes=peak,
    )
