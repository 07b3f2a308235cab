"""Costs of a run: seconds of each start by activity, in GPU-hours and dollars, and the budget."""

import datetime
import itertools
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from diffusion.config.operations import OperationsConfig
from diffusion.errors import UserError
from diffusion.files import write_json
from diffusion.formats.run_folder import BUDGET, COSTS
from diffusion.reports.tables import text_table

log = logging.getLogger(__name__)

_ROW_BYTES = 1024


class BudgetSpentError(UserError):
    """The budget of the run is spent; the run was saved."""

    is_lasting = True
    is_agreed = True


class Activity(str, Enum):
    """Activity that time is spent on."""

    training = "training"
    repeated = "repeated"
    """Steps that an earlier start has completed, but no checkpoint contained."""

    starting = "starting"
    """From the start of the process to the first request for a batch: imports, model, data, checkpoint."""

    data = "data"
    evaluation = "evaluation"
    between = "between"
    """Between steps and after the last one: checkpoints, samples, averages."""


_LABELS = {
    Activity.repeated: "repeated steps after a restart",
    Activity.data: "waiting for data",
    Activity.between: "checkpoints and samples",
}
"""Rows of the table whose name is not that of the kind."""


@dataclass(kw_only=True)
class StartCosts:
    """Costs of one start, by the clock of rank 0: in each step all ranks wait for the slowest."""

    began: float
    """Seconds since 1970; `ended` is that of the last update."""

    ended: float

    num_devices: int
    """GPUs, or ranks on the CPU."""

    price: float | None = None
    """Dollars per GPU-hour."""

    step: int
    """Completed steps of the run at the beginning of the start."""

    reached: int
    """Completed steps of the run at the last update."""

    flops: float = 0.0
    """Operations of one device in this start, repeated steps included; NaN if unknown."""

    peak_flops: float | None = None
    """Operations per second of a device by its data sheet."""

    fetched_bytes: int = 0
    """Training data that all nodes have downloaded in this start, steps included that were repeated later."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    """By kind."""

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all devices."""
        return sum(self.seconds.values()) * self.num_devices / 3600

    @property
    def new_share(self) -> float:
        """Share of new steps in the computing time."""
        new, repeated = self.seconds[Activity.training], self.seconds[Activity.repeated]
        return new / (new + repeated) if new + repeated else 0.0

    @property
    def dollars(self) -> float:
        """Price of the GPU-hours; 0 without a price."""
        return self.gpu_hours * (self.price or 0.0)


