"""What a run folder tells about its run."""

import datetime
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.callbacks.run_record import STARTS
from diffusion.checkpointing.resume import FINISHED, PREEMPTED
from diffusion.config.checks import num_batches
from diffusion.config.loading import dump, load, to_dict
from diffusion.config.schema import Config
from diffusion.config.secrets import redact
from diffusion.curves import Curve, read_curves, read_json_lines
from diffusion.errors import ConfigurationError
from diffusion.evaluation.run_report.happenings import Happening, read_happenings


@dataclass(frozen=True, kw_only=True)
class Start:
    """One time that a run was started."""

    step: int
    began: datetime.datetime
    ended: datetime.datetime | None
    """When it ended or, if it was killed or still trains, last wrote metrics; None is not known."""

    reached: int | None
    """Last step."""

    end: str
    """`finished`, `pre-empted (SIGTERM)`, `ended early`, `killed` or `` for one that may still train."""

    world_size: int
    device: str
    versions: Mapping[str, str]

    @property
    def hours(self) -> float:
        """Wall-clock time; 0 if it is not known."""
        return (self.ended - self.began).total_seconds() / 3600 if self.ended is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as its folder shows it."""

    folder: Path
    name: str
    config: Config | None
    """None if it was written by a version with other keys."""

    config_text: str
    """Resolved, as YAML, without secrets."""

    curves: dict[str, Curve]
    num_damaged: int
    """Rows of metrics that could not be read."""

    starts: list[Start]
    status: str
    num_steps: int
    """Steps done."""

    num_planned: int | None
    """Steps of the whole run."""

    happenings: list[Happening]
    samples: dict[int, Path]
    """Sample grids by step."""

    first_step: int = 0
    """Where it begins on an axis that it shares with the phases before it."""

    def curve(self, name: str) -> Curve | None:
        """A metric; None if it was not logged."""
        return self.curves.get(name)

    def below(self, prefix: str) -> dict[str, Curve]:
        """Metrics whose name begins so, by the rest of the name."""
        return {name.removeprefix(prefix): self.curves[name] for name in sorted(self.curves) if name.startswith(prefix)}


def read_run(folder: Path, first_step: int = 0) -> Run:
    """Read a run folder; the run may be in progress.

    Args:
        folder: the run folder.
        first_step: of the run on an axis that it shares with others.

    Raises:
        ConfigurationError: it is not a run folder.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigurationError(f"{folder} is not a run folder: it has no config.yaml")
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    config: Config | None = None
    try:
        config = load(Config, folder / "config.yaml")
        values = to_dict(config)
    except ConfigurationError:  # Written by another version: it is shown as it stands.
        values = yaml.safe_load(text) or {}
    metrics = folder / "metrics.jsonl"
    curves, num_damaged = read_curves(read_json_lines(metrics))
    starts = read_starts(read_json_lines(folder / STARTS), _modified(metrics))
    num_steps = _num_steps(curves, starts)
    planned = num_batches(config) if config is not None else None
    return Run(
        folder=folder,
        name=str(values.get("run_name") or folder.resolve().name),
        config=config,
        config_text=dump(redact(values)),
        curves=curves,
        num_damaged=num_damaged,
        starts=starts,
        status=_status(folder, num_steps, planned, starts),
        num_steps=num_steps,
        num_planned=planned,
        happenings=read_happenings(folder),
        samples=_samples(folder),
        first_step=first_step,
    )


def read_phases(folders: Iterable[Path]) -> list[Run]:
    """Read run folders that follow one another; each begins at the step at which the one before has ended."""
    runs: list[Run] = []
    for folder in folders:
        runs.append(read_run(folder, sum(run.num_steps for run in runs)))
    return runs


def read_starts(rows: Iterable[Mapping[str, Any] | None], last_written: datetime.datetime | None) -> list[Start]:
    """Pair the rows of starts and ends.

    Args:
        rows: of the file of starts.
        last_written: when the run's metrics were written last.
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
        if ended is not None and ended < began:
            ended = None
        starts.append(
            Start(
                step=int(row["step"]),
                began=began,
                ended=ended,
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
    if not path.is_file():
        return None
    return datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.timezone.utc)


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
