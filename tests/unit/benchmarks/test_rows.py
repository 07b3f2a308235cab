"""Rows are measured once each, whatever happens to the process that measures them."""

import os
import signal
import time
from functools import partial

import pytest
import torch

from benchmarks import rows as benchmark_rows
from benchmarks.rows import Row, append, chosen, finished, read_rows, run_rows

MACHINE = {"device": "none", "type": "cpu"}


def measure(log, name, then=None):
    with log.open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    if then is not None:
        then()
    return {"value": 1.5}


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 239 GB")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_once(mark):
    if not mark.exists():
        mark.touch()
        kill()


@pytest.fixture
def run(tmp_path):
    """Run named rows; returns what `run_rows` does, the finished rows, and names and processes of all attempts."""

    def run(deadline=60.0, **actions):
        log, path = tmp_path / "log", tmp_path / "out" / "rows.jsonl"
        log.write_text("")

        def build():
            made = []
            for name, options in actions.items():
                options = dict(options or {})
                action = partial(measure, log, name, options.pop("then", None))
                made.append(Row(name=name, kind=name, measure=action, **{"seconds": 0, **options}))
            return made, MACHINE

        is_complete = run_rows(build, path, time.monotonic() + deadline)
        attempted = [tuple(line.split()) for line in log.read_text().splitlines()]
        return is_complete, finished(read_rows(path)), attempted

    return run


def test_a_row_that_fails_is_written_and_the_rest_runs_without_its_memory(run):
    is_complete, found, attempts = run(first=None, large={"then": out_of_memory}, last=None)
    assert is_complete
    assert [name for name, _ in attempts] == ["first", "large", "last"]
    assert "239 GB" in found["large"]["error"]
    assert found["last"]["result"] == {"value": 1.5}
    processes = [process for _, process in attempts]
    assert processes[0] == processes[1] != processes[2]
    _, again, attempts = run(first=None, large={"then": out_of_memory}, last=None)
    assert attempts == []
    assert again == found


def test_a_row_is_tried_again_after_a_kill_and_fails_after_two(run, tmp_path):
    once = partial(kill_once, tmp_path / "mark")
    is_complete, found, attempts = run(unlucky={"then": once}, deadly={"then": kill}, last=None)
    assert is_complete
    assert [name for name, _ in attempts] == ["unlucky", "unlucky", "deadly", "deadly", "last"]
    assert "result" in found["unlucky"]
    assert "result" in found["last"]
    assert "error" in found["deadly"]


def test_a_hanging_row_is_ended(run, monkeypatch):
    monkeypatch.setattr(benchmark_rows, "MIN_TIMEOUT", 1)
    _, found, attempts = run(hanging={"then": partial(time.sleep, 60)}, last=None)
    assert [name for name, _ in attempts] == ["hanging", "hanging", "last"]
    assert "error" in found["hanging"]


def test_a_call_ends_before_its_limit_and_the_next_one_goes_on(run):
    start = time.monotonic()
    _, found, attempts = run(deadline=3.0, long={"seconds": 30}, slow={"then": partial(time.sleep, 60)}, late=None)
    assert time.monotonic() - start < 10
    assert (list(found), [name for name, _ in attempts]) == ([], ["slow"])
    _, found, attempts = run(long={"seconds": 30}, slow=None, late=None)
    assert list(found) == [name for name, _ in attempts] == ["long", "slow", "late"]


def test_a_row_that_needs_a_process_of_its_own(run):
    _, _, attempts = run(first=None, alone={"is_alone": True}, third=None, fourth=None)
    first, alone, third, fourth = (process for _, process in attempts)
    assert len({first, alone, third}) == 3
    assert third == fourth


def test_other_parameters_are_another_measurement(tmp_path):
    path = tmp_path / "rows.jsonl"
    for size, num_results in ((1, 1), (1, 1), (2, 2)):
        row = Row(name="row", kind="row", measure=lambda size: {"size": size}, parameters={"size": size}, seconds=0)
        assert run_rows(lambda row=row: ([row], MACHINE), path, time.monotonic() + 60)
        assert finished(read_rows(path))["row"]["result"] == {"size": size}
        assert sum("result" in line for line in read_rows(path)) == num_results


def test_a_process_that_cannot_begin_is_not_started_for_ever(tmp_path):
    def build():
        raise ImportError("nothing is installed")

    assert not run_rows(build, tmp_path / "rows.jsonl", time.monotonic() + 60)


def test_a_line_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"name": "whole"})
    with path.open("a") as file:
        file.write('{"name": "cut o')
    assert read_rows(path) == [{"name": "whole"}]
    append(path, {"name": "next"})
    assert read_rows(path) == [{"name": "whole"}, {"name": "next"}]


def test_rows_by_pattern():
    names = ["step/512/64/stock", "step/256/64/stock", "trainer/512/64"]
    made = [Row(name=name, kind="", measure=dict) for name in names]
    assert [row.name for row in chosen(made, ["step/512/*", "trainer/*"])] == [names[0], names[2]]
    assert chosen(made, []) == made
