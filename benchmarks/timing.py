"""Seconds that a step takes: by the clock, and of the processors, which other work on the machine disturbs less."""

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Seconds(NamedTuple):
    """How long a step took."""

    clock: float
    cpu: float
    """Of this process and of its children that ended in the meantime."""


def timed(step: Callable[[], Any]) -> Seconds:
    """Run a step."""
    clock, cpu = time.perf_counter(), _cpu_seconds()
    step()
    return Seconds(time.perf_counter() - clock, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    """Return the processor time of this process and of its children that ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def ratios(limit: Sequence[Seconds], ours: Sequence[Seconds]) -> dict[str, Any]:
    """Compare neighbours of runs in turn.

    Args:
        limit: Rounds of what is compared with.
        ours: Rounds of ours, as many.

    Returns:
        `ratio`: rate of ours over the other, by the clock, the median; `ratios`: of each round; `ratio_cpu` and
        `ratios_cpu`: likewise of processor time.
    """
    clock = [one.clock / other.clock for one, other in zip(limit, ours, strict=True)]
    cpu = [one.cpu / other.cpu for one, other in zip(limit, ours, strict=True)]
    return {
        "ratio": statistics.median(clock),
        "ratios": clock,
        "ratio_cpu": statistics.median(cpu),
        "ratios_cpu": cpu,
    }
