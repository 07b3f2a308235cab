"""A run as its folder shows it: metrics, starts, timeline, sample grids, evaluations."""

import datetime
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.callbacks.run_record import STARTS
from diffusion.checkpointing.resume import FINISHED, PREEMPTED
from diffusion.checkpointing.roll_back import RECORD
from diffusion.config.checks import num_batches
from diffusion.config.loading import dump, load, to_dict
from diffusion.config.schema import Config
from diffusion.config.secrets import redact
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.protocol import COMPOSITIONAL
from diffusion.files import read_json
from diffusion.operations.costs import Kind, StartCosts, read_costs
from diffusion.operations.events import EVENTS, FORMER_NAMES, EventKind
from diffusion.reports.curves import Curve, read_curves, read_json_lines

ROLLBACK = "rollback"
"""Kind of a timeline entry, beside those of `EventKind`."""

CATEGORY = f"{COMPOSITIONAL}/"
"""Prefix of the shares of compositional checks by category."""

Row = dict[str, Any]


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
class TimelineEntry:
    """An event of the supervisor, or a rollback."""

    time: datetime.datetime
    step: int | None
    """Step of the run; None: unknown."""

    kind: str
    """Of `EventKind`, or `ROLLBACK`."""

    text: str
    seconds_lost: float | None = None
    """Time until the run was back at the same step; None: nothing lost, or unknown."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """An image metric of one model at one guidance scale, as evaluate.py wrote it."""

    metric: str
    protocol: str
    """Hash of the protocol; only numbers of equal protocols are comparable."""

    value: float
    model: str
    weights: str
    step: int | None
    guidance_scale: float | None


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
    status: str
    num_steps: int
    """Steps done."""

    num_planned: int | None
    """Steps of the whole run."""

    timeline: list[TimelineEntry]
    samples: dict[int, Path]
    """Sample grids by step."""

    first_step: int = 0
    """First step on an axis shared with earlier phases."""

    def curve(self, name: str) -> Curve | None:
        """Metric with at least one finite value; None otherwise."""
        curve = self.curves.get(name)
        return curve if curve is not None and curve.num_values else None

    def below(self, prefix: str) -> dict[str, Curve]:
        """Metrics with a prefix, by the rest of their names."""
        return {name.removeprefix(prefix): self.curves[name] for name in sorted(self.curves) if name.startswith(prefix)}

    @property
    def wall_hours(self) -> float:
        """Hours of all starts."""
        return sum(start.hours for start in self.starts)

    @property
    def gpu_hours(self) -> float:
        """Hours of all starts times their ranks."""
        return sum(start.hours * start.world_size for start in self.starts)

    @property
    def num_steps_redone(self) -> int:
        """Steps repeated after starts that ended without a checkpoint."""
        pairs = itertools.pairwise(self.starts)
        return sum(max(0, before.reached - after.step) for before, after in pairs if before.reached is not None)


def read_run(folder: Path, first_step: int = 0) -> Run:
    """Read a run folder, finished or in progress.

    Args:
        folder: the run folder.
        first_step: first step on an axis shared with other runs.

    Raises:
        ConfigurationError: it is not a run folder.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigurationError(f"{folder} is not a run folder: it has no config.yaml")
    config: Config | None = None
    try:
        config = load(Config, path)
        values = to_dict(config)
    except ConfigurationError:  # Another version's: shown as it stands.
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    metrics = folder / "metrics.jsonl"
    curves, num_damaged = read_curves(read_json_lines(metrics))
    starts = read_starts(read_json_lines(folder / STARTS), _modified(metrics))
    num_steps = _num_steps(curves, starts)
    num_planned = num_batches(config) if config is not None else None
    return Run(
        folder=folder,
        name=str(values.get("run_name") or folder.resolve().name),
        config=config,
        config_text=dump(redact(values)),
        curves=curves,
        num_damaged=num_damaged,
        starts=starts,
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


def read_starts(rows: Iterable[Mapping[str, Any] | None], last_written: datetime.datetime | None) -> list[Start]:
    """Pair the rows of starts and ends.

    Args:
        rows: of the file of starts.
        last_written: time of the last write of metrics.
    """
    whole = [row for row in rows if row is not None and "time" in row and "step" in row]
    begun = [i for i, row in enumerate(whole) if row.get("event") == "start"]
    starts: list[Start] = []
    for i, following in itertools.zip_longest(begun, begun[1:]):
        row, after = whole[i], whole[following] if following is not None else None
        ends = [row for row in whole[i + 1 : following] if row.get("event") == "end"]
        began = _time(row["time"])
        if ends:
            ended, reached, end = _time(ends[-1]["time"]), int(ends[-1]["step"]), _kind_of_end(ends[-1])
        elif after is not None:
            written, reached = after.get("written_before"), after.get("reached_before")
            ended, end = _time(written) if written is not None else None, "killed"
        else:
            ended, reached, end = last_written, None, ""
        starts.append(
            Start(
                step=int(row["step"]),
                began=began,
                ended=ended if ended is None or ended >= began else None,
                reached=int(reached) if reached is not None else None,
                end=end,
                world_size=int(row.get("world_size", 1)),
                device=str(row.get("device", "")),
                versions=row.get("versions", {}),
            )
        )
    return starts


def _kind_of_end(row: Mapping[str, Any]) -> str:
    if row.get("signal"):
        return f"pre-empted ({row['signal']})"
    return "finished" if row.get("is_finished") else "ended early"


def _time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)


