"""A hang is told from slow data and from what takes its time, by a clock that the test turns."""

from dataclasses import replace

import pytest

from diffusion.config.operations import SupervisionConfig
from diffusion.operations.beats import Beat, Phase
from diffusion.operations.patience import Condition, Watch

SETTINGS = SupervisionConfig(hang_floor=60, hang_factor=10, data_timeout=1800, pause_timeout=3600)


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def beat(rank: int, phase: Phase, step: int, count: int = 5, median: float | None = 0.5) -> Beat:
    return Beat(
        rank=rank, pid=1, host="", count=count, phase=phase, step=step, num_done=step, time=0.0, median_step=median
    )


def silent_for(seconds: float, beats: list[Beat], stopped: tuple[int, ...] = ()):
    clock = Clock()
    watch = Watch(SETTINGS, clock)
    watch.judge(beats)
    clock.seconds += seconds
    return watch.judge(beats, stopped)


@pytest.mark.parametrize(("median", "limit"), [(0.5, 60), (6.0, 60), (20.0, 200)])
def test_a_hang_is_noticed_after_a_minute_or_ten_median_steps(median, limit):
    beats = [beat(rank, Phase.step, 7, median=median) for rank in (0, 1)]
    assert silent_for(limit - 1, beats).condition is Condition.working
    judgement = silent_for(limit + 1, beats)
    assert judgement.condition is Condition.hang
    assert "ranks 0, 1 of 2 in phase step of step 7" in judgement.reason


def test_a_sign_of_any_rank_begins_the_silence_anew():
    clock = Clock()
    watch = Watch(SETTINGS, clock)
    beats = [beat(rank, Phase.step, 7) for rank in (0, 1)]
    watch.judge(beats)
    clock.seconds += 50
    watch.judge([replace(beats[0], count=6), beats[1]])
    clock.seconds += 50
    assert watch.judge([replace(beats[0], count=6), beats[1]]).condition is Condition.working


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
    assert silent_for(100, beats).condition is condition


def test_a_rank_that_compiles_has_time_for_it():
    beats = [beat(0, Phase.step, 700), beat(1, Phase.compiling, 700)]
    assert silent_for(3599, beats).condition is Condition.working
    assert silent_for(3601, beats).condition is Condition.hang


def test_data_and_pauses_have_their_own_patience():
    data = [beat(0, Phase.step, 7), beat(1, Phase.data, 7)]
    assert silent_for(1799, data).condition is Condition.slow_data
    assert silent_for(1801, data).condition is Condition.hang
    saving = [beat(0, Phase.between, 7), beat(1, Phase.between, 7)]
    assert silent_for(3599, saving).condition is Condition.working
    assert silent_for(3601, saving).condition is Condition.hang
    assert silent_for(3601, []).condition is Condition.hang


def test_the_first_steps_which_may_compile_are_given_time():
    beats = [beat(0, Phase.step, 1, median=None)]
    assert silent_for(100, beats).condition is Condition.working


def test_a_stopped_rank_is_a_hang_whatever_it_last_said():
    beats = [beat(0, Phase.step, 7), beat(1, Phase.data, 7)]
    judgement = silent_for(61, beats, stopped=(1,))
    assert judgement.condition is Condition.hang
    assert "rank 1 was stopped" in judgement.reason
