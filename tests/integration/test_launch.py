"""Errors of a command under both launchers, in real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import psutil
import pytest

from diffusion import telling
from diffusion.cli import train_command
from diffusion.distributed import agree, rank, world_size
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.launch import run_command
from tests.tools.training_runs import ROOT, launcher_environment
from verification.ports import free_port

SCRIPT = """\
import os, signal, sys, threading, time
from pathlib import Path
from diffusion import telling
from diffusion.errors import ConfigurationError, DataError
from diffusion.launch import run_command
from diffusion.distributed import agree, rank

def fail(text):
    raise DataError(text)

def main():
    mode = sys.argv[1]
    if mode == "before":
        time.sleep(1.0 if rank() == 0 else 0.0)
        raise ConfigurationError("the key is wrong")
    if mode == "one late":
        time.sleep(5.0 if rank() == 1 else 0.0)
        fail("a shard is damaged")
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if mode == "some":
        agree(lambda: fail("a shard is damaged") if rank() == 1 else None)
    if mode == "one asks late" and rank() == 2:
        ask, telling._ask_store = telling._ask_store, lambda *a, **b: time.sleep(1.5) or ask(*a, **b)
    if mode in ("alone", "one asks late"):
        fail("a shard is damaged") if rank() == 1 else dist.barrier()
    if mode == "first late":
        time.sleep(3.3 if rank() == 0 else 0.0)  # About when the other one no longer waits for it.
        fail("a shard is damaged")
    if mode.startswith("terminated"):
        if rank() == 1:
            fail("a shard is damaged")
        if mode == "terminated after":  # While this rank asks why its collective failed.
            ask, by = telling._ask_store, signal.SIGTERM
            telling._ask_store = lambda *a, **b: os.kill(os.getpid(), by) or ask(*a, **b)
            dist.barrier()
        barrier = dist.group.WORLD.barrier()
        if mode == "terminated within":  # Python handles the signal only when the collective has failed.
            threading.Thread(target=terminate).start()
            barrier.wait()
        terminate()
        barrier.wait()

def terminate():
    while not telling.is_known_elsewhere():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

def end(code):
    Path(sys.argv[2], f"code{rank()}").write_text(str(code))
    end_process(code)

if __name__ == "__main__":
    end_process, os._exit = os._exit, end
    os._exit(run_command(main))
"""
BIN = Path(sys.executable).parent


def launch(tmp_path: Path, launcher: list[str], mode: str) -> subprocess.CompletedProcess:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [str(BIN / launcher[0]), *launcher[1:], str(script), mode, str(tmp_path)]
    return subprocess.run(command, env=launcher_environment(), capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("launcher", "mode", "message"),
    [
        ("composer -n 2", "before", "ConfigurationError: the key is wrong"),
        ("composer -n 2", "one late", "DataError: a shard is damaged"),
        ("composer -n 2", "first late", "a shard is damaged"),
        ("composer -n 2", "some", "DataError: rank 1 of 2: a shard is damaged"),
        ("torchrun --nproc-per-node 2 --master-port PORT", "before", "ConfigurationError: the key is wrong"),
        ("torchrun --nproc-per-node 2 --master-port PORT", "alone", "a shard is damaged"),
        ("composer -n 4", "alone", "a shard is damaged"),
        ("composer -n 3", "one asks late", "a shard is damaged"),
        ("composer -n 2", "terminated before", "a shard is damaged"),
        ("composer -n 2", "terminated within", "a shard is damaged"),
        ("composer -n 2", "terminated after", "a shard is damaged"),
    ],
)
def test_one_message_and_exit_code_2_on_all_ranks(tmp_path, launcher, mode, message):
    arguments = launcher.replace("PORT", str(free_port())).split()
    result = launch(tmp_path, arguments, mode)
    output = result.stdout + result.stderr
    assert output.count(message) == 1, output
    assert result.returncode != 0
    codes = {path.name.removeprefix("code"): path.read_text() for path in tmp_path.glob("code*")}
    assert codes == {str(number): "2" for number in range(int(arguments[2]))}, output
    assert str(tmp_path / "script.py") + '"' not in output, "a traceback through the command"
    if launcher.startswith("composer"):
        assert result.returncode == 2, output
        assert "Traceback" not in output


def test_ranks_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (rank(), world_size()) == (0, 1)
    assert agree(lambda: 7) == 7


def test_a_user_error_is_said_without_a_traceback_and_a_defect_passes(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    said: list[str] = []

    def fail(error: Exception):
        raise error

    assert run_command(lambda: None, say=said.append) == 0
    assert run_command(lambda: fail(DataError("no shards in x")), say=said.append) == 2
    assert said == ["DataError: no shards in x"]
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: fail(ZeroDivisionError()))


def test_a_signal_that_comes_while_an_error_is_raised_does_not_hide_it(monkeypatch):
    """Python 3.10 may handle it before the error is caught."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    said: list[str] = []

    def fail(code: int):
        try:
            raise DataError("no shards in x")
        except DataError:
            sys.exit(code)

    assert run_command(lambda: fail(128 + signal.SIGTERM), say=said.append) == 2
    assert said == ["DataError: no shards in x"]
    with pytest.raises(SystemExit, match="3"):
        run_command(lambda: fail(3), say=said.append)
    assert len(said) == 1


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    said: list[str] = []

    def interrupt():
        raise KeyboardInterrupt

    assert run_command(interrupt, say=said.append) == 130
    assert said == ["interrupted"]


