"""Metrics for Prometheus: names, values from a run folder, and the HTTP endpoint.

Each has the label `run`, the name of the run folder. A value is read when it is scraped, and NaN while it is unknown.
"""

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusion.config.operations import PrometheusConfig
from diffusion.errors import MachineError
from diffusion.operations.costs import read_costs, total
from diffusion.operations.events import EventKind, read_events
from diffusion.operations.heartbeats import read_heartbeats

log = logging.getLogger(__name__)

LOSS = "diffusion_loss"
IMAGES_PER_SECOND = "diffusion_images_per_second"
STEPS_PER_SECOND = "diffusion_steps_per_second"
MFU = "diffusion_mfu_ratio"
DATA_WAITING = "diffusion_data_waiting_ratio"
STEP = "diffusion_step"
HEARTBEAT_AGE = "diffusion_heartbeat_age_seconds"
RESTARTS = "diffusion_restarts"
GPU_HOURS = "diffusion_gpu_hours"
DOLLARS = "diffusion_dollars"
QUEUE = "diffusion_evaluation_queue_checkpoints"
LEASED = "diffusion_evaluation_leased_checkpoints"
DONE = "diffusion_evaluation_done_checkpoints"

MEANINGS = {
    LOSS: "Training loss of the last step",
    IMAGES_PER_SECOND: "Images per second of all ranks, over the last steps",
    STEPS_PER_SECOND: "Optimizer steps per second, over the last steps",
    MFU: "Operations per second as a share of the peak of the devices, over the last steps",
    DATA_WAITING: "Share of the step time in which the slowest rank waits for data",
    STEP: "Completed steps of the run",
    HEARTBEAT_AGE: "Seconds since the last heartbeat of any rank",
    RESTARTS: "Starts of the run after the first one",
    GPU_HOURS: "GPU-hours of all starts of the run",
    DOLLARS: "Price of the GPU-hours of all starts of the run",
    QUEUE: "Complete checkpoints that are not evaluated yet, those in work included",
    LEASED: "Checkpoints that a watcher evaluates at present",
    DONE: "Checkpoints that are evaluated, or skipped",
}

MetricValues = Mapping[str, Mapping[str, float]]
"""Values by run and name."""


def read_run_metrics(run: Path, heartbeats: Path) -> dict[str, float]:
    """Read the metrics of all starts of a run from its folder and from the folder of its heartbeats."""
    starts, records = read_costs(run), read_heartbeats(heartbeats)
    num_supervised = sum(event["event"] == EventKind.started.value for event in read_events(run))
    totals = total(starts)
    return {
        STEP: max((record.step for record in records if record.step >= 0), default=math.nan),
        HEARTBEAT_AGE: time.time() - max((record.time for record in records), default=math.nan),
        RESTARTS: max(num_supervised, len(starts), 1) - 1,
        GPU_HOURS: totals.gpu_hours,
        DOLLARS: math.nan if totals.dollars is None else totals.dollars,
    }


@contextmanager
def served(settings: PrometheusConfig | None, read: Callable[[], MetricValues]) -> Iterator[int | None]:
    """Serve metrics at `/metrics` during the block, in threads; nothing without settings. Yields the port.

    Each scrape reads the values anew.

    Raises:
        MachineError: the address is not one of this machine, the port needs a privilege, or a package is missing.
    """
    if settings is None:
        yield None
        return
    server = _start(settings, read)
    os.register_at_fork(after_in_child=server.socket.close)  # A loader worker may outlive this process.
    log.info("metrics for Prometheus: http://%s:%d/metrics", settings.address, server.server_port)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _start(settings: PrometheusConfig, read: Callable[[], MetricValues]) -> Any:
    """Start the server, at a free port if the configured one is in use."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise MachineError("metrics for Prometheus need prometheus-client: uv pip install -e '.[metrics]'") from error

    class Reader(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            metrics = read()
            for name, meaning in MEANINGS.items():
                family = GaugeMetricFamily(name, meaning, labels=["run"])
                for run, values in metrics.items():
                    if name in values:
                        family.add_metric([run], values[name])
                if family.samples:
                    yield family

    registry = CollectorRegistry()
    registry.register(Reader())
    try:
        try:
            server, _ = start_http_server(settings.port, settings.address, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            log.warning("port %d is in use: metrics for Prometheus are at another one", settings.port)
            server, _ = start_http_server(0, settings.address, registry)
    except (OSError, UnicodeError) as error:  # The second of a name with an empty or too long label.
        reason = getattr(error, "strerror", None) or error
        raise MachineError(
            f"metrics for Prometheus cannot be served at {settings.address}:{settings.port}: {reason}. Choose another "
            "prometheus.address or prometheus.port"
        ) from error
    return server
