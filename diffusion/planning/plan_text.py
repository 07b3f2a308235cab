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
            f"{plan.num_microbatches} x {plan.microbatch_size:g}",
        ),
        *[(f"stream {stream.name}", _stream(stream)) for stream in plan.epoch.streams],
        *([("epoch", f"{plan.epoch.num_steps:,} steps")] if plan.epoch.num_steps is not None else []),
        ("throughput", f"{plan.images_per_second:,g} images/s" if plan.images_per_second else _not_known("throughput")),
        ("time", f"{plan.days:,.2f} days on {gpus}" if plan.days is not None else UNKNOWN),
        ("GPU-hours", f"{plan.gpu_hours:,.0f}" if plan.gpu_hours is not None else UNKNOWN),
        ("cost", f"${plan.cost:,.0f}" if plan.cost is not None else _not_known("cost")),
        ("parameters", f"{plan.num_parameters:,} trained"),
        *[(f"memory, {memory.name}", _memory(memory)) for memory in plan.memory],
        (
            "activations",
            f"{_size(plan.activation_bytes)} per microbatch of {plan.microbatch_size:g} (estimate)"
            if plan.activation_bytes is not None
            else UNKNOWN,
        ),
        ("checkpoint", _size(plan.checkpoint_bytes)),
        (
            "checkpoints kept",
            f"{plan.num_checkpoints:,}, together {_size(plan.storage_bytes)}"
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
    keys = {"throughput": "plan.images_per_second", "cost": "plan.images_per_second and plan.price_per_gpu_hour"}
    return f"{UNKNOWN} (give {keys[what]})"


def _stream(stream: StreamPlan) -> str:
    samples = f"{stream.num_samples:,} samples" if stream.num_samples is not None else f"samples {UNKNOWN}"
    text = f"{samples}, epochs {UNKNOWN if stream.epochs is None else f'{stream.epochs:,.2f}'}"
    return text if stream.draws is None else f"{text}; an epoch drops {stream.dropped:,} of {stream.draws:,}"


def _memory(memory: MemoryPlan) -> str:
    parts = f"weights {_size(memory.weights)}, gradients {_size(memory.gradients)}, Adam {_size(memory.optimizer)}"
    average = f", EMA {_size(memory.ema)}" if memory.ema else ""
    return f"{_size(memory.total)} per rank ({parts}{average}){'  <- chosen' if memory.is_chosen else ''}"


def _averages(plan: Plan) -> str:
    if plan.num_average_files is None:
        return UNKNOWN
    total = plan.num_average_files * plan.average_file_bytes
    return f"{plan.num_average_files:,} files of {_size(plan.average_file_bytes)}, together {_size(total)}"


def _size(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.2f} {unit}"
    return f"{num_bytes:,.0f} B"
