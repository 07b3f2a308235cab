"""Statistics of preferences: intervals, agreement between raters, and strengths of more than two models.

Shape letters: M models, P prompts, R resamples, U pairs of images. Numbers that the votes do not determine are NaN.
"""

import math
from collections.abc import Callable

import choix
import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from scipy.stats import binomtest

Array = NDArray[np.float64]

NUM_RESAMPLES = 2000


def wilson(successes: int, total: int) -> tuple[float, float]:
    """95 % score interval of a proportion of independent answers (Wilson 1927); NaN without any answer."""
    if total == 0:
        return math.nan, math.nan
    interval = binomtest(successes, total).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def bootstrap(counts: Array, statistic: Callable[[Array], Array], *, seed: int) -> Array:
    """95 % percentile intervals of statistics of sums over prompts, by resampling prompts (Efron 1979).

    Answers to one prompt may depend on each other. Prompts are assumed to be a random sample.

    Args:
        counts: float64 [P, K], the contribution of each prompt to the K sums.
        statistic: sums [R, K] to statistics [R, S]; NaN where undefined.
        seed: seed of the resamples.

    Returns:
        Intervals [S, 2]; NaN with fewer than two prompts, or where the statistic is undefined in a resample.
    """
    num_prompts = len(counts)
    shares = np.full(num_prompts, 1 / num_prompts)
    weights = np.random.default_rng(seed).multinomial(num_prompts, shares, size=NUM_RESAMPLES)
    intervals = np.quantile(statistic(weights @ counts), [0.025, 0.975], axis=0).T
    return intervals if num_prompts > 1 else np.full_like(intervals, np.nan)


def share_of_decided(sums: Array) -> Array:
    """Wins of the first among the wins of both: sums [R, 2] to shares [R, 1]; NaN without a win."""
    total = sums.sum(axis=1)
    shares = np.full(len(sums), np.nan)
    np.divide(sums[:, 0], total, out=shares, where=total > 0)
    return shares[:, None]


def krippendorff_alpha(*groups: NDArray[np.int64]) -> float:
    """Agreement between raters on nominal answers (Krippendorff 2011): 1 is full agreement, 0 agreement by chance.

    Args:
        groups: counts [U, answers] of how often each answer was given, each with a chance of its own. Rows with a
            single answer do not count.

    Returns:
        Alpha; NaN if no row has two answers, or all answers of each group are equal, so that chance agrees as well.
    """
    observed = expected = 0.0
    for counts in groups:
        shared = counts[counts.sum(axis=1) > 1].astype(float)
        if not shared.size:
            continue
        of_unit, of_answer = shared.sum(axis=1), shared.sum(axis=0)
        observed += ((of_unit**2 - (shared**2).sum(axis=1)) / (of_unit - 1)).sum()
        expected += (of_unit.sum() ** 2 - (of_answer**2).sum()) / (of_unit.sum() - 1)
    return float(1 - observed / expected) if expected else math.nan


def bradley_terry(wins: Array) -> Array:
    """Strengths of models by maximum likelihood: P(a preferred to b) = 1 / (1 + exp(strength_b - strength_a)).

    Args:
        wins: float64 [M, M], how often the row's model was preferred to the column's; a tie is half a win of each.

    Returns:
        Strengths [M] with mean 0, natural logarithms of odds. NaN where the likelihood has no maximum: some models
        were never preferred to any of the others (Ford 1957).
    """
    num_parts, _ = connected_components(wins > 0, connection="strong")
    if num_parts > 1:
        return np.full(len(wins), np.nan)
    return choix.ilsr_pairwise_dense(wins, max_iter=10_000)


def standard_errors(wins: Array, strengths: Array) -> Array:
    """Standard errors [M] of the strengths of `bradley_terry`, by the Fisher information of independent votes."""
    chances = 1 / (1 + np.exp(strengths[None, :] - strengths[:, None]))
    weights = (wins + wins.T) * chances * chances.T
    mean = 1 / len(wins)  # The information says nothing about the mean of the strengths, which is 0.
    return np.sqrt(np.diag(np.linalg.inv(np.diag(weights.sum(axis=1)) - weights + mean) - mean))
