"""Files of TensorBoard and wandb after interruptions: each point once."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

from diffusion.callbacks.continued_loggers import LoggedPoints, read_wandb, tensorboard_points, wandb_points
from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.launch import PREEMPTED_EXIT_CODE

NUM_STEPS = 16


def signal_at(step: int, number: int) -> str:
    return f"plugins.callbacks=[{{path: tests.tools.toys.SignalAt, arguments: {{step: {step}, number: {number}}}}}]"


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
    assert server.run(1, [("tests/tools/toy.yaml", [*options, signal_at(9, 9)])]).codes == [-9]
    assert batch_of(resolve_checkpoint(str(folder))) == 5
    assert server.run(1, [("tests/tools/toy.yaml", [*options, signal_at(11, 15)])]).codes == [PREEMPTED_EXIT_CODE]
    newest = resolve_checkpoint(str(folder))
    assert batch_of(newest) == 13
    shutil.rmtree(newest)
    server.train(1, [("tests/tools/toy.yaml", options)])
    return folder


def check_once(points: list[tuple[str, int]], images: list[int]) -> None:
    doubled = [point for point, num in Counter(points).items() if num > 1]
    assert not doubled
    assert sorted(step for name, step in points if name == TRAIN_LOSS) == list(range(NUM_STEPS))
    assert sorted(step for name, step in points if name == "samples") == images


def tensorboard_files(run: Path) -> list[tuple[str, int]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted((run / "tensorboard" / "toy").glob("events.out.tfevents.*"))
    assert len(files) > 3
    events: list[Any] = [event for path in files for event in EventFileLoader(str(path)).Load()]
    return [(value.tag, event.step) for event in events for value in event.summary.value]


def test_tensorboard_has_each_point_once(run: Path) -> None:
    points = tensorboard_files(run)
    assert len({name for name, _ in points}) > 5
    check_once(points, images=[5, 10, 15, 16])


def test_wandb_has_each_point_once_in_files_of_one_run(run: Path) -> None:
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 3
    assert len({path.name for path in files}) == 1, "the run has changed its id"
    points = [(name, row["_step"]) for path in files for row in read_wandb(path) for name in row if name[0] != "_"]
    check_once(points, images=[10, 15, 16])  # That of step 5 was lost with the process, and is in samples/ only.


def test_what_wandb_had_not_written_when_the_run_was_killed_comes_from_the_metrics_file(run: Path) -> None:
    first, second, _ = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert list(read_wandb(first)) == [], "wandb now writes at once: the test has lost its meaning"
    logged = {row["_step"]: row[TRAIN_LOSS] for row in read_wandb(second) if TRAIN_LOSS in row}
    steps, losses = series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)
    expected = dict(zip(steps, losses, strict=True))
    assert list(logged) == list(range(13))
    assert logged == pytest.approx({step: expected[step] for step in logged}, abs=0)


def test_points_of_the_run_as_they_are_read_when_it_continues(run: Path) -> None:
    for points in (tensorboard_points(run / "tensorboard" / "toy", 10), wandb_points(run, "*")):
        assert points.has(TRAIN_LOSS, NUM_STEPS - 1)
        assert not points.has(TRAIN_LOSS, NUM_STEPS)
        assert not points.has("another", 0)
        assert points.without({TRAIN_LOSS: 1.0, "another": 2.0}, 3) == {"another": 2.0}
    assert LoggedPoints().last_step == -1


def test_a_wandb_file_that_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    store = DataStore()
    store.open_for_write(str(path))
    for step in range(3):
        record: Any = Record()
        for name, value in (("loss", step / 2), ("_step", step)):
            record.history.item.add(nested_key=[name], value_json=str(value))
        store.write(record)
    store.close()
    assert list(read_wandb(path)) == [{"loss": step / 2, "_step": step} for step in range(3)]
    for num_bytes in (1, 5, 20):
        cut = tmp_path / f"cut-{num_bytes}.wandb"
        cut.write_bytes(path.read_bytes()[:-num_bytes])
        assert list(read_wandb(cut)) == [{"loss": step / 2, "_step": step} for step in range(2)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("wandb", "reason"),
    [("{offline: false}", "api_key not configured"), ("{project: 'a/b:c'}", "project name 'a/b:c'")],
)
def test_what_wandb_refuses_is_told_once_with_what_to_do(server, tmp_path: Path, wandb: str, reason: str) -> None:
    program = ["run.py", "tests/tools/toy.yaml", f"output_folder={tmp_path / 'run'}", f"loggers.wandb={wandb}"]
    account = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "HOME": str(tmp_path)}
    job = server.start(2, program, **account).finish()
    assert job.codes == [2, 2], job.output
    assert job.output.count("Error: ") == 1
    assert "loggers.wandb: Weights & Biases does not start: " in job.output
    assert reason in job.output
    assert "loggers.wandb.offline=true" in job.output
    assert "Traceback" not in job.output
