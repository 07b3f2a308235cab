"""Metrics in bounded memory, run folders as they are read, and the page of a run."""

import base64
import datetime
import itertools
import json
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from PIL.PngImagePlugin import PngInfo

from diffusion.errors import ConfigurationError
from diffusion.evaluation.protocol import Number, Result, protocol_hash
from diffusion.files import read_json_lines
from diffusion.formats.run_folder import TRAIN_LOSS, checkpoint_folder
from diffusion.operations.costs import Activity, CostsFile, StartCosts
from diffusion.reports.run import Curve, read_curves, read_phases, read_run, read_starts
from diffusion.reports.run_page import (
    STREAM_LOSS,
    THROUGHPUT,
    facts,
    find_metrics,
    metrics_section,
    plan_table,
    read_evaluations,
    write_report,
)

CONFIG = """
run_name: {name}
model: {{architecture: tiny, network: {{block_out_channels: [16, 32], norm_num_groups: 4}}}}
data: {{representation: latents, resolution: 32, global_batch_size: 8}}
trainer: {{max_duration: 100ba, device: cpu, precision: fp32}}
plan: {{images_per_second: 2, price_per_gpu_hour: 3}}
plugins:
  train_dataset: {{path: tests.tools.toys.ToyLatents}}
  callbacks: [{{path: a.B, arguments: {{api_key: planted-value}}}}]
"""


def at(second: int) -> str:
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return (begin + datetime.timedelta(seconds=second)).isoformat()


def start(step: int, second: int, **more: object) -> dict[str, object]:
    return {"event": "start", "time": at(second), "step": step, "world_size": 2, "device": "CPU", **more}


STARTS = [
    start(0, 0),
    start(10, 100, reached_before=14, written_before=at(90)),
    {"event": "end", "time": at(200), "step": 31, "signal": "SIGTERM"},
    start(31, 300),
    {"event": "end", "time": at(400), "step": 40},
    start(40, 500),
]


def write_run(folder: Path, rows: list[dict[str, float]]) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(name=folder.name))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 99, "los')
    return folder


def test_intervals_are_widened_and_keep_means_and_extremes() -> None:
    curve = Curve(max_bins=16)
    values = np.random.default_rng(0).normal(size=1000)
    for step, value in enumerate(values.tolist()):
        curve.add(step, value)
    assert curve.width == 64
    assert curve.steps == list(range(0, 1000, 64))
    parts = [values[first : first + 64] for first in range(0, 1000, 64)]
    assert curve.means == pytest.approx([part.mean() for part in parts])
    lowest, highest = curve.extremes
    assert lowest == pytest.approx([part.min() for part in parts])
    assert highest == pytest.approx([part.max() for part in parts])
    assert (curve.num_values, curve.total) == (1000, pytest.approx(values.sum()))
    assert (curve.last_step, curve.last) == (999, values[-1])


def test_rows_of_a_step_are_merged() -> None:
    curves, num_damaged = read_curves([{"step": 1, "a": 1.0}, {"step": 2, "b": 1.0}, {"step": 2, "a": 3.0}])
    assert num_damaged == 0
    assert (curves["a"].steps, curves["a"].means, curves["b"].steps) == ([1, 2], [1.0, 3.0], [2])


def test_numbers_that_are_not_finite_are_counted_and_left_out() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        curve.add(step, value)
    assert (curve.num_not_finite, curve.first_not_finite, curve.means) == (2, 1, [1.0, 2.0])


@pytest.mark.parametrize("num_finite", [0, 20])
def test_a_loss_that_ends_not_finite_is_reported(tmp_path: Path, num_finite: int) -> None:
    rows = [{"step": step, TRAIN_LOSS: 1.0 if step < num_finite else math.nan} for step in range(30)]
    run = read_run(write_run(tmp_path / "run", rows))
    write_report([run], tmp_path / "report.html")
    assert run.num_steps == 30
    assert ("Training loss", "not finite") in [one[:2] for one in facts(run)]


def test_throughput_is_the_images_of_all_steps_over_their_time(tmp_path: Path) -> None:
    speeds = [50.0] * 1000 + [2000.0] * 1000
    run = read_run(write_run(tmp_path / "run", [{"step": i, THROUGHPUT: speed} for i, speed in enumerate(speeds)]))
    assert ("Throughput", "2,000 images/s", "mean of the run 97.56 images/s") in facts(run)
    table = plan_table(run)
    assert table is not None
    assert table.set_index("").loc["throughput"].tolist() == ["2 images/s", "97.56 images/s", "4878.0%"]


def test_streams_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    streams = [f"{STREAM_LOSS}{name}" for name in ("512x2048", "1024x960", "1024x1024")]
    run = read_run(write_run(tmp_path / "run", [{"step": 0, **dict.fromkeys(streams[::-1], 1.0)}]))
    assert find_metrics([run], STREAM_LOSS) == streams


