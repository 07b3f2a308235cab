"""Ranks that compile wait for one another longer than ranks that train."""

from composer import Callback, Logger, State

from diffusion.sharding import set_collective_timeout

NUM_FIRST_STEPS = 100
"""Steps of a start in which ranks meet most sizes of images, and compile for each."""


class CollectiveTimeout(Callback):
    """Change the timeout of collectives when training begins, and once the first steps of this start are done.

    Args:
        first: seconds in the first steps.
        then: seconds after them.
        num_first_steps: how many there are.
    """

    def __init__(self, first: float, then: float, num_first_steps: int = NUM_FIRST_STEPS) -> None:
        self.first, self.then = first, then
        self._num_left = num_first_steps

    def fit_start(self, state: State, logger: Logger) -> None:
        """Wait long."""
        set_collective_timeout(self.first, state.device_mesh)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Wait as long as usual after the first steps."""
        self._num_left -= 1
        if self._num_left == 0:
            set_collective_timeout(self.then, state.device_mesh)
