"""Runs are listed, stopped, continued and tidied up; nothing of a run that is at work is touched."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from diffusion.checkpointing.layout import list_checkpoints
from diffusion.checkpointing.save import write_file
from diffusion.config.loading import load_config, to_public_yaml
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.formats.run_folder import (
    BUDGET,
    COSTS,
    FINISHED,
    LEASE,
    ROLLBACK,
    SUPERVISED,
    Rollback,
    find_runs,
    request_rollback,
)
from diffusion.operations.costs import Activity, CostsFile, StartCosts
from diffusion.operations.heartbeats import HeartbeatFile, HeartbeatRecord, Phase, heartbeat_folder
from diffusion.operations.lease import Applicant
from diffusion.operations.pruning import find_superseded
from diffusion.operations.runs import is_running, read_status, stop
from scripts import runs as runs_command
from tests.tools.training_runs import ROOT


def write_run(folder: Path, *overrides: str) -> Config:
    config = load_config("tests/tools/toy.yaml", [f"output_folder={folder}", *overrides])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_public_yaml(config))
    return config


def beat(config: Config, *, host: str, pid: int) -> None:
    file = HeartbeatFile(heartbeat_folder(config, Path(config.output_folder)), 0)
    now = time.time()
    file.write(HeartbeatRecord(rank=0, pid=pid, host=host, count=1, phase=Phase.step, step=3, num_done=3, time=now))
    file.close()


def hold(run: Path, *, host: str, age: float = 0.0) -> None:
    """Hold the lease of a run on another host."""
    holder = {"pid": 1, "host": host, "time": 0.0, "namespace": "", "token": "other", "count": 1}
    (run / LEASE).write_text(json.dumps(holder))
    written = time.time() - age
    os.utime(run / LEASE, (written, written))


def write_checkpoints(folder: Path, *steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        write_file(folder / f"ep0-ba{step}.pt", {"state": {"x": torch.zeros(8)}})


def supervise(folder: Path, pid: int, arguments: list[str], *, host: str | None = None, age: float = 0.0) -> int:
    """Hold a run's lock, as a supervisor does."""
    lock = os.open(folder / SUPERVISED, os.O_RDWR | os.O_CREAT)
    fields = {"pid": pid, "host": host or socket.gethostname(), "time": time.time() - age, "folder": str(folder)}
    os.ftruncate(lock, 0)
    os.write(lock, json.dumps(fields | {"arguments": arguments}).encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_runs_are_found_and_each_says_how_it_stands(tmp_path, capsys):
    for name in ("a", "sweep/b", "c"):
        write_run(tmp_path / name)
    (tmp_path / "a" / FINISHED).write_text('{"step": 1234}')
    (tmp_path / "sweep/b" / BUDGET).write_text("{}")
    file = CostsFile(tmp_path / "a")
    seconds = {kind.value: 0.0 for kind in Activity} | {"training": 3600.0, "data": 1800.0}
    row = StartCosts(began=0, ended=5400, num_devices=8, price=2.0, step=0, reached=1234, seconds=seconds)
    file.write(row)
    file.close()
    lease = Applicant(tmp_path / "c" / LEASE).acquire()
    assert lease is not None
    assert find_runs([tmp_path]) == [tmp_path / "a", tmp_path / "c", tmp_path / "sweep/b"]
    runs_command.show_list([tmp_path])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == [str(tmp_path / "a"), "finished", "1,234", "1", "12.00", "24.00"]
    assert "running" in lines[2]
    assert "budget spent" in lines[3]
    lease.release()
    assert read_status(tmp_path / "c") == "not trained"
    (tmp_path / "c" / COSTS).write_text("")
    assert read_status(tmp_path / "c") == "interrupted"
    (tmp_path / "a" / FINISHED).write_text('{"step": 1000}')
    assert read_status(tmp_path / "a") == "interrupted", "it was continued"
    runs_command.show(tmp_path / "a")
    shown = capsys.readouterr().out
    assert "66.7%" in shown
    assert "33.3%" in shown
    with pytest.raises(ConfigurationError, match="absent"):
        find_runs([tmp_path / "absent"])


def test_a_damaged_file_hides_no_run(tmp_path, capsys, caplog):
    whole = {"began": 0, "ended": 1, "num_devices": 1, "step": 0, "reached": 7}
    seconds = {kind.value: 3600.0 for kind in Activity}
    rows = [
        {**whole, "seconds": {"training": 3600.0}},  # Of a version with fewer activities.
        {**whole, "seconds": seconds, "reached": None},
        {**whole, "seconds": [1]},
        {**whole, "seconds": seconds},
    ]
    write_run(tmp_path / "a")
    (tmp_path / "a" / COSTS).write_text("".join(f"{json.dumps(row):1023}\n" for row in rows))
    runs_command.show_list([tmp_path])
    assert capsys.readouterr().out.splitlines()[1].split()[2:] == ["7", "2", f"{len(seconds) + 1:.2f}", "-"]
    assert caplog.text.count(str(tmp_path / "a" / COSTS)) == 2
    for name in ("foreign", "judged"):
        (tmp_path / name / "results").mkdir(parents=True)
    (tmp_path / "foreign/results/scores.json").write_text("[1, 2]")
    result = {"path": str(tmp_path / "a"), "name": "a", "numbers": {}, "protocols": {}}
    (tmp_path / "judged/results/a.json").write_text(json.dumps(result))
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "ep0-ba1.pt").touch()
    runs_command.show_inventory([str(tmp_path)], [tmp_path], None)
    shown = capsys.readouterr().out
    assert f"{tmp_path}/foreign/results/scores.json  is skipped" in shown
    assert f"evaluation {tmp_path}/judged" in shown


