"""Errors of wandb, and progress lines."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from diffusion.callbacks import loggers
from diffusion.callbacks.loggers import ProgressLines
from diffusion.errors import MachineError
from diffusion.formats.run_folder import TRAIN_LOSS


@pytest.mark.world_size(2)
def test_an_error_of_wandb_is_reported_once_with_its_key(server, tmp_path: Path) -> None:
    program = ["run.py", "tests/tools/toy.yaml", f"output_folder={tmp_path / 'run'}", "loggers.wandb={offline: false}"]
    account = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    job = server.start(2, program, **account).finish()
    assert job.codes == [2, 2], job.output
    assert job.output.count("Error: ") == 1
    assert "loggers.wandb: " in job.output
    assert "API key" in job.output
    assert "loggers.wandb.offline=true" in job.output
    assert "Traceback" not in job.output
    with pytest.raises(MachineError, match=r"loggers\.wandb: .*project name 'a/b:c'"), loggers.starting_wandb():
        wandb.Settings(project="a/b:c")


def at(step: int) -> Any:
    """State of a run of 1,000 steps."""
    share = SimpleNamespace(value=step / 1000)
    return SimpleNamespace(
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)), get_elapsed_duration=lambda: share
    )


def test_progress_lines_come_now_and_then(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now)
    lines, log = ProgressLines(), SimpleNamespace()
    for step in range(101, 161):
        now += 1.0
        lines.log_metrics({TRAIN_LOSS: 0.5}, step - 1)
        lines.log_metrics({"throughput/batches_per_sec": 1.0, "time/remaining_estimate": 0.25}, step)
        lines.batch_end(at(step), log)  # pyright: ignore[reportArgumentType]
    lines.fit_end(at(160), log)  # pyright: ignore[reportArgumentType]
    assert len(caplog.messages) == 3
    assert caplog.messages[1] == "step 160 (16.0 %): loss 0.5, 1 steps/s, 15 min left"


def test_a_run_that_is_too_short_for_a_speed_shows_its_loss(caplog) -> None:
    caplog.set_level(logging.INFO)
    lines = ProgressLines()
    lines.log_metrics({TRAIN_LOSS: 0.5}, 5)
    lines.fit_end(at(6), SimpleNamespace())  # pyright: ignore[reportArgumentType]
    assert caplog.messages == ["step 6 (0.6 %): loss 0.5"]
