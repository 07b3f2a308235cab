"""How long training waits for data: on a clock of the test's own, and in real runs with a slow and a fast data set."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from composer import Callback, Logger, State

from diffusion.callbacks import data_waiting as module
from diffusion.callbacks.data_waiting import QUIET_INTERVALS, DataWaiting
from diffusion.callbacks.metrics_file import read_metrics, series
from diffusion.operations.utilisation import LoaderSettings
from tests.tools.toys import ToyLatents
from tests.tools.training_runs import ROOT

SLEEP = 0.08


class SlowLatents(ToyLatents):
    """Each sample takes `SLEEP` seconds, in which nothing is computed."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(SLEEP)
        return super().__getitem__(index)


class LongSteps(Callback):
    """Lets each step take half a second, beside which it is nothing that other programs slow the loader down."""

    def before_forward(self, state: State, logger: Logger) -> None:
        time.sleep(0.5)


class Steps:
    """Runs steps of given lengths through the callback, on a clock that only they advance."""

    def __init__(self, interval: int, monkeypatch: pytest.MonkeyPatch) -> None:
        utilisation: Any = SimpleNamespace(interval=interval, latest=None)
        self.callback = DataWaiting(utilisation, LoaderSettings(num_workers=0, num_cores=2, decodes=False))
        self.now, self.step = 0.0, 0
        self.metrics: list[dict[str, float]] = []
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def run(self, num: int, *, wait: float, compute: float, between: float = 5.0) -> None:
        log: Any = SimpleNamespace(log_metrics=self.metrics.append)
        for _ in range(num):
            state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=self.step + 1)))
            self.now += between  # Evaluation and checkpoints.
            self.callback.before_dataloader(state, log)
            self.now += wait
            self.callback.after_dataloader(state, log)
            self.now += compute
            self.callback.batch_end(state, log)
            self.step += 1

    def shares(self) -> list[float]:
        return [row["time/data_waiting_share"] for row in self.metrics if "time/data_waiting_share" in row]


def test_waiting_is_measured_without_what_comes_between_steps(monkeypatch):
    steps = Steps(2, monkeypatch)
    steps.run(2, wait=1.0, compute=3.0)
    steps.run(1, wait=0.0, compute=1.0)
    steps.run(1, wait=1.0, compute=8.0)
    assert [row["time/data_waiting"] for row in steps.metrics if "time/data_waiting" in row] == [1.0, 1.0, 0.0, 1.0]
    assert steps.shares() == pytest.approx([0.25, 0.1])


def test_warns_after_the_first_interval_and_then_not_again_for_a_while(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    steps = Steps(1, monkeypatch)
    steps.run(1, wait=9.0, compute=1.0)
    steps.run(5, wait=0.05, compute=1.0)
    assert caplog.messages == []
    steps.run(1 + QUIET_INTERVALS, wait=1.0, compute=1.0)
    (message,) = caplog.messages
    assert message.startswith("training waits for data 50 % of the time: batches are loaded in the training process")
    steps.run(1, wait=1.0, compute=1.0)
    assert len(caplog.messages) == 2


@pytest.fixture(scope="module")
def outputs(server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[float], list[float], str]]:
    """Waiting of each step, share of each interval, and output: slow and fast, with and without loader workers."""
    root = tmp_path_factory.mktemp("waiting")
    found = {}
    options = [
        "loggers.utilisation_interval=4",
        "samples.prompts=[]",
        "algorithms.ema=null",
        "trainer.save_interval=8ba",
    ]
    for name, dataset, num_workers in (("slow", "SlowLatents", 0), ("workers", "SlowLatents", 1), ("fast", "", 0)):
        path = f"tests.unit.callbacks.test_data_waiting.{dataset}" if dataset else "tests.tools.toys.ToyLatents"
        overrides = [f"output_folder={root / name}", f"plugins.train_dataset.path={path}"]
        if name == "fast":
            overrides.append("plugins.callbacks=[{path: tests.unit.callbacks.test_data_waiting.LongSteps}]")
        job = server.train(
            1, [(str(ROOT / "tests/tools/toy.yaml"), [*overrides, *options, f"data.num_workers={num_workers}"])]
        )
        rows = read_metrics(root / name / "metrics.jsonl")
        found[name] = series(rows, "time/data_waiting")[1], series(rows, "time/data_waiting_share")[1], job.output
        assert len(series(rows, "utilisation/cpu")[1]) == 2
    return found


def test_a_slow_data_set_is_measured_and_told_with_its_cause(outputs):
    waited, shares, output = outputs["slow"]
    assert len(waited) == 8
    assert min(waited) >= 8 * SLEEP
    assert all(share > 0.1 for share in shares)
    assert output.count("training waits for data") == 1
    assert "batches are loaded in the training process: set data.num_workers" in output


def test_loader_workers_that_only_wait_are_told(outputs):
    waited, _, output = outputs["workers"]
    assert max(waited) >= 4 * SLEEP
    assert output.count("training waits for data") == 1
    # What other programs do on this machine may be a cause as well.
    assert any(cause in output for cause in ("the loader workers idle", "cores are busy", "cores wait for it"))


def test_a_fast_data_set_gives_no_warning(outputs):
    _, shares, output = outputs["fast"]
    assert shares[1] < 0.1
    assert "training waits for data" not in output
    assert "WARNING" not in output
