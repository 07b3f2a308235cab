"""How long training waits for data, and a warning with the cause when the loader is the limit."""

import logging
import time

from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.callbacks.utilisation import Utilisation
from diffusion.operations.utilisation import LoaderSettings, explain_waiting

log = logging.getLogger(__name__)

WARNING_SHARE = 0.1
"""Share of the steps' time above which waiting is worth a warning."""

QUIET_INTERVALS = 20
"""Intervals after a warning without another one."""


class DataWaiting(Callback):
    """Log the time that each step waits for its batch, and the share of it over an interval.

    - `time/data_waiting`: seconds from the request for a batch until this rank has its own
    - `time/data_waiting_share`: of the time of the steps of each interval, without evaluation and checkpoints; of the
      rank that waits longest, for which the others wait in the step

    A warning tells the cause when the share
    of an interval is above a tenth: not of the first, in which workers start and caches are empty.

    Args:
        utilisation: has the readings of each interval; it must run before this callback.
        settings: the loader, for the explanation.
    """

    def __init__(self, utilisation: Utilisation, settings: LoaderSettings) -> None:
        self.utilisation, self.settings = utilisation, settings
        self._asked = self._given = 0.0
        self._waited = self._computed = 0.0
        self._quiet = 1

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self._asked = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Stop it."""
        self._given = time.perf_counter()
        waited = self._given - self._asked
        self._waited += waited
        logger.log_metrics({"time/data_waiting": waited})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Add up, and at the end of an interval look whether the loader is the limit."""
        self._computed += time.perf_counter() - self._given
        if state.timestamp.batch.value % self.utilisation.interval:
            return
        share = max(dist.all_gather_object(self._waited / max(self._waited + self._computed, 1e-9)))
        logger.log_metrics({"time/data_waiting_share": share})
        self._waited = self._computed = 0.0
        if self._quiet:
            self._quiet -= 1
        elif share > WARNING_SHARE:
            self._quiet = QUIET_INTERVALS
            if dist.get_global_rank() == 0:
                log.warning("training waits for data %.0f %% of the time: %s", 100 * share, self._cause())

    def _cause(self) -> str:
        usage = self.utilisation.latest
        return explain_waiting(
            usage.busiest if usage is not None else None, usage.downloaded if usage is not None else 0.0, self.settings
        )