def _modified(path: Path) -> datetime.datetime | None:
    return _date(path.stat().st_mtime) if path.is_file() else None


def _date(seconds: Any) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


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
    marker = folder / PREEMPTED
    if marker.is_file():
        try:
            signal = json.loads(marker.read_text(encoding="utf-8")).get("signal", "a signal")
        except ValueError:
            signal = "a signal"
        return f"pre-empted by {signal}; the same command continues it"
    if starts and starts[-1].end and starts[-1].end != "finished":
        return starts[-1].end
    return "in progress, or killed"


def _samples(folder: Path) -> dict[int, Path]:
    found = (folder / "samples").glob("step-*.png")
    steps = {path: path.stem.removeprefix("step-") for path in found}
    return dict(sorted((int(step), path) for path, step in steps.items() if step.isdecimal()))


def read_timeline(folder: Path) -> list[TimelineEntry]:
    """Events of the supervisor and rollbacks of a run, in order; unreadable rows are skipped."""
    events = [row for row in _dated_rows(folder / EVENTS) if "event" in row]
    entries = [*_events(events, read_costs(folder)), *map(_rollback, _dated_rows(folder / RECORD))]
    return sorted(entries, key=lambda entry: entry.time)


def _dated_rows(path: Path) -> Iterator[Row]:
    """Rows of a file of JSON lines with `time` as a date; rows without a valid time are skipped."""
    for row in read_json_lines(path):
        time = row.get("time") if row is not None else None
        try:
            date = _time(time) if isinstance(time, str) else _date(time)
        except (TypeError, ValueError, OverflowError, OSError):
            continue
        if row is not None and date.tzinfo is not None:
            yield {**row, "time": date}


def _events(rows: Sequence[Row], starts: Sequence[StartCosts]) -> Iterator[TimelineEntry]:
    """Entries of events; starts, the end of slow data and rollbacks have entries or tables of their own."""
    counted: set[int] = set()
    for i, row in enumerate(rows):
        kind, time = FORMER_NAMES.get(str(row["event"]), str(row["event"])), row["time"]
        if kind in (EventKind.started.value, EventKind.data_came.value, EventKind.rolling_back.value):
            continue
        lost = None
        if kind == EventKind.ended.value:
            # The time before a start belongs to the first of the ends before it.
            following = next((j for j, start in enumerate(starts) if start.began >= time.timestamp()), 0)
            if following and following not in counted:
                lost = _restart_seconds(starts[following - 1], starts[following])
            counted.add(following)
        elif kind == EventKind.slow_data.value:
            came = (after["time"] for after in rows[i + 1 :] if after["event"] == EventKind.data_came.value)
            lost = (end - time).total_seconds() if (end := next(came, None)) is not None else None
        step = row.get("step")
        host = f"{row['host']}: " if "host" in row else ""
        yield TimelineEntry(
            time=time,
            step=step if isinstance(step, int) and step >= 0 else None,
            kind=kind,
            text=f"{host}{row.get('reason', '')}",
            seconds_lost=lost,
        )


def _restart_seconds(before: StartCosts, after: StartCosts) -> float:
    """Seconds from the last step of a start to the first new step of the next one."""
    return after.began - before.ended + after.seconds[Kind.starting.value] + after.seconds[Kind.repeated.value]


def _rollback(row: Row) -> TimelineEntry:
    text = f"loss {row.get('loss')}; checkpoints after step {row.get('limit')} were given up"
    if skipped := ", ".join(map(str, row.get("skipped", ()))):
        text += f"; updates of steps {skipped} are skipped"
    return TimelineEntry(time=row["time"], step=row.get("step"), kind=ROLLBACK, text=text)


def find_results(folder: Path) -> list[Path]:
    """Files of evaluation results in the run folder, or one or two folders below it."""
    return sorted(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}results/*.json"))


def read_points(paths: Sequence[Path], phase: str = "") -> tuple[list[Point], int]:
    """Read files of results.

    Args:
        paths: the files.
        phase: put before the names of models.

    Returns:
        The metrics, and the number of unreadable files.
    """
    points: list[Point] = []
    num_damaged = 0
    for path in paths:
        try:
            points += _points(read_json(path), phase)
        except (DataError, KeyError, TypeError, ValueError, AttributeError):
            num_damaged += 1
    return points, num_damaged


def _points(content: Mapping[str, Any], phase: str) -> list[Point]:
    return [
        Point(
            metric=metric,
            protocol=str(number["protocol"]),
            value=float(number["value"]),
            model=f"{phase} {content['name']}".strip(),
            weights=f"{phase} {content.get('weights') or ''}".strip(),
            step=content.get("step"),
            guidance_scale=content.get("guidance_scale"),
        )
        for metric, number in content["numbers"].items()
        if "/" not in metric or metric.startswith(CATEGORY)
    ]
