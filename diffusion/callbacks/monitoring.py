"""Clocks of a run: the heartbeat of each rank, the costs of each start, utilisation and waiting for data."""

import faulthandler
import logging
import math
import statistics
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil
import torch
from composer import Callback, Event, Logger, State
from composer.callbacks.speed_monitor import get_gpu_flops_available
from torch._dynamo.callback import callback_handler

from diffusion.config.operations import OperationsConfig
from diffusion.config.secrets import redact
from diffusion.datasets.cache import TierCounts, TierMeter
from diffusion.distributed import all_gather, broadcast, is_first_rank, local_rank, local_world_size, rank, world_size
from diffusion.errors import UserError, explained_writes
from diffusion.formats.run_folder import BUDGET
from diffusion.launch import exit_code
from diffusion.operations.checks.gpu import GpuMeter
from diffusion.operations.costs import (
    Activity,
    BudgetSpentError,
    CostsFile,
    StartCosts,
    budget_left,
    mark_spent,
    read_costs,
)
from diffusion.operations.hang_detection import STACKS_SIGNAL
from diffusion.operations.heartbeats import HeartbeatFile, HeartbeatRecord, Phase, stacks_file
from diffusion.operations.lease import Lease, renewed
from diffusion.operations.processes import own_record
from diffusion.operations.utilisation import (
    Counters,
    LoaderSettings,
    Usage,
    explain_waiting,
    read_counters,
    usage_between,
)

log = logging.getLogger(__name__)

_PHASES = {
    Event.FIT_START: Phase.starting,
    Event.BEFORE_DATALOADER: Phase.data,
    Event.AFTER_DATALOADER: Phase.step,
    Event.BATCH_END: Phase.between,
    Event.EVAL_START: Phase.evaluation,
    Event.EVAL_BATCH_END: Phase.evaluation,
    Event.EVAL_END: Phase.between,
    Event.FIT_END: Phase.ending,
}
_NUM_STEPS = 50
"""Steps in the median of the step time."""

_ACTIVITIES = {
    Event.BEFORE_DATALOADER: Activity.data,
    Event.AFTER_DATALOADER: Activity.training,
    Event.BATCH_END: Activity.between,
    Event.EVAL_START: Activity.evaluation,
    Event.EVAL_END: Activity.between,
    Event.FIT_END: Activity.between,
}
"""Activity of time that begins with an event."""

WARNING_SHARE = 0.1
"""Share of an interval's step time above which waiting for data is worth a warning."""

QUIET_INTERVALS = 20
"""Intervals without another warning after one."""


