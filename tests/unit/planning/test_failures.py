"""Simulated failures, and the interval between checkpoints that they recommend."""

import numpy as np
import pytest

from diffusion.planning.failures import Failures, recommend_interval, simulate, young_daly_interval

DAY = 86_400.0


def test_without_failures_only_saving_costs():
    failures = Failures(mean_time_between=1e15, restart=600, save=30)
    assert simulate(10_000, 1_000, failures, num_runs=3) == pytest.approx(10_300)


def test_the_mean_of_many_runs_is_that_of_the_closed_form():
    """Daly 2006, equation 13, for segments of equal length: restart and rework of each failure."""
    failures = Failures(mean_time_between=20_000, restart=300, save=60)
    work, interval = 100_000.0, 2_000.0
    segment = interval + failures.save
    expected = 50 * (20_000 + 300) * np.expm1(segment / 20_000)
    found = simulate(work, interval, failures, num_runs=4_000)
    assert found.mean() == pytest.approx(expected, rel=4 * found.std() / found.mean() / 4_000**0.5)


@pytest.mark.parametrize(("hours", "save"), [(10, 30), (80, 30), (80, 300), (1_250, 60)])
def test_the_recommended_interval_is_within_ten_percent_of_young_daly(hours, save):
    failures = Failures(mean_time_between=hours * 3600, restart=600, save=save)
    recommended = recommend_interval(60 * DAY, failures)
    assert recommended == pytest.approx(young_daly_interval(failures), rel=0.1)
    around = [simulate(60 * DAY, recommended * factor, failures, num_runs=600).mean() for factor in (0.2, 1.0, 5.0)]
    assert around[1] < min(around[0], around[2])


def test_a_run_that_is_over_before_it_would_save():
    failures = Failures(mean_time_between=1e9, restart=600, save=30)
    assert recommend_interval(1_000, failures) == 1_000
