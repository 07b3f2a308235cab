"""Load of machines and storage on recorded counters; waiting for data on a fake clock and in real runs."""

import logging
import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from composer import Callback, Logger, State

from diffusion import distributed
from diffusion.callbacks import monitoring as module
from diffusion.callbacks.monitoring import QUIET_INTERVALS, Utilisation
from diffusion.datasets.cache import TierCounts, TierMeter
from diffusion.formats.run_folder import read_metrics, series
from diffusion.operations import utilisation
from diffusion.operations.utilisation import Counters, LoaderSettings
from tests.tools.toys import ToyLatents

SLEEP = 0.1
HERE = "tests.integration.test_utilisation"
SLOW = f"{HERE}.SlowLatents"

FIRST = Counters(
    clock=100.0, cpu_busy=0.0, cpu_waiting=0.0, cpu_total=0.0, disk_read=0, memory_total=1000,
    memory_available=750, worker_seconds={7: 0.0},
)  # fmt: skip
SECOND = replace(
    FIRST, clock=110.0, cpu_busy=10.0, cpu_waiting=4.0, cpu_total=40.0, disk_read=10_000,
    worker_seconds={7: 9.0},
)  # fmt: skip


def test_a_container_with_a_quota_is_busy_when_it_uses_its_quota(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr(distributed, "CGROUP", tmp_path)
    monkeypatch.setattr(utilisation, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    counters = []
    for clock, usage in ((100.0, 5_000_000), (110.0, 24_000_000)):
        (tmp_path / "cpu.stat").write_text(f"usage_usec {usage}\nuser_usec 1\n")
        monkeypatch.setattr(utilisation.time, "monotonic", lambda clock=clock: clock)
        counters.append(utilisation.read_counters())
    assert utilisation.usage_between(*counters, 0).cpu == pytest.approx(0.95)


class Log:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


def state_at(step: int) -> Any:
    return SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)))


def loader(num_workers: int) -> LoaderSettings:
    return LoaderSettings(num_workers=num_workers, num_cores=2, decodes=False)


