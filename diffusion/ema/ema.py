"""Averages of the weights that start late and are sharded like them.

Composer's own keeps a full copy on every rank from step 0 and is not sharded in checkpoints. This one is a callback,
since a callback's state is a dictionary, whose sharded tensors a distributed checkpoint stores and reshards like the
model's.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State, Time, TimeUnit
from composer.utils.misc import partial_format
from torch.distributed.checkpoint.state_dict_loader import load

from diffusion.checkpointing.read import SafeLoadPlanner, SafeReader, load_sharded
from diffusion.ema.averaging import WeightAverage, check_names, gather_on_rank_0, reshard, trainable_parameters
from diffusion.ema.profiles import Profile
from diffusion.errors import DataError


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
        self._loaded: dict[str, Any] | None = None
        self._state: State | None = None

    @property
    def started(self) -> bool:
        """Whether there are averages."""
        return bool(self.averages)

    @property
    def labels(self) -> str:
        """What the averages are, in order, separated by blanks."""
        return " ".join(profile.label for profile in self.profiles)

    def init(self, state: State, logger: Logger) -> None:
        """Remember the state, which `state_dict` needs."""
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

    def _swap(self, state: State) -> None:
        reshard(state.model)
        self.averages[0].swap()
        self._swapped = not self._swapped

    @contextlib.contextmanager
    def swapped_in(self, state: State) -> Iterator[bool]:
        """Put the first average in place of the weights for the duration of a block, if it has started.

        Yields:
            Whether the weights are the average.
        """
        if not self.averages or self._swapped:
            yield self._swapped
            return
        self._swap(state)
        try:
            yield True
        finally:
            self._swap(state)

    def _swap_in(self, state: State) -> None:
        if self.evaluate and self.averages and not self._swapped:
            self._swap(state)

    def _swap_out(self, state: State) -> None:
        if self._swapped:
            self._swap(state)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Evaluate the average."""
        self._swap_in(state)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Go on training the weights."""
        self._swap_out(state)

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Evaluate the average."""
        self._swap_in(state)

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Back to the weights."""
        self._swap_out(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Train the weights, also after an evaluation that ended with an exception."""
        self._swap_out(state)

    def close(self, state: State, logger: Logger) -> None:
        """Leave the weights in place, also after an evaluation that ended with an exception."""
        self._swap_out(state)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The averages beside the weights; empty before the start, so that it adds no keys to a checkpoint.

        `averages` holds the first by parameter name, `others` the others by label; `labels` and `num_updates` say what
        they are.
        """
        if not self.averages:
            return {}
        assert not self._swapped, "a checkpoint was asked for while the average is swapped in"
        first, *others = ({**average.averages} for average in self.averages)
        if not (self._state is not None and self._state.fsdp_sharded_state_dict_enabled):
            first, *others = (gather_on_rank_0(tensors) for tensors in (first, *others))
        return self._contents(first, others, self.averages[0].num_updates)

    def _contents(self, first: dict[str, Any], others: list[dict[str, Any]], num_updates: int) -> dict[str, Any]:
        contents = {"labels": self.labels, "num_updates": num_updates, "averages": first}
        if others:  # A distributed checkpoint would keep an empty dictionary as an entry of its own.
            contents["others"] = {p.label: tensors for p, tensors in zip(self.profiles[1:], others, strict=True)}
        return contents

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the model is loaded."""
        self._loaded = state

    def after_load(self, state: State, logger: Logger) -> None:
        """Take over the averages that the checkpoint holds.

        Raises:
            DataError: they are others than are configured, or those of another model.
        """
        if self._loaded is None:
            return
        path = Path(partial_format(str(state.load_path), run_name=state.run_name))
        try:
            if state.fsdp_sharded_state_dict_enabled:
                self._load_shards(state, path)
            elif self._loaded.get("averages"):
                self._load_whole(state, self._loaded)
        except ValueError as error:
            raise DataError(f"checkpoint {path}: {error}") from error
        self._loaded = None

    def _check_labels(self, stored: str) -> None:
        if stored != self.labels:
            raise ValueError(
                f"it holds the averages {stored}, but configured are {self.labels}. Set algorithms.ema back, or begin "
                "a new run from it with init_from"
            )

    def _load_whole(self, state: State, stored: dict[str, Any]) -> None:
        self._check_labels(stored.get("labels", "(unknown)"))
        self._allocate(state)
        tensors = [stored["averages"], *(stored["others"][profile.label] for profile in self.profiles[1:])]
        for average, averages in zip(self.averages, tensors, strict=True):
            average.load(averages, int(stored["num_updates"]))

    def _load_shards(self, state: State, path: Path) -> None:
        """Composer loads only the keys that exist already; before the start there are none, so read them here."""
        reader = SafeReader(path)
        prefix = f"state.callbacks.{type(self).__qualname__}."
        stored = [key for key in reader.read_metadata().state_dict_metadata if key.startswith(prefix)]
        if not stored:
            return
        labels: dict[str, Any] = {f"{prefix}labels": None}
        load_sharded(labels, path)
        self._check_labels(labels[f"{prefix}labels"])
        self._allocate(state)
        first, *others = (average.averages for average in self.averages)
        expected = [f"averages.{name}" for name in first]
        expected += [f"others.{p.label}.{name}" for p in self.profiles[1:] for name in first]
        names = (key.removeprefix(prefix) for key in stored)
        check_names(expected, [name for name in names if name.startswith(("averages.", "others."))])
        contents = self._contents(first, others, 0)
        with torch.no_grad():
            whole = {"state": {"callbacks": {type(self).__qualname__: contents}}}
            load(whole, storage_reader=reader, planner=SafeLoadPlanner())
        for average in self.averages:
            average.num_updates = int(contents["num_updates"])
