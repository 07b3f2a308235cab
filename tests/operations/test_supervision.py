"""The supervisor over jobs that act like training: when it starts again, ends a hang, and ends itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from diffusion.config.operations import SupervisionConfig
from diffusion.errors import ConfigurationError, MachineError
from diffusion.operations.beats import read_beats
from diffusion.operations.command import read_command
from diffusion.operations.events import EventLog, read_events
from diffusion.operations.jobs import Command, kill
from diffusion.operations.supervision import Places, Supervisor
from tests.training_runs import ROOT, environment

WAITS = {"phase": "step", "step": 7, "waits": True, "code": 0}
FINISHES = {"phase": "ending", "step": 9, "code": 0}


def failing(code: int, error: str, step: int = 7, **more) -> dict:
    return {"phase": "step", "step": step, "code": code, "error": error, **more}


def supervisor_of(
    run: Path, acts: list[dict], prepare: Callable[[], None] = lambda: None, launcher: Sequence[str] = (), **settings
) -> Supervisor:
    script = run / "acts.json"
    run.mkdir(exist_ok=True)
    script.write_text(json.dumps(acts))
    places = Places(run=run, beats=run / "beats")
    places.beats.mkdir(exist_ok=True)
    command = [*launcher, sys.executable, str(ROOT / "tests/operations/acting_rank.py"), str(places.beats), str(script)]
    return Supervisor(
        lambda lock: Command(command, keep_open=lock, environment=environment()),
        places,
        SupervisionConfig(first_pause=0.01, **settings),
        EventLog(run),
        prepare=prepare,
    )


def names(run: Path) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_jobs_are_started_again_until_one_finishes(tmp_path):
    acts = [failing(1, "RuntimeError: lost a peer"), failing(75, "PreemptedError: saved"), FINISHES]
    assert supervisor_of(tmp_path, acts).run() == 0
    assert names(tmp_path) == ["started", "ended", "started", "ended", "started", "finished"]
    ended = [event for event in read_events(tmp_path) if event["event"] == "ended"]
    assert [(event["code"], event["pause"], event["step"]) for event in ended] == [(1, 0.01, 7), (75, 0, 7)]
    assert ended[0]["reason"] == "RuntimeError: lost a peer"


def test_an_error_that_lasts_stops_the_supervisor_which_says_why(tmp_path):
    acts = [failing(1, "RuntimeError: lost a peer"), failing(2, "UnfitDataError: 11 pictures", 8, is_lasting=True)]
    assert supervisor_of(tmp_path, acts).run() == 2
    last = read_events(tmp_path)[-1]
    assert (last["event"], last["code"]) == ("stopped", 2)
    assert last["reason"] == "UnfitDataError: 11 pictures; starting again does not mend it"


def test_a_hang_is_ended_with_the_stack_traces_of_all_ranks(tmp_path):
    began = time.monotonic()
    assert supervisor_of(tmp_path, [WAITS, FINISHES], hang_floor=1.5).run() == 0
    assert time.monotonic() - began < 60
    assert names(tmp_path) == ["started", "hang", "ended", "started", "finished"]
    hang = read_events(tmp_path)[1]
    assert "ranks 0, 1 of 2 in phase step of step 7" in hang["reason"]
    stacks = (tmp_path / hang["stacks"]).read_text()
    assert stacks.count("in wait_in_a_collective") == 2


def test_a_launcher_has_time_to_end_the_ranks_of_other_machines_when_those_of_this_one_hang(tmp_path):
    ends_others = f"sleep 1; touch {tmp_path}/ended; exit 1"
    launcher = ["bash", "-c", f'trap "{ends_others}" TERM; "$@" && exit; while :; do sleep 0.1; done', "launcher"]
    assert supervisor_of(tmp_path, [{**WAITS, "code": 1}, FINISHES], launcher=launcher, hang_floor=1.5).run() == 0
    assert (tmp_path / "ended").exists()


def test_slow_data_is_told_and_waited_for(tmp_path):
    supervisor = supervisor_of(tmp_path, [{**WAITS, "phase": "data"}, FINISHES], hang_floor=2, data_patience=12)
    assert supervisor.run() == 0
    assert names(tmp_path) == ["started", "slow_data", "hang", "ended", "started", "finished"]


@pytest.fixture
def own_handlers():
    """The signal handlers that were there before come back."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("own_handlers")