def test_a_run_of_another_machine_is_at_work_while_its_lease_is_renewed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    config = write_run(run, f"operations.heartbeat_folder={tmp_path / 'of_another_machine'}")
    (run / COSTS).write_text("")
    hold(run, host="elsewhere")
    assert is_running(run)
    with pytest.raises(MachineError, match="on elsewhere"):
        stop(run, config)
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 600)  # The clock of this machine is ahead.
        assert is_running(run)
        with pytest.raises(MachineError, match="running"):
            find_superseded(run, config, 1)
    hold(run, host="elsewhere", age=600)
    beat(config, host="elsewhere", pid=1)
    assert not is_running(run)
    with pytest.raises(MachineError, match=r"not running on this machine$"):
        stop(run, config)
    assert read_status(run) == "interrupted"


def test_the_supervisor_is_asked_to_stop_and_without_one_the_ranks(tmp_path):
    config = write_run(tmp_path / "run")
    supervisor, rank = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    beat(config, host=socket.gethostname(), pid=rank.pid)
    lock = supervise(tmp_path / "run", supervisor.pid, [])
    try:
        assert stop(tmp_path / "run", config) == [supervisor.pid]
        assert supervisor.wait(60) == -signal.SIGTERM
        assert rank.poll() is None
        os.close(lock)
        assert stop(tmp_path / "run", config) == [rank.pid]
        assert rank.wait(60) == -signal.SIGTERM
    finally:
        supervisor.kill()
        rank.kill()
    with pytest.raises(MachineError, match="run"):
        stop(tmp_path / "run", config)


def test_a_run_is_not_stopped_by_the_heartbeats_of_another_in_the_same_folder(tmp_path):
    shared = f"operations.heartbeat_folder={tmp_path / 'heartbeats'}"
    stopped, other = (write_run(tmp_path / name, shared) for name in "ab")
    rank = subprocess.Popen(["sleep", "600"])
    try:
        beat(other, host=socket.gethostname(), pid=rank.pid)
        with pytest.raises(MachineError, match="not running on this machine"):
            stop(tmp_path / "a", stopped)
        assert stop(tmp_path / "b", other) == [rank.pid]
    finally:
        rank.kill()


