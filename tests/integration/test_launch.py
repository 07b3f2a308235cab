"""Errors of a command under both launchers, in real processes."""

import contextlib
import os
import runpy
import subprocess
import sys
import time
from dataclasses import astuple
from functools import partial
from pathlib import Path

import psutil
import pytest

from diffusion import launch as launch_module
from diffusion.checkpointing.roll_back import DivergenceError
from diffusion.cli import train_command
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.launch import run_command
from diffusion.operations.costs import BudgetSpentError
from tests.tools.forking import free_port
from tests.tools.training_runs import ROOT, Ended, TrainingServer

pytestmark = pytest.mark.slow

SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
from diffusion.distributed import agree, rank
from diffusion.errors import DataError
from diffusion.launch import run_command

def fail():
    raise DataError("a shard is damaged")

def meet():
    Path(sys.argv[2], f"begun{rank()}").touch()
    while len(list(Path(sys.argv[2]).glob("begun*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)

def main():
    mode = sys.argv[1]
    meet()
    if mode == "first late":
        time.sleep(1.0 if rank() == 0 else 0.0)
        fail()
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if mode == "agreed":
        agree(lambda: fail() if rank() == 1 else None)
    if mode == "alone":
        fail() if rank() == 1 else dist.barrier()
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL) if rank() == 1 else dist.barrier()

def end(code):
    Path(sys.argv[2], f"code{rank()}").write_text(str(code))
    end_process(code)

if __name__ == "__main__":
    end_process, os._exit = os._exit, end
    os._exit(run_command(main))
"""


def launch(server: TrainingServer, tmp_path: Path, launcher: str, mode: str) -> Ended:
    script, port = tmp_path / "script.py", str(free_port())
    script.write_text(SCRIPT)
    command = ["tests/tools/forked_launcher.py", *launcher.replace("PORT", port).split(), str(script), mode]
    return server.start(0, [*command, str(tmp_path)], MASTER_PORT=port).finish()


TORCHRUN = "torchrun --nproc-per-node 2 --master-port PORT"


def codes(tmp_path: Path) -> dict[str, str]:
    return {path.name.removeprefix("code"): path.read_text() for path in tmp_path.glob("code*")}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("launcher", "mode", "message"),
    [
        ("composer -n 2", "first late", "rank 0: DataError: a shard is damaged"),
        (TORCHRUN, "agreed", "rank 0: DataError: rank 1 of 2: a shard is damaged"),
    ],
)
def test_the_first_rank_of_a_node_prints_the_error_and_all_end_with_exit_code_2(
    server, tmp_path, launcher, mode, message
):
    (code,), output = astuple(launch(server, tmp_path, launcher, mode))
    assert output.count(message) == 1, output
    assert output.count("Error: ") == 1 + output.count("ChildFailedError: "), output
    assert codes(tmp_path) == {"0": "2", "1": "2"}, output
    if launcher.startswith("composer"):
        assert code == 2, output
        assert "Traceback" not in output


@pytest.mark.world_size(2)
@pytest.mark.parametrize("launcher", ["composer -n 3", TORCHRUN])
def test_an_error_that_another_rank_meets_alone_is_printed_by_that_rank(server, tmp_path, launcher):
    (code,), output = astuple(launch(server, tmp_path, launcher, "alone"))
    assert output.count("rank 1: DataError: a shard is damaged") == 1, output
    assert codes(tmp_path)["1"] == "2"
    assert code != 0


@pytest.mark.world_size(2)
def test_a_killed_rank_ends_the_job(server, tmp_path):
    assert launch(server, tmp_path, "composer -n 2", "killed").codes != [0]
    assert "1" not in codes(tmp_path), "it ended by itself"


def test_a_user_error_is_said_without_a_traceback_and_a_defect_passes(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    said: list[str] = []

    def fail(error: Exception):
        raise error

    assert run_command(lambda: None, say=said.append) == 0
    assert run_command(lambda: fail(DataError("no shards in x")), say=said.append) == 2
    assert said == ["DataError: no shards in x"]
    assert (
        run_command(lambda: fail(DataError("\x1b[31mred\n\tof\rsftp://me:planted@host/x\udcff")), say=said.append) == 2
    )
    assert said[1] == "DataError: \\x1b[31mred\n\tof\\rsftp://***@host/x\\udcff"
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: fail(ZeroDivisionError()))


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    said: list[str] = []

    def interrupt():
        raise KeyboardInterrupt

    assert run_command(interrupt, say=said.append) == 130
    assert said == ["interrupted"]


def test_the_first_rank_of_each_node_prints_with_its_rank_in_front(monkeypatch):
    said: list[str] = []

    def fail(error: Exception):
        raise error

    for name, value in {"RANK": "8", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    assert run_command(lambda: fail(ConfigurationError("the key is wrong")), say=said.append) == 2
    assert run_command(lambda: fail(MachineError("no GPU")), say=said.append) == 2
    assert said == ["rank 8: ConfigurationError: the key is wrong", "rank 8: MachineError: no GPU"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(launch_module, "_FIRST_SECONDS", 0.1)
    assert run_command(lambda: fail(MachineError("no GPU")), say=said.append) == 2
    assert len(said) == 3, "the first rank has not ended"
    error = DataError("agreed")
    error.is_agreed = True
    for of_all_ranks in (error, BudgetSpentError("spent"), DivergenceError("diverged")):
        assert run_command(partial(fail, of_all_ranks), say=said.append) == 2
    assert len(said) == 3


def test_torchrun_names_the_node_for_composer(monkeypatch):
    without = {name: value for name, value in os.environ.items() if name != "NODE_RANK"}
    monkeypatch.setattr(os, "environ", {**without, "GROUP_RANK": "3"})
    run_command(lambda: None)
    assert os.environ["NODE_RANK"] == "3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run.py: name the configuration of the run"),
        (["a.yaml", "--seed=1"], r"unrecognized arguments: --seed=1. Values are set without dashes, key.sub=value."),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        train_command(arguments, say=lambda text: None)


@pytest.mark.parametrize(
    "command",
    [
        ["provenance.py", "RUN", "--out"],
        ["provenance.py", "RUN", "--summary"],
        ["report.py", "RUN", "--out"],
        ["plan.py", "RUN.yaml", "--json"],
        ["doctor.py", "RUN.yaml", "--json"],
        ["preference.py", "export", "VOTES", "--out"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_named_before_any_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("RUN").mkdir()
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "file" / "below"):
        monkeypatch.setattr(sys, "argv", [*command, str(out)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / command[0]), run_name="__main__")
        assert ended.value.code == 2
        assert f"MachineError: {out} cannot be written" in capsys.readouterr().err


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
        child.wait(300)
    finally:
        launcher.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
