import json
import math
import tracemalloc
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from matplotlib.axes import Axes
from PIL import Image

from diffusion.callbacks import metrics_file
from diffusion.callbacks.metrics_file import (
    TRAIN_LOSS,
    LossCurve,
    MetricsFile,
    draw_loss_curve,
    read_metrics,
    running_mean,
    series,
)
from diffusion.reports.curves import MAX_BINS, Curve


def state_at(step: int):
    return SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)))


def test_a_row_holds_everything_of_a_step(tmp_path):
    metrics = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    metrics.fit_start(state_at(0), None)
    metrics.log_metrics({TRAIN_LOSS: 1.0}, step=0)
    metrics.log_metrics({"lr": 0.5}, step=0)
    metrics.log_metrics({TRAIN_LOSS: 0.5}, step=1)
    assert read_metrics(metrics.path) == [{"step": 0, TRAIN_LOSS: 1.0, "lr": 0.5}]
    metrics.fit_end(state_at(2), None)
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


def points(curves: Mapping[str, Curve]) -> dict[str, tuple[list[float], list[float]]]:
    return {name: (curve.steps, curve.means) for name, curve in curves.items()}


def test_drawing_at_an_evaluation_shows_its_numbers_and_leaves_the_row_whole(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(metrics_file, "draw_loss_curve", lambda losses, path, title: drawn.append(points(losses)))
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    curve = LossCurve(metrics, tmp_path / "loss.png", "a run")
    metrics.log_metrics({TRAIN_LOSS: 1.0}, step=0)
    metrics.log_metrics({"metrics/validation/loss": 0.5}, step=1)
    curve.eval_end(state_at(1), None)
    metrics.log_metrics({TRAIN_LOSS: 0.9}, step=1)
    metrics.log_metrics({TRAIN_LOSS: 0.8}, step=2)
    first = {"step": 0, TRAIN_LOSS: 1.0}
    assert drawn == [{TRAIN_LOSS: ([0], [1.0]), "metrics/validation/loss": ([1], [0.5])}]
    assert read_metrics(metrics.path) == [first, {"step": 1, "metrics/validation/loss": 0.5, TRAIN_LOSS: 0.9}]


def test_running_mean_is_over_the_last_values():
    assert running_mean([1.0, 2.0, 3.0, 4.0], 2) == pytest.approx([1.0, 1.5, 2.5, 3.5])


def test_the_curve_holds_every_step_of_a_short_run_also_of_its_earlier_starts(tmp_path):
    losses = [1 / (step + 1) for step in range(300)]
    rows = [{"step": step, TRAIN_LOSS: loss, "metrics/validation/loss": 2 * loss} for step, loss in enumerate(losses)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = MetricsFile(path)
    metrics.fit_start(state_at(200), None)
    for step in range(200, 300):
        metrics.log_metrics({TRAIN_LOSS: losses[step]}, step=step)
    steps = list(range(300))
    assert points(metrics.losses)[TRAIN_LOSS] == (steps, pytest.approx(losses))
    assert points(metrics.losses)["metrics/validation/loss"][0] == steps[:201], "that of step 200 was in the checkpoint"


def test_what_the_curve_takes_does_not_grow_with_the_run(tmp_path, monkeypatch):
    path, num_steps = tmp_path / "metrics.jsonl", 20_000
    with path.open("w") as file:
        file.writelines(json.dumps({"step": step, TRAIN_LOSS: 1.0, "lr": 0.1}) + "\n" for step in range(num_steps))
    metrics = MetricsFile(path)
    tracemalloc.start()
    metrics.fit_start(state_at(num_steps), None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6
    assert path.read_bytes().count(b"\n") == num_steps
    curve = metrics.losses[TRAIN_LOSS]
    assert (len(curve.steps) <= MAX_BINS, curve.num_values) == (True, num_steps)
    path.unlink()
    LossCurve(metrics, tmp_path / "loss.png", "a run").fit_end(state_at(num_steps), None)
    assert (tmp_path / "loss.png").is_file(), "drawn without reading the file again"


@pytest.mark.parametrize("finite", [0, 5])
def test_losses_that_are_not_finite_are_told_and_left_out(tmp_path, finite, monkeypatch):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(10):
        metrics.log_metrics({TRAIN_LOSS: 1.0 if step < finite else math.nan}, step=step)
    titles = []
    setter = Axes.set
    monkeypatch.setattr(Axes, "set", lambda self, **words: titles.append(words["title"]) or setter(self, **words))
    LossCurve(metrics, tmp_path / "loss.png", "a run").eval_end(state_at(10), None)
    assert titles == [f"a run (not finite: {10 - finite} steps from step {finite} on)"]


def test_the_curve_is_an_image_with_something_on_it(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(50):
        metrics.log_metrics({TRAIN_LOSS: 1 / (step + 1), "metrics/validation/loss": 1.0}, step=step)
    draw_loss_curve(metrics.losses, tmp_path / "loss.png", "a run")
    image = Image.open(tmp_path / "loss.png").convert("RGB")
    assert image.width > 600
    assert len(image.getcolors(maxcolors=2**24)) > 50
