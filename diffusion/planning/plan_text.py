"""A plan as text."""

from diffusion.planning.plan import MemoryPlan, Plan
from diffusion.planning.streams import StreamPlan

UNKNOWN = "not known"


def format_plan(plan: Plan) -> str:
    """Write a plan for a terminal.

    Args:
        plan: what `make_plan` worked out.

    Returns:
        Lines of text, without a line break at the end.
    """
    gpus = f"{plan.num_ranks} GPU{'s' if plan.num_ranks > 1 else ''}"
    rows = [
        ("images", f"{plan.num_images:,} = {plan.num_iterations:,} iterations x {plan.global_batch_size:,}"),
        (
            "per rank",
            f"{plan.samples_per_rank:g} samples of each step on {plan.num_ranks} ranks, "
            f"{plan.num_microbatches} x {plan.microbatch_size}",
        ),
        *[(f"stream {stream.name}", _stream(stream)) for stream in plan.epoch.streams],
        *([("epoch", f"{plan.epoch.num_steps:,} steps")] if plan.epoch.num_steps is not None else []),
        ("throughput", f"{plan.images_per_second:,g} images/s" if plan.images_per_second else _not_known("throughput")),
        ("time", f"{plan.days:,.2f} days on {gpus}" if plan.days is not None else UNKNOWN),
        ("GPU-hours", f"{plan.gpu_hours:,.0f}" if plan.gpu_hours is not None else UNKNOWN),
        ("cost", f"${plan.cost:,.0f}" if plan.cost is not None else _not_known("cost")),
        ("parameters", f"{plan.num_parameters:,} trained"),
        ("operations", _operations(plan)),
        *[(f"memory, {memory.name}", _memory(memory)) for memory in plan.memory],
        ("memory, frozen", f"{size_text(plan.frozen_bytes)} of networks that are only used"),
        ("memory, reduction", f"{size_text(plan.reduction_bytes)} of gradients that are not sharded"),
        (
            "activations",
            f"{size_text(plan.activation_bytes)} per microbatch of {plan.microbatch_size}"
            if plan.activation_bytes is not None
            else UNKNOWN,
        ),
        ("largest microbatch", largest_microbatch(plan)),
        ("data", _data(plan)),
        ("tier, store", _store(plan)),
        ("tier, local disk", _disk(plan)),
        ("tier, shared memory", f"{size_text(plan.tiers.memory_bytes)} per node of batches that are ready"),
        ("checkpoint", size_text(plan.checkpoint_bytes)),
        (
            "checkpoints kept",
            f"{plan.num_checkpoints:,}, together {size_text(plan.storage_bytes)}"
            if plan.num_checkpoints is not None and plan.storage_bytes is not None
            else UNKNOWN,
        ),
        *([("averages stored", _averages(plan))] if plan.average_file_bytes else []),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"Plan of {plan.run_name}", *(f"  {name:<{width}}  {text}" for name, text in rows)]
    if plan.missing:
        lines.append("Still missing before it can start")
        lines += [f"  {key}: {doc}" for key, doc in plan.missing.items()]
    return "\n".join([*lines, "Assumed", *(f"  - {assumption}" for assumption in plan.assumptions)])


def _not_known(what: str) -> str:
    keys = {
        "throughput": "plan.images_per_second",
        "cost": "plan.images_per_second and plan.price_per_gpu_hour",
        "images": "plan.image_kb",
        "samples": "plan.num_samples",
    }
    return f"{UNKNOWN} (give {keys[what]})"


def _stream(stream: StreamPlan) -> str:
    samples = f"{stream.num_samples:,} samples" if stream.num_samples is not None else f"samples {UNKNOWN}"
    text = f"{samples}, epochs {UNKNOWN if stream.epochs is None else f'{stream.epochs:,.2f}'}"
    if stream.share is not None and stream.steps is not None:
        text += f", {stream.share:.2%} of the run: {stream.steps:,.0f} steps of its own"
    return text if stream.draws is None else f"{text}; an epoch drops {stream.dropped:,} of {stream.draws:,}"


def _memory(memory: MemoryPlan) -> str:
    sizes = {"weights": memory.weights, "gradients": memory.gradients, "Adam": memory.optimizer, "EMA": memory.ema}
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)
    return f"{size_text(memory.total)} per rank ({parts}){'  <- chosen' if memory.is_chosen else ''}"


def _operations(plan: Plan) -> str:
    if plan.training_flops is None:
        return UNKNOWN
    text = f"{plan.training_flops / 1e9:,.1f} GFLOP per image, {plan.training_flops * plan.num_images:.2e} in all"
    if plan.images_per_second is None:
        return text
    return f"{text}; {plan.training_flops * plan.images_per_second / plan.num_ranks / 1e12:,.1f} TFLOP/s per GPU"


def largest_microbatch(plan: Plan) -> str:
    """The largest microbatch on each size of GPU."""
    if plan.largest_microbatches is None:
        return UNKNOWN
    return ", ".join(f"{size or 'none'} on {memory:g} GB" for memory, size in plan.largest_microbatches.items())


def _data(plan: Plan) -> str:
    if plan.sample_bytes is None:
        return _not_known("images")
    total = size_text(plan.data_bytes) if plan.data_bytes is not None else _not_known("samples")
    return f"{plan.sample_bytes:,} bytes per sample, together {total}"


def _store(plan: Plan) -> str:
    tiers = plan.tiers
    if tiers.first_epoch_bytes is None or tiers.fetched_bytes is None:
        return _not_known("samples" if plan.sample_bytes is not None else "images")
    if not tiers.first_epoch_bytes:
        return "none: without data.remote nothing is fetched, and data.local holds everything on each node"
    again = "again" if tiers.epoch_bytes else "nothing"
    text = f"{_nodes(tiers.num_nodes)} {size_text(tiers.first_epoch_bytes)} in its first epoch, {again} in others"
    if plan.images_per_second is not None and plan.sample_bytes is not None:
        text += f", up to {size_text(plan.sample_bytes * plan.images_per_second)}/s together"
    text += f"; in all {size_text(tiers.fetched_bytes)}"
    return text if tiers.requests is None else f"{text}, {tiers.requests:,.0f} requests"


def _nodes(num_nodes: int) -> str:
    return f"each of {num_nodes:,} nodes fetches" if num_nodes > 1 else "the node fetches"


def _disk(plan: Plan) -> str:
    held, limited = plan.tiers.node_bytes, plan.tiers.disk_bytes
    if held is None or limited is None:
        return UNKNOWN
    return f"{size_text(held)} per node" + (f", by data.cache_limit {size_text(limited)}" if limited < held else "")


def _averages(plan: Plan) -> str:
    if plan.num_average_files is None:
        return UNKNOWN
    total = plan.num_average_files * plan.average_file_bytes
    return f"{plan.num_average_files:,} files of {size_text(plan.average_file_bytes)}, together {size_text(total)}"


def size_text(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.2f} {unit}"
    return f"{num_bytes:,.0f} B"
