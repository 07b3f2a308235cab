"""A run as its folder shows it: metrics (of long runs in bounded memory), starts, timeline, sample grids."""

import datetime
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from diffusion.config.loading import dump, from_dict, read_yaml, to_dict
from diffusion.config.schema import Config
from diffusion.config.secrets import redact
from diffusion.errors import ConfigurationError
from diffusion.files import read_json_lines
from diffusion.formats.run_folder import (
    CONFIG,
    EVENTS,
    FINISHED,
    METRICS,
    ROLLBACKS,
    SAMPLES,
    STARTS,
    TRAIN_LOSS,
    check_is_run,
    preemption_signal,
)
from diffusion.operations.costs import StartCosts, read_costs, total
from diffusion.operations.events import EventKind

ROLLBACK = "rollback"
"""Event of a timeline, beside those of `EventKind`."""

_SHOWN_ELSEWHERE = (
    EventKind.started.value,
    EventKind.data_came.value,
    EventKind.rolling_back.value,
)
"""Events of starts, of the end of slow data, and of rollbacks, which have rows or tables of their own."""

MAX_BINS = 800
"""Largest number of intervals of a curve: about as many as a page has columns of pixels."""

Row = Mapping[str, Any]


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
        """Last value, finite or not."""

        self._bins: list[list[float]] = []  # [first step, number, sum, sum of reciprocals, smallest, largest]

    def add(self, step: float, value: float) -> None:
        """Add a value; steps ascend."""
        self.last_step, self.last = step, value
        if not math.isfinite(value):
            if self.first_not_finite is None:
                self.first_not_finite = step
            self.num_not_finite += 1
            return
        self._add([step, 1, value, 1 / value if value else math.inf, value, value])
        while len(self._bins) > self.max_bins:
            self.width *= 2
            bins, self._bins = self._bins, []
            for bin_ in bins:
                self._add(bin_)
        self.num_values += 1
        self.total += value

    def _add(self, bin_: list[float]) -> None:
        """Join an interval to the last one, or append it."""
        first, num, total, reciprocals, low, high = bin_
        if not self._bins or first // self.width > self._bins[-1][0] // self.width:
            self._bins.append(bin_)
            return
        last = self._bins[-1]
        last[1:4] = [last[1] + num, last[2] + total, last[3] + reciprocals]
        last[4:] = [min(last[4], low), max(last[5], high)]

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
        return [bin_[4] for bin_ in self._bins], [bin_[5] for bin_ in self._bins]

    @property
    def mean(self) -> float:
        """Mean of all values."""
        return self.total / self.num_values if self.num_values else math.nan

    def recent(self, share: float = 0.02) -> float:
        """Mean of the values in the last share of the intervals; NaN if the last value is not finite."""
        bins = self._last_bins(share)
        return sum(bin_[2] for bin_ in bins) / sum(bin_[1] for bin_ in bins) if math.isfinite(self.last) else math.nan

    def rate(self, share: float = 1.0) -> float:
        """Harmonic mean of the values in the last share of the intervals, which are rates of equal amounts."""
        bins = self._last_bins(share)
        return sum(bin_[1] for bin_ in bins) / sum(bin_[3] for bin_ in bins) if bins else math.nan

    def _last_bins(self, share: float) -> list[list[float]]:
        return self._bins[-max(1, round(share * len(self._bins))) :]


