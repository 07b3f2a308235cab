"""The supervisor over jobs that act like training: when it starts again, ends a hang, and ends itself."""

import errno
import fcntl
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import psutil
import pytest

from diffusion.config.operations import SupervisionConfig
from diffusion.errors import ConfigurationError, MachineError
from diffusion.formats.run_folder import LEASE, ROLLBACK, SUPERVISED
from diffusion.operations import supervisor as supervisor_module
from diffusion.operations import timeouts
from diffusion.operations.events import EventLog, read_events
from diffusion.operations.heartbeats import HeartbeatFile, HeartbeatRecord, Phase, read_heartbeats
from diffusion.operations.processes import is_alive, kill, tree
from diffusion.operations.supervisor import Supervisor, split_command
from tests.tools.training_runs import ROOT, environment

WAITS = {"phase": "step", "step": 7, "waits": True, "code": 0}
FINISHES = {"phase": "ending", "step": 9, "code": 0}


def failing(code: int, error: str, step: int = 7, **more) -> dict:
    return {"phase": "step", "step": step, "code": code, "error": error, **more}


def supervisor_of(
    run: Path,
    acts: list[dict],
    prepare: Callable[[], None] = lambda: None,
    launcher: Sequence[str] = (),
    growth: tuple[Callable[[], bool], float] | None = None,
    **settings,
) -> Supervisor:
    script = run / "acts.json"
    run.mkdir(exist_ok=True)
    script.write_text(json.dumps(acts))
    heartbeats = run / "beats"
    heartbeats.mkdir(exist_ok=True)
    program = ROOT / "tests/tools/acting_rank.py"
    command = [*launcher, sys.executable, str(program), str(heartbeats), str(script)]

    def start() -> list[str]:
        prepare()
        return command

    settled = SupervisionConfig(first_pause=0.01, **settings)
    return Supervisor(start, run, heartbeats, settled, EventLog(run), environment=environment(), growth=growth)


def names(run: Path) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_jobs_are_started_again_until_one_finishes(tmp_path):
    acts = [failing(1, "RuntimeError: lost a peer"), failing(75, "PreemptedError: saved"), FINISHES]
    assert supervisor_of(tmp_path, acts).run() == 0
    assert names(tmp_path) == ["started", "ended", "started", "ended", "started", "finished"]
    ended = [event for event in read_events(tmp_path) if event["event"] == "ended"]
    assert [(event["code"], event["pause"], event["step"]) for event in ended] == [(1, 0.01, 7), (75, 0, 7)]
    assert ended[0]["reason"] == "RuntimeError: lost a peer"


@pytest.mark.parametrize("continues", [True, False])
def test_a_job_is_ended_and_started_again_when_it_could_have_more_hosts(tmp_path, continues):
    """Also where pre-empted jobs are not continued. Before there are more hosts, nothing happens."""
    answers = [False, False, True]
    supervisor = supervisor_of(
        tmp_path, [WAITS, FINISHES], growth=(lambda: answers.pop(0), 0.1), continue_preempted=continues
    )
    assert supervisor.run() == 0
    assert answers == []
    assert names(tmp_path) == ["started", "growing", "ended", "started", "finished"]
    (ended,) = [event for event in read_events(tmp_path) if event["event"] == "ended"]
    assert (ended["code"], ended["pause"], ended["step"]) == (75, 0, 7)


def test_an_error_that_lasts_stops_the_supervisor_which_says_why(tmp_path):
    acts = [failing(1, "RuntimeError: lost a peer"), failing(2, "UnfitDataError: 11 images", 8, is_lasting=True)]
    assert supervisor_of(tmp_path, acts).run() == 2
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["code"]) == ("stopped", 2)
    assert last["reason"] == "UnfitDataError: 11 images; a restart meets the same error"