class CostsFile:
    """Row of this start in a run folder, overwritten in place by one system call: it needs no space on a full disk."""

    def __init__(self, run: Path) -> None:
        self._file = os.open(run / COSTS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._offset = -(-os.fstat(self._file).st_size // _ROW_BYTES) * _ROW_BYTES

    def write(self, costs: StartCosts) -> None:
        """Overwrite the row."""
        os.pwrite(self._file, json.dumps(asdict(costs)).encode().ljust(_ROW_BYTES - 1) + b"\n", self._offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_costs(run: Path) -> list[StartCosts]:
    """Read the costs of the starts of a run, the current one included; damaged rows are skipped."""
    content = (run / COSTS).read_bytes() if (run / COSTS).is_file() else b""
    starts = []
    for row in (content[offset : offset + _ROW_BYTES] for offset in range(0, len(content), _ROW_BYTES)):
        try:
            starts.append(_checked(StartCosts(**json.loads(row))))
        except ValueError:  # Truncated, as a killed process leaves it.
            continue
        except TypeError as error:
            log.warning("%s: a row is skipped, which is not of a start: %s", run / COSTS, error)
    return starts


def _checked(start: StartCosts) -> StartCosts:
    """Return costs that were read, with 0 s of activities of later versions; a TypeError if they are no numbers."""
    start.seconds = {**dict.fromkeys(Activity, 0.0), **start.seconds}
    optional = {"price": start.price or 0.0, "peak_flops": start.peak_flops or 0.0}
    for name, value in {**vars(start), **optional, **start.seconds}.items():
        if name != "seconds" and not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}, not a number")
    return start


def _limited(starts: Sequence[StartCosts], limits: OperationsConfig) -> list[tuple[str, float, float]]:
    """Return of each limited quantity the words for an amount and its limit, the use so far, and the limit."""
    hours, dollars = sum(start.gpu_hours for start in starts), sum(start.dollars for start in starts)
    rows = [
        ("{:,.2f} of {:,.2f} GPU-hours (operations.max_gpu_hours)", hours, limits.max_gpu_hours),
        ("${:,.2f} of ${:,.2f} (operations.max_dollars)", dollars, limits.max_dollars),
    ]
    return [(words, used, limit) for words, used, limit in rows if limit is not None]


def budget_left(starts: Sequence[StartCosts], limits: OperationsConfig) -> tuple[bool, str]:
    """Return whether budget is left, and the expenses in words."""
    rows = _limited(starts, limits)
    is_left = all(used < limit for _, used, limit in rows)
    return is_left, " and ".join(words.format(used, limit) for words, used, limit in rows)


def project(starts: Sequence[StartCosts], num_steps: int, limits: OperationsConfig) -> list[str]:
    """Say what each limited quantity will be at the last step, at the rate so far; nothing before the first step."""
    lines = []
    if step := starts[-1].reached:
        for words, used, limit in _limited(starts, limits):
            at_end = used * num_steps / step
            line = f"at this rate it will have cost {words.format(at_end, limit)} at step {num_steps:,}"
            if at_end > limit:
                line = f"on its way over its budget: {line}; it ends at step {int(step * limit / used):,}"
            lines.append(line)
    return lines


def mark_spent(run: Path, step: int, reason: str) -> None:
    """Record that the budget of a run is spent."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(run / BUDGET, {"time": time, "step": step, "reason": reason})


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Costs of all starts of a run."""

    gpu_hours: float
    dollars: float | None
    """None if a start has no price."""

    hours: dict[Activity, float]
    """GPU-hours by kind."""

    restart_hours: float
    """GPU-hours lost to restarts: repeated steps, and `starting` of all starts but the first."""

    gap_hours: float
    """Hours of the clock between the starts, which cost nothing here."""

    mfu: float | None
    """Operations of new steps as a share of the devices' peak over all of the time; None if unknown."""


def total(starts: Sequence[StartCosts]) -> Totals:
    """Add up the starts of a run."""
    hours = {kind: sum(start.seconds[kind] * start.num_devices for start in starts) / 3600 for kind in Activity}
    restarting = sum(start.seconds[Activity.starting] * start.num_devices for start in starts[1:]) / 3600
    possible = sum(start.gpu_hours * 3600 * (start.peak_flops or 0.0) for start in starts)
    is_known = possible > 0 and all(start.peak_flops for start in starts)
    useful = sum(start.flops * start.num_devices * start.new_share for start in starts)
    return Totals(
        gpu_hours=sum(start.gpu_hours for start in starts),
        dollars=sum(start.dollars for start in starts) if all(start.price is not None for start in starts) else None,
        hours=hours,
        restart_hours=restarting + hours[Activity.repeated],
        gap_hours=sum(max(0.0, b.began - a.ended) for a, b in itertools.pairwise(starts)) / 3600,
        mfu=useful / possible if is_known and useful == useful else None,
    )


def cost_table(starts: Sequence[StartCosts], gpu_utilisation: float | None) -> list[str]:
    """Return the lines of a table of a run's time by activity, with totals and the mean GPU utilisation (0 to 1)."""
    totals = total(starts)
    price = totals.dollars / totals.gpu_hours if totals.dollars and totals.gpu_hours else None
    hours_by_label = {_LABELS.get(kind, kind.value): totals.hours[kind] for kind in Activity}
    rows = [("", "GPU-hours", "share", "dollars")]
    for label, hours in {**hours_by_label, "total": totals.gpu_hours}.items():
        share = f"{hours / totals.gpu_hours:.1%}" if totals.gpu_hours else "-"
        rows.append((label, f"{hours:,.3f}", share, f"{hours * price:,.2f}" if price is not None else "-"))
    return [
        *text_table(rows),
        f"lost to restarts: {totals.restart_hours:,.3f} GPU-hours, and {totals.gap_hours:,.2f} h between the starts "
        "(not in the table)",
        f"GPU utilisation, mean of the run: {'unknown' if gpu_utilisation is None else f'{gpu_utilisation:.1%}'}",
        f"MFU over all of the time: {'unknown' if totals.mfu is None else f'{totals.mfu:.1%}'}",
    ]