def read_curves(rows: Iterable[Row | None]) -> tuple[dict[str, Curve], int]:
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


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run."""

    step: int
    began: datetime.datetime
    ended: datetime.datetime | None
    """End of the start; of a killed or unfinished one, its last write of metrics. None: unknown."""

    reached: int | None
    """Last step."""

    end: str
    """`finished`, `pre-empted (SIGTERM)`, `ended early`, `killed`, or empty for the last start without an end."""

    world_size: int
    device: str
    versions: Mapping[str, str]

    @property
    def hours(self) -> float:
        """Wall-clock time; 0 if unknown."""
        return (self.ended - self.began).total_seconds() / 3600 if self.ended is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder."""

    folder: Path
    name: str
    config: Config | None
    """None for the configuration of another version."""

    config_text: str
    """Resolved configuration as YAML, without secrets."""

    curves: dict[str, Curve]
    num_damaged: int
    """Unreadable rows of metrics."""

    starts: list[Start]
    costs: list[StartCosts]
    """Costs of the starts; none where costs.jsonl is missing, or lacks a start."""

    status: str
    num_steps: int
    """Steps done."""

    num_planned: int | None
    """Steps of the whole run."""

    timeline: pd.DataFrame
    """Events of the supervisor and rollbacks."""

    samples: dict[int, Path]
    """Sample grids by step."""

    first_step: int = 0
    """First step on an axis shared with earlier phases."""

    def curve(self, name: str) -> Curve | None:
        """Metric with at least one finite value; None otherwise."""
        curve = self.curves.get(name)
        return curve if curve is not None and curve.num_values else None

    @property
    def wall_hours(self) -> float:
        """Hours of all starts: by their costs from the start of the process, else from the first step."""
        if self.costs:
            return sum(sum(start.seconds.values()) for start in self.costs) / 3600
        return sum(start.hours for start in self.starts)

    @property
    def gpu_hours(self) -> float:
        """Hours of all starts times their ranks."""
        if self.costs:
            return total(self.costs).gpu_hours
        return sum(start.hours * start.world_size for start in self.starts)

    @property
    def dollars(self) -> float | None:
        """Price of the GPU-hours; None: unknown."""
        price = self.config.plan.price_per_gpu_hour if self.config is not None else None
        if self.costs:
            return total([one if one.price is not None else replace(one, price=price) for one in self.costs]).dollars
        return self.gpu_hours * price if price is not None and self.starts else None

    @property
    def num_steps_redone(self) -> int:
        """Steps repeated after starts that ended without a checkpoint."""
        pairs = itertools.pairwise(self.starts)
        return sum(max(0, before.reached - after.step) for before, after in pairs if before.reached is not None)


def read_run(folder: Path, first_step: int = 0) -> Run:
    """Read a run folder, finished or in progress; its first step is that on an axis shared with other runs.

    Raises:
        ConfigurationError: it is not a run folder.
    """
    check_is_run(folder)
    path = folder / CONFIG
    config: Config | None = None
    try:
        config = from_dict(Config, read_yaml(path), str(path))
        values = to_dict(config)
    except ConfigurationError:  # Another version's: shown as it stands.
        values = read_yaml(path)
    metrics = folder / METRICS
    curves, num_damaged = read_curves(read_json_lines(metrics))
    last_written = _date(metrics.stat().st_mtime) if metrics.is_file() else None
    starts = read_starts(read_json_lines(folder / STARTS), last_written)
    num_steps = _num_steps(curves, starts)
    num_planned = config.planned_steps() if config is not None else None
    return Run(
        folder=folder,
        name=str(values.get("run_name") or folder.resolve().name),
        config=config,
        config_text=dump(redact(values)),
        curves=curves,
        num_damaged=num_damaged,
        starts=starts,
        costs=costs if len(costs := read_costs(folder)) >= len(starts) else [],
        status=_status(folder, num_steps, num_planned, starts),
        num_steps=num_steps,
        num_planned=num_planned,
        timeline=read_timeline(folder),
        samples=_samples(folder),
        first_step=first_step,
    )


def read_phases(folders: Iterable[Path]) -> list[Run]:
    """Read run folders of consecutive phases; each begins at the last step of the one before."""
    runs: list[Run] = []
    for folder in folders:
        runs.append(read_run(folder, sum(run.num_steps for run in runs)))
    return runs