def test_before_the_process_group_rank_0_speaks_and_of_its_machine_the_first_rank_of_a_node(monkeypatch):
    said: list[str] = []

    def fail(error: Exception):
        raise error

    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run_command(lambda: fail(ConfigurationError("same everywhere")), say=said.append) == 2
    assert said == []
    assert run_command(lambda: fail(MachineError("no GPU")), say=said.append) == 2
    assert said[0].startswith("MachineError: rank 8 on ")
    assert said[0].endswith(": no GPU")


def test_torchrun_names_the_node_for_composer(monkeypatch):
    without = {name: value for name, value in os.environ.items() if name != "NODE_RANK"}
    monkeypatch.setattr(os, "environ", {**without, "GROUP_RANK": "3"})
    run_command(lambda: None)
    assert os.environ["NODE_RANK"] == "3"


YAML = """\
run_name: plan
model: {architecture: tiny}
data: {streams: [{name: a}], resolution: 32, global_batch_size: 8}
schedule: {warmup: 1ba}
trainer: {max_duration: 10ba, precision: fp32}
"""


def test_dry_run_goes_on_without_locations(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    said: list[str] = []
    train_command([str(path), "--dry-run", "seed=5"], say=said.append)
    text = "\n".join(said)
    assert "seed: 5\n" in text
    assert "80 = 10 iterations x 8" in text
    assert "Still missing before it can start\n  data.local: Root of the data set" in text
    with pytest.raises(ConfigurationError, match=r"1 value is missing in .*run.yaml: data.local"):
        train_command([str(path), "seed=5"], say=said.append)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run.py: name the configuration of the run"),
        (["a.yaml", "--seed=1"], r"unrecognized arguments: --seed=1. Values are set without dashes, key.sub=value."),
        (["no.yaml"], "The configuration file no.yaml does not exist."),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        train_command(arguments, say=lambda text: None)


def test_a_signal_at_any_place_of_the_wait_for_it_ends_the_wait():
    """Also within what it waits by."""
    files, places = {telling.__file__, threading.__file__}, []

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for itself")

    def interrupt(frame: FrameType, event: str, argument: object):
        if frame.f_code.co_filename not in files:
            return None
        place = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not has_told and place not in places:
            places.append(place)
            has_told.append(True)
            signal.raise_signal(signal.SIGTERM)
        return interrupt

    before, previous, trace = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGALRM, give_up), sys.gettrace()
    signal.alarm(120)
    try:
        while True:
            termination, has_told = telling.Termination(), []
            sys.settrace(interrupt)
            has_come = termination.wait(0.1)
            sys.settrace(trace)
            assert has_come == bool(has_told)
            if not has_told:
                break
    finally:
        sys.settrace(trace)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        signal.signal(signal.SIGTERM, before)
    assert len(places) >= 4


PARENT = """\
import os, subprocess, sys, threading, time
def spawn():
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
thread = threading.Thread(target=spawn)
thread.start()
thread.join()
print("ended", flush=True)
time.sleep(600)
"""
CHILD = (
    "import time; from diffusion.launch import run_command; run_command(lambda: print(flush=True) or time.sleep(600))"
)


def test_a_rank_ends_with_its_launcher_and_not_with_the_thread_that_started_it(tmp_path):
    launcher = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    try:
        assert launcher.stdout.readline() == "ended\n"
        time.sleep(3)
        assert child.status() != psutil.STATUS_ZOMBIE
        launcher.kill()
        launcher.wait()
        child.wait(10)
    finally:
        launcher.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
