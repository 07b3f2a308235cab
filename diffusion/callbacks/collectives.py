"""Collective operations of a step: FSDP2 reduces gradients once per step, and ranks that compile wait longer."""

from composer import Callback, Logger, State

from diffusion.datasets.batch import num_microbatches, num_samples
from diffusion.sharding import set_collective_timeout, set_last_microbatch

NUM_FIRST_STEPS = 100
"""Steps of a start in which ranks meet most sizes of images, and compile for each."""


class AccumulateLocally(Callback):
    """Let FSDP2 gather the weights for the first microbatch of a step and reduce the gradients after the last one.

    By default it does both for every microbatch.
    """

    def __init__(self) -> None:
        self._num_left = 0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Count the microbatches of this step."""
        size = state.device_train_microbatch_size
        self._num_left = num_microbatches(state.batch, num_samples(state.batch) if size is None else size)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Mark the last microbatch for FSDP2."""
        self._num_left -= 1
        set_last_microbatch(state.model, self._num_left == 0)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Check the count: without a last microbatch the gradients of the ranks would differ."""
        assert self._num_left == 0, f"{self._num_left} microbatches were expected and did not come"


class CollectiveTimeout(Callback):
    """Change the timeout of collectives at the start of training and again after its first steps.

    Args:
        first: seconds in the first steps.
        then: seconds after them.
        num_first_steps: number of first steps.
    """

    def __init__(self, first: float, then: float, num_first_steps: int = NUM_FIRST_STEPS) -> None:
        self.first, self.then = first, then
        self._num_left = num_first_steps

    def fit_start(self, state: State, logger: Logger) -> None:
        """Set the timeout of the first steps."""
        set_collective_timeout(self.first, state.device_mesh)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Set the usual timeout after the first steps."""
        self._num_left -= 1
        if self._num_left == 0:
            set_collective_timeout(self.then, state.device_mesh)
