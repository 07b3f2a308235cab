"""Rows are measured once each, whatever happens to the process that measures them."""

import os
import signal
from functools import partial

import pytest
import torch

from benchmarks.rows import Row, append, chosen, read_rows, run_rows

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


@pytest.fixture
def run(tmp_path):
    """Run named rows; returns the finished rows, and names and processes of all attempts."""

    def run(**actions):
        log, path = tmp_path / "log", tmp_path / "out" / "rows.jsonl"
        log.write_text("")
        made = []
        for name, options in actions.items():
            options = dict(options or {})
            action = partial(measure, log, name, options.pop("then", None))
            made.append(Row(name=name, measure=action))
        run_rows(made, MACHINE, path)
        return read_rows(path), [tuple(line.split()) for line in log.read_text().splitlines()]

    return run


def test_rows_that_fail_are_written_and_the_rest_runs_in_other_processes(run):
    actions = {"first": None, "large": {"then": out_of_memory}, "deadly": {"then": kill}, "last": None}
    found, attempts = run(**actions)
    assert [name for name, _ in attempts] == list(actions)
    assert len({process for _, process in attempts}) == 4
    assert "239 GB" in found["large"]["error"]
    assert "error" in found["deadly"]
    assert found["first"]["result"] == found["last"]["result"] == {"value": 1.5}
    again, attempts = run(**actions)
    assert attempts == []
    assert again == found


def test_other_parameters_are_another_measurement(tmp_path):
    path = tmp_path / "rows.jsonl"
    for size, num_results in ((1, 1), (1, 1), (2, 2)):
        row = Row(name="row", measure=lambda size: {"size": size}, parameters={"size": size})
        run_rows([row], MACHINE, path)
        assert read_rows(path)["row"]["result"] == {"size": size}
        assert len(path.read_text().splitlines()) == num_results


def test_a_line_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"name": "whole"})
    with path.open("a") as file:
        file.write('{"name": "cut o')
    assert read_rows(path) == {"whole": {"name": "whole"}}
    append(path, {"name": "next"})
    assert list(read_rows(path)) == ["whole", "next"]


def test_rows_by_pattern():
    names = ["step/512/64/stock", "step/256/64/stock", "trainer/512/64"]
    made = [Row(name=name, measure=dict) for name in names]
    assert [row.name for row in chosen(made, ["step/512/*", "trainer/*"])] == [names[0], names[2]]
    assert chosen(made, []) == made
