"""Budgets of fleets as a table, and drawn."""

from collections.abc import Sequence
from pathlib import Path

from diffusion.planning.fleets import Budget
from diffusion.planning.plan import Plan
from diffusion.planning.plan_text import UNKNOWN, largest_microbatch, size_text
from diffusion.reports.tables import text_table


def format_budgets(budgets: Sequence[Budget]) -> str:
    """Write what runs take on each fleet, side by side.

    Args:
        budgets: of the same runs on several fleets.

    Returns:
        Lines of text, without a line break at the end.
    """
    plans = budgets[0].plans
    rates = [f"{plan.run_name} img/s" for plan in plans]
    saves = [f"{plan.run_name} save" for plan in plans]
    costs = ["cost", "+ storage", "+ egress", "+ requests", "+ disks"]
    head = ["fleet", *rates, "days", "GPU-hours", *costs, "with failures", *saves]
    rows = [head, *(_row(budget) for budget in budgets)]
    lines = [
        "Together " + " and ".join(f"{plan.num_images:,} images ({plan.run_name})" for plan in plans),
        *text_table(rows),
        "",
        "Memory of one GPU, and what all of them read",
        *text_table([_MEMORY_HEAD, *(row for budget in budgets for row in _memory_rows(budget))]),
        "",
        "Data and checkpoints",
        *text_table([_DATA_HEAD, *(_data_row(budget, i) for i in range(len(plans)) for budget in budgets[:1])]),
        "",
        "Tiers of storage: what the store gives, and what a node holds",
        *text_table([_TIERS_HEAD, *(_tier_row(budget, plan) for budget in budgets for plan in budget.plans)]),
        "",
        "Assumed",
    ]
    notes = dict.fromkeys(note for budget in budgets for note in budget.assumptions)
    shared = dict.fromkeys(note for budget in budgets for plan in budget.plans for note in plan.assumptions)
    return "\n".join([*lines, *(f"  - {note}" for note in [*notes, *shared])])


def _row(budget: Budget) -> list[str]:
    days, bounds = f"{budget.days:,.2f}", budget.days_range
    if bounds is not None:
        days += f" ({bounds[0]:,.2f} to {bounds[1]:,.2f})"
    return [
        budget.fleet.name,
        *(f"{plan.images_per_second:,.0f}" for plan in budget.plans),
        days,
        f"{budget.gpu_hours:,.0f}",
        *(_dollars(cost) for cost in (budget.gpu_cost, budget.storage_cost, budget.egress_cost)),
        *(_dollars(cost) for cost in (budget.request_cost, budget.disk_cost)),
        f"{budget.days_with_failures:,.2f} days",
        *(f"{steps:,}ba" for steps in budget.save_interval_steps),
    ]


_MEMORY_HEAD = [
    "fleet", "run", "state", "frozen", "reduction", "microbatch", "activations", "read", "largest microbatch"
]  # fmt: skip


def _memory_rows(budget: Budget) -> list[list[str]]:
    return [
        [
            budget.fleet.name,
            plan.run_name,
            size_text(next(memory.total for memory in plan.memory if memory.is_chosen)),
            size_text(plan.frozen_bytes),
            size_text(plan.reduction_bytes),
            str(plan.microbatch_size),
            size_text(plan.activation_bytes) if plan.activation_bytes is not None else UNKNOWN,
            f"{size_text(plan.sample_bytes * (plan.images_per_second or 0))}/s" if plan.sample_bytes else UNKNOWN,
            largest_microbatch(plan),
        ]
        for plan in budget.plans
    ]


_DATA_HEAD = ["run", "epochs", "bytes per sample", "data", "checkpoints kept", "together"]


def _data_row(budget: Budget, index: int) -> list[str]:
    plan = budget.plans[index]
    epochs = [stream.epochs for stream in plan.epoch.streams if stream.epochs is not None]
    if not epochs and plan.num_samples is not None:
        epochs = [plan.num_images / plan.num_samples]
    return [
        plan.run_name,
        ", ".join(f"{value:,.2f}" for value in dict.fromkeys(epochs)) or UNKNOWN,
        f"{plan.sample_bytes:,}" if plan.sample_bytes is not None else UNKNOWN,
        size_text(plan.data_bytes) if plan.data_bytes is not None else UNKNOWN,
        f"{plan.num_checkpoints:,}" if plan.num_checkpoints is not None else UNKNOWN,
        size_text(plan.storage_bytes) if plan.storage_bytes is not None else UNKNOWN,
    ]


_TIERS_HEAD = [
    "fleet", "run", "nodes", "store holds", "out per node: epoch 1", "later epochs", "requests", "out in all",
    "requests in all", "disk per node", "with the limit", "shared memory",
]  # fmt: skip


def _tier_row(budget: Budget, plan: Plan) -> list[str]:
    tiers = plan.tiers
    return [
        budget.fleet.name,
        plan.run_name,
        f"{tiers.num_nodes:,}",
        *(_size(size) for size in (plan.data_bytes, tiers.first_epoch_bytes, tiers.epoch_bytes)),
        _count(tiers.epoch_requests),
        _size(tiers.fetched_bytes),
        _count(tiers.requests),
        *(_size(size) for size in (tiers.node_bytes, tiers.disk_bytes, tiers.memory_bytes)),
    ]


def _size(num_bytes: float | None) -> str:
    return size_text(num_bytes) if num_bytes is not None else UNKNOWN


def _count(number: float | None) -> str:
    return f"{number:,.0f}" if number is not None else UNKNOWN


def _dollars(cost: float | None) -> str:
    return f"${cost:,.0f}" if cost is not None else UNKNOWN


def plot_budgets(budgets: Sequence[Budget], path: Path) -> None:
    """Draw cost against days over the number of GPUs; error bars where a rate was measured several times."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.add_subplot()
    shown = [(budget, budget.cost) for budget in sorted(budgets, key=lambda one: one.days)]
    points = [(budget, cost) for budget, cost in shown if cost is not None]
    days, costs = [budget.days for budget, _ in points], [cost for _, cost in points]
    spread = [(budget.fleet.deviation or 0.0) * budget.days for budget, _ in points]
    axis.errorbar(days, costs, xerr=spread, fmt="o", capsize=3)
    for budget, cost in points:
        label = f"{budget.fleet.num_gpus} GPUs"
        axis.annotate(label, (budget.days, cost), xytext=(4, 6), textcoords="offset points")
    axis.set(xscale="log", xlabel="days", ylabel="cost, dollars", title="Cost against time")
    axis.set_xticks(days, [f"{value:,.1f}" for value in days])
    axis.minorticks_off()
    axis.margins(x=0.15)
    axis.set_ylim(0, 1.2 * max(costs, default=1))
    figure.savefig(path, dpi=110)