def test_a_damaged_line_is_left_out_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "a": 1}\n{"step": 1, "a"\n[3]\n\xff\xfe\n{"step": 2, "a": 3}\n{"step": 3, "a": 4')
    curves, num_damaged = read_curves(read_json_lines(path))
    assert curves["a"].means == [1.0, 3.0]
    assert num_damaged == 4


def test_memory_does_not_grow_with_the_number_of_steps() -> None:
    def peak(num_steps: int) -> int:
        tracemalloc.start()
        read_curves({"step": step, "a": step * 0.5, "b": -step * 0.5} for step in range(num_steps))
        _, result = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return result

    assert peak(40_000) < 1.5 * peak(4_000)


def test_starts_tell_how_each_ended_what_was_redone_and_how_long_it_ran(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": step, TRAIN_LOSS: 1.0} for step in range(50)])
    (folder / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STARTS))
    last_written = datetime.datetime.fromisoformat(at(600))
    starts = read_starts(STARTS, last_written)
    assert [one.end for one in starts] == ["killed", "pre-empted (SIGTERM)", "ended early", ""]
    assert [round(3600 * one.hours) for one in starts] == [90, 100, 100, 100]
    run = read_run(folder)
    assert run.num_steps_redone == 14 - 10
    assert run.gpu_hours == pytest.approx(2 * sum(one.hours for one in run.starts))
    assert (run.num_steps, run.num_planned, run.status) == (50, 100, "in progress, or killed")
    assert not read_starts([], last_written)


def test_hours_and_dollars_are_those_of_the_costs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 0, TRAIN_LOSS: 1.0}])
    (folder / "starts.jsonl").write_text(json.dumps(start(0, 0)) + "\n")
    for price, starting in ((3.0, 1800.0), (6.0, 0.0)):
        file = CostsFile(folder)
        seconds = {Activity.starting.value: starting, Activity.training.value: 3600.0}
        file.write(StartCosts(began=0, ended=1, num_devices=2, price=price, step=0, reached=1, seconds=seconds))
        file.close()
    run = read_run(folder)
    assert (run.wall_hours, run.gpu_hours) == (2.5, 5.0)
    table = plan_table(run)
    assert table is not None
    assert table["actual"].to_list()[-4:-1] == ["2:30:00", "5.00", "$21.00"]
    assert "5.00 rank-hours" in str(facts(run))


EVENTS = [
    {"time": at(1), "event": "started", "reason": ""},
    {"time": at(50), "event": "slow_data", "reason": "no batch for 60 s"},
    {"time": at(62), "event": "data_came", "reason": ""},
    {"time": at(100), "event": "hang", "reason": "no sign of any rank", "step": 20},
    {"time": at(101), "event": "ended", "reason": "no sign of any rank", "step": 20, "code": 124},
    {"time": at(111), "event": "unfit", "reason": "no room: free space", "host": "n3"},
    {"time": at(112), "event": "started", "reason": ""},
    {"time": at(300), "event": "rolling_back", "reason": "the loss of step 31 is nan"},
    {
        "time": at(301),
        "event": "ended",
        "reason": "RolledBackError: the loss of step 31 is nan",
        "step": 31,
        "code": 75,
    },
]


def test_the_timeline_has_events_and_rollbacks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": step, TRAIN_LOSS: 1.0} for step in range(50)])
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVENTS) + '{"time"')
    wrong = {"step": 31, "loss": "nan", "limit": 30, "skipped": [30, 31]}
    second = datetime.datetime.fromisoformat(at(302)).timestamp()
    (folder / "rollbacks.jsonl").write_text(json.dumps({**wrong, "time": second}) + "\n")
    run = read_run(folder)
    assert run.timeline["event"].tolist() == ["slow_data", "hang", "ended", "unfit", "ended", "rollback"]
    assert run.timeline["step"].fillna(-1).tolist() == [-1, 20, 20, -1, 31, 31]
    write_report([run], folder / "report.html")
    page = (folder / "report.html").read_text()
    for text in ("n3: no room: free space", "30, 31"):
        assert text in page, text
    [svg] = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert "rollback" in base64.b64decode(svg).decode()


def test_a_run_in_its_first_steps_has_a_page_that_says_what_would_make_the_missing_parts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    write_report([read_run(folder)], folder / "report.html")
    page = (folder / "report.html").read_text()
    keys = ("samples.prompts", "evaluate.py", "trainer.eval_interval", "loggers.utilisation_interval", "starts.jsonl")
    for key in keys:
        assert key in page, key
    assert "<img" not in page


