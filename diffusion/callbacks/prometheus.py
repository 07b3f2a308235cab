"""Prometheus endpoint of a training run, on rank 0."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer import Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist

from diffusion.config.operations import PrometheusConfig
from diffusion.distributed import agree
from diffusion.formats.run_folder import TRAIN_LOSS
from diffusion.operations import metrics as names
from diffusion.operations.metrics import read_run_metrics, served

_LOGGED = {
    TRAIN_LOSS: names.LOSS,
    "throughput/samples_per_sec": names.IMAGES_PER_SECOND,
    "throughput/batches_per_sec": names.STEPS_PER_SECOND,
    "throughput/device/mfu": names.MFU,
    "time/data_waiting_share": names.DATA_WAITING,
}
"""Names of logged numbers in Prometheus."""


class PrometheusLogger(LoggerDestination):
    """Serve the newest logged numbers, and what the run folder shows, from the beginning of training to its end."""

    def __init__(self, settings: PrometheusConfig, run: Path, heartbeats: Path) -> None:
        self._settings, self._run, self._heartbeats = settings, run, heartbeats
        self._numbers = dict.fromkeys(_LOGGED.values(), math.nan)
        self._server = ExitStack()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the server; a MachineError on all ranks if the address cannot be used."""
        is_first = dist.get_global_rank() == 0
        agree(lambda: self._server.enter_context(served(self._settings, self._read)) if is_first else None)

    def _read(self) -> names.MetricValues:
        return {self._run.name: self._numbers | read_run_metrics(self._run, self._heartbeats)}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the newest numbers, all at once: a scrape reads them in another thread."""
        self._numbers |= {_LOGGED[name]: float(metrics[name]) for name in _LOGGED.keys() & metrics.keys()}

    def close(self, state: State, logger: Logger) -> None:
        """End the server."""
        self._server.close()
