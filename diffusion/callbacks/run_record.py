"""The resolved configuration with the run, and with each checkpoint."""

import copy
from typing import Any

from composer import Callback


class RunRecord(Callback):
    """Store in each checkpoint what is needed to understand and use it.

    Args:
        record: plain containers: the resolved configuration, latent scaling, noise schedule.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def state_dict(self) -> dict[str, Any]:
        """The record: a copy, since a sharded checkpoint is loaded into it, and this start has settings of its own."""
        return copy.deepcopy(self.record)
