"""Guards of a run: wrong losses roll it back, and too many images that cannot be decoded end it."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, SupportsFloat

from composer import Callback, Logger, State

from diffusion.checkpointing.roll_back import decide, is_wrong
from diffusion.config.operations import GuardConfig
from diffusion.datasets.bad_images import BadImage, check_bad_images, read_bad_images
from diffusion.datasets.dataset import TextImageDataset, TrainingDataset
from diffusion.distributed import agree, all_gather, is_first_rank, on_first_rank
from diffusion.errors import PreemptedError, explained_writes
from diffusion.files import append_json_lines
from diffusion.formats.run_folder import (
    BAD_IMAGES,
    ROLLBACK,
    TRAIN_LOSS,
    WRONG_LOSSES,
    Rollback,
    read_rollbacks,
    request_rollback,
)
from diffusion.trainer import HostNumber

log = logging.getLogger(__name__)

SKIPPED = "guard/skipped"
"""Metric: 1 for a step whose update was skipped."""


STEADY_TERMS = tuple(f"loss/train/{name}" for name in ("diffusion", "l1", "l2", "perceptual"))
"""Terms of the loss that are positive in all steps: if there are any, a spike is one of their sum."""


class RolledBackError(PreemptedError):
    """The run ends on all ranks, and rolls back when it is started again."""


class LossGuard(Callback):
    """Check the loss of each step (NaN, infinity, spikes), and end the run when it is wrong, before it is saved.

    The loss is the mean over all ranks, as loggers get it, so that all ranks decide the same. Nothing waits for the
    device here: a loss that the Trainer reads one step later is checked then, or before a checkpoint is saved. A
    skipped step has no update: weights, moments and step count of the optimizer stay, while time, learning rate and
    data go on. Skipped steps are part of the record of the run and of each later checkpoint.
    """

    def __init__(self, guard: GuardConfig, run: Path) -> None:
        self.guard, self.run = guard, run
        self._record: list[Rollback] = []
        self._rolled_back: set[int] = set()
        self._before: deque[float] = deque(maxlen=guard.spike_window)
        self._unchecked: tuple[int, SupportsFloat, Sequence[SupportsFloat]] | None = None

    @property
    def _skipped(self) -> set[int]:
        return self._rolled_back.union(self.guard.skip_steps)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Read the skipped steps from the record; a DataError on all ranks if it is damaged."""
        self._record = on_first_rank(lambda: read_rollbacks(self.run))
        self._rolled_back.update(step for rollback in self._record for step in rollback.skipped)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Drop the gradients of a skipped step: the optimizer ignores weights without gradients."""
        step, skipped = state.timestamp.batch.value, self._skipped
        if step in skipped:
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)
        if skipped and min(skipped) <= step:
            logger.log_metrics({SKIPPED: int(step in skipped)})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Check the loss of the step, or that of the step before, as `check` does."""
        self.check(state)
        losses = state.total_loss_dict
        loss, terms = losses[TRAIN_LOSS], [losses[name] for name in STEADY_TERMS if name in losses]
        self._unchecked = state.timestamp.batch.value - 1, loss, terms
        if not isinstance(loss, HostNumber):
            self.check(state)

    def check(self, state: State) -> None:
        """Check the newest loss, if it is not checked yet.

        Raises:
            RolledBackError: on all ranks: the run rolls back.
            DivergenceError: on all ranks: it has rolled back before, and the loss is wrong again.
        """
        if self._unchecked is None:
            return
        step, total, terms = self._unchecked
        loss = float(total)
        if terms and math.isfinite(loss):
            loss = sum(map(float, terms))
        self._unchecked = None
        if step in self._skipped:
            return
        if not is_wrong(loss, self._before, self.guard):
            self._before.append(loss)
            return
        if is_first_rank():
            self._list_samples(state, step, loss)
        rollback = decide(step, loss, self._record, self.guard, time.time())
        if is_first_rank():
            with explained_writes(self.run / ROLLBACK, "Make room"):
                request_rollback(self.run, rollback)
        skipped = f" and skips the updates of steps {list(rollback.skipped)}" if rollback.skipped else ""
        raise RolledBackError(
            f"the loss of step {step} is {loss:g}. Start the same command again: it rolls back to a checkpoint of at "
            f"most {rollback.limit} steps{skipped}"
        )

    def _list_samples(self, state: State, step: int, loss: float) -> None:
        """List the samples of a step with their shards: the data may be the cause."""
        dataset = getattr(state.train_dataloader, "dataset", None)
        if isinstance(dataset, TrainingDataset):
            rows = [
                {"step": step, "loss": f"{loss:g}", "stream": stream, "index": index, "shard": shard}
                for stream, index, shard in dataset.samples_of_step(step)
            ]
            with explained_writes(self.run / WRONG_LOSSES, "Make room"):
                append_json_lines(self.run / WRONG_LOSSES, rows)
            log.warning("the loss of step %d is %g; its samples are listed in %s", step, loss, self.run / WRONG_LOSSES)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that rollbacks skip and the losses that later ones are compared with, as text."""
        before = list(self._before) if self.guard.spike_factor is not None else []
        return {"state": json.dumps({"skipped": sorted(self._rolled_back), "before": before})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the state of a checkpoint."""
        content = json.loads(state.get("state") or "{}")
        self._rolled_back.update(content.get("skipped", []))
        self._before.extend(content.get("before", []))