def test_a_hang_is_ended_with_the_stack_traces_of_all_ranks(tmp_path):
    assert supervisor_of(tmp_path, [WAITS, FINISHES], hang_floor=1.5).run() == 0
    assert names(tmp_path) == ["started", "hang", "ended", "started", "finished"]
    hang = read_events(tmp_path)[1]
    silence = re.search(r"no heartbeat of any rank for (\d+) s", hang["reason"])
    assert silence is not None and int(silence[1]) < 60
    assert "ranks 0, 1 of 2 in phase step of step 7" in hang["reason"]
    stacks = (tmp_path / hang["stacks"]).read_text()
    assert stacks.count("in wait_in_a_collective") == 2


@pytest.mark.parametrize(
    ("code", "error", "reason"),
    [
        (0, None, "exit code 0"),
        (2, "BudgetSpentError: spent", "BudgetSpentError: spent; a restart meets the same error"),
    ],
)
def test_ranks_that_end_but_do_not_exit_are_killed_and_judged_by_what_they_said(
    tmp_path, monkeypatch, code, error, reason
):
    monkeypatch.setattr(timeouts, "EXIT", 1.5)
    act = {"phase": "ending", "step": 7, "code": code, "error": error, "is_lasting": True, "lingers": True}
    assert supervisor_of(tmp_path, [act]).run() == code
    assert names(tmp_path) == ["started", "hang", "stopped" if code else "finished"]
    assert read_events(tmp_path)[-1]["reason"] == reason


def test_a_job_without_a_heartbeat_is_ended_after_the_timeout_of_a_pause(tmp_path):
    supervisor = supervisor_of(tmp_path, [], launcher=["bash", "-c", "sleep 600"], pause_timeout=0.5, max_restarts=0)
    assert supervisor.run() == 124
    assert names(tmp_path) == ["started", "hang", "stopped"]


def test_a_launcher_has_time_to_end_the_ranks_of_other_machines_when_those_of_this_one_hang(tmp_path):
    ends_others = f"sleep 1; touch {tmp_path}/ended; exit 1"
    launcher = ["bash", "-c", f'trap "{ends_others}" TERM; "$@" && exit; while :; do sleep 0.1; done', "launcher"]
    assert supervisor_of(tmp_path, [{**WAITS, "code": 1}, FINISHES], launcher=launcher, hang_floor=1.5).run() == 0
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("acts", [[FINISHES], [WAITS, FINISHES]])
def test_what_a_launcher_leaves_without_a_heartbeat_ends_with_the_job(tmp_path, monkeypatch, acts):
    monkeypatch.setattr(timeouts, "STRAGGLERS", 0.5)
    launcher = ["bash", "-c", f'(sleep 600 & echo $! >> {tmp_path}/orphans); exec "$@"', "launcher"]
    assert supervisor_of(tmp_path, acts, launcher=launcher, hang_floor=1.5).run() == 0
    orphans = [int(line) for line in (tmp_path / "orphans").read_text().split()]
    assert len(orphans) == len(acts)
    assert tree(orphans) == []


def test_slow_data_is_reported_and_waited_for(tmp_path):
    supervisor = supervisor_of(tmp_path, [{**WAITS, "phase": "data"}, FINISHES], hang_floor=2, data_timeout=6)
    assert supervisor.run() == 0
    assert names(tmp_path) == ["started", "slow_data", "hang", "ended", "started", "finished"]


def test_a_signal_is_passed_on_and_the_supervisor_ends_with_the_job(tmp_path):
    supervisor = supervisor_of(tmp_path, [WAITS])
    supervisor.listen()

    def tell() -> None:
        while len(read_heartbeats(tmp_path / "beats")) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell).start()
    assert supervisor.run() == 75
    assert names(tmp_path) == ["started", "signal", "stopped"]


