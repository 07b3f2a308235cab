"""Workers of this machine: results, errors, GPUs, death and the end of the parent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from diffusion.errors import DataError, MachineError
from diffusion.preparation import engine
from diffusion.preparation.engine import Workers, run
from tests.tools.training_runs import ROOT, environment


def doubling():
    return lambda task: 2 * task


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_task_is_done_once(number):
    assert sorted(run(Workers(number=number), doubling, range(100))) == list(range(0, 200, 2))
    assert list(run(Workers(number=number), doubling, [])) == []
    assert list(run(Workers(number=number), doubling, [4])) == [8]


def test_tasks_are_taken_as_they_are_needed_and_make_is_called_once_per_worker():
    taken = []
    tasks = (taken.append(number) or number for number in range(100))

    def make():
        calls = []
        return lambda task: (os.getpid(), calls.append(task) or len(calls))

    results = run(Workers(number=2), make, tasks)
    first = next(results)
    assert len(taken) <= 5
    everything = [first, *results]
    for process in {pid for pid, _ in everything}:
        counts = sorted(count for pid, count in everything if pid == process)
        assert counts == list(range(1, len(counts) + 1))
    assert len({pid for pid, _ in everything} | {os.getpid()}) == 3


def test_workers_import_nothing_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("cloudpickle", "diffusion", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of a stranger')")
    monkeypatch.chdir(tmp_path)
    assert sorted(run(Workers(number=2), doubling, range(4))) == [0, 2, 4, 6]


def test_large_tasks_and_results_do_not_block_each_other():
    sizes = [len(result) for result in run(Workers(number=2), doubling, [b"x" * 2**21] * 12)]
    assert sizes == [2**22] * 12


@pytest.mark.parametrize("number", [1, 2])
def test_error_of_a_task_comes_as_it_is(number):
    def make():
        def work(task):
            if task == 7:
                raise DataError("shelf/7.tar: damaged")
            return [] / task if task == 8 else task  # a defect, with its traceback

        return work

    with pytest.raises(DataError, match=r"shelf/7\.tar"):
        list(run(Workers(number=number), make, range(8)))
    with pytest.raises(TypeError):
        list(run(Workers(number=number), make, [8, 8]))


def test_error_that_cannot_be_pickled_keeps_its_words():
    def make():
        class OddError(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        def work(task):
            raise OddError("salt", "pepper")

        return work

    with pytest.raises(RuntimeError, match="salt and pepper"):
        list(run(Workers(number=2), make, range(2)))


@pytest.mark.parametrize("number", [1, 2])
def test_error_of_make_and_of_memory(number):
    def make():
        raise DataError("weights/x")

    def hungry():
        def work(task):
            raise MemoryError

        return work

    with pytest.raises(DataError, match="weights/x"):
        list(run(Workers(number=number), make, range(8)))
    with pytest.raises(MachineError):
        list(run(Workers(number=number), hungry, range(8)))


def deadly():
    def work(task):
        if task == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if task == 6:
            raise MemoryError
        return task

    return work


def test_death_of_a_worker_names_its_task():
    with pytest.raises(MachineError, match=r"at number 5;"):
        list(run(Workers(number=2), deadly, [1, 5, 2, 3], describe=lambda task: f"number {task}"))
    with pytest.raises(MachineError, match=r"at number 6;"):
        list(run(Workers(number=1), deadly, [1, 6, 2, 3], describe=lambda task: f"number {task}"))


def test_a_task_at_which_a_worker_died_is_changed_and_done_last():
    died = []

    def change(task):
        died.append(task)
        return task if died.count(task) < 2 else 10 * task

    assert sorted(run(Workers(number=2), deadly, range(12), on_death=change)) == [*range(5), *range(7, 12), 50, 60]
    assert sorted(died) == [5, 5, 6, 6]


def test_workers_get_the_gpus_in_turn(monkeypatch):
    def make():
        def work(task):
            time.sleep(0.05)
            return os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], "torch" in sys.modules

        return work

    def seen(num_gpus):
        results = set(run(Workers(number=5), make, range(40), num_gpus=num_gpus))
        assert not any(imported for _, _, imported in results)
        return sorted(gpus for _, gpus, _ in results)

    monkeypatch.setattr(engine, "visible_gpus", lambda: ["4", "6", "7"])
    assert seen(1.0) == seen(0.5) == ["4", "4", "6", "6", "7"]
    assert seen(2.0) == ["4,6", "4,6", "6,7", "7,4", "7,4"]
    assert seen(0.0) == [""] * 5
    monkeypatch.setattr(engine, "visible_gpus", list)
    assert seen(1.0) == [""] * 5


def test_workers_end_when_results_are_not_wanted_any_more():
    def make():
        return lambda task: (os.getpid(), time.sleep(0 if task < 2 else 60))

    results = run(Workers(number=2), make, range(6))
    processes = {next(results)[0], next(results)[0]}
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 30
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent_in_the_middle_of_their_work(number, tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from diffusion.preparation.engine import Workers, run\n"
        "work = lambda mark: (Path(mark).touch(), time.sleep(120))\n"
        "list(run(Workers(number=2), lambda: work, sys.argv[1:]))"
    )
    marks = [tmp_path / "one", tmp_path / "two"]
    command = [sys.executable, "-c", program, *map(str, marks)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=-1, stderr=-1) as parent:
        assert parent.stdout is not None
        while not all(mark.exists() for mark in marks):
            assert parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(number)
        began = time.monotonic()
        parent.stdout.read()  # Workers hold the other end of it.
        assert time.monotonic() - began < 60