def read_starts(rows: Iterable[Row | None], last_written: datetime.datetime | None) -> list[Start]:
    """Pair the rows of starts and ends; metrics were last written at a time."""
    begun: list[tuple[Row, Row | None]] = []
    for row in rows:
        if row is not None and row.get("event") == "start":
            begun.append((row, None))
        elif row is not None and row.get("event") == "end" and begun:
            begun[-1] = (begun[-1][0], row)
    following = [start for start, _ in begun[1:]]
    return [_start(start, end, after, last_written) for (start, end), after in itertools.zip_longest(begun, following)]


def _start(start: Row, end: Row | None, after: Row | None, last_written: datetime.datetime | None) -> Start:
    """One start from its row, the row of its end, and the row of the next start."""
    began = _date(start["time"])
    if end is not None:
        ended, reached = _date(end["time"]), end["step"]
        signal = end.get("signal")
        kind = f"pre-empted ({signal})" if signal else "finished" if end.get("is_finished") else "ended early"
    elif after is not None:
        written, reached, kind = after.get("written_before"), after.get("reached_before"), "killed"
        ended = _date(written) if written is not None else None
    else:
        ended, reached, kind = last_written, None, ""
    return Start(
        step=start["step"],
        began=began,
        ended=ended if ended is not None and ended >= began else None,
        reached=int(reached) if reached is not None else None,
        end=kind,
        world_size=start.get("world_size", 1),
        device=start.get("device", ""),
        versions=start.get("versions", {}),
    )


def _date(time: str | float) -> datetime.datetime:
    """Date of an ISO text, or of seconds since 1970."""
    if isinstance(time, str):
        return datetime.datetime.fromisoformat(time)
    return datetime.datetime.fromtimestamp(time, datetime.UTC)


def _num_steps(curves: Mapping[str, Curve], starts: list[Start]) -> int:
    """Steps done: the row of a step holds its loss, and the number of steps before it."""
    done = [int(curves[TRAIN_LOSS].last_step) + 1] if TRAIN_LOSS in curves else [0]
    if "time/batch" in curves:
        done.append(int(curves["time/batch"].last))
    if starts and starts[-1].end:
        done.append(starts[-1].reached or 0)
    return max(done)


def _status(folder: Path, num_steps: int, planned: int | None, starts: list[Start]) -> str:
    if (folder / FINISHED).is_file() and (planned is None or num_steps >= planned):
        return "finished"
    if signal := preemption_signal(folder):
        return f"pre-empted by {signal}; the same command continues it"
    if starts and starts[-1].end and starts[-1].end != "finished":
        return starts[-1].end
    return "in progress, or killed"


def _samples(folder: Path) -> dict[int, Path]:
    paths = (folder / SAMPLES).glob("step-*.png")
    return dict(sorted((int(path.stem.removeprefix("step-")), path) for path in paths))


def read_timeline(folder: Path) -> pd.DataFrame:
    """Events of the supervisor and rollbacks of a run, in order: time, step, event and details."""
    rows = [
        {"time": _date(row["time"]), "step": row.get("step"), "event": row["event"],
         "details": f"{row['host']}: {row['reason']}" if "host" in row else row["reason"]}
        for row in read_json_lines(folder / EVENTS)
        if row is not None and row["event"] not in _SHOWN_ELSEWHERE
    ]  # fmt: skip
    for row in read_json_lines(folder / ROLLBACKS):
        if row is not None:
            details = f"loss {row['loss']}; checkpoints after step {row['limit']} were removed"
            if row["skipped"]:
                details += f"; updates of steps {', '.join(map(str, row['skipped']))} are skipped"
            rows.append({"time": _date(row["time"]), "step": row["step"], "event": ROLLBACK, "details": details})
    table = pd.DataFrame(rows, columns=["time", "step", "event", "details"]).astype({"step": "Int64"})
    return table.sort_values("time")


def find_results(folder: Path) -> list[Path]:
    """Files of evaluation results in a folder, or up to three folders below it."""
    return sorted(path for depth in ("", "*/", "*/*/", "*/*/*/") for path in folder.glob(f"{depth}results/*.json"))
