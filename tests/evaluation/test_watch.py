"""A watcher that is started before, during and after a run, and killed once: each checkpoint is evaluated once."""

import json
import multiprocessing
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from diffusion.callbacks.continued_loggers import _event_points, read_wandb
from tests.evaluation.evaluation_toys import run_watcher, write_pictures, write_prompts
from tests.training_runs import TrainingServer

PATIENCE = 240.0
STEPS = [2, 4, 6, 8]


def start_watcher(overrides: list[str]) -> BaseProcess:
    """Fork it from a process that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diffusion.evaluation.watch", "wandb", "torch.utils.tensorboard.writer"])
    process = context.Process(target=run_watcher, args=(overrides,))
    process.start()
    return process


def wait_for(path: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.is_file():
        assert process.is_alive() or path.is_file(), f"the watcher has ended with {process.exitcode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = TrainingServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def state_of(folder: Path) -> dict[str, int]:
    kinds = ("results/*.json", "images/*/prompts/*.png")
    return {str(path): path.stat().st_mtime_ns for kind in kinds for path in folder.glob(kind)}


@pytest.fixture(scope="module")
def watched(server, tmp_path_factory):
    """Output folder and run folder after three watchers, the first of them killed; and what the third has changed."""
    root = tmp_path_factory.mktemp("watch")
    write_pictures(root / "reference", 5)
    write_prompts(root / "prompts.txt", ["a red star", "a blue star"])
    run, output = root / "run", root / "evaluation"
    overrides = [
        f"model={run}",
        f"output_folder={output}",
        f"protocol.prompts.path={root / 'prompts.txt'}",
        f"protocol.reference.path={root / 'reference'}",
        "protocol.metrics=[fid]",
        "protocol.sampling.num_inference_steps=1",
        "guidance_scales=[1.0]",
        "weights=[raw, ema]",
        "poll_seconds=0.2",
        "loggers={tensorboard: true, wandb: {offline: true}}",
    ]
    first = start_watcher(overrides)
    server.start(1, [("tests/toy.yaml", [f"output_folder={run}", "loggers.tensorboard=true"])])
    wait_for(output / "ledger.json", first)
    first.kill()
    first.join()
    second = start_watcher(overrides)
    job = server.finish()
    assert job.codes == [0], job.output[-3000:]
    second.join(PATIENCE)
    assert second.exitcode == 0
    before = state_of(output)
    third = start_watcher(overrides)
    third.join(PATIENCE)
    assert third.exitcode == 0
    return output, run, before


def test_each_checkpoint_is_evaluated_once(watched):
    output, _, before = watched
    ledger = json.loads((output / "ledger.json").read_text())["checkpoints"]
    assert ledger == {f"ep0-ba{step}": {"step": step, "skipped": None} for step in STEPS}
    # The average starts after 3 steps, so the first checkpoint has none.
    names = {f"ep0-ba{step}-{weights}-cfg1.json" for step in STEPS for weights in ("raw", "ema")} - {
        "ep0-ba2-ema-cfg1.json"
    }
    assert {path.name for path in (output / "results").iterdir()} == names
    assert state_of(output) == before
    assert not list((output / "held").iterdir())


def test_numbers_stand_at_the_steps_of_training(watched):
    output, run, _ = watched
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == STEPS
    name = "evaluation/raw/cfg1/frechet_random-4"
    result = json.loads((output / "results" / "ep0-ba4-raw-cfg1.json").read_text())
    assert rows[1][name] == result["numbers"]["frechet_random-4"]["value"]
    assert result["place"] == f"{run}/ep0-ba4"


def test_writers_never_meet_and_write_no_point_twice(watched):
    output, run, _ = watched
    files = list((run / "tensorboard" / "toy").glob("events.out.tfevents.*"))
    own = [path for path in files if path.name.endswith(".evaluation")]
    assert own
    assert len(own) < len(files)
    points = Counter(point for path in own for point in _event_points(path))
    assert set(points.values()) == {1}
    assert {step for name, step in points if "/raw/" in name} == set(STEPS)
    rows = [row for path in output.glob("wandb/offline-run-*/*.wandb") for row in read_wandb(path)]
    assert sorted(row["_step"] for row in rows) == STEPS
    assert all(row["trainer/step"] == row["_step"] for row in rows)
