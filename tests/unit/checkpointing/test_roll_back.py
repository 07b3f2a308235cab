"""Decisions about a wrong loss, whose record outlives interruptions."""

import math
from dataclasses import replace

import pytest

from diffusion.checkpointing.roll_back import DivergenceError, decide, is_wrong
from diffusion.config.operations import GuardConfig
from diffusion.errors import DataError
from diffusion.formats.run_folder import (
    ROLLBACK,
    ROLLBACKS,
    Rollback,
    read_request,
    read_rollbacks,
    record_rollback,
    request_rollback,
)

FIRST = Rollback(step=10, loss="nan", limit=9, time=1.0)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_wrong(loss):
    assert is_wrong(loss, [], GuardConfig())


def test_a_spike_is_measured_by_the_median_of_a_whole_window():
    guard = GuardConfig(spike_factor=3.0, spike_window=3)
    assert not is_wrong(9.0, [1.0, 1.0], guard)
    assert is_wrong(3.1, [1.0, 0.5, 8.0], guard)
    assert not is_wrong(2.9, [1.0, 0.5, 8.0], guard)
    assert not is_wrong(99.0, [1.0, 0.5, 8.0], GuardConfig())


@pytest.mark.parametrize(("margin", "limit"), [(1, 9), (4, 6), (50, 0)])
def test_the_first_time_nothing_is_skipped_and_unproven_checkpoints_are_given_up(margin, limit):
    guard = GuardConfig(skip=3, margin=margin)
    assert decide(10, math.nan, [], guard, 1.0) == Rollback(step=10, loss="nan", limit=limit, time=1.0)


@pytest.mark.parametrize(("skip", "skipped", "limit"), [(1, (10,), 9), (3, (8, 9, 10), 8), (99, tuple(range(11)), 0)])
def test_the_second_time_at_a_step_updates_up_to_it_are_skipped(skip, skipped, limit):
    rollback = decide(10, math.nan, [FIRST], GuardConfig(skip=skip), 2.0)
    assert (rollback.skipped, rollback.limit) == (skipped, limit)


def test_the_second_time_at_a_step_ends_a_run_that_must_not_skip():
    with pytest.raises(DivergenceError, match=r"step 10 is nan.*operations\.guard\.skip"):
        decide(10, math.nan, [FIRST], GuardConfig(), 2.0)
    assert decide(11, math.nan, [FIRST], GuardConfig(), 2.0).step == 11


def test_going_back_has_an_end():
    with pytest.raises(DivergenceError, match=r"operations\.guard\.max_rollbacks"):
        decide(11, math.inf, [FIRST], GuardConfig(max_rollbacks=1), 2.0)


def test_a_record_that_was_cut_off_is_continued(tmp_path):
    for number in range(2):
        request_rollback(tmp_path, replace(FIRST, time=float(number)))
        record_rollback(tmp_path, read_request(tmp_path))
        with (tmp_path / ROLLBACKS).open("a") as file:
            file.write('{"step": 1')
    assert [one.time for one in read_rollbacks(tmp_path)] == [0.0, 1.0]


def test_a_rollback_is_recorded_once_however_often_carrying_it_out_is_interrupted(tmp_path):
    assert (read_request(tmp_path), read_rollbacks(tmp_path)) == (None, [])
    second = Rollback(step=10, loss="nan", limit=8, skipped=(9, 10), time=2.0)
    request_rollback(tmp_path, FIRST)
    assert read_request(tmp_path) == FIRST
    record_rollback(tmp_path, FIRST)
    request_rollback(tmp_path, FIRST)  # As if the process had been killed before it removed the order.
    record_rollback(tmp_path, FIRST)
    request_rollback(tmp_path, second)
    record_rollback(tmp_path, second)
    assert (read_request(tmp_path), read_rollbacks(tmp_path)) == (None, [FIRST, second])


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"step": 1, "skipped": []}', '{"skipped": null}'])
def test_a_damaged_request_is_named(tmp_path, content):
    (tmp_path / ROLLBACK).write_text(content)
    with pytest.raises(DataError, match=ROLLBACK):
        read_request(tmp_path)
