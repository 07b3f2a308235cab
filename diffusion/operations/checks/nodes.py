"""Comparison of the nodes of a job with their median, which names the slow ones."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diffusion.operations.checks.verdicts import Level, Verdict, ok, size_text, warning


@dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """Measurements of one node, of its slowest rank; None is not measured."""

    name: str
    """Such as `node 3`."""

    host: str
    num_gpus: int
    """Visible GPUs; 0 for training on the CPU."""

    flops: float | None = None
    """Operations per second of a matrix product."""

    copied: float | None = None
    """Bytes per second of a copy in the device's memory, read and written."""

    written: float | None = None
    """Bytes per second of the disk for checkpoints."""

    link: float | None = None
    """Bytes per second to the better of two other nodes, and back."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity by which nodes are compared."""

    name: str
    value: Callable[[NodeSpeed], float | None]
    share: float
    """Share of the median below which a node is slow."""

    unit: str
    remedy: str


COMPARISONS = [
    Comparison(
        name="GPUs of nodes",
        value=lambda node: float(node.num_gpus) or None,
        share=1.0,
        unit="GPUs",
        remedy="look for lost GPUs in its kernel log",
    ),
    Comparison(
        name="matrix product",
        value=lambda node: node.flops,
        share=0.8,  # Each step waits for the slowest node.
        unit="operations/s",
        remedy="check its clocks and its cooling",
    ),
    Comparison(
        name="memory copy",
        value=lambda node: node.copied,
        share=0.8,
        unit="B/s",
        remedy="check it for other processes, and its clocks",
    ),
    Comparison(
        name="disk of nodes",
        value=lambda node: node.written,
        share=0.2,
        unit="B/s",
        remedy="check its disk for other users and free space",
    ),
    Comparison(
        name="network of nodes",
        value=lambda node: node.link,
        share=0.5,
        unit="B/s",
        remedy="check its cable, its NIC and its error counters",
    ),
]


def compare_nodes(nodes: Sequence[NodeSpeed]) -> list[Verdict]:
    """Compare nodes with their median; of two nodes the slower one with the faster one."""
    return [_compare(nodes, by) for by in COMPARISONS if any(by.value(node) is not None for node in nodes)]


def _compare(nodes: Sequence[NodeSpeed], by: Comparison) -> Verdict:
    values = [by.value(node) or 0.0 for node in nodes]
    usual = max(values) if len(nodes) == 2 else statistics.median(values)
    slow = [(node, value) for node, value in zip(nodes, values, strict=True) if value < by.share * usual]
    if not slow:
        return ok(f"{_text(min(values), by.unit)} on the slowest of {len(nodes)} nodes", check=by.name)
    found = ", ".join(f"{node.host} has {_text(value, by.unit)}" for node, value in slow)
    what = f"{found}, the median of the {len(nodes)} nodes is {_text(usual, by.unit)}"
    where = ", ".join(node.name for node, _ in slow)
    return replace(warning(what, f"{by.remedy}, or remove it from the job", check=by.name), where=where)


def _text(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{size_text(value)}/s"
    return f"{value:,.0f} {unit}" if value < 1e9 else f"{value / 1e12:,.4g} T{unit}"


def unfit_nodes(names: Sequence[str], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the slow nodes, and those with a problem that not all nodes have.

    Args:
        names: names of all nodes.
        verdicts: verdicts of all checks.
    """
    comparisons = {by.name for by in COMPARISONS}
    unfit: set[str] = set()
    for verdict in verdicts:
        if verdict.level is Level.problem or (verdict.level is Level.warning and verdict.check in comparisons):
            unfit.update(verdict.where.split(", "))
    return [name for name in names if name in unfit]
