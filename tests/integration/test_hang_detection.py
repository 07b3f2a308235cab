"""Hangs, slow data and long pauses, by a clock that the test turns; stack traces of ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from diffusion.config.operations import SupervisionConfig
from diffusion.operations import timeouts
from diffusion.operations.hang_detection import Condition, HangDetector, collect_stacks
from diffusion.operations.heartbeats import HeartbeatRecord, Phase, read_heartbeats
from tests.tools.training_runs import ROOT, environment

SETTINGS = SupervisionConfig(hang_floor=60, hang_factor=10, data_timeout=1800, pause_timeout=3600)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def beat(rank: int, phase: Phase, step: int, count: int = 5, median: float | None = 0.5) -> HeartbeatRecord:
    return HeartbeatRecord(
        rank=rank, pid=1, host="", count=count, phase=phase, step=step, num_done=step, time=0.0, median_step=median
    )


def silent_for(
    seconds: float, beats: list[HeartbeatRecord], stopped: tuple[int, ...] = (), *, have_exited: bool = False
):
    clock = Clock()
    watch = HangDetector(SETTINGS, clock)
    watch.judge(beats)
    clock.seconds += seconds
    return watch.judge(beats, stopped, have_exited=have_exited)


@pytest.mark.parametrize(("median", "limit"), [(0.5, 60), (6.0, 60), (20.0, 200)])
def test_a_hang_is_noticed_after_a_minute_or_ten_median_steps(median, limit):
    beats = [beat(rank, Phase.step, 7, median=median) for rank in (0, 1)]
    assert silent_for(limit - 1, beats)[0] is Condition.working
    condition, reason = silent_for(limit + 1, beats)
    assert condition is Condition.hang
    assert "ranks 0, 1 of 2 in phase step of step 7" in reason


def test_a_heartbeat_of_any_rank_ends_the_silence():
    clock = Clock()
    watch = HangDetector(SETTINGS, clock)
    beats = [beat(rank, Phase.step, 7) for rank in (0, 1)]
    watch.judge(beats)
    clock.seconds += 50
    watch.judge([replace(beats[0], count=6), beats[1]])
    clock.seconds += 50
    assert watch.judge([replace(beats[0], count=6), beats[1]])[0] is Condition.working


@pytest.mark.parametrize(
    ("others", "slowest", "condition"),
    [
        ((Phase.step, 7), (Phase.data, 7), Condition.slow_data),
        ((Phase.data, 8), (Phase.step, 7), Condition.hang),
        ((Phase.between, 8), (Phase.step, 7), Condition.hang),
        ((Phase.step, 7), (Phase.between, 7), Condition.working),
        ((Phase.data, 8), (Phase.evaluation, 8), Condition.working),
        ((Phase.ended, 8), (Phase.ending, 8), Condition.working),
    ],
)
def test_the_phase_of_the_slowest_rank_says_what_is_waited_for(others, slowest, condition):
    beats = [beat(0, *others), beat(1, *slowest), beat(2, *others)]
    assert silent_for(100, beats)[0] is condition


def test_a_rank_that_compiles_has_time_for_it():
    beats = [beat(0, Phase.step, 700), beat(1, Phase.compiling, 700)]
    assert silent_for(3599, beats)[0] is Condition.working
    assert silent_for(3601, beats)[0] is Condition.hang


def test_data_and_pauses_have_timeouts_of_their_own():
    data = [beat(0, Phase.step, 7), beat(1, Phase.data, 7)]
    assert silent_for(1799, data)[0] is Condition.slow_data
    assert silent_for(1801, data)[0] is Condition.hang
    saving = [beat(0, Phase.between, 7), beat(1, Phase.between, 7)]
    assert silent_for(3599, saving)[0] is Condition.working
    assert silent_for(3601, saving)[0] is Condition.hang
    assert silent_for(3601, [])[0] is Condition.hang


def test_ranks_that_have_ended_have_minutes_to_exit():
    beats = [beat(0, Phase.ended, 7), beat(1, Phase.ended, 7)]
    assert silent_for(timeouts.EXIT - 1, beats)[0] is Condition.working
    condition, reason = silent_for(timeouts.EXIT + 1, beats)
    assert condition is Condition.hang
    assert "all ranks have ended, but not their processes" in reason
    assert silent_for(3599, beats, have_exited=True)[0] is Condition.working, "their command does something else"


def test_the_first_steps_which_may_compile_are_given_time():
    beats = [beat(0, Phase.step, 1, median=None)]
    assert silent_for(100, beats)[0] is Condition.working


def test_a_stopped_rank_is_a_hang_whatever_it_last_said():
    beats = [beat(0, Phase.step, 7), beat(1, Phase.data, 7)]
    condition, reason = silent_for(61, beats, stopped=(1,))
    assert condition is Condition.hang
    assert "rank 1 was stopped" in reason


NUM_TIMES = 5
"""How often they are asked: a signal to a process that is stopped mostly reaches its main thread."""


def start_ranks(folder: Path) -> tuple[subprocess.Popen, list[HeartbeatRecord]]:
    """Start two that work, and wait for their first heartbeats."""
    folder.mkdir()
    script = folder / "acts.json"
    script.write_text(json.dumps([{"phase": "step", "step": 7, "works": True, "threads": 4, "code": 0}]))
    command = [sys.executable, str(ROOT / "tests/tools/acting_rank.py"), str(folder), str(script)]
    job = subprocess.Popen(command, env=environment())
    while True:
        beats = read_heartbeats(folder)
        if len(beats) == 2 and all(beat.phase is Phase.step for beat in beats):
            break
        assert job.poll() is None
        time.sleep(0.05)
    return job, beats


def test_frozen_ranks_write_what_their_main_threads_do(tmp_path):
    job, beats = start_ranks(tmp_path / "ranks")
    processes = [psutil.Process(beat.pid) for beat in beats]
    try:
        for times in range(1, NUM_TIMES + 1):
            for process in processes:
                process.suspend()
            while any(process.status() != psutil.STATUS_STOPPED for process in processes):
                time.sleep(0.01)
            text = collect_stacks(tmp_path / "ranks", beats)
            _, *parts = text.split("in phase step of step 7:\n")
            for part in parts:
                _, *mains = part.split("Current thread")
                assert len(mains) == times, text
                assert all("in work\n" in main for main in mains), text
                assert part.count("Thread 0x") == 4 * times, text
        assert len(parts) == 2
    finally:
        for process in processes:
            process.kill()
        job.wait()


def test_a_rank_that_ends_when_it_is_asked_gives_no_answer(tmp_path, monkeypatch):
    job, beats = start_ranks(tmp_path / "ranks")
    monkeypatch.setattr(
        "diffusion.operations.hang_detection._signal_main_thread", lambda pid: os.kill(pid, signal.SIGKILL)
    )
    monkeypatch.setattr(timeouts, "STACKS", 3600.0)  # Nobody waits for it.
    text = collect_stacks(tmp_path / "ranks", beats)
    job.wait()
    assert text.count("no answer from process") == 2
