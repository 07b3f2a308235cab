"""Stack traces of ranks, as they are when a supervisor asks for them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from diffusion.operations.beats import Beat, Phase, read_beats
from diffusion.operations.stacks import collect_stacks
from tests.tools.training_runs import ROOT, environment

NUM_TIMES = 30
"""How often they are asked: a signal to a process that is stopped mostly reaches its main thread."""


def start_ranks(folder: Path) -> tuple[subprocess.Popen, list[Beat]]:
    """Start two that work, and wait for their first signs of life."""
    folder.mkdir()
    script = folder / "acts.json"
    script.write_text(json.dumps([{"phase": "step", "step": 7, "works": True, "threads": 4, "code": 0}]))
    command = [sys.executable, str(ROOT / "tests/unit/operations/acting_rank.py"), str(folder), str(script)]
    job = subprocess.Popen(command, env=environment())
    while True:
        beats = read_beats(folder)
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
    monkeypatch.setattr("diffusion.operations.stacks._ask", lambda pid: os.kill(pid, signal.SIGKILL))
    monkeypatch.setattr("diffusion.operations.stacks._PATIENCE", 3600.0)  # Nobody waits for it.
    text = collect_stacks(tmp_path / "ranks", beats)
    job.wait()
    assert text.count("no answer from process") == 2
