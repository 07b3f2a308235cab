"""Callbacks that average the weights while training, and store averages for other widths afterwards.

Composer's own average keeps a full copy on every rank from step 0 and is not sharded in checkpoints. This one is a
callback, since a callback's state is a dictionary, whose sharded tensors a distributed checkpoint stores and reshards
like the model's.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State, Time, TimeUnit
from composer.utils.misc import partial_format
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from diffusion.checkpointing.read import SafeLoadPlanner, SafeReader, StoredState
from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.config.training import EMAConfig, NumberFormat
from diffusion.distributed import agree, is_first_rank
from diffusion.ema.averaging import (
    Exponential,
    PowerFunction,
    Profile,
    WeightAverage,
    check_names,
    gather_on_rank_0,
    reshard,
    trainable_parameters,
)
from diffusion.ema.posthoc import AVERAGE_SUFFIX, AverageRecord, step_of, write_average
from diffusion.errors import DataError, explained_writes
from diffusion.formats.run_folder import AVERAGES

log = logging.getLogger(__name__)

DTYPES = {
    NumberFormat.fp32: torch.float32,
    NumberFormat.fp16: torch.float16,
    NumberFormat.bf16: torch.bfloat16,
}


class LateStartEMA(Callback):
    """Average the weights from a given time on; evaluate and sample with the average.

    Nothing is allocated before the start. Afterwards each rank holds fp32 averages of its own shards.

    Args:
        start: Composer time string: `800000ba`, `0.94dur`, `1000000sp`. The averages begin as copies of the weights
            after the first step that reaches it.
        profiles: an average each; the first is the one that is evaluated and sampled.
        interval: batches between updates, `1ba`.
        evaluate: swap the first average in while evaluating.
    """

    def __init__(
        self, *, start: str, profiles: Sequence[Profile], interval: str = "1ba", evaluate: bool = True
    ) -> None:
        self.start = Time.from_timestring(start)
        self.interval = Time.from_timestring(interval)
        if self.interval.unit != TimeUnit.BATCH:
            raise ValueError(f"the interval between updates is counted in batches (1ba), not {interval}")
        self.profiles = list(profiles)
        self.evaluate = evaluate
        self.averages: list[WeightAverage] = []
        self._swapped = False
        self._state: State | None = None

    def init(self, state: State, logger: Logger) -> None:
        """Keep the state for `state_dict`."""
        self._state = state

    def _is_due(self, state: State) -> bool:
        if self.start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and elapsed >= self.start
        return state.timestamp.get(self.start.unit) >= self.start

    def _allocate(self, state: State) -> None:
        parameters = trainable_parameters(state.model)
        self.averages = [WeightAverage(parameters, profile) for profile in self.profiles]

    def batch_end(self, state: State, logger: Logger) -> None:
        """Start, or update."""
        if not self.averages:
            if self._is_due(state):
                self._allocate(state)
        elif state.timestamp.batch.value % self.interval.value == 0:
            for average in self.averages:
                average.update()

    # Evaluation and sampling

    def _swap(self, state: State, to_average: bool) -> None:
        """Exchange the weights and the first average, unless they are already as wanted."""
        if self.averages and to_average != self._swapped:
            reshard(state.model)
            self.averages[0].swap()
            self._swapped = to_average

    @contextlib.contextmanager
    def swapped_in(self, state: State) -> Iterator[bool]:
        """Replace the weights by the first average for the duration of a block, if it has started.

        Yields:
            Whether the weights are the average.
        """
        before = self._swapped
        self._swap(state, True)
        try:
            yield self._swapped
        finally:
            self._swap(state, before)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Evaluate the average."""
        if self.evaluate:
            self._swap(state, True)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Return to the weights."""
        self._swap(state, False)

    eval_standalone_start = eval_before_all
    eval_standalone_end = eval_after_all
    fit_start = close = eval_after_all  # After an evaluation that ended with an exception.

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The averages; empty before the start, so that a checkpoint has no keys for them.

        `averages` holds the first by parameter name, `others` the others by label, `labels` all labels, `num_updates`
        the number of updates.
        """
        if not self.averages:
            return {}
        assert not self._swapped, "a checkpoint was asked for while the average is swapped in"
        averages = [{**average.averages} for average in self.averages]
        if not (self._state is not None and self._state.fsdp_sharded_state_dict_enabled):
            averages = [gather_on_rank_0(tensors) for tensors in averages]
        return self._contents(averages, self.averages[0].num_updates)

    def _contents(self, averages: list[dict[str, Tensor]], num_updates: int) -> dict[str, Any]:
        first, *others = averages
        labels = " ".join(profile.label for profile in self.profiles)
        contents = {"labels": labels, "num_updates": num_updates, "averages": first}
        if others:  # A distributed checkpoint would keep an empty dictionary as an entry of its own.
            contents["others"] = {p.label: tensors for p, tensors in zip(self.profiles[1:], others, strict=True)}
        return contents

    def after_load(self, state: State, logger: Logger) -> None:
        """Load the averages of the checkpoint.

        Raises:
            DataError: they are those of another model.
        """
        if state.load_path is None:
            return
        path = Path(partial_format(str(state.load_path), run_name=state.run_name))
        try:
            self._load(state, path)
        except ValueError as error:
            raise DataError(f"checkpoint {path}: {error}") from error

    @torch.no_grad()
    def _load(self, state: State, path: Path) -> None:
        """Load them here: Composer loads only shards whose keys exist already, and before the start there are none."""
        prefix = f"state.callbacks.{type(self).__qualname__}."
        checkpoint = StoredState(path)
        stored = [key.removeprefix(prefix) for key in checkpoint.keys(prefix)]
        if not stored:
            return
        self._allocate(state)
        averages = [average.averages for average in self.averages]
        expected = [f"averages.{name}" for name in averages[0]]
        expected += [f"others.{profile.label}.{name}" for profile in self.profiles[1:] for name in averages[0]]
        check_names(expected, [name for name in stored if name.startswith(("averages.", "others."))])
        if state.fsdp_sharded_state_dict_enabled:
            whole = {"state": {"callbacks": {type(self).__qualname__: self._contents(averages, 0)}}}
            load(whole, storage_reader=SafeReader(path), planner=SafeLoadPlanner())
        else:
            tensors = chain.from_iterable(average.values() for average in averages)
            found = checkpoint.read([prefix + name for name in expected])
            for tensor, name in zip(tensors, expected, strict=True):
                tensor.copy_(found[prefix + name])
        num_updates = int(checkpoint.read([f"{prefix}num_updates"])[f"{prefix}num_updates"])
        for average in self.averages:
            average.num_updates = num_updates