def run_interval(callback: Utilisation, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Two steps of an interval of two, over recorded counters."""
    readings = iter([FIRST, SECOND])
    monkeypatch.setattr(module, "read_counters", lambda: next(readings))
    log: Any = Log()
    callback.fit_start(state_at(0), log)
    callback.batch_end(state_at(1), log)
    assert log.metrics == {}
    callback.batch_end(state_at(2), log)
    assert 0 <= log.metrics.pop("time/data_waiting_share") <= 1
    return log.metrics


def test_logs_shares_of_the_interval(monkeypatch):
    metrics = run_interval(Utilisation(2, loader(1)), monkeypatch)
    assert metrics == pytest.approx({
        "utilisation/cpu": 0.25,
        "utilisation/memory": 0.25,
        "utilisation/loader_workers": 0.9,
    })  # fmt: skip


def test_logs_storage_of_the_interval(monkeypatch):
    tiers = TierMeter()
    tiers.add(TierCounts(samples=16, hits=12, fetched_shards=2, fetched_bytes=400, read_bytes=1600))
    callback = Utilisation(2, loader(0), tiers)
    metrics = run_interval(callback, monkeypatch)
    first = {"fetched_bytes": 400, "fetched_shards": 2, "read_bytes": 1600, "cache_hit_rate": 0.75}
    assert {name: metrics[f"storage/{name}"] for name in first} == first
    assert "utilisation/loader_workers" not in metrics
    tiers.add(TierCounts(samples=16, hits=16, read_bytes=1600))
    metrics = run_interval(callback, monkeypatch)
    second = {"fetched_bytes": 0, "fetched_shards": 0, "read_bytes": 1600, "cache_hit_rate": 1.0}
    assert {name: metrics[f"storage/{name}"] for name in second} == second
    tiers.add(TierCounts(samples=8, fetched_shards=1, fetched_bytes=30))
    callback.fit_end(state_at(3), Log())  # pyright: ignore[reportArgumentType]
    assert callback.fetched_bytes == 430


def test_logs_gpus_where_there_are_some(monkeypatch):
    callback = Utilisation(2, loader(0))
    callback._gpus = SimpleNamespace(read=lambda: (0.5, 0.75))  # pyright: ignore[reportAttributeAccessIssue]
    metrics = run_interval(callback, monkeypatch)
    assert (metrics["utilisation/gpu"], metrics["utilisation/gpu_memory"]) == (0.5, 0.75)


class Steps:
    """Runs steps of given lengths through the callback, on a clock that only they advance."""

    def __init__(self, interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.callback = Utilisation(interval, loader(0))
        self.now, self.step = 0.0, 0
        self.metrics: list[dict[str, float]] = []
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "read_counters", lambda: FIRST)
        self.log: Any = SimpleNamespace(log_metrics=self.metrics.append)
        self.callback.fit_start(state_at(0), self.log)

    def run(self, num: int, *, wait: float, compute: float, between: float = 5.0) -> None:
        for _ in range(num):
            self.step += 1
            state = state_at(self.step)
            self.now += between  # Evaluation and checkpoints.
            self.callback.before_dataloader(state, self.log)
            self.now += wait
            self.callback.after_dataloader(state, self.log)
            self.now += compute
            self.callback.batch_end(state, self.log)

    def shares(self) -> list[float]:
        return [row["time/data_waiting_share"] for row in self.metrics if "time/data_waiting_share" in row]


def test_waiting_is_measured_without_what_comes_between_steps(monkeypatch):
    steps = Steps(2, monkeypatch)
    steps.run(2, wait=1.0, compute=3.0)
    steps.run(1, wait=0.0, compute=1.0)
    steps.run(1, wait=1.0, compute=8.0)
    assert steps.shares() == pytest.approx([0.25, 0.1])


def test_warns_after_the_first_interval_and_then_not_again_for_a_while(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    steps = Steps(1, monkeypatch)
    steps.run(1, wait=9.0, compute=1.0)
    steps.run(5, wait=0.05, compute=1.0)
    assert caplog.messages == []
    steps.run(1 + QUIET_INTERVALS, wait=1.0, compute=1.0)
    (message,) = caplog.messages
    assert "50 %" in message
    assert "data.num_workers" in message
    steps.run(1, wait=1.0, compute=1.0)
    assert len(caplog.messages) == 2


class SlowLatents(ToyLatents):
    """Each sample takes `SLEEP` seconds."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(SLEEP)
        return super().__getitem__(index)


class LongSteps(Callback):
    """Lets each step take half a second, beside which other programs do not slow the loader down."""

    def before_forward(self, state: State, logger: Logger) -> None:
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "num_workers"), [(SLOW, 0), (SLOW, 1), ("tests.tools.toys.ToyLatents", 0)])
def test_a_slow_data_set_is_measured_and_reported_with_its_cause(server, tmp_path, dataset, num_workers):
    overrides = [
        f"output_folder={tmp_path}",
        f"plugins.train_dataset.path={dataset}",
        f"data.num_workers={num_workers}",
        "loggers.utilisation_interval=4",
        "samples.prompts=[]",
        "algorithms.ema=null",
        "trainer.save_interval=8ba",
    ]
    is_slow = dataset == SLOW
    if not is_slow:
        overrides.append(f"plugins.callbacks=[{{path: {HERE}.LongSteps}}]")
    output = server.train(1, [("tests/tools/toy.yaml", overrides)]).output
    rows = read_metrics(tmp_path / "metrics.jsonl")
    shares = series(rows, "time/data_waiting_share")[1]
    assert (len(shares), len(series(rows, "utilisation/cpu")[1])) == (2, 2)
    assert output.count("training waits for data") == int(is_slow)
    if not is_slow:
        assert shares[1] < 0.1
    elif num_workers:
        # What other programs do on this machine may be a cause as well.
        assert any(cause in output for cause in ("the loader workers idle", "cores are busy", "cores wait for it"))
    else:
        assert all(share > 0.1 for share in shares)
        assert "set data.num_workers" in output
