"""Our Trainer against Composer's: equal numbers to the bit, on one rank and on two."""

import json
from pathlib import Path

import pytest
import torch
from composer import Callback, Logger, State, Trainer
from composer.utils import dist

from diffusion import train as training
from diffusion.callbacks.clipping import GRADIENT_NORM
from diffusion.config.loading import load_config
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.trainer import HostTrainer

LATE = "performance.log_late=true"
OVERRIDES = ["trainer.device_train_microbatch_size=2", "trainer.max_duration=4ba", "algorithms.ema.start=1ba"]


class RecordTimestamps(Callback):
    """Appends samples, batches and tokens of the timestamp to a file of the rank."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / f"rank-{dist.get_global_rank()}.json"
        self.rows: list[list[int]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        time = state.timestamp
        self.rows.append([time.batch.value, time.sample.value, time.token.value, time.sample_in_epoch.value])

    def fit_end(self, state: State, logger: Logger) -> None:
        self.path.write_text(json.dumps(self.rows))


@pytest.fixture
def process_group():
    is_first = not torch.distributed.is_initialized()
    yield
    if is_first:
        torch.distributed.destroy_process_group()


def run(folder, kind, parallelism, monkeypatch, *overrides):
    monkeypatch.setattr(training, "HostTrainer", kind)
    config = load_config(
        "tests/tools/toy.yaml",
        [*OVERRIDES, *overrides, f"output_folder={folder}", f"trainer.parallelism={parallelism}"],
    )
    trainer = training.train(config)
    return trainer, series(read_metrics(folder / "metrics.jsonl"), TRAIN_LOSS)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_trains_as_composers_trainer_does(tmp_path, monkeypatch, parallelism):
    theirs, losses = run(tmp_path / "theirs", Trainer, parallelism, monkeypatch)
    ours, same_losses = run(tmp_path / "ours", HostTrainer, parallelism, monkeypatch)
    assert same_losses == losses
    weights = theirs.state.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in ours.state.model.state_dict().items())
    assert ours.state.timestamp.sample == theirs.state.timestamp.sample == 32


@pytest.mark.usefixtures("process_group")
def test_numbers_that_are_logged_late_keep_their_steps_and_their_order(tmp_path, monkeypatch):
    settings = ["optimizer.max_grad_norm=1.0", "trainer.save_interval=3ba", "trainer.max_duration=5ba"]
    for name in ("false", "true"):
        run(tmp_path / name, HostTrainer, "ddp", monkeypatch, *settings, f"performance.log_late={name}")
    for end in ("3ba", "5ba"):
        resumed = run(
            tmp_path / "resumed", HostTrainer, "ddp", monkeypatch, *settings, f"trainer.max_duration={end}", LATE
        )
    rows, late = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("false", "true"))
    assert [list(row) for row in late] == [list(row) for row in rows]
    for name in ("step", TRAIN_LOSS, GRADIENT_NORM, "time/sample"):
        assert [row.get(name) for row in late] == [row.get(name) for row in rows]
    assert [TRAIN_LOSS in row for row in late] == [True] * 5 + [False]
    assert resumed[1] == series(rows, TRAIN_LOSS)


def test_two_ranks_count_the_same_samples(server, tmp_path):
    plugin = f"plugins.callbacks=[{{path: {__name__}.RecordTimestamps, arguments: {{folder: {tmp_path}}}}}]"
    server.train(2, [("tests/tools/toy.yaml", [*OVERRIDES, f"output_folder={tmp_path / 'run'}", plugin])])
    rows = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert rows[0] == rows[1] == [[step, 8 * step, 0, 8 * step] for step in range(1, 5)]
