"""Going back to a checkpoint before a step whose loss is no number or too high: what is decided, and its record.

The decision is a function of the losses and of the record, which are the same on all ranks. It is carried out by the
next start: until then `rollback.json` in the run folder says what is to be done.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion.config.operations import GuardConfig
from diffusion.errors import UserError
from diffusion.files import write_json

RECORD = "rollbacks.jsonl"
"""In the run folder: a row for each time that the run went back."""

PENDING = "rollback.json"
"""In the run folder: the row of a rollback that the next start has to carry out."""


class DivergenceError(UserError):
    """The loss is no number or too high, and going back does not help."""

    is_lasting = True


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One time that a run went back."""

    step: int
    """Whose loss was wrong, from 0."""

    loss: str
    limit: int
    """Checkpoints of more steps are given up."""

    skipped: tuple[int, ...] = ()
    """Steps whose updates are left out from now on."""

    time: float
    """Seconds since 1970."""


def is_wrong(loss: float, before: Sequence[float], guard: GuardConfig) -> bool:
    """Whether a loss is no number, or a spike over the median of the `guard.spike_window` losses before."""
    if not math.isfinite(loss):
        return True
    if guard.spike_factor is None or len(before) < guard.spike_window:
        return False
    return loss > guard.spike_factor * statistics.median(before)


def decide(step: int, loss: float, record: Sequence[Rollback], guard: GuardConfig, now: float) -> Rollback:
    """What to do about a wrong loss.

    The weights before a step are known to be good when its loss is. So a checkpoint written right before the wrong
    step is given up, too.

    Args:
        step: number of the step, from 0.
        loss: its loss.
        record: what was done before in this run.
        guard: the settings.
        now: seconds since 1970.

    Raises:
        DivergenceError: the run has to end.
    """
    what = f"the loss of step {step} is {loss:g}"
    if len(record) >= guard.max_rollbacks:
        raise DivergenceError(
            f"{what}, and the run has gone back {len(record)} times, which is all that operations.guard.max_rollbacks "
            "allows. Look at rollbacks.jsonl; lower optimizer.lr or mend the data, or raise the limit"
        )
    comes_again = any(row.step == step for row in record)
    if comes_again and guard.skip < 1:
        raise DivergenceError(
            f"{what} for the second time, so it is no passing fault of a machine. Lower optimizer.lr, mend the data of "
            "that step, or set operations.guard.skip to leave out so many steps that end there"
        )
    skipped = tuple(range(max(0, step - guard.skip + 1), step + 1)) if comes_again else ()
    limit = max(0, min(step - guard.margin, *skipped, step))
    return Rollback(step=step, loss=f"{loss:g}", limit=limit, skipped=skipped, time=now)


def read_record(run: Path) -> list[Rollback]:
    """All rollbacks of a run that were carried out."""
    path = run / RECORD
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [_from_json(line) for line in lines]


def read_pending(run: Path) -> Rollback | None:
    """The rollback that is to be carried out."""
    path = run / PENDING
    return _from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def order(run: Path, rollback: Rollback) -> None:
    """Let the next start of a run go back."""
    write_json(run / PENDING, asdict(rollback))


def mark_done(run: Path, rollback: Rollback) -> None:
    """Move a rollback that was carried out to the record, once also if this was interrupted before."""
    if rollback not in read_record(run):
        with (run / RECORD).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(rollback)) + "\n")
    (run / PENDING).unlink()


def _from_json(text: str) -> Rollback:
    fields = json.loads(text)
    return Rollback(**{**fields, "skipped": tuple(fields["skipped"])})