class Heartbeat(Callback):
    """Write the phase of this rank to a small file; as a context, from the start of a run to its end.

    A heartbeat is one write of 2 KiB that does not wait for the disk. The thread that renews the lease of the run also
    syncs the file, after which other hosts of a shared file system see it. Within the context, `STACKS_SIGNAL` makes
    the process write the stack traces of all its threads to a file beside it. This callback comes before others, whose
    work then belongs to its phase.
    """

    def __init__(self, folder: Path, lease: Lease) -> None:
        self.folder, self._lease = folder, lease
        self._renewal = ExitStack()
        self._phase = Phase.starting
        self._count, self._step, self._num_done = 0, -1, 0
        self._changed = time.perf_counter()
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._file: HeartbeatFile
        self._stacks: IO[str]

    def __enter__(self) -> "Heartbeat":
        """Open the files; a MachineError if they cannot be written."""
        remedy = "Choose another operations.heartbeat_folder, or null for the run folder"
        with explained_writes(f"the folder of heartbeats {self.folder}", remedy):
            self._file = HeartbeatFile(self.folder, rank())
            self._stacks = stacks_file(self.folder, rank()).open("w")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        callback_handler.register_start_callback(self._start_compilation)
        callback_handler.register_end_callback(self._end_compilation)
        self._write(Phase.starting)
        self._renewal.enter_context(renewed(self._lease, self._sync))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._renewal.close()
        self._write(
            Phase.ended,
            code=exit_code(error),
            error=None if error is None else redact(f"{type(error).__name__}: {error}"),
            is_lasting=isinstance(error, UserError) and error.is_lasting,
        )
        faulthandler.unregister(STACKS_SIGNAL)
        if self._start_compilation in callback_handler.start_callbacks:  # torch._dynamo.reset() removes them.
            callback_handler.remove_start_callback(self._start_compilation)
            callback_handler.remove_end_callback(self._end_compilation)
        self._stacks.close()
        self._file.close()

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Write the phase that begins; before a checkpoint, check that the lease is still this start's.

        Raises:
            MachineError: another start has taken the lease.
        """
        if event is Event.BATCH_CHECKPOINT:
            self._lease.check()
        if event not in _PHASES or self._phase is Phase.ended:
            return
        now = time.perf_counter()
        if event is Event.BATCH_END:
            self._steps.append(now - self._changed)
            self._num_done += 1
        self._changed, self._step = now, state.timestamp.batch.value
        self._write(_PHASES[event])

    def _start_compilation(self, *_: Any) -> None:
        if self._phase is Phase.step:
            self._write(Phase.compiling)

    def _end_compilation(self, *_: Any) -> None:
        if self._phase is Phase.compiling:
            self._write(Phase.step)

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            log.warning("the heartbeat in %s does not reach the disk: %s", self.folder, error.strerror)

    def _write(self, phase: Phase, **ending: Any) -> None:
        self._phase = phase
        self._file.write(
            HeartbeatRecord(
                **own_record(),
                rank=rank(),
                count=self._count,
                phase=phase,
                step=self._step,
                num_done=self._num_done,
                median_step=statistics.median(self._steps) if len(self._steps) > 2 else None,
                **ending,
            )
        )
        self._count += 1


class CostMeter(Callback):
    """Add up the time of this start by kind, on rank 0, and write the sums in each step.

    A start that finds the budget spent ends before its first step. `SaveOnPreemption` asks `is_spent` and ends the run.
    The price is in dollars per GPU-hour. `Utilisation`, which counts the downloads, comes before this callback.
    """

    def __init__(
        self, run: Path, operations: OperationsConfig, price: float | None, utilisation: "Utilisation"
    ) -> None:
        self.run, self._operations, self._price, self._utilisation = run, operations, price, utilisation
        self._before: list[StartCosts] = []
        self._furthest = 0
        self._costs: StartCosts | None = None
        self._file: CostsFile | None = None
        self._activity, self._since = Activity.starting, time.time()
        self._offset = 0.0

    @property
    def is_spent(self) -> bool:
        """Return whether the budget is spent, as rank 0 knows."""
        return not self._left()[0]

    def _now(self) -> float:
        return self._offset + time.monotonic()

    def _left(self) -> tuple[bool, str]:
        starts = self._before if self._costs is None else [*self._before, self._costs]
        return budget_left(starts, self._operations)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the row of this start.

        Raises:
            BudgetSpentError: on all ranks: nothing is left for another step.
        """
        if is_first_rank():
            self._open(state)
        if state.max_duration is not None and state.timestamp >= state.max_duration:
            return
        if broadcast(self.is_spent):
            self.end(state.timestamp.batch.value, "nothing was computed")
        if is_first_rank():
            (self.run / BUDGET).unlink(missing_ok=True)

    def _open(self, state: State) -> None:
        self._before = read_costs(self.run)
        self._furthest = max([start.reached for start in self._before], default=0)
        self._offset = time.time() - time.monotonic()  # A step of the clock is no time of the run.
        step, now = state.timestamp.batch.value, self._now()
        self._since = psutil.Process().create_time()
        self._costs = StartCosts(
            began=self._since,
            ended=now,
            num_devices=world_size(),
            price=self._price,
            step=step,
            reached=step,
            peak_flops=float(get_gpu_flops_available(state) or 0) or None,
        )
        self._file = CostsFile(self.run)
        self._write(now)

    def end(self, step: int, outcome: str) -> None:
        """End the run after a step by a BudgetSpentError; to be called by all ranks."""
        reason = broadcast(f"the budget is spent: {self._left()[1]}; {outcome}")
        if is_first_rank():
            mark_spent(self.run, step, reason)
        raise BudgetSpentError(f"{reason}. Raise the limit and start the same command again to go on from step {step}")

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Start the kind of time of the event, and write in each step."""
        super().run_event(event, state, logger)
        if self._costs is None or event not in _ACTIVITIES:
            return
        now, step = self._now(), state.timestamp.batch.value
        self._add(self._costs, now)
        is_repeated = event is Event.AFTER_DATALOADER and step < self._furthest
        self._activity = Activity.repeated if is_repeated else _ACTIVITIES[event]
        if event is Event.BATCH_END:
            self._costs.reached = step
            self._costs.flops += _flops(state)
        if event in (Event.BATCH_END, Event.EVAL_END, Event.FIT_END):
            self._write(now)

    def close(self, state: State, logger: Logger) -> None:
        """Write the last time."""
        self._write(self._now())
        if self._file is not None:
            self._file.close()
            self._file = self._costs = None

    def _add(self, costs: StartCosts, now: float) -> None:
        costs.seconds[self._activity] += max(0.0, now - self._since)
        self._since = now

    def _write(self, now: float) -> None:
        if self._costs is not None and self._file is not None:
            self._add(self._costs, now)
            self._costs.ended = now
            self._costs.fetched_bytes = self._utilisation.fetched_bytes
            self._file.write(self._costs)


def _flops(state: State) -> float:
    """Count the operations of this rank for its batch; NaN if the model does not count them."""
    count = getattr(getattr(state.model, "module", state.model), "batch_flops", None)
    return float(count(state.batch)) if count is not None else math.nan


class Utilisation(Callback):
    """Log at an interval how busy the machines are and how long the ranks wait for data; on all ranks.

    - `utilisation/cpu`, `utilisation/memory`: shares from 0 to 1, means over the nodes
    - `utilisation/loader_workers`: share of a core that a loader worker uses, mean over the ranks
    - `utilisation/gpu`, `utilisation/gpu_memory`: shares, means over the GPUs; where NVML answers
    - `time/data_waiting_share`: share of the step time of the interval, without evaluation and checkpoints, of the rank
      that waits longest for data: the others wait for it in the step
    - `storage/fetched_bytes`, `storage/fetched_shards`: from the store, by all nodes; for data with a remote
    - `storage/read_bytes`: of samples, from the disks of all nodes
    - `storage/cache_hit_rate`: share of the samples whose shard was on the node's disk when the loader asked for it

    A warning names the cause when the waiting share is above `WARNING_SHARE`; not in the first interval, in which
    workers start and caches are empty.

    Args:
        interval: steps between two logs.
        loader: settings of the loader, for the explanation.
        tiers: counts what this rank reads of data with a remote; None for other data.

    Attributes:
        fetched_bytes: downloads of all nodes in this start, until the end of the last interval.
    """

    def __init__(self, interval: int, loader: LoaderSettings, tiers: TierMeter | None = None) -> None:
        self.interval, self.loader, self.tiers = interval, loader, tiers
        is_first = local_rank() == 0 and torch.cuda.is_available()
        self._gpus = GpuMeter(num_gpus=local_world_size()) if is_first else None
        self.fetched_bytes = 0
        self._before: Counters | None = None
        self._storage = TierCounts()
        self._changed = self._waited = self._computed = 0.0
        self._num_quiet = 1

    def fit_start(self, state: State, logger: Logger) -> None:
        """Read the counters for the first time."""
        self._before = read_counters()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start the clock of the wait."""
        self._changed = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Start the clock of the step."""
        before, self._changed = self._changed, time.perf_counter()
        self._waited += self._changed - before

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log at the end of each interval."""
        self._computed += time.perf_counter() - self._changed
        if state.timestamp.batch.value % self.interval or self._before is None:
            return
        before, self._before = self._before, read_counters()
        usage = usage_between(before, self._before, self.loader.num_workers)
        own_share = self._waited / max(self._waited + self._computed, 1e-9)
        gpu = self._gpus.read() if self._gpus is not None else None
        ranks = all_gather((usage, own_share, gpu, self._read_storage(), local_rank()))
        usages, shares, gpus, storages, places = (list(values) for values in zip(*ranks, strict=True))
        self._waited = self._computed = 0.0
        metrics = _machine_metrics(usages, gpus, places) | {"time/data_waiting_share": max(shares)}
        storage = TierCounts(*map(sum, zip(*storages, strict=True)))
        self.fetched_bytes += storage.fetched_bytes
        if self.tiers is not None:
            names = ("fetched_bytes", "fetched_shards", "read_bytes")
            metrics |= {f"storage/{name}": getattr(storage, name) for name in names}
            if storage.samples:
                metrics["storage/cache_hit_rate"] = storage.hits / storage.samples
        logger.log_metrics(metrics)
        self._warn(max(shares), usages, storage.fetched_bytes / max(self._before.clock - before.clock, 1e-9))

    def fit_end(self, state: State, logger: Logger) -> None:
        """Count the downloads since the last interval."""
        self.fetched_bytes += sum(counts.fetched_bytes for counts in all_gather(self._read_storage()))

    def _read_storage(self) -> TierCounts:
        """Count since the last call."""
        before = self._storage
        if self.tiers is not None:
            self._storage = self.tiers.read()
        return self._storage.since(before)

    def _warn(self, waiting: float, usages: list[Usage], downloaded: float) -> None:
        if self._num_quiet:
            self._num_quiet -= 1
        elif waiting > WARNING_SHARE:
            self._num_quiet = QUIET_INTERVALS
            if is_first_rank():
                busiest = max(usages, key=lambda usage: usage.cpu)
                cause = explain_waiting(busiest, downloaded, self.loader)
                log.warning("training waits for data %.0f %% of the time: %s", 100 * waiting, cause)


def _machine_metrics(
    usages: list[Usage], gpus: list[tuple[float, float] | None], local_ranks: list[int]
) -> dict[str, float]:
    """Average over ranks, nodes and GPUs; those of a node are measured by its first rank."""
    nodes = [usage for usage, place in zip(usages, local_ranks, strict=True) if place == 0]
    metrics = {
        "utilisation/cpu": statistics.fmean(node.cpu for node in nodes),
        "utilisation/memory": statistics.fmean(node.memory for node in nodes),
    }
    if workers := [usage.workers for usage in usages if usage.workers is not None]:
        metrics["utilisation/loader_workers"] = statistics.fmean(workers)
    if known := [gpu for gpu in gpus if gpu is not None]:
        metrics["utilisation/gpu"] = statistics.fmean(busy for busy, _ in known)
        if memory := [share for _, share in known if not math.isnan(share)]:
            metrics["utilisation/gpu_memory"] = statistics.fmean(memory)
    return metrics
