"""What is logged of the machines, on recorded counters; and what a data set downloads, on a real cache."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffusion.callbacks import utilisation as module
from diffusion.callbacks.utilisation import Utilisation
from diffusion.config.data import Representation
from diffusion.datasets.loader import train_loader
from diffusion.errors import ConfigurationError
from diffusion.health.counters import Counters
from diffusion.health.downloads import DownloadMeter, bytes_per_sample
from tests.written_data import data_config, write_encoded

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


def test_logs_downloads_and_the_share_that_came_from_the_cache(monkeypatch):
    downloads: Any = SimpleNamespace(has_remote=True, bytes_since=lambda: 400)
    callback = Utilisation(2, num_workers=0, downloads=downloads, bytes_per_sample=100.0)
    metrics = run_interval(callback, monkeypatch)
    assert metrics["throughput/downloaded_bytes"] == 400
    assert metrics["throughput/downloaded_bytes_per_sec"] == pytest.approx(40)
    assert metrics["throughput/cache_hit_rate"] == pytest.approx(0.75)  # 16 samples of 100 bytes
    assert "utilisation/loader_workers" not in metrics
    assert callback.latest is not None
    assert callback.latest.busiest.workers is None


def test_logs_gpus_where_there_are_some(monkeypatch):
    callback = Utilisation(2, num_workers=0)
    callback._gpus = SimpleNamespace(read=lambda: (0.5, 0.75))  # pyright: ignore[reportAttributeAccessIssue]
    metrics = run_interval(callback, monkeypatch)
    assert (metrics["utilisation/gpu"], metrics["utilisation/gpu_memory"]) == (0.5, 0.75)


def test_an_interval_below_one_step_is_refused():
    with pytest.raises(ConfigurationError, match=r"loggers.utilisation_interval is 0"):
        Utilisation(0, num_workers=0)


@pytest.mark.parametrize("limit", [None, "100kb"])
def test_bytes_that_a_data_set_downloads(tmp_path, limit):
    root = write_encoded(tmp_path / "remote", {"a": 40, "b": 24})
    sizes = {path.name: path.stat().st_size for path in (root / "a").glob("*.mds")}
    total = sum(path.stat().st_size for path in root.glob("*/*.mds"))
    config = data_config(
        tmp_path / "cache", "a", "b", remote=str(root), cache_limit=limit, representation=Representation.latents,
        num_workers=1,
    )  # fmt: skip
    loader = train_loader(config, seed=3, tokenize=None, rank_batch_size=8)
    dataset: Any = loader.dataset
    meter = DownloadMeter(dataset)
    assert len(sizes) > 1
    assert bytes_per_sample(dataset) == pytest.approx(total / 64)
    assert meter.bytes_since() == 0
    batches = list(loader)
    assert len(batches) == 8
    assert torch.is_tensor(batches[0]["sample"])
    assert meter.bytes_since() == total
    assert meter.bytes_since() == 0
    list(loader)
    assert meter.bytes_since() == 0  # All of it is in the cache.
    dataset.close()


def test_originals_are_not_downloads(tmp_path):
    root = write_encoded(tmp_path, {"a": 16})
    config = data_config(root, "a", representation=Representation.latents)
    loader = train_loader(config, seed=3, tokenize=None, rank_batch_size=8)
    meter = DownloadMeter(loader.dataset)  # pyright: ignore[reportArgumentType]
    list(loader)
    assert not meter.has_remote
    assert meter.bytes_since() == 0