def test_a_process_with_the_number_of_a_supervisor_that_is_gone_or_elsewhere_is_left_alone(tmp_path):
    config = write_run(tmp_path / "run")
    stranger, rank = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    beat(config, host=socket.gethostname(), pid=rank.pid)
    try:
        lock = supervise(tmp_path / "run", stranger.pid, [], host="elsewhere")
        with pytest.raises(MachineError, match="elsewhere"):
            stop(tmp_path / "run", config)
        os.close(lock)
        lock = supervise(tmp_path / "run", stranger.pid, [], age=100)
        assert stop(tmp_path / "run", config) == [rank.pid]
        os.close(lock)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        rank.kill()


def test_a_run_goes_on_with_the_command_of_its_supervisor(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_run(run)
    with pytest.raises(ConfigurationError, match="run"):
        runs_command.resume(run, [])
    lock = supervise(run, os.getpid(), ["--hosts", "file", "--", "composer", "run.py", "a.yaml"])
    with pytest.raises(MachineError, match="run"):
        runs_command.resume(run, [])
    os.close(lock)
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: called.append(arguments))
    monkeypatch.chdir(tmp_path)
    runs_command.resume(run, ["operations.max_dollars=9"])
    arguments = ["--hosts", "file", "--", "composer", "run.py", "a.yaml", "operations.max_dollars=9"]
    assert called == [[sys.executable, str(ROOT / "scripts/supervise.py"), *arguments]]
    assert Path.cwd() == run, "paths in the command are relative to where it was given"
    (run / SUPERVISED).write_text((run / SUPERVISED).read_text().replace(str(run), str(tmp_path / "gone")))
    with pytest.raises(ConfigurationError, match=str(tmp_path / "gone")):
        runs_command.resume(run, [])


def test_a_copy_of_a_run_does_not_go_on_in_the_original(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.close(supervise(tmp_path / "copy", os.getpid(), ["--", "composer", "run.py", "a.yaml"]))
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: called.append(arguments))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"trains {tmp_path}/run"):
        runs_command.resume(Path("copy"), [])
    with pytest.raises(ConfigurationError, match=r"composer run\.py a\.yaml"):
        runs_command.resume(Path("copy"), [f"output_folder={tmp_path}/copy"])
    runs_command.resume(Path("copy"), [f"output_folder={tmp_path}/copy"], is_confirmed=True)
    assert len(called) == 1
    assert "composer run.py a.yaml" in capsys.readouterr().out


def test_a_command_of_someone_else_is_not_run(tmp_path, monkeypatch):
    write_run(tmp_path / "run", "output_folder=run")
    record = {"pid": 1, "host": "x", "time": 0, "folder": ".", "arguments": ["--", "touch", "file", "a.yaml"]}
    (tmp_path / "run" / SUPERVISED).write_text(json.dumps(record))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was run"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="touch file"):
        runs_command.resume(Path("run"), [])


def test_old_checkpoints_go_and_those_of_a_run_at_work_stay(tmp_path):
    run = tmp_path / "run"
    config = write_run(run, "trainer.keep_every=4ba")
    write_checkpoints(run / "checkpoints", 2, 4, 6, 8)
    (run / "checkpoints/ep0-ba10.pt").write_bytes(b"damaged")

    hold(run, host="elsewhere")
    with pytest.raises(MachineError, match="running"):
        find_superseded(run, config, num_kept=1)
    (run / LEASE).unlink()
    request_rollback(run, Rollback(step=8, loss="nan", limit=7, time=1.0))
    with pytest.raises(MachineError, match="rollback to step 7"):
        find_superseded(run, config, num_kept=1)
    (run / ROLLBACK).unlink()
    assert [path.name for path in find_superseded(run, config, num_kept=1)] == ["ep0-ba2.pt", "ep0-ba6.pt"]
    names = ["ep0-ba2.pt", "ep0-ba4.pt", "ep0-ba6.pt", "ep0-ba8.pt", "ep0-ba10.pt"]
    runs_command.prune([tmp_path], 1, is_confirmed=False)
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == names
    runs_command.prune([tmp_path], 1, is_confirmed=True)
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["ep0-ba4.pt", "ep0-ba8.pt", "ep0-ba10.pt"]