def test_a_signal_is_received_wherever_the_supervisor_is(tmp_path):
    """Also within what it waits by: one comes at each line of it."""
    supervisor = supervisor_of(tmp_path, [WAITS])
    supervisor.listen()
    files, is_begun = {supervisor_module.__file__, threading.__file__, queue.__file__}, False

    def interrupt(frame: FrameType, event: str, argument: object):
        nonlocal is_begun
        if frame.f_code.co_filename not in files:
            return None
        is_begun = is_begun or len(read_heartbeats(tmp_path / "beats")) == 2
        if is_begun and event == "line":
            signal.raise_signal(signal.SIGTERM)
        return interrupt

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for itself")

    before, previous = sys.gettrace(), signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)
    sys.settrace(interrupt)
    try:
        assert supervisor.run() == 75
    finally:
        sys.settrace(before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        kill(tree([beat.pid for beat in read_heartbeats(tmp_path / "beats")]))
    assert names(tmp_path) == ["started", "signal", "stopped"]


def test_nothing_is_started_after_a_signal_that_came_during_the_check(tmp_path):
    supervisor = supervisor_of(tmp_path, [WAITS], lambda: os.kill(os.getpid(), signal.SIGTERM))
    supervisor.listen()
    assert supervisor.run() == 75
    assert names(tmp_path) == ["stopped"]


def test_a_mistake_before_the_first_step_stops_the_supervisor_until_it_is_mended(tmp_path):
    assert supervisor_of(tmp_path, [failing(2, "MachineError: no space left", -1)]).run() == 2
    assert "MachineError: no space left; no restart before the first step" in read_events(tmp_path)[-1]["reason"]
    assert supervisor_of(tmp_path, [FINISHES]).run() == 0


def test_a_run_that_is_at_work_is_refused_also_when_its_supervisor_is_gone_until_its_job_is_ended(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tests.integration.test_supervisor import *; "
        "supervisor_of(Path(sys.argv[1]), [WAITS]).run()"
    )
    first = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment())
    while len(beats := read_heartbeats(tmp_path / "beats")) < 2 or names(tmp_path) != ["started"]:
        assert first.poll() is None
        time.sleep(0.05)
    ranks = [psutil.Process(beat.pid) for beat in beats]
    try:
        for is_gone in (False, True):
            if is_gone:
                first.kill()
                first.wait()
            with pytest.raises(MachineError, match=str(tmp_path)):
                supervisor_of(tmp_path, [FINISHES]).run()
        for rank in ranks:
            rank.terminate()
        psutil.wait_procs(ranks, timeout=600)
        assert supervisor_of(tmp_path, [FINISHES]).run() == 0
    finally:
        kill(ranks)
    assert names(tmp_path) == ["started", "started", "finished"]


@pytest.mark.parametrize("is_before", [True, False])
def test_ranks_of_a_start_by_hand_are_left_alone(tmp_path, is_before):
    """It begins before the supervisor's next start, or while the job imports, which is rejected then."""
    beats, acts = tmp_path / "beats", tmp_path / "other.json"
    acts.write_text(json.dumps([WAITS]))
    other = f"setsid {sys.executable} {ROOT}/tests/tools/acting_rank.py {beats} {acts} & "
    wait = f"until [ -s {beats}/rank-0.json ] && [ -s {beats}/rank-1.json ]; do sleep 0.1; done; exit 2"
    begin, begun = ["bash", "-c", other + wait], []
    if is_before:
        supervisor = supervisor_of(
            tmp_path, [FINISHES], lambda: begun.append(subprocess.run(begin, cwd=ROOT, check=False))
        )
    else:
        supervisor = supervisor_of(tmp_path, [], launcher=begin)
    try:
        assert supervisor.run() == 2
        assert "another start" in read_events(tmp_path)[-1]["reason"]
        assert [is_alive(beat) for beat in read_heartbeats(beats)] == [True, True]
    finally:
        kill(tree([beat.pid for beat in read_heartbeats(beats)]))


