"""Rollbacks: the return to a checkpoint before a step whose loss is not finite or too high.

The decision is a function of the losses and of the earlier rollbacks, which are the same on all ranks. The run that
decides writes a request to `rollback.json` in its folder and ends. The next start removes the checkpoints that the
request rejects, and records the rollback in `rollbacks.jsonl`.
"""

import logging
import math
import statistics
from collections.abc import Sequence

from diffusion.checkpointing.find import Checkpoints, LocalCheckpoints
from diffusion.checkpointing.layout import Checkpoint, batch_of
from diffusion.checkpointing.resume import CheckpointStorage, check_beginning
from diffusion.config.operations import GuardConfig
from diffusion.config.schema import Config
from diffusion.distributed import agree, is_first_rank, local_rank, on_first_rank
from diffusion.errors import UserError
from diffusion.formats.run_folder import Rollback, read_request, record_rollback

log = logging.getLogger(__name__)


class DivergenceError(UserError):
    """The loss is not finite or too high, and a rollback does not help."""

    is_lasting = True
    is_agreed = True


# The decision


def is_wrong(loss: float, before: Sequence[float], guard: GuardConfig) -> bool:
    """Return whether a loss is not finite, or a spike over the median of the `guard.spike_window` losses before."""
    if not math.isfinite(loss):
        return True
    if guard.spike_factor is None or len(before) < guard.spike_window:
        return False
    median = statistics.median(before)
    return loss > median + (guard.spike_factor - 1) * abs(median)


def decide(step: int, loss: float, record: Sequence[Rollback], guard: GuardConfig, now: float) -> Rollback:
    """Decide what follows the wrong loss of a step, given the earlier rollbacks of the run.

    The weights before a step are known to be good when its loss is. So a checkpoint written right before the wrong
    step is removed, too.

    Raises:
        DivergenceError: the run has to end.
    """
    problem = f"the loss of step {step} is {loss:g}"
    if len(record) >= guard.max_rollbacks:
        raise DivergenceError(
            f"{problem}, and the run has rolled back {len(record)} times, the limit of operations.guard.max_rollbacks. "
            "See rollbacks.jsonl; lower optimizer.lr or correct the data, or raise the limit"
        )
    is_repeated = any(row.step == step for row in record)
    if is_repeated and guard.skip < 1:
        raise DivergenceError(
            f"{problem} for the second time, so the machine is not the cause. Lower optimizer.lr, correct the data of "
            "that step, or set operations.guard.skip to the number of steps to skip up to that one"
        )
    skipped = tuple(range(max(0, step - guard.skip + 1), step + 1)) if is_repeated else ()
    limit = max(0, min(step - guard.margin, *skipped, step))
    return Rollback(step=step, loss=f"{loss:g}", limit=limit, skipped=skipped, time=now)


# The next start


def roll_back(config: Config, storage: CheckpointStorage) -> None:
    """Carry out the rollback that an earlier start has requested, if any. To be called by all ranks.

    A run that keeps all checkpoints begins anew without one before the limit. Else the oldest one stays, though it is
    after the limit.

    Raises:
        ConfigurationError: the run would begin anew although there are checkpoints; the request stays.
        DataError: the request is damaged.
        MachineError: a checkpoint cannot be removed.
    """
    rollback = on_first_rank(lambda: read_request(storage.run))
    if rollback is None:
        return
    on_first_rank(lambda: check_beginning(config, storage, storage.kept.present()), takes_long=True)
    keeps_all = config.trainer.keep_checkpoints == -1
    remote, limit = storage.remote, rollback.limit
    # Where checkpoints are uploaded, each node has files of its own.
    removes = is_first_rank() or (remote is not None and local_rank() == 0)

    def remove(checkpoints: Checkpoints, may_begin_anew: bool) -> None:
        for found in _rejected(checkpoints.present(), limit, may_begin_anew):
            log.warning("removing %s for the rollback to at most %d steps", found, limit)
            checkpoints.remove(found)

    local = LocalCheckpoints(storage.folder)
    agree(lambda: remove(local, keeps_all or remote is not None) if removes else None, takes_long=True)
    if remote is not None:
        agree(lambda: remove(remote, keeps_all) if is_first_rank() else None, takes_long=True)
    on_first_rank(lambda: record_rollback(storage.run, rollback))


def _rejected(checkpoints: Sequence[Checkpoint], limit: int, may_begin_anew: bool) -> list[Checkpoint]:
    """The checkpoints of more steps than the limit; newest first, so that an interruption leaves no gap."""
    rejected = [one for one in checkpoints if batch_of(one) > limit]
    if len(rejected) == len(checkpoints) and not may_begin_anew:
        rejected = rejected[1:]
    return rejected[::-1]