def test_a_checkpoint_stays_that_is_half_written_or_with_which_another_run_began(tmp_path):
    folder = tmp_path / "a/checkpoints"
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", f"init_from.checkpoint={folder / 'ep0-ba4.pt'}")
    write_checkpoints(folder, 2, 4, 8)
    (folder / "ep0-ba6.pt").write_bytes(b"being written")
    runs_command.prune([tmp_path], 1, is_confirmed=True)
    assert [path.name for path in list_checkpoints(folder)] == ["ep0-ba4.pt", "ep0-ba6.pt", "ep0-ba8.pt"]


def test_a_checkpoint_stays_with_which_a_run_began_by_another_path(tmp_path, monkeypatch):
    folder = tmp_path / "a/checkpoints"
    (tmp_path / "link").symlink_to(tmp_path)
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", f"init_from.checkpoint={tmp_path / 'link/a/checkpoints/ep0-ba2.pt'}")
    write_run(tmp_path / "sweeps/c/d", "init_from.checkpoint=../a/checkpoints/ep0-ba4.pt")
    write_checkpoints(folder, 2, 4, 6, 8)
    monkeypatch.chdir("/")
    runs_command.prune([tmp_path], 1, is_confirmed=True)
    assert [path.name for path in list_checkpoints(folder)] == ["ep0-ba2.pt", "ep0-ba4.pt", "ep0-ba8.pt"]


def test_checkpoints_of_another_run_stay(tmp_path, capsys):
    mine, shared = tmp_path / "runs/mine/checkpoints", tmp_path / "shared"
    write_run(tmp_path / "runs/mine")
    write_run(tmp_path / "theirs", f"trainer.checkpoint_folder={mine}")
    for name in "ab":
        write_run(tmp_path / "runs" / name, f"trainer.checkpoint_folder={shared}")
    for folder in (mine, shared):
        write_checkpoints(folder, 2, 4)
    runs_command.prune([tmp_path / "theirs", tmp_path / "runs/a", tmp_path / "runs/b"], 1, is_confirmed=True)
    assert [len(list_checkpoints(folder)) for folder in (mine, shared)] == [2, 2]
    assert f"{tmp_path}/theirs  is skipped: its checkpoints are in {mine}" in capsys.readouterr().out


def test_checkpoints_stay_while_a_run_with_another_folder_holds_them(tmp_path):
    config = write_run(tmp_path / "run", f"trainer.checkpoint_folder={tmp_path / 'kept'}")
    (tmp_path / "kept").mkdir()
    hold(tmp_path / "kept", host="elsewhere")
    with pytest.raises(MachineError, match="running"):
        find_superseded(tmp_path / "run", config, num_kept=1)


def test_a_relative_checkpoint_folder_is_that_of_the_folder_in_which_the_run_was_started(tmp_path, monkeypatch):
    config = write_run(tmp_path / "run", "trainer.checkpoint_folder=kept")
    for folder in (tmp_path, tmp_path / "other"):
        write_checkpoints(folder / "kept", 2, 4)
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ConfigurationError, match=r"trainer\.checkpoint_folder is kept"):
        find_superseded(tmp_path / "run", config, num_kept=1)
    os.close(supervise(tmp_path, os.getpid(), []))
    (tmp_path / SUPERVISED).rename(tmp_path / "run" / SUPERVISED)
    assert find_superseded(tmp_path / "run", config, num_kept=1) == [tmp_path / "kept/ep0-ba2.pt"]


def test_a_run_that_cannot_be_read_is_named_and_the_others_are_pruned(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("a_key_of_another_version: 1\n")
    write_run(tmp_path / "b")
    write_checkpoints(tmp_path / "b/checkpoints", 2, 4)
    runs_command.prune([tmp_path], 1, is_confirmed=False)
    output = capsys.readouterr().out
    assert f"{tmp_path}/a  is skipped: " in output
    assert f"{tmp_path}/b/checkpoints/ep0-ba2.pt\n" in output
