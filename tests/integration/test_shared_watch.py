"""Several watchers of two runs, one in a folder and one in an object store: each checkpoint is evaluated once."""

import contextlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffusion.evaluation.watch import COPIES, LEASES, LEDGER, read_ledger
from diffusion.formats.run_folder import METRICS
from tests.tools.evaluation_toys import overrides, write_images, write_prompts
from tests.tools.logged_points import tensorboard_points
from tests.tools.s3_server import S3Server, s3_process
from tests.tools.training_runs import Job, TrainingServer

pytestmark = [pytest.mark.slow, pytest.mark.s3]

__all__ = ["s3_process"]

STEPS = [2, 4, 6, 8]
URL = "s3://tests/shared-watch/second"


def is_evaluating(output: Path, pid: int) -> bool:
    """Check that a watcher has the lease of a checkpoint that is not in the ledger."""
    for path in output.glob(f"*/{LEASES}/ep*.json"):
        with contextlib.suppress(FileNotFoundError, ValueError):  # It is being created or removed.
            if json.loads(path.read_bytes())["pid"] == pid:
                return not (path.parents[1] / LEDGER / path.name).exists()
    return False


def stop_within_an_evaluation(job: Job, output: Path) -> None:
    """Stop a watcher while it evaluates a checkpoint, after the first entry of any watcher."""
    [pid] = job.pids

    def is_stopped_within() -> bool:
        if not (any(output.glob(f"*/{LEDGER}/*.json")) and is_evaluating(output, pid)):
            return False
        os.kill(pid, signal.SIGSTOP)
        if is_evaluating(output, pid):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    job.wait_for(is_stopped_within)


@pytest.fixture(scope="module")
def watched(
    server: TrainingServer, s3_process: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[Job]]]:
    """Root folder, in which `one` is the output of one watcher and `three` that of three, and those three jobs."""
    root = tmp_path_factory.mktemp("shared")
    write_images(root / "reference", 5)
    write_prompts(root / "prompts.txt", ["a red star", "a blue star"])
    runs = [
        ("tests/tools/toy.yaml", [f"output_folder={root / 'first'}", "seed=1"]),
        ("tests/tools/toy.yaml", [f"output_folder={root / 'second'}", "seed=2", f"trainer.checkpoint_folder={URL}"]),
    ]
    ended = server.start_training(1, runs, **s3_process.environment).finish()
    assert not any(ended.codes), ended.output[-3000:]

    def start(output: str) -> Job:
        settings = [f"runs=[{root / 'first'}, {URL}]", "protocol.metrics=[fid]", "guidance_scales=[1.0, 2.0]"]
        settings += ["poll_seconds=0.2", "loggers.tensorboard=true"]
        command = ["evaluate.py", "tests/tools/toy_evaluation.yaml", "watch=true"]
        command += overrides(root, root / output, *settings)
        return server.start(1, command, **s3_process.environment)

    assert not any(start("one").finish().codes)
    jobs = [start("three")]
    stop_within_an_evaluation(jobs[0], root / "three")

    def num_evaluated() -> int:
        return len(list((root / "three").glob(f"*/{LEDGER}/*.json")))

    before = num_evaluated()
    jobs += [start("three") for _ in range(2)]
    # The others evaluate what the first one does not hold, if there is any.
    jobs[1].wait_for(lambda: num_evaluated() > min(before, 2 * len(STEPS) - 2))
    jobs[0].kill()
    for job in jobs[1:]:
        ended = job.finish()
        assert not any(ended.codes), ended.output[-3000:]
    yield root, jobs


def test_each_checkpoint_is_evaluated_once_and_none_is_lost(watched):
    root, jobs = watched
    reported = [re.findall(r"checkpoint (\S+) of (\S+) is evaluated", job.output) for job in jobs]
    assert sum(map(bool, reported)) >= 2, "they share the work"
    uris = {"first": str(root / "first"), "second": URL}
    checkpoints = [(f"ep0-ba{step}", uri) for uri in uris.values() for step in STEPS]
    assert Counter(one for job in reported for one in job) == Counter(checkpoints)
    for name, uri in uris.items():
        entries = read_ledger(root / "three" / name / LEDGER, uri)
        assert entries.keys() == {f"ep0-ba{step}" for step in STEPS}
        assert [entry.skipped for entry in entries.values()] == [None] * len(STEPS)
        for number, job in enumerate(jobs):
            assert {checkpoint for checkpoint, entry in entries.items() if entry.pid == job.pids[0]} == {
                checkpoint for checkpoint, of in reported[number] if of == uri
            }
        assert not list((root / "three" / name / LEASES).iterdir())
        assert not list((root / "three" / name / COPIES).iterdir())


def test_the_results_are_those_of_one_watcher(watched):
    root, _ = watched
    for name in ("first", "second"):
        one, three = root / "one" / name, root / "three" / name
        results = {path.name: path.read_bytes() for path in (one / "results").iterdir()}
        assert len(results) == 2 * len(STEPS)
        assert {path.name: path.read_bytes() for path in (three / "results").iterdir()} == results
        for file in (METRICS, "table.md"):
            assert (three / file).read_bytes() == (one / file).read_bytes()


def test_the_loggers_have_each_point_once(watched):
    root, _ = watched
    for name in ("first", "second"):
        points = tensorboard_points(root / "three" / name / "tensorboard" / "toy.evaluation")
        assert set(Counter(points).values()) == {1}
        assert {step for _, step in points} == set(STEPS)
