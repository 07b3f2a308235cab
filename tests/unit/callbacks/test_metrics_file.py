import json
import resource
from types import SimpleNamespace

import pytest

from diffusion.callbacks.metrics_file import MetricsFile
from diffusion.errors import MachineError
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series


def state_at(step: int):
    return SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)))


def test_a_row_holds_everything_of_a_step(tmp_path):
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    metrics.fit_start(state_at(0), None)
    metrics.log_metrics({TRAIN_LOSS: 1.0}, step=0)
    metrics.log_metrics({"lr": 0.5}, step=0)
    metrics.log_metrics({TRAIN_LOSS: 0.5}, step=1)
    assert read_metrics(metrics.path) == [{"step": 0, TRAIN_LOSS: 1.0, "lr": 0.5}]
    metrics.close(state_at(2), None)
    assert series(read_metrics(metrics.path), TRAIN_LOSS) == ([0, 1], [1.0, 0.5])


def test_a_resumed_run_drops_the_steps_that_it_runs_again_and_completes_the_row_of_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = "".join(json.dumps({"step": step, TRAIN_LOSS: step}) + "\n" for step in range(6))
    path.write_text(rows + '{"step": 6, "lo')
    before = MetricsFile(tmp_path / "other.jsonl")
    before.log_metrics({"metrics/validation/loss": 0.5}, step=3)
    metrics = MetricsFile(path)
    metrics.load_state_dict(before.state_dict())
    metrics.fit_start(state_at(3), None)
    metrics.log_metrics({TRAIN_LOSS: 30.0}, step=3)
    metrics.close(state_at(4), None)
    found = read_metrics(path)
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    assert found[-1] == {"step": 3, "metrics/validation/loss": 0.5, TRAIN_LOSS: 30.0}


def test_rows_that_a_full_disk_takes_in_part_are_appended_later(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.fit_start(state_at(0), None)
    metrics.log_metrics({TRAIN_LOSS: 0.0}, step=0)
    metrics.flush()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.path.stat().st_size + 5, limits[1]))
    try:
        for step in (1, 2, 3):
            metrics.log_metrics({TRAIN_LOSS: step}, step=step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    metrics.close(state_at(4), None)
    assert metrics.path.read_text() == "".join(
        json.dumps({"step": step, TRAIN_LOSS: float(step)}) + "\n" for step in range(4)
    )
    with pytest.raises(MachineError, match="cannot be written"):
        MetricsFile(metrics.path / "below" / "metrics.jsonl").fit_start(state_at(0), None)
