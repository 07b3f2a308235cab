"""SIGTERM and SIGUSR1 in real processes: saved in time, left with an exit code of its own, continued."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composer.devices import DeviceCPU

from diffusion.callbacks.preemption import SaveOnPreemption
from diffusion.checkpointing.find import find_checkpoints, resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.distributed import PREEMPTED_EXIT_CODE
from diffusion.errors import PreemptedError
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.launch import run_command
from tests.tools.forking import free_port
from tests.tools.runs import signal_at

COMMON = ["trainer.save_interval=100ba", "samples.prompts=[]"]


def options(run: Path, *more: str) -> list[str]:
    return [f"output_folder={run}", *COMMON, *more]


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("parallelism", "number", "rank"), [("fsdp", signal.SIGUSR1, 0), ("ddp", signal.SIGINT, 1)])
def test_a_signal_to_one_rank_saves_the_step_on_all_and_the_run_continues(server, tmp_path, parallelism, number, rank):
    run, name = tmp_path / "run", signal.Signals(number).name
    chosen = f"trainer.parallelism={parallelism}"
    job = server.run(2, [("tests/tools/toy.yaml", options(run, chosen, signal_at(3, number, rank)))])
    assert job.codes == [PREEMPTED_EXIT_CODE] * 2, job.output[-4000:]
    (checkpoint,) = find_checkpoints(run / "checkpoints")
    assert 4 <= batch_of(checkpoint) <= 5
    assert json.loads((run / "preempted.json").read_text()) == {
        "step": batch_of(checkpoint),
        "signal": name,
        "checkpoint": str(checkpoint),
    }
    assert f"{name} after step {batch_of(checkpoint)}: saved {checkpoint}" in job.output
    assert job.output.count("Start the same command again to continue") == 1
    assert "Traceback" not in job.output
    rows = read_metrics(run / "metrics.jsonl")
    assert series(rows, TRAIN_LOSS)[0] == list(range(batch_of(checkpoint))), "the last row was not written"
    assert not (run / "finished.json").exists(), "the run ended as if it were done"

    server.train(2, [("tests/tools/toy.yaml", options(run, chosen))])
    assert not (run / "preempted.json").exists()
    assert series(read_metrics(run / "metrics.jsonl"), TRAIN_LOSS)[0] == list(range(8))


@pytest.mark.slow
def test_a_signal_in_the_last_step_lets_the_run_end(server, tmp_path):
    run = tmp_path / "run"
    server.train(1, [("tests/tools/toy.yaml", options(run, signal_at(7, signal.SIGTERM, 0)))])
    assert not (run / "preempted.json").exists()
    assert batch_of(resolve_checkpoint(str(run))) == 8


@pytest.mark.world_size(2)
def test_under_the_launcher_all_ranks_are_told_and_the_code_passes(server, tmp_path):
    """As a scheduler does it: SIGTERM to every rank and every data worker, from outside, while they train."""
    run = tmp_path / "run"
    reached = tmp_path / "reached"
    plugin = f"plugins.callbacks=[{{path: tests.tools.toys.Announce, arguments: {{step: 3, path: {reached}}}}}]"
    command = ["tests/tools/forked_launcher.py", "composer", "-n", "2", "run.py", "tests/tools/toy.yaml"]
    endless = "plugins.train_dataset.arguments.num_samples=1000000"  # With each epoch the workers end and others begin.
    command += options(run, plugin, endless, "trainer.max_duration=100000ba", "data.num_workers=1")
    job = server.start(0, command, MASTER_PORT=str(free_port()))
    job.wait_for(reached.exists)
    processes = descendants(job.pids[0])
    assert len(processes) >= 4, "two ranks with a data worker each"
    for number in reversed(processes):
        os.kill(number, signal.SIGTERM)
    ended = job.finish()
    assert ended.codes == [PREEMPTED_EXIT_CODE], ended.output[-4000:]
    marker = json.loads((run / "preempted.json").read_text())
    assert marker["signal"] == "SIGTERM"
    assert marker["checkpoint"] == str(resolve_checkpoint(str(run)))
    assert "Traceback" not in ended.output


WORKING = """
import atexit, multiprocessing.util, time
from diffusion.datasets.loader import BatchLoader
from diffusion.callbacks.preemption import end_workers
atexit._clear()  # This process is forked; the interpreter of another one would do at its end:
atexit.register(multiprocessing.util._exit_function)
atexit.register(time.sleep, 1.0)  # As others have things to do at the end, after that.
atexit.register(end_workers)
batches = iter(BatchLoader(range(8), num_workers=2))
next(batches)
print("done")
atexit._run_exitfuncs()
"""


def test_loader_workers_end_with_the_process_and_nothing_is_told(server, tmp_path):
    program = tmp_path / "working.py"
    program.write_text(WORKING)
    job = server.start(0, [str(program)]).finish()
    assert (job.codes, job.output) == ([0], "done\n")


def descendants(process: int) -> list[int]:
    """Process ids below a process, parents first."""
    children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def is_blocked_in_a_fork(number: int) -> bool:
    """Whether a forked process does not receive a signal."""
    if (child := os.fork()) == 0:
        os._exit(number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    _, status = os.waitpid(child, 0)
    return bool(os.waitstatus_to_exitcode(status))


def test_sigterm_is_blocked_in_forked_processes_while_the_run_handles_it_and_no_longer(tmp_path):
    """A training that fails keeps its handlers; with another one in force, pools can end their processes."""
    before = signal.getsignal(signal.SIGTERM)
    nothing: Any = None
    state: Any = SimpleNamespace(device=DeviceCPU())
    callback: Any = SaveOnPreemption(nothing, tmp_path, nothing)
    callback.fit_start(state, nothing)
    assert is_blocked_in_a_fork(signal.SIGTERM)
    assert is_blocked_in_a_fork(signal.SIGINT)
    signal.signal(signal.SIGTERM, before)
    assert not is_blocked_in_a_fork(signal.SIGTERM)


def test_the_exit_code_without_a_process_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    said: list[str] = []

    def main() -> None:
        raise PreemptedError("SIGTERM after step 3: saved x")

    assert run_command(main, say=said.append) == PREEMPTED_EXIT_CODE == os.EX_TEMPFAIL
    assert said == ["SIGTERM after step 3: saved x"]
