"""The plan of a run before it starts: images, epochs, days, cost, memory, storage.

Counts (images, bytes of weights, gradients, optimizer state, checkpoints) are exact; estimates and assumptions are
listed with the plan.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config import fields
from diffusion.config.data import ImageSize
from diffusion.config.loading import to_yaml
from diffusion.config.schema import Config, Task
from diffusion.models.architectures import text_shape, unread_vae, vae_factor
from diffusion.models.flops import count_flops
from diffusion.planning.amounts import Amounts, EpochPlan, StreamPlan, plan_amounts, plan_epoch
from diffusion.planning.memory import (
    CUDA_BYTES,
    USABLE_MEMORY,
    MemoryPlan,
    ParameterCounts,
    StateMemory,
    mean_over_streams,
    meta_forward,
    meta_parts,
    parameter_counts,
    parse_model,
    plan_memory,
)
from diffusion.planning.storage import CheckpointPlan, TierPlan, plan_checkpoints, plan_tiers

UNKNOWN = "unknown"

ASSUMPTIONS = [
    "Memory: fp32 weights, gradients, moments of the optimizer and averages; fsdp gathers weights in the arithmetic's "
    "precision, which the frozen text encoder's linear layers have on a GPU. "
    "With reshard_after_forward the gathered block is not counted.",
    "Activations: what autograd keeps in the arithmetic's precision, nothing recomputed or compiled. Largest "
    f"microbatch: {CUDA_BYTES / 1e9:g} GB for CUDA, and at most {USABLE_MEMORY:.0%} of the memory.",
    "Checkpoints: 4 bytes of each weight and, for those that are trained, of each moment of the optimizer and of each "
    "started average.",
    "Streams of several sizes: operations and stored bytes are means over them, or of the largest size where "
    "shares or samples are not known; memory is that of the largest.",
    "Latents: one caption per image, without keys and what MDS adds; no validation data.",
    "Days: images over plan.images_per_second of the whole fleet; no restart, evaluation, checkpoint or idle time.",
]


@dataclass(frozen=True, kw_only=True)
class Plan(Amounts):
    """Time, operations and memory of a run. None: unknown."""

    num_parameters: int
    """Trained parameters."""

    training_flops: float | None
    """Operations of network and text adapter for one image, forward and backward; mean of the streams."""

    num_samples: int | None
    """Samples of the data set."""

    epoch: EpochPlan
    memory: MemoryPlan
    tiers: TierPlan
    checkpoints: CheckpointPlan
    assumptions: list[str]
    """Those of this run, beside `ASSUMPTIONS`."""


def plan_run(config: Config, *, world_size: int = 1, counts: ParameterCounts | None = None) -> Plan:
    """Compute what a run takes, whose locations may be missing (`???`).

    `plan.num_gpus` replaces the world size. Without counts, the parameters of the configured network are counted.
    """
    counts = parameter_counts(config) if counts is None else counts
    amounts = plan_amounts(config, world_size=world_size)
    num_images, num_ranks = amounts.num_images, amounts.num_ranks
    epoch = plan_epoch(config, num_images)
    samples = [stream.num_samples for stream in epoch.streams]
    known = [count for count in samples if count is not None]
    num_samples = sum(known) if samples and len(known) == len(samples) else config.plan.num_samples
    return Plan(
        **vars(amounts),
        num_parameters=counts.trained,
        training_flops=mean_training_flops(config, epoch.streams),
        num_samples=num_samples,
        epoch=epoch,
        memory=plan_memory(config, counts, num_ranks),
        tiers=plan_tiers(config, epoch.streams, num_ranks=num_ranks, num_images=num_images, num_samples=num_samples),
        checkpoints=plan_checkpoints(config, counts, epoch.num_steps),
        assumptions=_assumptions(config),
    )


def _assumptions(config: Config) -> list[str]:
    vae = unread_vae(config.model) if config.task is Task.diffusion else None
    if vae is None:
        return []
    return [
        f"VAE: {vae} is no folder here with the config.json of a VAE. The architecture's is planned in its place, with "
        f"{vae_factor(config.model)} pixels per latent position along a side."
    ]


def mean_training_flops(config: Config, streams: Sequence[StreamPlan]) -> float | None:
    """Mean operations for one image of the run, as of `training_flops`."""
    return mean_over_streams(config, [stream.share for stream in streams], functools.partial(training_flops, config))


def training_flops(config: Config, size: ImageSize) -> int | None:
    """Operations of what is trained for one image of a size in pixels, forward and backward; None where not known."""
    return _training_flops(to_yaml(config.model), size) if config.task is Task.diffusion else None


@functools.cache
def _training_flops(model: str, size: ImageSize) -> int | None:
    config = parse_model(model)
    network, ingredients = meta_parts(config)
    if not all(parameter.requires_grad for parameter in network.parameters()):
        with FlopCounterMode(display=False) as counter:
            output = meta_forward(config, network, ingredients, size, torch.float32)
            if output is None:
                return None
            output.sum().backward()
        return counter.get_total_flops()
    height, width = (side // vae_factor(config) for side in size)
    flops = count_flops(
        network.config,
        height=height,
        width=width,
        num_tokens=text_shape(config)[0],
        ingredients=ingredients,
    )
    return flops.training if flops is not None else None


def format_plan(plan: Plan, missing: Mapping[str, str] | None = None) -> str:
    """Write a plan for a terminal, with the keys that have to be set before the start, and their meanings."""
    memory, tiers, checkpoints = plan.memory, plan.tiers, plan.checkpoints
    share = plan.global_batch_size / plan.num_ranks
    rows = [
        ("images", f"{plan.num_images:,} = {plan.num_iterations:,} iterations x {plan.global_batch_size:,}"),
        (
            "per rank",
            f"{share:g} samples of each step on {plan.num_ranks} ranks, "
            f"{math.ceil(share / memory.microbatch_size)} x {memory.microbatch_size}",
        ),
        *[(f"stream {stream.name}", _stream(stream)) for stream in plan.epoch.streams],
        ("epoch", number_text(plan.epoch.num_steps, "{:,} steps")),
        ("throughput", number_text(plan.images_per_second, "{:,g} images/s", "plan.images_per_second")),
        ("time", number_text(plan.days, f"{{:,.2f}} days on {plan.num_ranks} GPU{'s' if plan.num_ranks > 1 else ''}")),
        ("GPU-hours", number_text(plan.gpu_hours, "{:,.0f}")),
        ("cost", number_text(plan.cost, "${:,.0f}", "plan.images_per_second and plan.price_per_gpu_hour")),
        ("parameters", f"{plan.num_parameters:,} trained"),
        ("operations", _operations(plan)),
        *[(f"memory, {state.name}", _state(state)) for state in memory.states],
        ("memory, frozen", f"{size_text(memory.frozen_bytes)} of networks that are only used"),
        ("memory, reduction", f"{size_text(memory.reduction_bytes)} of gradients that are not sharded"),
        ("activations", f"{size_text(memory.activation_bytes)} per microbatch of {memory.microbatch_size}"),
        ("largest microbatch", largest_microbatch(plan)),
        ("data", _data(plan)),
        ("tier, store", _store(plan)),
        ("tier, local disk", _disk(plan)),
        ("tier, shared memory", f"{size_text(tiers.memory_bytes)} per node of batches that are ready"),
        ("checkpoint", size_text(checkpoints.largest_bytes)),
        (
            "checkpoints kept",
            number_text(
                checkpoints.num_kept,
                f"{{:,}}, together {size_text(checkpoints.kept_bytes)}",
                "trainer.save_interval in batches",
            ),
        ),
    ]
    if checkpoints.average_file_bytes:
        number, size = checkpoints.num_average_files, checkpoints.average_file_bytes
        total = size_text(checkpoints.average_bytes)
        rows.append(("averages stored", number_text(number, f"{{:,}} files of {size_text(size)}, together {total}")))
    rows = [(name, text) for name, text in rows if text != UNKNOWN]
    width = max(len(name) for name, _ in rows)
    lines = [f"Plan of {plan.run_name}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
    if missing:
        lines += ["Still missing before it can start", *(f"  {key}: {doc}" for key, doc in missing.items())]
    lines += [f"This run would not start: {plan.epoch.problem}."] if plan.epoch.problem is not None else []
    return "\n".join([*lines, "Assumed", *(f"  - {assumption}" for assumption in ASSUMPTIONS + plan.assumptions)])


def number_text(value: float | None, form: str, key: str = "") -> str:
    """Format a number; an unknown one names the key to set."""
    if value is None:
        return f"{UNKNOWN} (set {key})" if key else UNKNOWN
    return form.format(value)


def size_text(num_bytes: float | None) -> str:
    """Bytes in decimal units."""
    return UNKNOWN if num_bytes is None else fields.size_text(num_bytes, digits=2)


def largest_microbatch(plan: Plan) -> str:
    """Largest microbatch on each size of GPU."""
    sizes = plan.memory.largest_microbatches
    if sizes is None:
        return UNKNOWN
    return ", ".join(f"{size or 'none'} on {memory:g} GB" for memory, size in sizes.items())


def _stream(stream: StreamPlan) -> str:
    numbers = {"{:,} samples": stream.num_samples, "{:,.2f} epochs": stream.epochs, "{:.2%} of the run": stream.share}
    parts = [form.format(number) for form, number in numbers.items() if number is not None] or [UNKNOWN]
    if stream.draws is not None:
        parts.append(f"an epoch drops {stream.dropped:,} of {stream.draws:,}")
    return ", ".join(parts)


def _state(state: StateMemory) -> str:
    sizes = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer, "EMA": state.ema}
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    return f"{size_text(state.total)} per rank ({parts}){'  <- chosen' if state.is_chosen else ''}"


def _operations(plan: Plan) -> str:
    if plan.training_flops is None:
        return UNKNOWN
    text = f"{plan.training_flops / 1e9:,.1f} GFLOP per image, {plan.training_flops * plan.num_images:.2e} in all"
    if plan.images_per_second is None:
        return text
    return f"{text}; {plan.training_flops * plan.images_per_second / plan.num_ranks / 1e12:,.1f} TFLOP/s per GPU"


def _data(plan: Plan) -> str:
    numbers = {
        "plan.image_kb": number_text(plan.tiers.sample_bytes, "{:,} bytes per sample"),
        "plan.num_samples": number_text(plan.num_samples, "{:,} samples"),
    }
    if missing := [key for key, text in numbers.items() if text == UNKNOWN]:
        return f"{UNKNOWN} (set {' and '.join(missing)})"
    return ", ".join([*numbers.values(), size_text(plan.tiers.data_bytes)])


def _disk(plan: Plan) -> str:
    whole, limited = size_text(plan.tiers.node_bytes), size_text(plan.tiers.disk_bytes)
    if whole == UNKNOWN:
        return UNKNOWN
    return f"{whole} per node" + (f", with data.cache_limit {limited}" if limited != whole else "")


def _store(plan: Plan) -> str:
    tiers = plan.tiers
    if tiers.fetched_bytes is None:
        return UNKNOWN
    if tiers.fetched_bytes == 0:
        return "none: without data.remote nothing is fetched, and data.local holds everything on each node"
    later = "the same" if tiers.epoch_bytes else "nothing"
    text = (
        f"each of {tiers.num_nodes:,} nodes downloads {size_text(tiers.node_bytes)} in its first epoch, and {later} in "
        "each later one"
    )
    if plan.images_per_second is not None and tiers.sample_bytes is not None:
        text += f", up to {size_text(tiers.sample_bytes * plan.images_per_second)}/s together"
    return f"{text}; in all {size_text(tiers.fetched_bytes)}"
