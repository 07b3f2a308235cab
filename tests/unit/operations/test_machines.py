"""A supervisor that checks machines before each start: what it tells, where it starts, and when it does not."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from diffusion.config.data import DataConfig
from diffusion.config.operations import SupervisionConfig
from diffusion.errors import ConfigurationError, MachineError
from diffusion.operations.checks.verdicts import Verdict, problem, to_json
from diffusion.operations.events import EventLog, read_events
from diffusion.operations.machines import Fleet, Machines
from diffusion.operations.supervision import Places, Supervisor
from tests.tools.training_runs import ROOT

FULL = problem("output folder", "no room", "free space")
FLEET = Fleet(hosts=("n0", "n1", "n2"), wanted=2, ranks_per_host=2)


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Decide what each host of the fleet answers; the job is a command that notes the hosts it gets."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/bash\ncat {tmp_path}/"${{@: -2:1}}"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("SSH", f"{ssh} -p 22")

    def decide(host: str, *verdicts: Verdict) -> None:
        reading = {"name": host, "host": host, "num_gpus": 0}
        (tmp_path / host).write_text(json.dumps({"reading": reading, "verdicts": to_json(verdicts)}))

    for host in FLEET.hosts:
        decide(host)
    return decide


def supervise(folder: Path, code: int, *, max_restarts: int = 10, patience: float | None = 60.0) -> int:
    run = folder / "run"
    events = EventLog(run)
    note = f"echo $ATTEMPTS $CHECK $RANKS_PER_HOST > {folder}/environment; echo $@ >> {folder}/starts; exit {code}"
    command = ["bash", "-c", note, "job", "{hosts}"]
    machines = Machines(command, [], FLEET, DataConfig(global_batch_size=8), patience, events)
    settings = SupervisionConfig(first_pause=0.01, longest_pause=0.01, max_restarts=max_restarts)
    places = Places(run=run, beats=run / "beats")
    return Supervisor(machines.start, places, settings, events, prepare=machines.check).run()


def test_an_unfit_host_is_told_and_a_spare_one_takes_its_place(answer, tmp_path):
    answer("n1", FULL)
    assert supervise(tmp_path, 0) == 0
    unfit, started, finished = read_events(tmp_path / "run")
    assert (unfit["event"], unfit["host"], unfit["reason"]) == ("unfit", "n1", "no room: free space")
    assert (started["event"], finished["event"]) == ("started", "finished")
    assert (tmp_path / "starts").read_text() == "n0 n2\n"
    assert (tmp_path / "environment").read_text() == "1 false 2\n", "the launcher neither checks nor starts again"


def test_hosts_are_checked_before_each_start(answer, tmp_path):
    answer("n0", FULL)
    answer("n2", FULL)
    assert supervise(tmp_path, 1, max_restarts=1) == 1
    assert (tmp_path / "starts").read_text() == "n1\nn1\n", "a smaller number of ranks that divides the batch"
    unfit = [event["host"] for event in read_events(tmp_path / "run") if event["event"] == "unfit"]
    assert unfit == ["n0, n2", "n0, n2"]


def test_nothing_is_started_on_unfit_machines(answer, tmp_path):
    for host in FLEET.hosts:
        answer(host, FULL)
    assert supervise(tmp_path, 0) == 2
    assert not (tmp_path / "starts").exists()
    *_, last = read_events(tmp_path / "run")
    assert last["event"] == "stopped"
    assert last["reason"].startswith("MachineError: all hosts: no room: free space; the run has not come to a step")


def test_without_a_check_the_first_hosts_are_taken(answer, tmp_path):
    answer("n0", FULL)
    assert supervise(tmp_path, 0, patience=None) == 0
    assert (tmp_path / "starts").read_text() == "n0 n1\n"


def test_this_machine_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    arguments = ["tests/tools/toy.yaml", "output_folder=/dev/null/run"]
    events = EventLog(tmp_path)
    machines = Machines(["true"], arguments, None, DataConfig(global_batch_size=8), 300, events)
    with pytest.raises(MachineError, match=r"^here: /dev/null/run cannot be written to: Not a directory: free space"):
        machines.check()
    (event,) = read_events(tmp_path)
    assert (event["event"], event["host"]) == ("unfit", "here")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fleet_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Fleet | None:
    supervise = script("supervise")
    monkeypatch.setattr(sys, "argv", ["supervise.py", *arguments])
    return supervise.read_fleet(supervise.parse_arguments())


def test_a_file_of_hosts_may_hold_comments(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("# rack 1\nn0 n1  # the new ones\n\nn2\n")
    fleet = fleet_of(
        monkeypatch, "--hosts", str(tmp_path / "hosts"), "--nodes", "2", "--", "ssh.sh", "{hosts}", "x.yaml"
    )
    assert fleet == Fleet(hosts=("n0", "n1", "n2"), wanted=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["composer", "-n", "8", "run.py", "x.yaml"], "does not know -n 8 run.py x.yaml: put `--` before the command"),
        (["--nodes", "4", "--", "composer", "x.yaml"], "are about the hosts of --hosts FILE: give it, too"),
        (["--ranks-per-host", "8", "--", "composer", "x.yaml"], "are about the hosts of --hosts FILE: give it, too"),
        (
            ["--nodes=-1", "--hosts", "hosts", "--", "ssh.sh", "{hosts}"],
            "argument --nodes: -1 is no whole number of at",
        ),
        (["--hosts", "hosts", "--", "ssh.sh", "x.yaml"], "must say by the word {hosts} where they go"),
        (["--hosts", "twice", "--", "ssh.sh", "{hosts}"], "--hosts twice names n1 more than once"),
        (["--hosts", "none", "--", "ssh.sh", "{hosts}"], "--hosts none names no hosts"),
    ],
)
def test_mistakes_in_the_hosts_of_a_supervisor(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"hosts": "n0\nn1\n", "twice": "n1 n0\nn1\n", "none": "# n0\n"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        fleet_of(monkeypatch, *arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "tests/tools/toy.yaml"], "'' names no hosts"),
        (["n0 n1 n0", "tests/tools/toy.yaml"], "'n0 n1 n0' names n0 more than once"),
        (["n0", "tests/tools/toy.yaml", "--nodes=-1"], "argument --nodes: -1 is no whole number of at least 1"),
        (["n0", "tests/tools/toy.yaml", "--ranks-per-host=0"], "argument --ranks-per-host: 0 is no whole number"),
    ],
)
def test_mistakes_in_the_hosts_that_a_launcher_asks_about(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        script("fit_hosts").fit_hosts(arguments)
    assert message in str(caught.value)
