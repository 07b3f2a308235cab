"""TensorBoard, wandb and progress lines of runs that are interrupted: each point once."""

import logging
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffusion.callbacks import loggers
from diffusion.callbacks.loggers import ProgressLines
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.distributed import PREEMPTED_EXIT_CODE
from diffusion.formats.run_folder import TRAIN_LOSS
from tests.tools.logged_points import tensorboard_points, wandb_rows
from tests.tools.runs import signal_at

NUM_STEPS = 16
KILLED_AT = 9


@pytest.fixture(scope="module")
def run(server, tmp_path_factory) -> Path:
    """A run that was killed after steps that no checkpoint has, then pre-empted, then put back, and ended."""
    root = tmp_path_factory.mktemp("logged")
    folder = root / "run"
    options = [
        f"output_folder={folder}",
        f"trainer.max_duration={NUM_STEPS}ba",
        "trainer.save_interval=5ba",
        "samples.interval=5ba",
        "loggers.tensorboard=true",
        "loggers.wandb={project: toy}",
    ]
    assert server.run(1, [("tests/tools/toy.yaml", [*options, signal_at(KILLED_AT, 9)])]).codes == [-9]
    assert batch_of(resolve_checkpoint(str(folder))) == 5
    assert server.run(1, [("tests/tools/toy.yaml", [*options, signal_at(11, 15)])]).codes == [PREEMPTED_EXIT_CODE]
    newest = resolve_checkpoint(str(folder))
    assert batch_of(newest) == 13
    shutil.rmtree(newest)
    server.train(1, [("tests/tools/toy.yaml", options)])
    return folder


def steps_of(name: str, points: list[tuple[str, int]], *, but: tuple[int, ...]) -> list[int]:
    """Steps of the points of a name; each point is there once, but for those of some steps."""
    assert not [point for point, num in Counter(points).items() if num > 1 and point[1] not in but]
    return sorted({step for other, step in points if other == name})


def test_tensorboard_shows_the_points_of_repeated_steps_once(run: Path) -> None:
    folder = run / "tensorboard" / "toy"
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 3
    points = tensorboard_points(folder)
    assert len({name for name, _ in points}) > 5
    resumed_at = (5, 10)
    assert steps_of(TRAIN_LOSS, points, but=resumed_at) == list(range(NUM_STEPS))
    assert steps_of("time/checkpoint_stall", points, but=resumed_at) == [5, 10, 15, 16]
    assert steps_of("lr-AdamW/group0", points, but=resumed_at) == list(range(1, NUM_STEPS + 1))
    assert steps_of("samples", points, but=resumed_at) == [5, 10, 15, 16]


def test_wandb_gets_the_points_of_all_starts_in_files_of_one_run(run: Path) -> None:
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 3
    assert len({path.name for path in files}) == 1, "the run has changed its id"
    points = [(name, row["_step"]) for path in files for row in wandb_rows(path) for name in row if name[0] != "_"]
    # What wandb had not written when the run was killed is in the metrics file only.
    assert {step for name, step in points if name == TRAIN_LOSS} >= set(range(KILLED_AT, NUM_STEPS))
    assert {10, 15, 16} <= {step for name, step in points if name == "samples"}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("wandb", "reason"),
    [("{offline: false}", "API key"), ("{project: 'a/b:c'}", "project name 'a/b:c'")],
)
def test_an_error_of_wandb_is_reported_once_with_its_key(server, tmp_path: Path, wandb: str, reason: str) -> None:
    program = ["run.py", "tests/tools/toy.yaml", f"output_folder={tmp_path / 'run'}", f"loggers.wandb={wandb}"]
    account = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    job = server.start(2, program, **account).finish()
    assert job.codes == [2, 2], job.output
    assert job.output.count("Error: ") == 1
    assert "loggers.wandb: " in job.output
    assert reason in job.output
    assert "loggers.wandb.offline=true" in job.output
    assert "Traceback" not in job.output


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
    assert caplog.messages[1] == "step 160 (16.0 %): loss 0.5, 1 steps/s, 0.2 h left"


def test_a_run_that_is_too_short_for_a_speed_shows_its_loss(caplog) -> None:
    caplog.set_level(logging.INFO)
    lines = ProgressLines()
    lines.log_metrics({TRAIN_LOSS: 0.5}, 5)
    lines.fit_end(at(6), SimpleNamespace())  # pyright: ignore[reportArgumentType]
    assert caplog.messages == ["step 6 (0.6 %): loss 0.5"]