class AverageSnapshots(Callback):
    """Store the power-function averages at intervals and at the end.

    Rank 0 gathers one average at a time, which needs its size in memory. The interval (`5000ba`) counts from the
    beginning of the run. A start removes the files of later steps: a run that resumes from a checkpoint writes them
    again, with the same bytes, and one that begins anew has others. With an object store, files are uploaded as
    `averages/NAME` in the background, and before the next checkpoint is complete there. To be run after the callback
    that updates the averages.
    """

    def __init__(
        self,
        ema: LateStartEMA,
        folder: Path,
        *,
        interval: str,
        dtype: torch.dtype,
        remote: RemoteCheckpoints | None = None,
    ) -> None:
        self.ema, self.folder, self.dtype, self.remote = ema, folder, dtype, remote
        self.interval = Time.from_timestring(interval)
        self._last_step = -1

    def fit_start(self, state: State, logger: Logger) -> None:
        """Remove the files of later steps, and upload those that an earlier start has written, but not uploaded."""
        step = state.timestamp.batch.value
        agree(lambda: self._continue_from(step) if is_first_rank() else None, takes_long=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Store at the interval."""
        if state.timestamp.batch.value % self.interval.value == 0:
            self._store_all(state.timestamp.batch.value)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Store at the end, unless that was just done."""
        self._store_all(state.timestamp.batch.value)
        if self.remote is not None:
            agree(self.remote.await_uploads, takes_long=True)

    def _store_all(self, step: int) -> None:
        averages = [average for average in self.ema.averages if isinstance(average.profile, PowerFunction)]
        if step == self._last_step or not averages or averages[0].num_updates == 0:
            return
        self._last_step = step
        for average in averages:
            record = AverageRecord(label=average.profile.label, step=step, time=average.time)
            tensors = gather_on_rank_0(average.averages, self.dtype)
            agree(lambda record=record, tensors=tensors: self._store(record, tensors), takes_long=True)

    def _store(self, record: AverageRecord, tensors: dict[str, Tensor]) -> None:
        if is_first_rank():
            path = write_average(self.folder, record, tensors)
            if self.remote is not None:
                self.remote.upload_later(path, f"{AVERAGES}/{path.name}")

    def _continue_from(self, step: int) -> None:
        for path in self.folder.glob(f"*{AVERAGE_SUFFIX}"):
            if step_of(path.name) > step:
                log.warning("removing %s: the run continues from step %d", path, step)
                with explained_writes(path):
                    path.unlink()
        if self.remote is None:
            return
        stored = {
            name.rpartition("/")[2]: file
            for name, file in self.remote.files().items()
            if name.startswith(f"{AVERAGES}/")
        }
        self.remote.remove_files(file for name, file in stored.items() if step_of(name) > step)
        for path in sorted(self.folder.glob(f"*{AVERAGE_SUFFIX}")):
            if path.name not in stored:
                self.remote.upload_later(path, f"{AVERAGES}/{path.name}")


def build_averages(
    config: EMAConfig | None, folder: Path, remote: RemoteCheckpoints | None = None
) -> tuple[LateStartEMA | None, list[Callback]]:
    """Build the callbacks that average and store, for a run in `folder` with checkpoints in a folder or store.

    Returns:
        The average to sample and export, None for the weights themselves; and all callbacks in their order.
    """
    if config is None:
        return None, []
    power = config.power
    profiles: list[Profile] = [Exponential(decay) for decay in config.decays]
    profiles += [PowerFunction(width) for width in (power.relative_widths if power is not None else [])]
    ema = LateStartEMA(start=config.start, profiles=profiles, interval=config.interval, evaluate=config.evaluate)
    callbacks: list[Callback] = [ema]
    if power is not None:
        dtype = DTYPES[power.snapshot_precision]
        snapshots = AverageSnapshots(
            ema, folder / AVERAGES, interval=power.snapshot_interval, dtype=dtype, remote=remote
        )
        callbacks.append(snapshots)
    return ema if config.evaluate else None, callbacks
