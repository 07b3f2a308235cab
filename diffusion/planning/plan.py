"""What a run amounts to, worked out before it starts: images, epochs, days, cost, memory, storage.

Counts (images, bytes of weights, gradients, optimizer state, checkpoints) are exact; what is estimated or assumed is
listed with the result. Text is made by `format_plan`.
"""

import math
from dataclasses import dataclass, field

from diffusion.checkpointing.retention import kept_steps
from diffusion.config.checks import num_batches
from diffusion.config.model import Architecture
from diffusion.config.quantities import parse_time
from diffusion.config.schema import Config, Task
from diffusion.config.training import Parallelism, Precision
from diffusion.planning.averages import average_file_bytes, count_average_files
from diffusion.planning.state_bytes import StateBytes
from diffusion.planning.streams import EpochPlan, plan_epoch

WEIGHT_BYTES = GRADIENT_BYTES = EMA_BYTES = 4
"""Master weights, gradients and their average are fp32."""

ADAM_BYTES = 8
"""AdamW holds two fp32 moments per parameter."""

SD2_ACTIVATION_BYTES = {256: 237e6, 512: 935e6}
"""Activations that the U-Net saves per image in autocast, counted on the meta device."""

SECONDS_PER_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(StateBytes):
    """Bytes per rank for one way to spread the model; weights include gathered ones that stay for the backward pass."""

    name: str
    is_chosen: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run amounts to. None is not known."""

    run_name: str
    num_iterations: int
    global_batch_size: int
    num_images: int
    num_ranks: int
    samples_per_rank: float
    microbatch_size: float
    num_microbatches: int
    epoch: EpochPlan
    num_parameters: int
    memory: list[MemoryPlan]
    activation_bytes: float | None
    """Per rank and microbatch (estimate)."""

    checkpoint_bytes: int
    """The largest checkpoint."""

    num_checkpoints: int | None
    """Checkpoints that stay."""

    storage_bytes: int | None
    """Of all checkpoints that stay."""

    num_average_files: int | None
    """Files of averages of the weights, beside the checkpoints."""

    average_file_bytes: int
    """Of one of them."""

    images_per_second: float | None
    days: float | None
    gpu_hours: float | None
    cost: float | None
    """In dollars."""

    missing: dict[str, str] = field(default_factory=dict)
    """Keys of locations that are not given yet, and their meanings."""

    assumptions: list[str] = field(default_factory=list)


def make_plan(
    config: Config, *, num_parameters: int, world_size: int = 1, missing: dict[str, str] | None = None
) -> Plan:
    """Work out what a run amounts to.

    Args:
        config: the configuration; locations may be missing (`???`).
        num_parameters: trained parameters.
        world_size: ranks that the launcher started, which `plan.num_gpus` replaces.
        missing: keys that are missing and their meanings, to be told with the plan.

    Raises:
        ConfigurationError: `trainer.max_duration` is not a number of batches.
    """
    num_iterations = num_batches(config)
    num_ranks = config.plan.num_gpus or world_size
    num_images = num_iterations * config.data.global_batch_size
    share = config.data.global_batch_size / num_ranks
    microbatch = min(config.trainer.device_train_microbatch_size or share, share)
    throughput, price = config.plan.images_per_second, config.plan.price_per_gpu_hour
    seconds = num_images / throughput if throughput else None
    gpu_hours = seconds / 3600 * num_ranks if seconds is not None else None
    saves = _checkpoints(config, num_iterations, num_parameters)
    largest = num_parameters * (WEIGHT_BYTES + ADAM_BYTES + _ema_bytes(config))
    activations = _activations(config, microbatch)
    epoch = plan_epoch(config, num_images)
    assumptions = _assumptions(config, throughput, activations, num_ranks)
    if epoch.problem is not None:
        assumptions.append(f"This run would not start: {epoch.problem}.")
    return Plan(
        run_name=config.run_name,
        num_iterations=num_iterations,
        global_batch_size=config.data.global_batch_size,
        num_images=num_images,
        num_ranks=num_ranks,
        samples_per_rank=share,
        microbatch_size=microbatch,
        num_microbatches=math.ceil(share / microbatch),
        epoch=epoch,
        num_parameters=num_parameters,
        memory=_memory(config, num_parameters, num_ranks),
        activation_bytes=activations,
        checkpoint_bytes=largest,
        num_checkpoints=len(saves) if saves is not None else None,
        storage_bytes=sum(saves) if saves is not None else None,
        num_average_files=count_average_files(config, num_iterations),
        average_file_bytes=average_file_bytes(config, num_parameters),
        images_per_second=throughput,
        days=seconds / SECONDS_PER_DAY if seconds is not None else None,
        gpu_hours=gpu_hours,
        cost=gpu_hours * price if gpu_hours is not None and price is not None else None,
        missing=missing or {},
        assumptions=assumptions,
    )


def _ema_bytes(config: Config) -> int:
    """Bytes per parameter of all averages together."""
    return EMA_BYTES * config.algorithms.ema.num_averages if config.algorithms.ema is not None else 0


def _memory(config: Config, num_parameters: int, num_ranks: int) -> list[MemoryPlan]:
    """Bytes per rank: fsdp (FSDP2) without and with resharding after the forward pass, and ddp."""
    shard = math.ceil(num_parameters / num_ranks)
    gathered = num_parameters * (4 if config.trainer.precision is Precision.fp32 else 2)
    parallelism, reshards = config.trainer.parallelism, config.trainer.reshard_after_forward

    def plan(name: str, held: int, copy: int, is_chosen: bool) -> MemoryPlan:
        return MemoryPlan(
            name=name,
            is_chosen=is_chosen,
            weights=held * WEIGHT_BYTES + copy,
            gradients=held * GRADIENT_BYTES,
            optimizer=held * ADAM_BYTES,
            ema=held * _ema_bytes(config),
        )

    is_fsdp = parallelism is Parallelism.fsdp
    return [
        plan("fsdp (SHARD_GRAD_OP)", shard, gathered, is_fsdp and not reshards),
        plan("fsdp, reshard_after_forward (FULL_SHARD)", shard, 0, is_fsdp and reshards),
        plan("ddp", num_parameters, 0, parallelism is Parallelism.ddp),
    ]


def _activations(config: Config, microbatch: float) -> float | None:
    known = (
        config.task is Task.diffusion
        and config.model.architecture is Architecture.stable_diffusion_2
        and not config.model.unet
        and config.trainer.precision is not Precision.fp32
        and not config.trainer.activation_checkpointing
    )
    if not known:
        return None
    resolution = config.data.resolution
    nearest = min(SD2_ACTIVATION_BYTES, key=lambda side: abs(side - resolution))
    return microbatch * SD2_ACTIVATION_BYTES[nearest] * (resolution / nearest) ** 2


def _checkpoints(config: Config, num_iterations: int, num_parameters: int) -> list[int] | None:
    """Bytes of each checkpoint that stays, oldest first; None where the interval is in epochs."""
    scale = {"num_batches": num_iterations, "global_batch_size": config.data.global_batch_size}
    interval = parse_time(config.trainer.save_interval, "trainer.save_interval").in_batches(**scale)
    ema = config.algorithms.ema
    start = parse_time(ema.start, "algorithms.ema.start").in_batches(**scale) if ema else math.inf
    if interval is None or start is None:
        return None
    count = math.ceil(num_iterations / max(interval, 1))
    saved = [min(number * max(interval, 1), num_iterations) for number in range(1, count + 1)]
    keep, text = config.trainer.keep_checkpoints, config.trainer.keep_every
    every = parse_time(text, "trainer.keep_every").in_batches(**scale) if text is not None else None
    batches = kept_steps(saved, newest=keep, every=every) if keep != -1 else saved
    per_parameter = WEIGHT_BYTES + ADAM_BYTES
    return [num_parameters * (per_parameter + (_ema_bytes(config) if batch >= start else 0)) for batch in batches]


def _assumptions(config: Config, throughput: float | None, activations: float | None, num_ranks: int) -> list[str]:
    assumptions = [
        "Memory: fp32 weights, gradients, AdamW moments and averages per rank, without activations, buffers, "
        "VAE, text encoder and what CUDA takes; fsdp gathers weights in "
        f"{'fp32' if config.trainer.precision is Precision.fp32 else 'half precision'} and, with "
        "reshard_after_forward, one block at a time, which is not counted.",
        "Checkpoints: 4 bytes of weights, 8 of AdamW and, once they have started, 4 of each average per parameter.",
    ]
    if throughput:
        assumptions.append(
            "Days: images over plan.images_per_second, which is taken as given for the whole fleet; no restart, "
            "evaluation, checkpoint or idle time."
        )
    if activations is not None:
        assumptions.append(
            "Activations: counted per image for the SD2 U-Net at 256 and 512 px, scaled by area elsewhere; an estimate."
        )
    if config.data.global_batch_size % num_ranks:
        assumptions.append(
            f"data.global_batch_size={config.data.global_batch_size} cannot be divided among {num_ranks} GPUs: this "
            "run would not start."
        )
    if config.task is Task.diffusion and config.model.pretrained is None and config.model.vae is None:
        assumptions.append("VAE and text encoder: random weights (model.pretrained is null).")
    return assumptions
