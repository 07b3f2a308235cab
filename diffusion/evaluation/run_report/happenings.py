"""What happened to a run: the events of its supervisor, and each time that it went back."""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.checkpointing.roll_back import RECORD
from diffusion.curves import read_json_lines
from diffusion.operations.costs import Kind, StartCosts, read_costs
from diffusion.operations.events import EVENTS, EventKind

WENT_BACK = "went back"

_SEEN_ELSEWHERE = (EventKind.started.value, EventKind.data_came.value, EventKind.going_back.value)
"""Kinds of events that the starts, the event before, and the record of going back tell."""


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that happened to a run."""

    time: datetime.datetime
    step: int | None
    """Of the run; None where it is not known."""

    kind: str
    """Of an event, or `WENT_BACK`."""

    what: str
    seconds_lost: float | None = None
    """Until the run was where it had been; None where nothing was lost, or it is not known."""


def read_happenings(folder: Path) -> list[Happening]:
    """What happened to the run of a folder, in order; rows that cannot be read are left out."""
    events = [row for row in _dated(folder / EVENTS) if "event" in row]
    found = [*_events(events, read_costs(folder)), *map(_rollback, _dated(folder / RECORD))]
    return sorted(found, key=lambda happening: happening.time)


def _dated(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a file of JSON lines, with `time` as a date; those whose `time` is none are left out."""
    for row in read_json_lines(path):
        time = row.get("time") if row is not None else None
        try:
            date = datetime.datetime.fromisoformat(time) if isinstance(time, str) else _date(time)
        except (TypeError, ValueError, OverflowError, OSError):
            continue
        if row is not None and date.tzinfo is not None:
            yield {**row, "time": date}


def _date(seconds: Any) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


def _events(rows: Sequence[Mapping[str, Any]], starts: Sequence[StartCosts]) -> Iterator[Happening]:
    counted: set[int] = set()
    for place, row in enumerate(rows):
        kind, time = str(row["event"]), row["time"]
        if kind in _SEEN_ELSEWHERE:
            continue
        lost = None
        if kind == EventKind.ended.value:
            following = _next_start(time, starts)
            if following not in counted:
                counted.add(following)
                lost = _lost_by_restart(following, starts)
        elif kind == EventKind.slow_data.value:
            lost = _until_data_came(time, rows[place + 1 :])
        step = row.get("step", -1)
        step = step if isinstance(step, int) else -1
        host = f"{row['host']}: " if "host" in row else ""
        what = f"{host}{row.get('reason', '')}"
        yield Happening(time=time, step=step if step >= 0 else None, kind=kind, what=what, seconds_lost=lost)


def _next_start(time: datetime.datetime, starts: Sequence[StartCosts]) -> int:
    """The first start that got to its steps after a time; 0 where there is none.

    The time lost before it belongs to the first event that ended a job since the start before, not to each.
    """
    return next((i for i, start in enumerate(starts) if start.began >= time.timestamp()), 0)


def _lost_by_restart(following: int, starts: Sequence[StartCosts]) -> float | None:
    """Seconds from the last step of a start to the first new step of the next one, `following`."""
    if not following:
        return None
    before, after = starts[following - 1], starts[following]
    return after.began - before.ended + after.seconds[Kind.starting.value] + after.seconds[Kind.repeated.value]


def _until_data_came(time: datetime.datetime, rows: Iterable[Mapping[str, Any]]) -> float | None:
    came = next((row for row in rows if row["event"] == EventKind.data_came.value), None)
    return (came["time"] - time).total_seconds() if came is not None else None


def _rollback(row: Mapping[str, Any]) -> Happening:
    skipped = ", ".join(map(str, row.get("skipped", ())))
    what = f"the loss was {row.get('loss')}; checkpoints of more than {row.get('limit')} steps were given up"
    return Happening(
        time=row["time"],
        step=row.get("step"),
        kind=WENT_BACK,
        what=f"{what}; the updates of steps {skipped} are left out" if skipped else what,
    )
