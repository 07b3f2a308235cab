import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from apps.preference import statistics
from apps.preference.report import strengths
from apps.preference.statistics import (
    bootstrap,
    bradley_terry,
    krippendorff_alpha,
    share_of_decided,
    wilson,
)


def test_wilson_ends_solve_the_score_equation():
    z = 1.959963984540054
    for successes, total in [(1, 10), (5, 10), (81, 263), (499, 500)]:
        for p in wilson(successes, total):
            assert abs(successes / total - p) == pytest.approx(z * math.sqrt(p * (1 - p) / total), rel=1e-9)
    # Newcombe 1998, table I: 81 of 263 and 0 of 20
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(20, 20)[1] == 1
    assert np.isnan(wilson(0, 0)).all()


def test_bootstrap_of_a_mean_has_the_normal_width_and_knows_clusters():
    generator = np.random.default_rng(0)
    wins = generator.binomial(1, 0.5, 400).astype(float)
    counts = np.stack([wins, 1 - wins], axis=1)
    [interval] = bootstrap(counts, share_of_decided, seed=1)
    assert np.diff(interval) == pytest.approx(2 * 1.96 * 0.5 / 20, rel=0.08)
    for again in (counts, 10 * counts):  # Ten equal votes on a prompt tell no more than one.
        assert np.array_equal(bootstrap(again, share_of_decided, seed=1), [interval])


def test_bootstrap_says_nothing_where_nothing_is_known():
    assert np.isnan(bootstrap(np.array([[3.0, 1.0]]), share_of_decided, seed=0)).all()
    assert np.isnan(bootstrap(np.array([[1.0, 0.0], [0.0, 0.0]]), share_of_decided, seed=0)).all()


def counts_of(units):
    values = sorted({value for unit in units for value in unit})
    return np.array([[list(unit).count(value) for value in values] for unit in units])


def test_alpha_of_the_published_example():
    """Krippendorff 2011, section C: four observers, twelve units, missing values; nominal alpha 0.743."""
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[row[i] for row in table if row[i] is not None] for i in range(12)]
    assert krippendorff_alpha(counts_of(units)) == pytest.approx(0.743421052631579, abs=1e-12)


def test_alpha_by_hand():
    # Coincidences: two units agree (aa, bb), one disagrees; n = 6, D_o = 2/6, D_e = 2*3*3/(6*5).
    assert krippendorff_alpha(counts_of(["aa", "bb", "ab"])) == pytest.approx(1 - (2 / 6) / (18 / 30))
    assert krippendorff_alpha(counts_of(["aa", "bb"])) == 1
    assert np.isnan(krippendorff_alpha(counts_of(["a", "b"])))
    assert np.isnan(krippendorff_alpha(counts_of(["aa", "aa"])))


def test_bradley_terry_finds_the_strengths_that_wins_were_made_from():
    truth = np.array([0.7, 0.1, -0.2, -0.6])
    rates = 1 / (1 + np.exp(truth[None, :] - truth[:, None]))
    played = np.array([[0, 9, 4, 0], [9, 0, 5, 2], [4, 5, 0, 7], [0, 2, 7, 0]], dtype=float)
    strengths = bradley_terry(rates * played)
    assert strengths == pytest.approx(truth, abs=1e-8)
    assert strengths.sum() == pytest.approx(0, abs=1e-12)


def test_bradley_terry_solves_the_equations_of_the_maximum():
    """Hunter 2004, equation 3: the wins of each model are those that its strength predicts."""
    generator = np.random.default_rng(1)
    for _ in range(50):
        wins = generator.integers(0, 20, (5, 5)) + 0.5 * (1 - np.eye(5))
        np.fill_diagonal(wins, 0)
        strengths = bradley_terry(wins)
        expected = (wins + wins.T) / (1 + np.exp(strengths[None, :] - strengths[:, None]))
        assert expected.sum(axis=1) == pytest.approx(wins.sum(axis=1), abs=1e-5)


def test_bradley_terry_without_a_maximum():
    never_beaten = np.array([[0.0, 3, 2], [0, 0, 1], [0, 1, 0]])
    cycle = np.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    assert np.isnan(bradley_terry(never_beaten)).all()
    assert bradley_terry(cycle) == pytest.approx([0, 0, 0])


def test_the_bootstrap_agrees_with_scipy():
    """The same method with other resamples: both ends within the error of 2,000 of them."""
    counts = np.random.default_rng(2).multinomial(4, [0.5, 0.3, 0.2], 60).astype(float)[:, :2]
    [interval] = bootstrap(counts, share_of_decided, seed=1)
    options = {"paired": True, "method": "percentile", "n_resamples": 2000, "vectorized": True, "random_state": 1}
    share = lambda a, b, axis: a.sum(axis) / (a.sum(axis) + b.sum(axis))  # noqa: E731
    reference = scipy.stats.bootstrap((counts[:, 0], counts[:, 1]), share, **options).confidence_interval
    assert tuple(interval) == pytest.approx((reference.low, reference.high), abs=0.01)


def contains(interval, value: float) -> bool:
    low, high = interval
    return low <= value <= high


@pytest.mark.parametrize(
    ("rates", "num_prompts", "num_votes", "held_by_wilson"),
    [([0.6], 100, 2, (0.91, 0.98)), ([0.3, 0.9], 60, 20, (0.0, 0.75))],
    ids=["equal prompts", "unequal prompts"],
)
def test_intervals_hold_the_true_preference_as_often_as_they_say(
    monkeypatch, rates, num_prompts, num_votes, held_by_wilson
):
    """200 studies, whose prompts prefer the first with 0.6 on the average; Wilson's interval is for equal prompts."""
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 500)
    generator = np.random.default_rng(17)
    held = {"wilson": 0, "bootstrap": 0}
    for repetition in range(200):
        wins = generator.binomial(num_votes, generator.choice(rates, size=num_prompts)).astype(float)
        held["wilson"] += contains(wilson(int(wins.sum()), num_prompts * num_votes), 0.6)
        [interval] = bootstrap(np.stack([wins, num_votes - wins], axis=1), share_of_decided, seed=repetition)
        held["bootstrap"] += contains(interval, 0.6)
    low, high = held_by_wilson
    assert low <= held["wilson"] / 200 <= high, held
    assert 0.91 <= held["bootstrap"] / 200 <= 0.98, held


def test_intervals_of_strengths_hold_the_true_ones_with_two_prompts(monkeypatch):
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 20)
    generator = np.random.default_rng(17)
    truth, pairs = np.array([0.6, 0.0, -0.6]), [*combinations(range(3), 2)] * 20
    first, second = np.array(pairs).T
    table = pd.DataFrame({"prompt": np.arange(len(pairs)) // 30, "first": first, "second": second})
    held = []
    for repetition in range(100):
        wins = generator.random(len(pairs)) < 1 / (1 + np.exp(truth[second] - truth[first]))
        rows = strengths(table.assign(quality=np.where(wins, first, second)), ["l", "m", "n"], "quality", repetition)
        held += [row["low"] <= value <= row["high"] for row, value in zip(rows, truth, strict=True)]
    assert 0.91 <= np.mean(held) <= 0.99
