"""A run that was killed, pre-empted, put back and ended, on one and two ranks: its report, and each point once."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.distributed import PREEMPTED_EXIT_CODE
from diffusion.formats.run_folder import TRAIN_LOSS
from diffusion.reports.run import read_run
from diffusion.reports.run_page import write_report
from tests.tools.image_marks import read_mark
from tests.tools.logged_points import stored_records, tensorboard_points, wandb_rows
from tests.tools.toys import API_KEY

pytestmark = pytest.mark.slow

NUM_STEPS, KILLED_AT = 24, 8
PROMPTS = ["a red circle", "a blue star", "a green square"]
IN_ENVIRONMENT, IN_CONFIG, IN_URL = "planted-0-environment", API_KEY, "planted-2-url"


def signal_at(step: int, number: int) -> str:
    quoted = f"{{path: tests.tools.toys.SignalAt, arguments: {{step: {step}, number: {number}}}}}"
    return f"plugins.callbacks=[{quoted}, {SECRETIVE}]"


SECRETIVE = (
    "{path: tests.tools.toys.Secretive, "
    f"arguments: {{api_key: {IN_CONFIG}, url: 'https://me:{IN_URL}@host/x', note: '${{oc.env:TEST_STORE_PASSWORD}}'}}}}"
)


@pytest.fixture(scope="module")
def run(server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after steps that no checkpoint has, then pre-empted, then put back, and ended."""
    root = tmp_path_factory.mktemp("report")
    folder = root / "run"
    options = [
        f"output_folder={folder}",
        f"trainer.max_duration={NUM_STEPS}ba",
        "trainer.save_interval=5ba",
        f"samples.prompts=[{', '.join(PROMPTS)}]",
        "samples.interval=8ba",
        "group=study",
        "loggers={tensorboard: true, wandb: {project: toy, tags: [a, b]}}",
        "loggers.utilisation_interval=4",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_STORE_PASSWORD", IN_ENVIRONMENT)
        assert server.run(1, [("tests/tools/toy.yaml", [*options, signal_at(KILLED_AT, 9)])]).codes == [-9]
        codes = server.run(2, [("tests/tools/toy.yaml", [*options, signal_at(13, 15)])]).codes
        assert codes == [PREEMPTED_EXIT_CODE] * 2
        newest = resolve_checkpoint(str(folder))
        assert batch_of(newest) == 15
        shutil.rmtree(newest)
        server.train(1, [("tests/tools/toy.yaml", [*options, f"plugins.callbacks=[{SECRETIVE}]"])])
    return folder


def wandb_records(run: Path) -> Iterator[tuple[str, Any]]:
    """Kind and content of each record in the offline files, as `wandb sync` reads them."""
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 3
    for path in files:
        if not path.stat().st_size:
            continue
        for content in stored_records(path):
            record: Any = Record()
            record.ParseFromString(content)
            yield record.WhichOneof("record_type"), record


def test_starts_say_when_where_and_how_they_ended(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["start", "start", "end", "start", "end"]
    assert [row["step"] for row in rows] == [0, 5, 15, 10, NUM_STEPS]
    assert [row["world_size"] for row in rows if row["event"] == "start"] == [1, 2, 1]
    assert rows[2]["signal"] == "SIGTERM"
    assert rows[4]["is_finished"]
    assert rows[0]["versions"]["torch"]


def test_the_report_of_the_run(run: Path) -> None:
    found = read_run(run)
    assert (found.status, found.num_steps) == ("finished", NUM_STEPS)
    assert [one.end for one in found.starts] == ["killed", "pre-empted (SIGTERM)", "finished"]
    assert 5 < found.num_steps_redone <= 5 + 3
    write_report([found], run / "report.html")
    page = (run / "report.html").read_text()
    assert all(prompt in page for prompt in PROMPTS)
    assert "average of the weights (EMA)" in page
    assert "3 starts" in page or ">3<" in page


def test_a_grid_says_what_it_shows(run: Path) -> None:
    with Image.open(run / "samples" / "step-000024.png") as grid:
        shown = json.loads(grid.info["samples"])
    assert (shown["prompts"], shown["weights"], shown["step"]) == (PROMPTS, "ema", NUM_STEPS)
    assert read_mark(run / "samples" / "step-000024.png")["AISystemUsed"] == f"toy step {NUM_STEPS} ema"


def test_wandb_has_configuration_group_tags_and_captions(run: Path) -> None:
    records = list(wandb_records(run))
    runs = [record.run for kind, record in records if kind == "run"]
    assert {(one.run_group, one.job_type, one.project, tuple(one.tags)) for one in runs} == {
        ("study", "train", "toy", ("a", "b"))
    }
    assert len({one.run_id for one in runs}) == 1
    config = {item.key: json.loads(item.value_json) for item in runs[-1].config.update}
    assert config["trainer"]["max_duration"] == f"{NUM_STEPS}ba"
    assert config["optimizer"]["lr"] == 1e-3
    assert config["plugins"]["callbacks"][0]["arguments"]["api_key"] == "***"
    files = [
        name
        for kind, record in records
        if kind == "history"
        for item in record.history.item
        if list(item.nested_key) == ["samples", "filenames"]
        for name in json.loads(item.value_json)
    ]
    assert len(files) == len(set(files)) == 3 * len(PROMPTS), "an image is missing, or logged twice"
    there = {path.name for path in run.glob("wandb/offline-run-*/files/media/images/*.png")}
    assert {Path(name).name for name in files} <= there
    captions = [
        json.loads(item.value_json)
        for kind, record in records
        if kind == "history"
        for item in record.history.item
        if list(item.nested_key) == ["samples", "captions"]
    ]
    assert captions
    assert all(found == PROMPTS for found in captions)


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
    assert steps_of("time/checkpoint_stall", points, but=resumed_at) == [5, 10, 15, 20, NUM_STEPS]
    assert steps_of("lr-AdamW/group0", points, but=resumed_at) == list(range(1, NUM_STEPS + 1))
    assert steps_of("samples", points, but=resumed_at) == [8, 16, NUM_STEPS]


def test_wandb_gets_the_points_of_all_starts_in_files_of_one_run(run: Path) -> None:
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len({path.name for path in files}) == 1, "the run has changed its id"
    points = [(name, row["_step"]) for path in files for row in wandb_rows(path) for name in row if name[0] != "_"]
    # What wandb had not written when the run was killed is in the metrics file only.
    assert {step for name, step in points if name == TRAIN_LOSS} >= set(range(KILLED_AT, NUM_STEPS))
    assert {8, 16, NUM_STEPS} <= {step for name, step in points if name == "samples"}


def test_no_secret_is_in_what_wandb_the_loggers_and_the_report_write(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TEST_STORE_PASSWORD", IN_ENVIRONMENT
    )  # Under a harmless name, a secret is known by its variable.
    write_report([read_run(run)], run / "report.html")
    places = [
        *run.glob("wandb/**/*"),
        *run.parent.glob("job-*/*"),
        *run.glob("*.jsonl"),
        run / "report.html",
        *run.glob("samples/*"),
        run / "config.yaml",
        *run.glob("checkpoints/**/*"),
    ]
    files = [path for path in places if path.is_file()]
    assert len(files) > 12
    for path in files:
        content = path.read_bytes()
        for secret in (IN_ENVIRONMENT, IN_CONFIG, IN_URL):
            assert secret.encode() not in content, (secret, path)
