"""What failures cost a run, simulated, and how often to save against them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_INTERVALS = 13
"""Intervals that are simulated for a recommendation, from a quarter to four times the first guess."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a fleet fails, and what that and saving cost; all in seconds."""

    mean_time_between: float
    """Between two failures of the whole fleet, which are independent of one another."""

    restart: float
    """From a failure to the first step of the restarted run."""

    save: float
    """For which a step waits for a checkpoint."""


def young_daly_interval(failures: Failures) -> float:
    """Best time between checkpoints to first order (Young 1974, Daly 2006): sqrt(2 x save x mean time between)."""
    return math.sqrt(2 * failures.save * failures.mean_time_between)


def simulate(work: float, interval: float, failures: Failures, *, num_runs: int = 200, seed: int = 0) -> np.ndarray:
    """Simulate runs that save at intervals, fail, and continue from their newest checkpoint.

    Args:
        work: seconds of training that the run consists of.
        interval: seconds of training between two checkpoints.
        failures: how often and how expensive.
        num_runs: how often it is simulated.
        seed: of the times of failures.

    Returns:
        float64 [num_runs], seconds from start to end.
    """
    generator = np.random.default_rng(seed)
    clock, saved, running = np.zeros(num_runs), np.zeros(num_runs), np.ones(num_runs, bool)
    while running.any():
        remaining = work - saved
        to_the_end = remaining + np.ceil(remaining / interval) * failures.save
        until_failure = generator.exponential(failures.mean_time_between, num_runs)
        ends = running & (until_failure >= to_the_end)
        fails = running & ~ends
        clock += np.where(ends, to_the_end, 0.0) + np.where(fails, until_failure + failures.restart, 0.0)
        saved += np.where(fails, until_failure // (interval + failures.save) * interval, 0.0)
        running = fails
    return clock


def recommend_interval(work: float, failures: Failures, *, num_failures: int = 20_000, seed: int = 0) -> float:
    """Time between checkpoints at which simulated runs end soonest.

    What saving costs falls with the interval and what failures lose grows with it; the sum of both is fitted to
    simulated runs of several intervals, and its minimum taken, which a single noisy minimum would miss.

    Args:
        work: seconds of training.
        failures: how often and how expensive.
        num_failures: about so many are simulated for each interval.
        seed: of the times of failures.

    Returns:
        Seconds.
    """
    guess = young_daly_interval(failures)
    if guess >= work:
        return work
    intervals = guess * np.geomspace(0.25, 4.0, NUM_INTERVALS)
    num_runs = max(1, round(num_failures * failures.mean_time_between / work))
    means = [simulate(work, interval, failures, num_runs=num_runs, seed=seed).mean() for interval in intervals]
    return min(work, _minimum(intervals, means))


def _minimum(intervals: np.ndarray, means: Sequence[float]) -> float:
    """Where a + b x interval + c / interval + d x interval^2, fitted to the means, is least."""
    scale = float(np.sqrt(intervals[0] * intervals[-1]))
    x = intervals / scale
    terms = np.stack([np.ones_like(x), x, 1 / x, x**2], axis=1)
    _, linear, inverse, square = np.linalg.lstsq(terms, np.asarray(means), rcond=None)[0]
    fine = np.geomspace(x[0], x[-1], 2001)
    return float(fine[np.argmin(linear * fine + inverse / fine + square * fine**2)] * scale)
