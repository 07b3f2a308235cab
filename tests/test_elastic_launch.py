"""Pre-emption and restarts under the launchers, in real processes started by them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.checkpointing.reading import batch_of, resolve_checkpoint
from tests.training_runs import BIN, ROOT, environment

RESTARTING = ["--nnodes=1:1", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
COMMON = ["trainer.save_interval=100ba", "samples.prompts=[]"]


def plugin(name: str, arguments: str) -> str:
    return f"plugins.callbacks=[{{path: tests.toys.{name}, arguments: {{{arguments}}}}}]"


@contextmanager
def launched(launcher: list[str], output: Path, *overrides: str) -> Iterator[subprocess.Popen]:
    command = [str(BIN / launcher[0]), *launcher[1:], "run.py", "tests/toy.yaml", *COMMON, *overrides]
    variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                for number in [*descendants(process.pid), process.pid]:
                    os.kill(number, signal.SIGKILL)
                process.wait()


def descendants(process: int) -> list[int]:
    """Process ids below a process."""
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def alive(processes: list[int]) -> list[int]:
    """Those that have not ended."""
    states = {}
    for number in processes:
        try:
            states[number] = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [number for number, state in states.items() if state != "Z"]


def wait_until(condition, what: str, timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.mark.world_size(2)
def test_torchrun_starts_preempted_ranks_again_and_no_step_is_lost_or_doubled(tmp_path):
    run, output = tmp_path / "run", tmp_path / "output"
    told = plugin("SignalAt", "step: 3, number: 15, rank: 1")
    torchrun = ["torchrun", "--nproc-per-node=2", *RESTARTING]
    with launched(torchrun, output, f"output_folder={run}", told) as process:
        code = process.wait(timeout=300)
    text = output.read_text()
    assert code == 0, text[-4000:]
    assert text.count("SIGTERM after step 5: saved") == 1
    assert "Traceback" not in text
    assert series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)[0] == list(range(8))
    assert not (run / "preempted.json").exists()


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        (["composer", "-n", "2"], signal.SIGTERM),
        pytest.param(["torchrun", "--nproc-per-node=2", *RESTARTING], signal.SIGTERM, marks=pytest.mark.thorough),
        pytest.param(["torchrun", "--nproc-per-node=2", *RESTARTING], signal.SIGUSR1, marks=pytest.mark.thorough),
    ],
)
def test_a_signal_to_the_launcher_alone_saves_the_run(tmp_path, launcher, number):
    """The launchers pass on little: composer's ends at once, torchrun's passes on SIGTERM and ends at SIGUSR1."""
    run, reached, output = tmp_path / "run", tmp_path / "reached", tmp_path / "output"
    announce = plugin("Announce", f"step: 3, path: {reached}")
    with launched(launcher, output, f"output_folder={run}", announce, "trainer.max_duration=100000ba") as process:
        wait_until(lambda: reached.exists() or process.poll() is not None, "the run does not begin")
        assert process.poll() is None, output.read_text()[-4000:]
        below = descendants(process.pid)
        assert len(below) >= 2
        os.kill(process.pid, number)
        wait_until(lambda: process.poll() is not None and not alive(below), "processes go on", 90)
    marker = json.loads((run / "preempted.json").read_text())
    assert marker["signal"] == "SIGTERM"
    assert marker["checkpoint"] == str(resolve_checkpoint(str(run)))
    assert process.returncode != 0
    steps, _ = series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)
    assert steps == list(range(batch_of(resolve_checkpoint(str(run)))))
