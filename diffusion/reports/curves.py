"""Metrics of long runs in bounded memory: means and extremes over intervals of steps."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

MAX_BINS = 800
"""Largest number of intervals of a curve: about as many as a page has columns of pixels."""


class Curve:
    """A metric over steps, in intervals whose width doubles when there are more than `max_bins`."""

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self.max_bins, self.width = max_bins, 1
        self.num_values = self.num_not_finite = 0
        self.first_not_finite: float | None = None
        self.total = 0.0
        """Sum of all values."""

        self.last_step = -math.inf
        self.last = math.nan
        self._bins: list[list[float]] = []  # [first step, number, sum, smallest, largest]

    def add(self, step: float, value: float) -> None:
        """Add a value; steps ascend."""
        if not math.isfinite(value):
            if self.first_not_finite is None:
                self.first_not_finite = step
            self.num_not_finite += 1
            return
        self._add([step, 1, value, value, value])
        while len(self._bins) > self.max_bins:
            self.width *= 2
            bins, self._bins = self._bins, []
            for bin_ in bins:
                self._add(bin_)
        self.num_values += 1
        self.total += value
        self.last_step, self.last = step, value

    def _add(self, bin_: list[float]) -> None:
        """Join an interval to the last one, or append it."""
        first, num, total, low, high = bin_
        if not self._bins or first // self.width > self._bins[-1][0] // self.width:
            self._bins.append(bin_)
            return
        last = self._bins[-1]
        last[1:] = [last[1] + num, last[2] + total, min(last[3], low), max(last[4], high)]

    @property
    def steps(self) -> list[float]:
        """First step of each interval."""
        return [bin_[0] for bin_ in self._bins]

    @property
    def means(self) -> list[float]:
        """Mean of each interval."""
        return [bin_[2] / bin_[1] for bin_ in self._bins]

    @property
    def extremes(self) -> tuple[list[float], list[float]]:
        """Smallest and largest value of each interval."""
        return [bin_[3] for bin_ in self._bins], [bin_[4] for bin_ in self._bins]

    @property
    def mean(self) -> float:
        """Mean of all values."""
        return self.total / self.num_values if self.num_values else math.nan

    def recent(self, share: float = 0.02) -> float:
        """Mean of the values in the last share of the intervals."""
        bins = self._bins[-max(1, round(share * len(self._bins))) :]
        return sum(bin_[2] for bin_ in bins) / sum(bin_[1] for bin_ in bins)


def read_curves(rows: Iterable[Mapping[str, Any] | None]) -> tuple[dict[str, Curve], int]:
    """Collect the metrics of a run from rows `{"step": 1, "name": 0.5, ...}`.

    Returns:
        Curves by name, and the number of unreadable rows.
    """
    curves: dict[str, Curve] = {}
    num_damaged = 0
    for row in rows:
        if row is None or "step" not in row:
            num_damaged += 1
            continue
        for name, value in row.items():
            if name != "step":
                curves.setdefault(name, Curve()).add(row["step"], value)
    return curves, num_damaged