def test_a_signal_is_passed_on_and_the_supervisor_ends_with_the_job(tmp_path):
    supervisor = supervisor_of(tmp_path, [WAITS])
    supervisor.listen()

    def tell() -> None:
        while len(read_beats(tmp_path / "beats")) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell).start()
    assert supervisor.run() == 75
    assert names(tmp_path) == ["started", "told", "stopped"]


@pytest.mark.usefixtures("own_handlers")
def test_nothing_is_started_after_a_signal_that_came_during_the_check(tmp_path):
    supervisor = supervisor_of(tmp_path, [WAITS], lambda: os.kill(os.getpid(), signal.SIGTERM))
    supervisor.listen()
    assert supervisor.run() == 75
    assert names(tmp_path) == ["stopped"]


def test_a_mistake_before_the_first_step_stops_the_supervisor_until_it_is_mended(tmp_path):
    assert supervisor_of(tmp_path, [failing(2, "MachineError: no space left", -1)]).run() == 2
    assert "MachineError: no space left; the run has not come to a step yet" in read_events(tmp_path)[-1]["reason"]
    assert supervisor_of(tmp_path, [FINISHES]).run() == 0


def test_a_run_that_is_at_work_is_refused_also_when_its_supervisor_is_gone_until_its_job_is_ended(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tests.operations.test_supervision import *; "
        "supervisor_of(Path(sys.argv[1]), [WAITS]).run()"
    )
    first = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment())
    while len(read_beats(tmp_path / "beats")) < 2:
        assert first.poll() is None
        time.sleep(0.05)
    ranks = [psutil.Process(beat.pid) for beat in read_beats(tmp_path / "beats")]
    try:
        for is_gone in (False, True):
            if is_gone:
                first.kill()
                first.wait()
            with pytest.raises(MachineError, match="is at work, supervised or not"):
                supervisor_of(tmp_path, [FINISHES]).run()
        for rank in ranks:
            rank.terminate()
        psutil.wait_procs(ranks, timeout=600)
        assert supervisor_of(tmp_path, [FINISHES]).run() == 0
    finally:
        kill(ranks)
    assert names(tmp_path) == ["started", "started", "finished"]


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path):
    supervisor = supervisor_of(tmp_path, [FINISHES])
    supervisor.places = replace(supervisor.places, run=Path("/dev/null/run"))
    with pytest.raises(MachineError, match="cannot be written to: Not a directory"):
        supervisor.run()


def test_a_program_that_is_not_there_ends_the_supervisor_with_its_name(tmp_path):
    supervisor = supervisor_of(tmp_path, [FINISHES], launcher=["composr"])
    with pytest.raises(ConfigurationError, match="the command cannot be started: composr: No such file"):
        supervisor.run()


def test_the_command_says_what_is_supervised(tmp_path):
    command = ["torchrun", "--nnodes=2", "run.py", "tests/toy.yaml", f"output_folder={tmp_path}"]
    supervised = read_command([*command, "operations.supervision.hang_floor=90"], {})
    assert supervised.places == Places(run=tmp_path, beats=tmp_path / "heartbeats")
    assert (supervised.config.operations.supervision.hang_floor, supervised.webhook) == (90, None)
    named = "operations.supervision.webhook_variable=ALARMS"
    assert read_command([*command, named], {"ALARMS": "http://x/SECRET"}).webhook == "http://x/SECRET"
    with pytest.raises(ConfigurationError, match="no such environment variable"):
        read_command([*command, named], {})
    with pytest.raises(ConfigurationError, match="names no YAML file"):
        read_command(["composer", "run.py"], {})