def test_a_page_of_two_phases_has_all_parts_and_no_secret(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = []
    for step in range(60):
        row = {
            "step": step,
            TRAIN_LOSS: 2 / (step + 1),
            "loss/train/stream/a$b": 1.0,
            "throughput/samples_per_sec": 4.0,
            "throughput/device/mfu": 0.4321,
            "time/data_waiting_share": 0.0625,
        }
        rows.append(row)
        if step % 20 == 19:
            losses = {
                f"metrics/validation/loss/timesteps/{low}-{low + 99}": 1 / (low + 1) for low in range(0, 1000, 100)
            }
            rows.append({"step": step, "metrics/validation/loss": 0.5, "time/checkpoint_stall": 2.0, **losses})
    folders = [write_run(tmp_path / name, rows) for name in ("one", "two")]
    (folders[0] / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STARTS))
    Image.new("RGB", (60, 30), "red").save(folders[1] / "samples" / "step-000020.png")
    results = folders[1] / "evaluation" / "results"
    for step in (20, 40):
        for scale in (1.0, 3.0):
            numbers = {
                "fid": Number(value=step + scale, protocol={"images": 10}),
                "compositional/count": Number(value=scale / 4, protocol={"detector": "oracle"}),
            }
            Result(name=f"ep0-ba{step}", path="", step=step, guidance_scale=scale, numbers=numbers).write(
                folders[1] / "evaluation"
            )
    (results / "damaged.json").write_text("{")
    runs = read_phases(folders)
    assert [run.first_step for run in runs] == [0, 60]
    write_report(runs, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "planted-value" not in page
    for text in ("<td>21</td>", "<td>43</td>", "<td>0.75</td>", "43.2%", "6.2%", "60.0%", "two, step 20"):
        assert text in page, text
    for protocol in ({"images": 10}, {"detector": "oracle"}):
        assert protocol_hash(protocol)[:8] in page
    assert "pre-empted (SIGTERM)" in page
    assert len(re.findall(r"skipped: 1\b", page)) == 3, "damaged results, and a damaged line of metrics in each phase"
    assert page.count("data:image/svg+xml") == 9
    write_report(runs, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text() == page


def test_a_page_leaves_out_damaged_samples_and_takes_a_damaged_marker_for_a_signal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 0, TRAIN_LOSS: 1.0}])
    for step, size in ((10, None), (20, 100), (30, 0)):
        path = folder / f"samples/step-{step}.png"
        Image.effect_noise((60, 30), 50).save(path)
        path.write_bytes(path.read_bytes()[:size])
    (folder / "preempted.json").touch()
    write_report([read_run(folder)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"run, step (\d+)", page)) == {"10"}
    assert "pre-empted by a signal" in page


def test_samples_of_someone_else_end_no_page_and_start_no_program(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: pytest.fail("it was started"))
    folder, image = write_run(tmp_path / "run", [{"step": 0, TRAIN_LOSS: 1.0}]), Image.new("RGB", (60, 30))
    image.save(folder / "samples/step-40.png", "EPS")
    for step, text in enumerate(('["a"]', '{"guidance_scale": "7"}', '{"prompts": 7}', "{}"), start=50):
        info = PngInfo()
        info.add_text("samples", text)
        image.save(folder / f"samples/step-{step}.png", pnginfo=info)
    write_report([read_run(folder)], tmp_path / "report.html")
    assert set(re.findall(r"run, step (\d+)", (tmp_path / "report.html").read_text())) == {"53"}


def test_results_of_several_output_folders_are_apart(tmp_path: Path) -> None:
    for run, value in (("one", 1.0), ("two", 2.0)):
        numbers = {"fid": Number(value=value, protocol={"images": 10})}
        result = Result(name="ep0-ba20-raw", path="", step=20, weights="raw", numbers=numbers)
        result.write(tmp_path / "evaluation" / run)
    points, _ = read_evaluations([tmp_path / "evaluation"])
    models = {"evaluation/one ep0-ba20-raw": 1.0, "evaluation/two ep0-ba20-raw": 2.0}
    assert dict(zip(points["model"], points["value"], strict=True)) == models
    assert list(points["weights"]) == ["evaluation/one raw", "evaluation/two raw"]


def test_figures_show_guidance_scales_of_the_whole_range_and_how_many(tmp_path: Path) -> None:
    for step, scale in itertools.product((20, 40), range(1, 17)):
        numbers = {"fid": Number(value=scale, protocol={})}
        Result(name=f"ba{step}", path="", step=step, guidance_scale=scale, numbers=numbers).write(tmp_path)
    figures = metrics_section([], [tmp_path])["figures"]
    assert [caption.partition(") over ")[2] for caption in figures] == [
        "the guidance scale",
        "checkpoints, 6 of 16 curves",
    ]
    _, svg = (base64.b64decode(uri.partition(",")[2]).decode() for uri in figures.values())
    assert re.findall(r"<!--.* at guidance (\d+) -->", svg) == ["1", "4", "7", "10", "13", "16"]


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.yaml"):
        read_run(tmp_path)


def test_a_configuration_of_another_version_is_shown_without_a_plan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [{"step": 0, TRAIN_LOSS: 1.0}])
    (folder / "config.yaml").write_text("run_name: old\nnot_a_key: {password: planted-value}\n")
    write_report([read_run(folder)], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "actual / planned" not in page
    assert "planted-value" not in page
    assert "not_a_key" in page


@pytest.mark.parametrize("content", [b"\x80", b"a: [", b"[1]", b"3"])
def test_a_damaged_configuration_is_an_error_of_the_folder(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    for read in (read_run, checkpoint_folder):
        with pytest.raises(ConfigurationError, match=r"config\.yaml"):
            read(tmp_path)
