"""The cost of a run while it runs, and its end when the budget is spent."""

import time
from pathlib import Path

import psutil
from composer import Callback, Event, Logger, State
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.utils import dist

from diffusion.config.operations import OperationsConfig
from diffusion.operations.costs import (
    BUDGET,
    BudgetSpentError,
    CostsFile,
    Kind,
    StartCosts,
    budget_left,
    mark_spent,
    read_costs,
)

_BEGINS = {
    Event.BEFORE_DATALOADER: Kind.data,
    Event.AFTER_DATALOADER: Kind.training,
    Event.BATCH_END: Kind.between,
    Event.EVAL_START: Kind.evaluation,
    Event.EVAL_END: Kind.between,
    Event.FIT_END: Kind.between,
}
"""Kind of time that begins with an event."""


class CostMeter(Callback):
    """Add up the time of this start by kind, on rank 0, and write the sums in each step.

    A start that finds the budget spent ends before its first step. `SaveOnPreemption` asks `is_spent` and ends the run.

    Args:
        run: the run folder.
        operations: the limits.
        price: dollars per GPU-hour.
    """

    def __init__(self, run: Path, operations: OperationsConfig, price: float | None) -> None:
        self.run, self._operations, self._price = run, operations, price
        self._before: list[StartCosts] = []
        self._furthest = 0
        self._costs: StartCosts | None = None
        self._file: CostsFile | None = None
        self._kind, self._since = Kind.starting, time.time()

    @property
    def is_spent(self) -> bool:
        """Whether the budget is spent, as rank 0 knows."""
        return not self._left()[0]

    def _left(self) -> tuple[bool, str]:
        present = [self._costs] if self._costs is not None else []
        limits = self._operations
        return budget_left(
            [*self._before, *present], max_gpu_hours=limits.max_gpu_hours, max_dollars=limits.max_dollars
        )

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the row of this start.

        Raises:
            BudgetSpentError: on all ranks: nothing is left for another step.
        """
        if dist.get_global_rank() == 0:
            self._open(state)
        if state.max_duration is not None and state.timestamp >= state.max_duration:
            return
        left = [self._left()]
        dist.broadcast_object_list(left)
        is_left, spent = left[0]
        if not is_left:
            self._refuse(state.timestamp.batch.value, f"the budget is spent: {spent}; nothing was computed")
        if dist.get_global_rank() == 0:
            (self.run / BUDGET).unlink(missing_ok=True)

    def _open(self, state: State) -> None:
        self._before = read_costs(self.run)
        self._furthest = max([start.reached for start in self._before], default=0)
        step, now = state.timestamp.batch.value, time.time()
        self._since = psutil.Process().create_time()
        self._costs = StartCosts(
            began=self._since,
            ended=now,
            num_devices=dist.get_world_size(),
            price=self._price,
            step=step,
            reached=step,
            peak_flops=float(get_gpu_flops_available(state) or 0) or None,
        )
        self._file = CostsFile(self.run)
        self._write(now)

    def end(self, step: int, saved: str | None) -> None:
        """End the run because its budget is spent; to be called by all ranks.

        Args:
            step: steps that are done.
            saved: the checkpoint, as rank 0 knows it.

        Raises:
            BudgetSpentError: always.
        """
        reason = [f"the budget is spent: {self._left()[1]}; saved {saved}"]
        dist.broadcast_object_list(reason)
        self._refuse(step, reason[0])

    def _refuse(self, step: int, reason: str) -> None:
        if dist.get_global_rank() == 0:
            mark_spent(self.run, step, reason)
        raise BudgetSpentError(f"{reason}. Raise the limit and start the same command again to go on from step {step}")

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Start the kind of time of the event, and write in each step."""
        super().run_event(event, state, logger)
        if self._costs is None or (kind := _BEGINS.get(event)) is None:
            return
        now, step = time.time(), state.timestamp.batch.value
        if kind is Kind.training and step < self._furthest:
            kind = Kind.repeated
        self._add(now)
        self._kind = kind
        if event is Event.BATCH_END:
            self._costs.reached = step
            self._costs.flops += _flops(state)
        if event in (Event.BATCH_END, Event.EVAL_END, Event.FIT_END):
            self._write(now)

    def close(self, state: State, logger: Logger) -> None:
        """Write the last time."""
        if self._file is not None:
            self._write(time.time())
            self._file.close()
            self._file = self._costs = None

    def _add(self, now: float) -> None:
        """Add the time until now."""
        assert self._costs is not None
        self._costs.seconds[self._kind.value] += max(0.0, now - self._since)
        self._since = now

    def _write(self, now: float) -> None:
        assert self._costs is not None
        assert self._file is not None
        self._add(now)
        self._costs.ended = now
        self._file.write(self._costs)


def _flops(state: State) -> float:
    """Count the operations of this rank for its batch; NaN if the model does not count them."""
    count = getattr(getattr(state.model, "module", state.model), "batch_flops", None)
    return float(count(state.batch)) if count is not None else float("nan")
