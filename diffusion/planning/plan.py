"""What a run amounts to, worked out before it starts: images, epochs, days, cost, memory, storage.

Counts (images, bytes of weights, gradients, optimizer state, checkpoints) are exact; what is estimated or assumed is
listed with the result. Text is made by `format_plan`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from diffusion.checkpointing.layout import kept_steps
from diffusion.config.checks import num_batches
from diffusion.config.data import ImageSize, Representation, image_sizes, microbatch_size
from diffusion.config.fields import parse_time
from diffusion.config.schema import Config, Task
from diffusion.config.training import NumberFormat, Parallelism, Precision
from diffusion.planning.network import activation_bytes, largest_unit, parameter_counts, training_flops
from diffusion.planning.streams import EpochPlan, plan_epoch
from diffusion.planning.tiers import STORED_BYTES, TierPlan, plan_tiers, stored_bytes

WEIGHT_BYTES = GRADIENT_BYTES = EMA_BYTES = 4
"""Master weights, gradients and their average are fp32."""

ADAM_BYTES = 8
"""AdamW holds two fp32 moments per parameter."""

CUDA_BYTES = 1.5e9
"""What CUDA, its libraries and NCCL take of a GPU's memory (assumed)."""

USABLE_MEMORY = 0.9
"""Share of a GPU's memory that may be planned: workspaces, the largest temporary tensors and fragments take the rest
(assumed)."""

GPU_MEMORY_GB = (40, 80, 141, 192)
"""Sizes of GPUs for which the largest microbatch is worked out."""

SECONDS_PER_DAY = 86400


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of the training state per rank for one parallelism, without activations."""

    name: str
    is_chosen: bool
    weights: int
    """With the copies that stay for the backward pass."""

    gradients: int
    optimizer: int
    ema: int
    """Of all averages."""

    @property
    def total(self) -> int:
        """Weights, gradients, optimizer and averages."""
        return self.weights + self.gradients + self.optimizer + self.ema


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run amounts to. None is not known."""

    run_name: str
    num_iterations: int
    global_batch_size: int
    num_images: int
    num_ranks: int
    samples_per_rank: float
    microbatch_size: int
    num_microbatches: int
    epoch: EpochPlan
    num_parameters: int
    memory: list[MemoryPlan]
    activation_bytes: float | None
    """Per rank and microbatch."""

    frozen_bytes: int
    """Of networks that are only used, per rank."""

    reduction_bytes: int
    """Gradients that are not sharded (yet), per rank: of the unit that is reduced, and those accumulated whole."""

    gpu_bytes: float
    """All of these and what CUDA takes: of a GPU, for one rank; without activations where they are not known."""

    largest_microbatches: dict[float, int] | None
    """The largest that fits, by GB of a GPU's memory, of those that divide a rank's share or a group; 0: none fits."""

    training_flops: float | None
    """Of the U-Net for one image, forward and backward."""

    sample_bytes: int | None
    """Of one stored sample, without its key."""

    num_samples: int | None
    """Of the data set."""

    data_bytes: float | None
    """Of all samples."""

    tiers: TierPlan

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


def plan_run(config: Config, *, world_size: int = 1, missing: dict[str, str] | None = None) -> Plan:
    """Count the parameters of what is configured, and work out what a run amounts to (`make_plan`)."""
    counts = parameter_counts(config)
    return make_plan(
        config,
        num_parameters=counts.trained,
        fixed_parameters=counts.fixed,
        frozen_parameters=counts.frozen,
        world_size=world_size,
        missing=missing,
    )


