"""What a run has cost, for people."""

from diffusion.operations.costs import Kind, Totals, total
from diffusion.operations.runs import Overview
from diffusion.reports.tables import text_table

_WHAT = {
    Kind.training: "training",
    Kind.repeated: "steps done again after a restart",
    Kind.starting: "starting",
    Kind.data: "waiting for data",
    Kind.evaluation: "evaluation",
    Kind.between: "checkpoints and samples",
}


def describe_costs(overview: Overview, utilisation: float | None) -> str:
    """A table of what the time of a run went into, and its totals below.

    Args:
        overview: of the run.
        utilisation: of its GPUs, the mean of the run from 0 to 1; None is not known.
    """
    totals = total(overview.starts)
    price = totals.dollars / totals.gpu_hours if totals.dollars and totals.gpu_hours else None
    rows = [("", "GPU-hours", "share", "dollars")]
    rows += [_row(text, totals.hours[kind.value], totals.gpu_hours, price) for kind, text in _WHAT.items()]
    rows += [_row("all", totals.gpu_hours, totals.gpu_hours, price)]
    head = f"{overview.folder}: {overview.status}, step {overview.step:,}"
    return "\n".join([head, *text_table(rows), *_lines(totals, utilisation)])


def _row(text: str, hours: float, whole: float, price: float | None) -> tuple[str, str, str, str]:
    share = f"{hours / whole:.1%}" if whole else "-"
    return text, f"{hours:,.3f}", share, f"{hours * price:,.2f}" if price is not None else "-"


def _lines(totals: Totals, utilisation: float | None) -> list[str]:
    return [
        f"lost to restarts: {totals.restart_hours:,.3f} GPU-hours, and {totals.gap_hours:,.2f} h between the starts, "
        "which are not counted above",
        f"GPU utilisation, mean of the run: {_share(utilisation)}",
        f"MFU over all of the time: {_share(totals.mfu)}",
    ]


def _share(value: float | None) -> str:
    return f"{value:.1%}" if value is not None else "not known"
