"""Gradients are accumulated on each rank, and averaged over the ranks once per step."""

from composer import Callback, Logger, State

from diffusion.datasets.batch import num_microbatches, num_samples
from diffusion.sharding import set_last_microbatch


class AccumulateLocally(Callback):
    """Let FSDP2 gather the weights for the first microbatch of a step and reduce the gradients after the last one.

    On its own it does both for every microbatch.
    """

    def __init__(self) -> None:
        self._num_left = 0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Count the microbatches of this step."""
        size = state.device_train_microbatch_size
        self._num_left = num_microbatches(state.batch, num_samples(state.batch) if size is None else size)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Say whether this microbatch is the last one."""
        self._num_left -= 1
        set_last_microbatch(state.model, self._num_left == 0)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Without a last microbatch the gradients of the ranks would differ."""
        assert self._num_left == 0, f"{self._num_left} microbatches were expected and did not come"