def make_plan(
    config: Config,
    *,
    num_parameters: int,
    fixed_parameters: int = 0,
    frozen_parameters: int = 0,
    world_size: int = 1,
    missing: dict[str, str] | None = None,
) -> Plan:
    """Work out what a run amounts to.

    Args:
        config: the configuration; locations may be missing (`???`).
        num_parameters: trained parameters.
        fixed_parameters: of the same network, that LoRA's matrices are put beside.
        frozen_parameters: of networks that are only used: VAE and text encoder.
        world_size: ranks that the launcher started, which `plan.num_gpus` replaces.
        missing: missing keys and their meanings, listed with the plan.

    Raises:
        ConfigurationError: `trainer.max_duration` is not a number of batches.
    """
    num_iterations = num_batches(config)
    num_ranks = config.plan.num_gpus or world_size
    num_images = num_iterations * config.data.global_batch_size
    share = config.data.global_batch_size / num_ranks
    microbatch = microbatch_size(config.data, config.trainer.device_train_microbatch_size, num_ranks)
    throughput, price = config.plan.images_per_second, config.plan.price_per_gpu_hour
    seconds = num_images / throughput if throughput else None
    gpu_hours = seconds / 3600 * num_ranks if seconds is not None else None
    saves = _checkpoints(config, num_iterations, num_parameters, fixed_parameters)
    largest = fixed_parameters * WEIGHT_BYTES + num_parameters * (WEIGHT_BYTES + ADAM_BYTES + _ema_bytes(config))
    size = _largest_size(config)
    activations, flops = activation_bytes(config, size), training_flops(config, size)
    epoch = plan_epoch(config, num_images)
    num_samples, sample_bytes = _num_samples(config, epoch), stored_bytes(config, size)
    data_bytes = num_samples * sample_bytes if num_samples is not None and sample_bytes is not None else None
    memory = _memory(config, num_parameters, fixed_parameters, num_ranks)
    frozen = frozen_parameters * WEIGHT_BYTES
    held = next(one.total for one in memory if one.is_chosen) + frozen

    def reduction(size: int) -> int:
        return _reduction_bytes(config, num_parameters, is_whole=size < share)

    def gpu_bytes(size: int) -> float:
        return CUDA_BYTES + held + reduction(size) + size * (activations or 0)

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
        memory=memory,
        activation_bytes=activations * microbatch if activations is not None else None,
        frozen_bytes=frozen,
        reduction_bytes=reduction(microbatch),
        gpu_bytes=gpu_bytes(microbatch),
        largest_microbatches=_largest_microbatches(config, num_ranks, gpu_bytes) if activations is not None else None,
        training_flops=flops,
        sample_bytes=sample_bytes,
        num_samples=num_samples,
        data_bytes=data_bytes,
        tiers=plan_tiers(
            config,
            num_ranks=num_ranks,
            num_images=num_images,
            num_samples=num_samples,
            sample_bytes=sample_bytes,
            num_shards=epoch.num_shards,
        ),
        checkpoint_bytes=largest,
        num_checkpoints=len(saves) if saves is not None else None,
        storage_bytes=sum(saves) if saves is not None else None,
        num_average_files=_count_average_files(config, num_iterations),
        average_file_bytes=_average_file_bytes(config, num_parameters),
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


def _memory(config: Config, num_parameters: int, fixed_parameters: int, num_ranks: int) -> list[MemoryPlan]:
    """Bytes per rank: fsdp (FSDP2) without and with resharding after the forward pass, and ddp."""
    part = Fraction(config.trainer.num_replicas, num_ranks)
    is_fp32 = config.trainer.precision is Precision.fp32
    gathered = (num_parameters + fixed_parameters) * (4 if is_fp32 else 2)
    parallelism, reshards = config.trainer.parallelism, config.trainer.reshard_after_forward

    def plan(name: str, part: Fraction, copy: int, is_chosen: bool) -> MemoryPlan:
        held, fixed = math.ceil(num_parameters * part), math.ceil(fixed_parameters * part)
        return MemoryPlan(
            name=name,
            is_chosen=is_chosen,
            weights=(held + fixed) * WEIGHT_BYTES + copy,
            gradients=held * GRADIENT_BYTES,
            optimizer=held * ADAM_BYTES,
            ema=held * _ema_bytes(config),
        )

    is_fsdp = parallelism is Parallelism.fsdp
    return [
        plan("fsdp (SHARD_GRAD_OP)", part, gathered, is_fsdp and not reshards),
        plan("fsdp, reshard_after_forward (FULL_SHARD)", part, 0, is_fsdp and reshards),
        plan("ddp", Fraction(1), 0 if is_fp32 else gathered, parallelism is Parallelism.ddp),
    ]


def _reduction_bytes(config: Config, num_parameters: int, *, is_whole: bool) -> int:
    """Gradients that are not sharded.

    Args:
        config: the configuration.
        num_parameters: trained.
        is_whole: whether there are several microbatches, whose gradients may be accumulated before they are reduced.
    """
    trainer = config.trainer
    if trainer.parallelism is Parallelism.ddp:
        return num_parameters * GRADIENT_BYTES  # The buckets that gradients are reduced in.
    computed = NumberFormat.fp32 if trainer.precision is Precision.fp32 else NumberFormat.bf16
    unit = largest_unit(config) * (STORED_BYTES[computed] + STORED_BYTES[trainer.reduce_precision])
    accumulates = config.performance.accumulate_locally and not trainer.reshard_after_forward and is_whole
    return unit + (num_parameters * GRADIENT_BYTES if accumulates else 0)


