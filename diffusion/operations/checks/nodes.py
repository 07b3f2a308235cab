"""Which node is out of line: each is compared with the median over all nodes of the job."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diffusion.operations.checks.verdicts import Level, Verdict, ok, size_text, warning

SLOW_SHARE = 0.8
"""Share of the median below which a node holds up all others: each step waits for the slowest."""

SLOW_LINK_SHARE = 0.5
"""The same of its network, which varies more."""


@dataclass(frozen=True, kw_only=True)
class NodeReading:
    """What one node has measured: of its ranks the slowest, which is the one that the others wait for."""

    name: str
    """Such as `node 3`."""

    host: str
    num_gpus: int
    """That NVML or CUDA sees; 0 for a run on the CPU."""

    flops: float | None = None
    """Operations per second of a matrix product; None where it was not measured, as all that follows."""

    copied: float | None = None
    """Bytes per second of a copy in the device's memory, read and written."""

    written: float | None = None
    """Bytes per second of the disk for checkpoints."""

    link: float | None = None
    """Bytes per second to the better of two other nodes, and back; None with one node."""


FIGURES: tuple[tuple[str, Callable[[NodeReading], float | None], float, str, str], ...] = (
    ("GPUs of nodes", lambda node: float(node.num_gpus) or None, 1.0, "GPUs", "look at its kernel log for lost GPUs"),
    ("matrix product", lambda node: node.flops, SLOW_SHARE, "operations/s", "look at its clocks and its cooling"),
    ("memory copy", lambda node: node.copied, SLOW_SHARE, "B/s", "look for other processes on it, and at its clocks"),
    ("disk of nodes", lambda node: node.written, 0.2, "B/s", "look for other users of its disk, and how full it is"),
    ("network of nodes", lambda node: node.link, SLOW_LINK_SHARE, "B/s", "look at its cable, its NIC and its errors"),
)
"""Name, value, share of the median below which it is out of line, unit and what to do."""


def check_nodes(nodes: Sequence[NodeReading]) -> list[Verdict]:
    """Name the nodes that are below the median; of two nodes the slower one is compared with the faster one."""
    return [_check(nodes, *figure) for figure in FIGURES if any(figure[1](node) is not None for node in nodes)]


def _check(
    nodes: Sequence[NodeReading],
    name: str,
    value: Callable[[NodeReading], float | None],
    share: float,
    unit: str,
    remedy: str,
) -> Verdict:
    values = [value(node) or 0.0 for node in nodes]
    usual = max(values) if len(nodes) == 2 else statistics.median(values)
    low = [(node, number) for node, number in zip(nodes, values, strict=True) if number < share * usual]
    if not low:
        return ok(name, f"{_text(min(values), unit)} on the slowest of {len(nodes)} nodes")
    found = ", ".join(f"{node.host} has {_text(number, unit)}" for node, number in low)
    what = f"{found}, usual on the {len(nodes)} nodes is {_text(usual, unit)}"
    where = ", ".join(node.name for node, _ in low)
    return replace(warning(name, what, f"{remedy}, or leave it out"), where=where)


def _text(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{size_text(value)}/s"
    return f"{value:,.0f} {unit}" if value < 1e9 else f"{value / 1e12:,.4g} T{unit}"


def unfit_nodes(names: Sequence[str], verdicts: Sequence[Verdict]) -> list[str]:
    """Nodes that are to be left out: with a problem that not all have, or out of line.

    Args:
        names: of all nodes.
        verdicts: of all checks.
    """
    figures = {figure[0] for figure in FIGURES}
    blamed: set[str] = set()
    for verdict in verdicts:
        if verdict.level is Level.problem or (verdict.level is Level.warning and verdict.check in figures):
            blamed.update(verdict.where.split(", "))
    return [name for name in names if name in blamed]


def pairings(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Two ways to pair nodes with their neighbours in a circle, so that each has two partners where that is possible.

    A node is judged by the better of its links, so that it is not blamed for its neighbour.
    """
    second = [(node, (node + 1) % num_nodes) for node in range(1, num_nodes - num_nodes % 2, 2)]
    found = [[(node, node + 1) for node in range(0, num_nodes - 1, 2)]]
    return [*found, second] if num_nodes > 2 else found if num_nodes == 2 else []
