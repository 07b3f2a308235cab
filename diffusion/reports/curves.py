"""Metrics of long runs in bounded memory: means and extremes over intervals of steps."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MAX_BINS = 800
"""Largest number of intervals of a curve: about as many as a page has columns of pixels."""

MAX_CURVES = 2000
"""Largest number of metrics; a run has some dozens."""


class Curve:
    """A metric over steps, in intervals whose width doubles when there are too many.

    Of two values of one step, the later one counts.

    Args:
        max_bins: largest number of intervals, an even number.
    """

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self.max_bins, self.width = max_bins, 1
        self.num_values = self.num_not_finite = 0
        self.first_not_finite: float | None = None
        self.total = 0.0
        """Sum of all values."""

        self.last_step = -math.inf
        self.last = math.nan
        self._bins: list[list[float]] = []  # [first step, number, sum, smallest, largest]
        self._before: list[float] | None = None  # the last interval without the last value

    def add(self, step: float, value: float) -> None:
        """Add a value; steps ascend, and an earlier one counts as the last."""
        if not math.isfinite(value):
            if self.first_not_finite is None:
                self.first_not_finite = step
            self.num_not_finite += 1
            return
        if step == self.last_step:
            self._remove_last()
        elif not self._bins or step // self.width > self._bins[-1][0] // self.width:
            self._append(step)
        self._before = list(self._bins[-1])
        bin_ = self._bins[-1]
        bin_[1:] = [bin_[1] + 1, bin_[2] + value, min(bin_[3], value), max(bin_[4], value)]
        self.num_values += 1
        self.total += value
        self.last_step, self.last = max(step, self.last_step), value

    def _append(self, step: float) -> None:
        """Begin an interval, unless the last one contains the step after intervals were joined."""
        while len(self._bins) >= self.max_bins:
            self._join_intervals()
        if not self._bins or step // self.width > self._bins[-1][0] // self.width:
            self._bins.append([step, 0, 0.0, math.inf, -math.inf])

    def _join_intervals(self) -> None:
        """Double the width of the intervals."""
        self.width *= 2
        joined: list[list[float]] = []
        for first, num, total, low, high in self._bins:
            if joined and first // self.width == joined[-1][0] // self.width:
                last = joined[-1]
                last[1:] = [last[1] + num, last[2] + total, min(last[3], low), max(last[4], high)]
            else:
                joined.append([first, num, total, low, high])
        self._bins = joined

    def _remove_last(self) -> None:
        assert self._before is not None
        self._bins[-1] = self._before
        self.num_values -= 1
        self.total -= self.last

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


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Rows of a file of JSON lines, one at a time; None for a damaged line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:  # also of bytes that are no UTF-8
                row = None
            yield row if isinstance(row, dict) else None


def read_curves(rows: Iterable[Mapping[str, Any] | None]) -> tuple[dict[str, Curve], int]:
    """Collect the metrics of a run.

    Args:
        rows: `{"step": 1, "name": 0.5, ...}`; a step may come in several.

    Returns:
        Curves by name, and the number of unreadable rows.
    """
    curves: dict[str, Curve] = {}
    num_damaged = 0
    for row in rows:
        step = row.get("step") if row is not None else None
        if row is None or not isinstance(step, int | float):
            num_damaged += 1
            continue
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in curves:
                if len(curves) >= MAX_CURVES:
                    continue
                curves[name] = Curve()
            curves[name].add(step, value)
    return curves, num_damaged