class BadImageGuard(Callback):
    """List the images that could not be decoded in `bad_images.jsonl`; too many of them end the run on all ranks.

    Each rank collects its own on the host; at an interval in steps the ranks exchange them. An image counts once, also
    over epochs and starts: the file in the run folder, which rank 0 writes, holds those of earlier ones.
    """

    def __init__(self, folder: Path, interval: int, dataset: TextImageDataset) -> None:
        self.path, self.interval, self.dataset = folder / BAD_IMAGES, interval, dataset
        self._listed: set[tuple[str, int]] | None = None
        """Stream and index of each image in the file; None until it is needed."""
        self._met: set[tuple[str, int]] = set()
        """The same of those that all ranks have met in this start."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Count what earlier starts have read: an order that begins with bad images is no reason to end then."""
        self.dataset.bad_images.continue_from(self._num_read(state))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Exchange at the end of each interval; a DataError on all ranks if too many images are bad."""
        if state.timestamp.batch.value % self.interval == 0:
            self._exchange(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Exchange the images of the last, incomplete interval."""
        self._exchange(state)

    def close(self, state: State, logger: Logger) -> None:
        """List the images of this rank since the last exchange: after a failure, each rank is alone."""
        if images := self.dataset.bad_images.take():
            self._list(images)

    def _exchange(self, state: State) -> None:
        images: list[list[BadImage]] = all_gather(self.dataset.bad_images.take())
        if new := [image for of_rank in images for image in of_rank]:
            num_read = self._num_read(state)
            agree(lambda: check_bad_images(self._count(new), num_read, str(new[-1])) if is_first_rank() else None)

    def _num_read(self, state: State) -> int:
        return min(state.timestamp.sample.value, self.dataset.num_samples)

    def _count(self, images: Sequence[BadImage]) -> int:
        """List images; return the number in the file, or of this start if none is new, as when steps are repeated."""
        self._met.update((image.stream, image.index) for image in images)
        return self._list(images) or len(self._met)

    def _list(self, images: Sequence[BadImage]) -> int:
        """Append the images that are not in the file; return the number in the file then, or 0 if there are none."""
        if self._listed is None:
            self._listed = {(image.stream, image.index) for image in read_bad_images(self.path)}
        entries = {(image.stream, image.index): image for image in images}
        if new := sorted(entries.keys() - self._listed):
            with explained_writes(self.path, "Make room"):
                append_json_lines(self.path, [asdict(entries[address]) for address in new])
            self._listed.update(new)
        return len(self._listed) if new else 0