def _largest_microbatches(config: Config, num_ranks: int, gpu_bytes: Callable[[int], float]) -> dict[float, int]:
    limits = range(1, config.data.global_batch_size // num_ranks + 1)
    needed = {size: gpu_bytes(size) for size in {microbatch_size(config.data, limit, num_ranks) for limit in limits}}
    own = config.plan.gpu_memory_gb
    memories: set[float] = {*GPU_MEMORY_GB, *([own] if own is not None else [])}
    return {
        memory: max((size for size, num in needed.items() if num <= USABLE_MEMORY * memory * 1e9), default=0)
        for memory in sorted(memories)
    }


def _largest_size(config: Config) -> ImageSize:
    """Of the images of all streams the one with the largest area."""
    streams = config.data.streams if isinstance(config.data.streams, list) else []
    square = ImageSize(config.data.resolution, config.data.resolution)
    return max(image_sizes(streams, config.data.resolution), key=lambda size: size.height * size.width, default=square)


def _num_samples(config: Config, epoch: EpochPlan) -> int | None:
    counts = [stream.num_samples for stream in epoch.streams]
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else config.plan.num_samples


def _checkpoints(config: Config, num_iterations: int, num_parameters: int, fixed_parameters: int) -> list[int] | None:
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
    without_ema = fixed_parameters * WEIGHT_BYTES + num_parameters * (WEIGHT_BYTES + ADAM_BYTES)
    return [without_ema + (num_parameters * _ema_bytes(config) if batch >= start else 0) for batch in batches]


def _assumptions(config: Config, throughput: float | None, activations: float | None, num_ranks: int) -> list[str]:
    assumptions = [
        "Memory: fp32 weights, gradients, AdamW moments and averages per rank, without activations, buffers, "
        "networks that are only used and what CUDA takes; fsdp gathers weights in "
        f"{'fp32' if config.trainer.precision is Precision.fp32 else 'half precision'} and, with "
        "reshard_after_forward, one block at a time, which is not counted.",
        "Checkpoints: 4 bytes of each weight and, for those that are trained, 8 of AdamW and 4 of each average that "
        "has started.",
    ]
    if throughput:
        assumptions.append(
            "Days: images over plan.images_per_second, which is taken as given for the whole fleet; no restart, "
            "evaluation, checkpoint or idle time."
        )
    if activations is not None:
        assumptions.append(
            "Activations: what autograd keeps in the arithmetic's precision, nothing recomputed or compiled. Largest "
            f"microbatch: with {CUDA_BYTES / 1e9:g} GB for CUDA it takes at most {USABLE_MEMORY:.0%} of the memory."
        )
    if config.data.representation is Representation.latents:
        assumptions.append("Data: one caption per image, without keys and what MDS adds; no validation data.")
    if config.data.global_batch_size % num_ranks:
        assumptions.append(
            f"data.global_batch_size={config.data.global_batch_size} cannot be divided among {num_ranks} GPUs: this "
            "run would not start."
        )
    if config.task is Task.diffusion and config.model.pretrained is None and config.model.vae is None:
        assumptions.append("VAE and text encoder: random weights (model.pretrained is null).")
    return assumptions


def _count_average_files(config: Config, num_iterations: int) -> int | None:
    """Files of `algorithms.ema.power`: of each width at each interval after the start, and at the end.

    Args:
        config: the configuration.
        num_iterations: length of the run in steps.

    Returns:
        The number; None where the start is in epochs, whose length only the data knows.
    """
    ema = config.algorithms.ema
    if ema is None or ema.power is None:
        return 0
    scale = {"num_batches": num_iterations, "global_batch_size": config.data.global_batch_size}
    start = parse_time(ema.start, "algorithms.ema.start").in_batches(**scale)
    every = parse_time(ema.power.snapshot_interval, "algorithms.ema.power.snapshot_interval").in_batches(**scale)
    if start is None or every is None:
        return None
    first, interval = max(1, math.ceil(start)), int(every)
    at_intervals = num_iterations // interval - first // interval
    at_the_end = 1 if num_iterations % interval and num_iterations > first else 0
    return (at_intervals + at_the_end) * len(ema.power.relative_widths)


def _average_file_bytes(config: Config, num_parameters: int) -> int:
    """Bytes of the tensors in one such file."""
    power = config.algorithms.ema.power if config.algorithms.ema is not None else None
    return num_parameters * STORED_BYTES[power.snapshot_precision] if power is not None else 0
