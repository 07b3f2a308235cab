"""What a run has cost: seconds of each start by what they went into, in GPU-hours and dollars, and its budget."""

import datetime
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from diffusion.errors import UserError
from diffusion.files import write_json

COSTS = "costs.jsonl"
"""In the run folder: a row for each start, which it overwrites in each step."""

BUDGET = "budget.json"
"""In the run folder: the run has ended because its budget is spent."""

_ROW_BYTES = 1024


class BudgetSpentError(UserError):
    """All that the run may cost is spent; it was saved."""

    is_lasting = True


class Kind(str, Enum):
    """What the time of a start goes into."""

    starting = "starting"
    """From the start of the process to the first request for a batch: imports, model, data, checkpoint."""

    training = "training"
    """Steps that were not done before."""

    repeated = "repeated"
    """Steps that a start before has done, but no checkpoint held."""

    data = "data"
    """Waiting for batches."""

    evaluation = "evaluation"
    """Evaluation on held-out data."""

    between = "between"
    """Between steps: checkpoints, samples, averages, and what follows the last step."""


@dataclass(kw_only=True)
class StartCosts:
    """What one start has cost so far, by the clock of rank 0: in each step all ranks wait for the slowest."""

    began: float
    """Seconds since 1970."""

    ended: float
    """When this was written."""

    num_devices: int
    """GPUs, or ranks on the CPU."""

    price: float | None = None
    """Dollars per GPU-hour."""

    step: int
    """Steps of the run at its start."""

    reached: int
    """And by now."""

    flops: float = 0.0
    """Operations of a device for the steps of this start, repeated ones included; NaN where not known."""

    peak_flops: float | None = None
    """Operations per second of a device by its data sheet."""

    seconds: dict[str, float] = field(default_factory=lambda: {kind.value: 0.0 for kind in Kind})
    """By kind."""

    @property
    def gpu_hours(self) -> float:
        """Of all devices, whatever they did."""
        return sum(self.seconds.values()) * self.num_devices / 3600

    @property
    def dollars(self) -> float:
        """Price of these; 0 where none is known."""
        return self.gpu_hours * (self.price or 0.0)


class CostsFile:
    """The row of this start, overwritten in place: one system call, which needs no room on a disk that is full.

    Args:
        run: the run folder.
    """

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
    """What the starts of a run have cost, the present one included; a row that was cut off is left out."""
    content = (run / COSTS).read_bytes() if (run / COSTS).is_file() else b""
    starts = []
    for row in (content[place : place + _ROW_BYTES] for place in range(0, len(content), _ROW_BYTES)):
        try:
            starts.append(StartCosts(**json.loads(row)))
        except (ValueError, TypeError):
            continue
    return starts


def budget_left(
    starts: Sequence[StartCosts], *, max_gpu_hours: float | None, max_dollars: float | None
) -> tuple[bool, str]:
    """Whether anything is left to spend, and what was spent, in words."""
    hours, dollars = sum(start.gpu_hours for start in starts), sum(start.dollars for start in starts)
    is_left = (max_gpu_hours is None or hours < max_gpu_hours) and (max_dollars is None or dollars < max_dollars)
    parts = []
    if max_gpu_hours is not None:
        parts.append(f"{hours:,.4g} of {max_gpu_hours:,.4g} GPU-hours (operations.max_gpu_hours)")
    if max_dollars is not None:
        parts.append(f"${dollars:,.2f} of ${max_dollars:,.2f} (operations.max_dollars)")
    return is_left, " and ".join(parts)


def mark_spent(run: Path, step: int, reason: str) -> None:
    """Write down why a run has ended."""
    time = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    write_json(run / BUDGET, {"time": time, "step": step, "reason": reason})


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a run has cost, of all of its starts."""

    gpu_hours: float
    dollars: float | None
    """None where a start has no price."""

    hours: dict[str, float]
    """GPU-hours by kind; those of restarts are `starting` after the first start, and `repeated`."""

    restart_hours: float
    """GPU-hours lost to restarts."""

    gap_hours: float
    """Hours (of the clock) between the last sign of a start and the beginning of the next one, which cost nothing
    here: whether they are paid depends on who keeps the machines."""

    mfu: float | None
    """Operations of new steps against what the devices could have done in all of the time; None where not known."""


def total(starts: Sequence[StartCosts]) -> Totals:
    """Add up the starts of a run."""
    hours = {kind.value: sum(start.seconds[kind.value] * start.num_devices for start in starts) / 3600 for kind in Kind}
    restarting = sum(start.seconds[Kind.starting.value] * start.num_devices for start in starts[1:]) / 3600
    possible = sum(start.gpu_hours * 3600 * (start.peak_flops or 0.0) for start in starts)
    is_known = possible > 0 and all(start.peak_flops for start in starts)
    useful = sum(start.flops * start.num_devices * _share_new(start) for start in starts)
    return Totals(
        gpu_hours=sum(start.gpu_hours for start in starts),
        dollars=sum(start.dollars for start in starts) if all(start.price is not None for start in starts) else None,
        hours=hours,
        restart_hours=restarting + hours[Kind.repeated.value],
        gap_hours=sum(max(0.0, b.began - a.ended) for a, b in itertools.pairwise(starts)) / 3600,
        mfu=useful / possible if is_known and useful == useful else None,
    )


def _share_new(start: StartCosts) -> float:
    """Share of a start's computing that went into steps that are new."""
    new, repeated = start.seconds[Kind.training.value], start.seconds[Kind.repeated.value]
    return new / (new + repeated) if new + repeated else 0.0