def test_a_job_of_another_host_keeps_its_heartbeats(tmp_path):
    supervisor = supervisor_of(tmp_path, [FINISHES])
    file, holder = tmp_path / "beats/rank-0.json", {"host": "elsewhere", "namespace": "", "pid": 7, "time": 0.0}
    file.touch()
    holder |= {"token": "other"}
    (tmp_path / LEASE).write_text(json.dumps({**holder, "count": 1}))
    renewal = threading.Timer(1, (tmp_path / LEASE).write_text, [json.dumps({**holder, "count": 2})])
    renewal.start()
    with pytest.raises(MachineError, match="process 7 on elsewhere"):
        supervisor.run()
    assert file.exists()


def test_who_looks_whether_a_run_is_supervised_keeps_no_supervisor_away(tmp_path, monkeypatch):
    looking = [os.open(tmp_path / SUPERVISED, os.O_RDONLY | os.O_CREAT)]
    fcntl.flock(looking[0], fcntl.LOCK_SH)
    lock = fcntl.flock

    def lock_while_somebody_looks(file: int, operation: int) -> None:
        try:
            lock(file, operation)
        finally:
            while looking:
                os.close(looking.pop())

    monkeypatch.setattr(fcntl, "flock", lock_while_somebody_looks)
    assert supervisor_of(tmp_path, [FINISHES]).run() == 0


def test_a_heartbeat_that_is_being_overwritten_is_read_again(tmp_path, monkeypatch):
    for rank in (0, 1):
        file = HeartbeatFile(tmp_path, rank)
        file.write(HeartbeatRecord(rank=rank, pid=1, host="h", count=1, phase=Phase.step, step=3, num_done=3, time=0.0))
        file.close()
    read, times = Path.read_bytes, {"rank-0.json": 0, "rank-1.json": 0}

    def read_while_it_is_written(path: Path) -> bytes:
        times[path.name] += 1
        return read(path)[: 40 if path.name == "rank-1.json" and times[path.name] < 3 else None]

    def read_from_a_network_disk(path: Path) -> bytes:
        times[path.name] += 1
        if times[path.name] == 1:
            raise OSError(errno.ESTALE, "stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_from_a_network_disk)
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [0, 1]
    times |= dict.fromkeys(times, 0)
    monkeypatch.setattr(Path, "read_bytes", read_while_it_is_written)
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [0, 1]
    assert times == {"rank-0.json": 1, "rank-1.json": 3}
    (tmp_path / "rank-0.json").write_text("{")
    assert [beat.rank for beat in read_heartbeats(tmp_path)] == [1], "one that stays so is left out"


def test_a_rollback_that_cannot_be_read_does_not_end_the_supervisor(tmp_path):
    supervisor = supervisor_of(tmp_path, [FINISHES])
    (tmp_path / ROLLBACK).write_text("{")
    assert supervisor.run() == 0


def test_a_full_disk_keeps_the_record_of_the_supervisor_before(tmp_path, monkeypatch):
    (tmp_path / SUPERVISED).write_text("the one before")

    def pwrite(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    supervisor = supervisor_of(tmp_path, [FINISHES])
    with monkeypatch.context() as full, pytest.raises(MachineError, match="No space left"):
        for name in ("write", "pwrite"):
            full.setattr(os, name, pwrite)
        supervisor.run()
    assert (tmp_path / SUPERVISED).read_text() == "the one before"


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    supervisor = supervisor_of(tmp_path, [FINISHES])
    supervisor.run_folder = Path("/dev/null/run")
    with pytest.raises(MachineError, match="/dev/null/run"):
        supervisor.run()


def test_a_program_that_is_not_there_ends_the_supervisor_with_its_name(tmp_path):
    supervisor = supervisor_of(tmp_path, [FINISHES], launcher=["composr"])
    with pytest.raises(ConfigurationError, match="composr"):
        supervisor.run()


def test_yaml_and_overrides_of_a_command():
    command = ["torchrun", "--nnodes=2", "run.py", "tests/tools/toy.yaml", "output_folder=x", "--other=1", "seed=3"]
    assert split_command(command) == ("tests/tools/toy.yaml", ["output_folder=x", "seed=3"])
    with pytest.raises(ConfigurationError, match=r"composer run\.py"):
        split_command(["composer", "run.py"])
