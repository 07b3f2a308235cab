"""What happened to a run: the events of its supervisor, and each time that it went back."""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.checkpointing.rollbacks import RECORD
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
    rows = [row for row in read_json_lines(folder / EVENTS) if row is not None and "time" in row and "event" in row]
    rollbacks = (row for row in read_json_lines(folder / RECORD) if row is not None and "time" in row)
    found = [*_events(rows, read_costs(folder)), *map(_rollback, rollbacks)]
    return sorted(found, key=lambda happening: happening.time)


def _events(rows: Sequence[Mapping[str, Any]], starts: Sequence[StartCosts]) -> Iterator[Happening]:
    for place, row in enumerate(rows):
        kind, time = str(row["event"]), datetime.datetime.fromisoformat(row["time"])
        if kind in _SEEN_ELSEWHERE:
            continue
        lost = None
        if kind == EventKind.ended.value:
            lost = _lost_by_restart(time, starts)
        elif kind == EventKind.slow_data.value:
            lost = _until_data_came(time, rows[place + 1 :])
        step = row.get("step", -1)
        host = f"{row['host']}: " if "host" in row else ""
        what = f"{host}{row.get('reason', '')}"
        yield Happening(time=time, step=step if step >= 0 else None, kind=kind, what=what, seconds_lost=lost)


def _lost_by_restart(time: datetime.datetime, starts: Sequence[StartCosts]) -> float | None:
    """Seconds from the last step of a start to the first new step of the next one."""
    following = next((i for i, start in enumerate(starts) if start.began >= time.timestamp()), 0)
    if not following:
        return None
    before, after = starts[following - 1], starts[following]
    return after.began - before.ended + after.seconds[Kind.starting.value] + after.seconds[Kind.repeated.value]


def _until_data_came(time: datetime.datetime, rows: Iterable[Mapping[str, Any]]) -> float | None:
    came = next((row for row in rows if row["event"] == EventKind.data_came.value), None)
    return (datetime.datetime.fromisoformat(came["time"]) - time).total_seconds() if came is not None else None


def _rollback(row: Mapping[str, Any]) -> Happening:
    skipped = ", ".join(map(str, row.get("skipped", ())))
    what = f"the loss was {row.get('loss')}; checkpoints of more than {row.get('limit')} steps were given up"
    return Happening(
        time=datetime.datetime.fromtimestamp(row["time"], datetime.UTC),
        step=row.get("step"),
        kind=WENT_BACK,
        what=f"{what}; the updates of steps {skipped} are left out" if skipped else what,
    )
