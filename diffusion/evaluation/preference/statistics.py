"""Statistics of preferences: intervals, agreement between raters, and strengths of more than two models.

Legend of shapes: M models, P prompts, R resamples.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A confidence interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def wilson(successes: int, total: int, confidence: float = 0.95) -> Interval | None:
    """Score interval of a proportion (Wilson 1927): the p with |successes/total - p| <= z sqrt(p (1 - p) / total).

    It supposes that the answers are independent of each other.

    Returns:
        The interval, None without any answer.
    """
    if total == 0:
        return None
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / total
    centre = rate + z * z / (2 * total)
    half = z * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == total else (centre + half) / scale
    return Interval(low, high)


def bootstrap(
    counts: Array,
    statistic: Callable[[Array], Array],
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
    confidence: float = 0.95,
) -> list[Interval | None]:
    """Percentile intervals of statistics of sums over prompts, with prompts drawn anew (Efron 1979).

    Answers to one prompt may depend on each other; prompts are supposed to be drawn at random from those that the
    statement is about.

    Args:
        counts: float64 [P, K], what each prompt adds to the K sums.
        statistic: sums [R, K] to statistics [R, S]; not a number where one is not defined.
        seed: of the resamples.
        num_resamples: R.
        confidence: share that the interval is to cover.

    Returns:
        S intervals; None where there are fewer than two prompts or the statistic is undefined in some resample.
    """
    num_prompts = len(counts)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_resamples)
    values = statistic(weights @ counts)
    tail = (1 - confidence) / 2
    intervals: list[Interval | None] = []
    for column in values.T:
        if num_prompts < 2 or not np.isfinite(column).all():
            intervals.append(None)
        else:
            low, high = np.quantile(column, [tail, 1 - tail])
            intervals.append(Interval(float(low), float(high)))
    return intervals


def share_of_decided(sums: Array) -> Array:
    """Wins of the first among the wins of both: sums [R, 2] to shares [R, 1]; 0/0 is not a number."""
    total = sums.sum(axis=1)
    shares = np.full(len(sums), np.nan)
    np.divide(sums[:, 0], total, out=shares, where=total > 0)
    return shares[:, None]


def krippendorff_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Agreement between raters on nominal answers (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability").

    1 is full agreement, 0 what chance gives. Any number of answers per unit will do; units with one say nothing.

    Args:
        units: the answers given to each unit.

    Returns:
        Alpha; None if no unit has two answers, or if all answers are the same, so that chance agrees as well.
    """
    pairable = [Counter(unit) for unit in units if len(unit) > 1]
    totals: Counter[Hashable] = Counter()
    disagreement = 0.0
    for unit in pairable:
        size = unit.total()
        totals.update(unit)
        disagreement += sum(unit[a] * unit[b] for a, b in permutations(unit, 2)) / (size - 1)
    num = totals.total()
    expected = sum(totals[a] * totals[b] for a, b in permutations(totals, 2))
    if not expected:
        return None
    return 1 - (num - 1) * disagreement / expected


def bradley_terry(wins: Array, *, tolerance: float = 1e-9, max_steps: int = 10_000) -> Array:
    """Strengths of models by maximum likelihood: P(a is preferred to b) = 1 / (1 + exp(strength_b - strength_a)).

    Bradley and Terry 1952, by the MM algorithm of Hunter 2004, equation 3.

    Args:
        wins: float64 [R, M, M], how often the row's model was preferred to the column's; a tie is half a win of each.
        tolerance: largest change of a strength in the last step.
        max_steps: where the iteration ends at the latest.

    Returns:
        Strengths [R, M] with mean 0, natural logarithms of odds; not a number where the likelihood has no maximum:
        some models were never preferred to any of the others.
    """
    num_models = wins.shape[1]
    wins = wins * (1 - np.eye(num_models))
    played = wins + wins.transpose(0, 2, 1)
    has_maximum = _is_strongly_connected(wins > 0)
    strengths = np.zeros((len(wins), num_models))
    strengths[~has_maximum] = np.nan
    active = np.flatnonzero(has_maximum)
    for _ in range(max_steps):
        if not len(active):
            break
        power = np.exp(strengths[active])
        denominator = (played[active] / (power[:, :, None] + power[:, None, :])).sum(axis=2)
        updated = np.log(wins[active].sum(axis=2) / denominator)
        updated -= updated.mean(axis=1, keepdims=True)
        change = np.abs(updated - strengths[active]).max(axis=1)
        strengths[active] = updated
        active = active[change > tolerance]
    return strengths


def _is_strongly_connected(edges: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether each node of graphs [R, M, M] can be reached from each other: bool [R] (Ford 1957's condition)."""
    num_nodes = edges.shape[1]
    reach = edges | np.eye(num_nodes, dtype=bool)
    for _ in range(max(1, math.ceil(math.log2(num_nodes)))):
        reach = (reach.astype(np.int64) @ reach.astype(np.int64)) > 0
    return reach.all(axis=(1, 2))
