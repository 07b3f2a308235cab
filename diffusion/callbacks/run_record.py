"""The resolved configuration with the run, and with each checkpoint."""

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
        """The record."""
        return self.record
