"""What is logged of the machines and of the tiers of storage, on recorded counters."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diffusion.callbacks import utilisation as module
from diffusion.callbacks.utilisation import Utilisation
from diffusion.datasets.tiers import TierCounts, TierMeter
from diffusion.errors import ConfigurationError
from diffusion.operations.utilisation import Counters

FIRST = Counters(
    clock=100.0, cpu_busy=0.0, cpu_waiting=0.0, cpu_total=0.0, received=0, sent=0, disk_read=0, memory_total=1000,
    memory_available=750, worker_seconds={7: 0.0}, job_bytes=2 * 10**9,
)  # fmt: skip
SECOND = replace(
    FIRST, clock=110.0, cpu_busy=10.0, cpu_waiting=4.0, cpu_total=40.0, received=5000, disk_read=10_000,
    worker_seconds={7: 9.0},
)  # fmt: skip


class Log:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


def state_at(step: int, batch_size: int = 8) -> Any:
    def value(number: int) -> SimpleNamespace:
        return SimpleNamespace(value=number)

    return SimpleNamespace(
        timestamp=SimpleNamespace(batch=value(step), sample=value(step * batch_size)),
        device=SimpleNamespace(tensor_to_device=lambda tensor: tensor),
    )


def run_interval(callback: Utilisation, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Two steps of an interval of two, over recorded counters."""
    readings = iter([FIRST, SECOND])
    monkeypatch.setattr(module, "read_counters", lambda: next(readings))
    log: Any = Log()
    callback.fit_start(state_at(0), log)
    callback.batch_end(state_at(1), log)
    assert log.metrics == {}
    callback.batch_end(state_at(2), log)
    return log.metrics


def test_logs_shares_and_rates_of_the_interval(monkeypatch):
    callback = Utilisation(2, num_workers=1)
    metrics = run_interval(callback, monkeypatch)
    assert metrics == pytest.approx({
        "utilisation/cpu": 0.25,
        "utilisation/cpu_waiting_for_disk": 0.1,
        "utilisation/memory": 0.25,
        "utilisation/loader_workers": 0.9,
        "throughput/network_received_bytes_per_sec": 500,
        "throughput/network_sent_bytes_per_sec": 0,
        "throughput/disk_read_bytes_per_sec": 1000,
        "memory/job_rss": 2.0,
    })  # fmt: skip
    assert callback.latest is not None
    assert callback.latest.busiest.workers == pytest.approx(0.9)
    assert callback.latest.downloaded == 0


def test_logs_what_came_from_each_tier_in_the_interval_and_in_all(monkeypatch):
    tiers = TierMeter()
    tiers.add(TierCounts(samples=16, hits=12, fetched_shards=2, fetched_bytes=400, read_bytes=1600))
    callback = Utilisation(2, num_workers=0, tiers=tiers)
    metrics = run_interval(callback, monkeypatch)
    first = {"fetched_bytes": 400, "fetched_shards": 2, "read_bytes": 1600, "cache_hit_rate": 0.75}
    assert {name: metrics[f"storage/{name}"] for name in first} == first
    assert {name: metrics[f"storage/total_{name}"] for name in first} == first
    assert "utilisation/loader_workers" not in metrics
    assert callback.latest is not None
    assert callback.latest.busiest.workers is None
    assert callback.latest.downloaded == 40
    tiers.add(TierCounts(samples=16, hits=16, read_bytes=1600))
    metrics = run_interval(callback, monkeypatch)
    second = {"fetched_bytes": 0, "fetched_shards": 0, "read_bytes": 1600, "cache_hit_rate": 1.0}
    assert {name: metrics[f"storage/{name}"] for name in second} == second
    total = {"fetched_bytes": 400, "fetched_shards": 2, "read_bytes": 3200, "cache_hit_rate": 28 / 32}
    assert {name: metrics[f"storage/total_{name}"] for name in total} == total


def test_logs_gpus_where_there_are_some(monkeypatch):
    callback = Utilisation(2, num_workers=0)
    callback._gpus = SimpleNamespace(read=lambda: (0.5, 0.75))  # pyright: ignore[reportAttributeAccessIssue]
    metrics = run_interval(callback, monkeypatch)
    assert (metrics["utilisation/gpu"], metrics["utilisation/gpu_memory"]) == (0.5, 0.75)


def test_an_interval_below_one_step_is_refused():
    with pytest.raises(ConfigurationError, match=r"loggers.utilisation_interval is 0"):
        Utilisation(0, num_workers=0)
