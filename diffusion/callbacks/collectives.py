"""Collective operations of training: how often FSDP2 has them, and how long they may take."""

from composer import Callback, Logger, State
from torch.distributed.fsdp import FSDPModule

from diffusion.datasets.batch import num_microbatches, num_samples
from diffusion.sharding import fsdp_modules, set_collective_timeout, set_last_microbatch

NUM_FIRST_STEPS = 100
"""Steps of a start in which ranks meet most sizes of images, and compile for each."""


class AccumulateLocally(Callback):
    """Let FSDP2 gather the weights for the first microbatch of a step and reduce the gradients after the last one.

    By default it does both for every microbatch.
    """

    def __init__(self) -> None:
        self._num_left = 0
        self._modules: list[FSDPModule] = []
        self._is_last = True

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the modules once: a network has hundreds of others."""
        self._modules = fsdp_modules(state.model)

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Count the microbatches of this step."""
        size = state.device_train_microbatch_size
        self._num_left = num_microbatches(state.batch, num_samples(state.batch) if size is None else size)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Mark the last microbatch for FSDP2, if the one before was not the last, or the reverse."""
        self._num_left -= 1
        is_last = self._num_left == 0
        if is_last != self._is_last:
            set_last_microbatch(self._modules, is_last)
        self._is_last = is_last

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Check the count: without a last microbatch the gradients of the ranks would differ."""
        assert self._num_left == 0, f"{self._num_left} microbatches were expected and did not come"


class CollectiveTimeout(Callback):
    """Set the timeout of collectives, in seconds, at the start of training and again after its first steps.

    Ranks that compile are slow. With None for `then` the first timeout stays: where ranks have images of different
    sizes, one may compile a rare size at any step while the others wait.
    """

    def __init__(self, first: float, then: float | None, num_first_steps: int = NUM_FIRST_STEPS) -> None:
        self.first, self.then = first, then
        self._num_left = num_first_steps

    def fit_start(self, state: State, logger: Logger) -> None:
        """Set the timeout of the first steps."""
        set_collective_timeout(self.first, state.device_mesh)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Set the usual timeout after the first steps."""
        self._num_left -= 1
        if self._num_left == 0 and self.then is not None:
            set_collective_timeout(self.then, state.device_mesh)
