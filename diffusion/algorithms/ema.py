"""Exponential moving average of the weights that starts late and is sharded like them.

Composer's own keeps a full copy on every rank from step 0 and is not sharded in checkpoints. This one is a callback,
since a callback's state is a dictionary, whose sharded tensors a distributed checkpoint stores and reshards like the
model's.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from composer import Callback, Logger, State, Time, TimeUnit
from composer.utils import dist
from composer.utils.misc import partial_format
from torch.distributed.checkpoint.state_dict_loader import load

from diffusion.algorithms.averaging import WeightAverage, check_names, full_tensor, reshard, trainable_parameters
from diffusion.errors import DataError
from diffusion.safe_loading import SafeLoadPlanner, SafeReader


class LateStartEMA(Callback):
    """Average the weights from a given time on; evaluate and sample with the average.

    Nothing is allocated before the start. Afterwards each rank holds the fp32 average of its own shards.

    Args:
        start: Composer time string: `800000ba`, `0.94dur`.
        decay: smoothing per update.
        interval: batches between updates, `1ba`.
        evaluate: swap the average in while evaluating.
    """

    def __init__(self, *, start: str, decay: float = 0.9999, interval: str = "1ba", evaluate: bool = True) -> None:
        self.start = Time.from_timestring(start)
        self.interval = Time.from_timestring(interval)
        if self.interval.unit != TimeUnit.BATCH:
            raise ValueError(f"the interval between updates is counted in batches (1ba), not {interval}")
        self.decay = decay
        self.evaluate = evaluate
        self.average: WeightAverage | None = None
        self._swapped = False
        self._loaded: dict[str, Any] | None = None
        self._state: State | None = None

    @property
    def started(self) -> bool:
        """Whether there is an average."""
        return self.average is not None

    def init(self, state: State, logger: Logger) -> None:
        """Remember the state, which `state_dict` needs."""
        self._state = state

    def _is_due(self, state: State) -> bool:
        if self.start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and elapsed >= self.start
        return state.timestamp.get(self.start.unit) >= self.start

    def _allocate(self, state: State) -> WeightAverage:
        self.average = WeightAverage(trainable_parameters(state.model), self.decay)
        return self.average

    def batch_end(self, state: State, logger: Logger) -> None:
        """Start, or update."""
        if self.average is None:
            if self._is_due(state):
                self._allocate(state)
        elif state.timestamp.batch.value % self.interval.value == 0:
            self.average.update()

    # Evaluation and sampling

    def _swap(self, state: State) -> None:
        assert self.average is not None
        reshard(state.model)
        self.average.swap()
        self._swapped = not self._swapped

    @contextlib.contextmanager
    def swapped_in(self, state: State) -> Iterator[bool]:
        """Put the average in place of the weights for the duration of a block, if it has started.

        Yields:
            Whether the weights are the average.
        """
        if self.average is None or self._swapped:
            yield self._swapped
            return
        self._swap(state)
        try:
            yield True
        finally:
            self._swap(state)

    def _swap_in(self, state: State) -> None:
        if self.evaluate and self.average is not None and not self._swapped:
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

    def close(self, state: State, logger: Logger) -> None:
        """Swap back also when an evaluation ended with an exception."""
        self._swap_out(state)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The average beside the weights; empty before the start, so that it adds no keys to a checkpoint."""
        if self.average is None:
            return {}
        assert not self._swapped, "a checkpoint was asked for while the average is swapped in"
        averages = self.average.averages
        if not (self._state is not None and self._state.fsdp_sharded_state_dict_enabled):
            averages = {name: full_tensor(average).cpu() for name, average in averages.items()}
            if dist.get_global_rank() != 0:
                averages = {}
        return {"num_updates": self.average.num_updates, "averages": averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the model is loaded."""
        self._loaded = state

    def after_load(self, state: State, logger: Logger) -> None:
        """Take over the average that the checkpoint holds."""
        if self._loaded is None:
            return
        if state.fsdp_sharded_state_dict_enabled:
            self._load_shards(state)
        elif self._loaded.get("averages"):
            try:
                self._allocate(state).load(self._loaded["averages"], int(self._loaded["num_updates"]))
            except ValueError as error:
                raise DataError(f"checkpoint {state.load_path}: {error}") from error
        self._loaded = None

    def _load_shards(self, state: State) -> None:
        """Composer loads only the keys that exist already; before the start there are none, so read them here."""
        path = partial_format(str(state.load_path), run_name=state.run_name)
        reader = SafeReader(path)
        prefix = f"state.callbacks.{type(self).__qualname__}."
        stored = [
            key.removeprefix(prefix) for key in reader.read_metadata().state_dict_metadata if key.startswith(prefix)
        ]
        if not stored:
            return
        average = self._allocate(state)
        names = [key.removeprefix("averages.") for key in stored if key.startswith("averages.")]
        try:
            check_names(average.averages, names)
        except ValueError as error:
            raise DataError(f"checkpoint {path}: {error}") from error
        content: dict[str, Any] = {"num_updates": 0, "averages": average.averages}
        with torch.no_grad():
            whole = {"state": {"callbacks": {type(self).__qualname__: content}}}
            load(whole, storage_reader=reader, planner=SafeLoadPlanner())
        average.num_updates = int(content["num_updates"])
