"""A watcher of two ranks that is started before, during and after a run in an object store, and killed once."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffusion.evaluation.watch import LEDGER, LedgerEntry, WatchLoggers, read_ledger
from diffusion.operations.lease import Applicant
from tests.tools.evaluation_toys import overrides, write_images, write_prompts
from tests.tools.logged_points import tensorboard_points, wandb_rows
from tests.tools.s3_server import S3Server, s3_process
from tests.tools.training_runs import Job, TrainingServer

pytestmark = [pytest.mark.slow, pytest.mark.s3, pytest.mark.world_size(2)]

__all__ = ["s3_process"]

STEPS = [2, 4, 6, 8]
NUM_RANKS = 2
URL = "s3://tests/watched"


def state_of(folder: Path) -> dict[str, int]:
    kinds = ("results/*.json", "images/*/prompts/*.png")
    return {str(path): path.stat().st_mtime_ns for kind in kinds for path in folder.glob(kind)}


@pytest.fixture(scope="module")
def watched(
    server: TrainingServer, s3_process: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, int]]:
    """Output folder and run folder after three watchers, the first one killed; files before the third."""
    root = tmp_path_factory.mktemp("watch")
    write_images(root / "reference", 5)
    write_prompts(root / "prompts.txt", ["a red star", "a blue star"])
    run, output = root / "run", root / "evaluation"
    of_watcher = overrides(
        root,
        output,
        f"model={URL}",
        "protocol.metrics=[fid]",
        "protocol.sampling.num_inference_steps=1",
        "guidance_scales=[1.0]",
        "weights=[raw, ema]",
        "poll_seconds=0.2",
        "loggers={tensorboard: true, wandb: {offline: true}}",
    )

    def start_watcher() -> Job:
        command = ["evaluate.py", "tests/tools/toy_evaluation.yaml", "watch=true", *of_watcher]
        return server.start(NUM_RANKS, command, WANDB_SILENT="true", **s3_process.environment)

    first = start_watcher()
    of_run = [f"output_folder={run}", f"trainer.checkpoint_folder={URL}", "loggers.tensorboard=true"]
    training = server.start_training(1, [("tests/tools/toy.yaml", of_run)], **s3_process.environment)
    first.wait_for(lambda: any((output / LEDGER).glob("*.json")))
    first.kill()
    second = start_watcher()
    for job in (training, second):
        ended = job.finish()
        assert not any(ended.codes), ended.output[-3000:]
    before = state_of(output)
    assert not any(start_watcher().finish().codes)
    return output, run, before


def test_each_checkpoint_is_evaluated_once(watched):
    output, _, before = watched
    ledger = read_ledger(output / LEDGER, URL)
    found = {name: (entry.step, entry.skipped, entry.is_last) for name, entry in ledger.items()}
    assert found == {f"ep0-ba{step}": (step, None, step == STEPS[-1]) for step in STEPS}
    # The average starts after 3 steps, so the first checkpoint has none.
    names = {f"ep0-ba{step}-{weights}-cfg1.json" for step in STEPS for weights in ("raw", "ema")} - {
        "ep0-ba2-ema-cfg1.json"
    }
    assert {path.name for path in (output / "results").iterdir()} == names
    assert state_of(output) == before
    assert not list((output / "copies").iterdir())


def test_numbers_stand_at_the_steps_of_training(watched):
    output, _, _ = watched
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == STEPS
    name = "evaluation/raw/cfg1/frechet_random-4"
    result = json.loads((output / "results" / "ep0-ba4-raw-cfg1.json").read_text())
    assert rows[1][name] == result["numbers"]["frechet_random-4"]["value"]
    assert result["path"] == f"{URL}/ep0-ba4"


def test_writers_never_meet_and_write_no_point_twice(watched):
    output, run, _ = watched
    points = tensorboard_points(run / "tensorboard" / "toy.evaluation")
    assert set(Counter(points).values()) == {1}
    assert {step for name, step in points if "/raw/" in name} == set(STEPS)
    assert not any("evaluation/" in name for name, _ in tensorboard_points(run / "tensorboard" / "toy"))
    folders = sorted(output.glob("wandb/offline-run-*"))
    assert len(folders) in (2, 3), "a folder of each start, of the killed one if it was killed late"
    rows = [row for path in folders[-1].glob("*.wandb") for row in wandb_rows(path)]
    assert [row["_step"] for row in rows] == STEPS
    assert all(row["trainer/step"] == row["_step"] for row in rows)


def test_an_undecodable_reference_image_ends_all_ranks_and_skips_no_checkpoint(server, s3_process, watched, tmp_path):
    write_images(tmp_path / "reference", 5)
    (tmp_path / "reference" / "004.png").write_bytes(b"no image")  # In the second batch, of the last rank.
    write_prompts(tmp_path / "prompts.txt", ["a", "b"])
    settings = ("watch=true", f"model={URL}", "batch_size=4", "protocol.metrics=[fid]")
    command = ["evaluate.py", "tests/tools/toy_evaluation.yaml", *overrides(tmp_path, tmp_path / "out", *settings)]
    ended = server.start(NUM_RANKS, command, **s3_process.environment).finish()
    assert set(ended.codes) == {2}, ended.output[-3000:]
    assert "004.png" in ended.output
    assert not (tmp_path / "out" / LEDGER).exists()


@pytest.mark.parametrize("run_name", ["../../outside", "/outside", "a/b"])
def test_the_name_of_a_run_leads_nowhere_else(tmp_path, run_name):
    """A checkpoint of someone else says what its run is called."""
    entry = LedgerEntry(run="r", step=1, skipped=None, is_last=False, host="h", pid=1, run_name=run_name, group=None,
                        output_folder=None)  # fmt: skip
    watched: Any = SimpleNamespace(
        folder=tmp_path / "out", entries={"a": entry}, applicant=lambda name: Applicant(tmp_path / "lease")
    )
    config: Any = SimpleNamespace(loggers=SimpleNamespace(tensorboard=True, wandb=None))
    loggers = WatchLoggers(config, watched)
    loggers.write([{"step": 1.0, "loss": 1.0}])
    loggers.close()
    (events,) = tmp_path.rglob("events.*")
    assert events.is_relative_to(tmp_path / "out" / "tensorboard")
