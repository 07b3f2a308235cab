"""The statistics against closed forms and plain double sums in float64."""

import numpy as np
import pytest

from diffusion.evaluation import statistics
from diffusion.evaluation.statistics import clip_scores, cmmd, frechet_distance, kernel_distance


def features(num: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, width))


def with_moments(num: int, mean: np.ndarray, covariance: np.ndarray, seed: int) -> np.ndarray:
    """Features whose sample mean and unbiased covariance are exactly these."""
    raw = features(num, len(mean), seed)
    raw -= raw.mean(axis=0)
    own = np.linalg.cholesky(raw.T @ raw / (num - 1))
    return raw @ np.linalg.inv(own).T @ np.linalg.cholesky(covariance).T + mean


def test_frechet_distance_of_commuting_covariances_is_the_closed_form():
    width = 12
    rotation = np.linalg.qr(features(width, width, 2))[0]
    first, second = np.linspace(0.1, 4.0, width), np.linspace(5.0, 0.2, width)
    means = np.linspace(-1, 1, width), np.linspace(2, 0, width)
    expected = np.square(means[0] - means[1]).sum() + np.square(np.sqrt(first) - np.sqrt(second)).sum()
    sets = [
        with_moments(200 + i, mean, rotation @ np.diag(values) @ rotation.T, 3 + i)
        for i, (mean, values) in enumerate(zip(means, (first, second), strict=True))
    ]
    found = frechet_distance(*sets)
    assert found == pytest.approx(expected, abs=1e-6)


def test_frechet_distance_of_general_covariances_is_that_of_the_eigenvalues_of_their_product():
    a, b = (features(300, 9, seed) @ features(9, 9, seed + 50) for seed in (5, 6))
    first, second = np.cov(a.T), np.cov(b.T)
    apart = a.mean(axis=0) - b.mean(axis=0)
    roots = np.sqrt(np.linalg.eigvals(first @ second).real).sum()
    expected = apart @ apart + np.trace(first) + np.trace(second) - 2 * roots
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)


def test_frechet_distance_of_a_set_to_itself_is_zero_with_fewer_features_than_numbers():
    one = features(20, 50, 7)
    assert frechet_distance(one, one) == pytest.approx(0.0, abs=1e-6)


def test_frechet_distance_of_float32_features_is_that_of_float64():
    a, b = ((features(5000, 3, seed) * 1e-2 + 100).astype(np.float32) for seed in (1, 2))
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(a.astype(float), b.astype(float)), rel=1e-9)


def double_sum(x: np.ndarray, y: np.ndarray, kernel) -> float:
    """Unbiased squared MMD, pair by pair."""
    num, other = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(num) for j in range(num) if i != j) / (num * (num - 1))
    within_y = sum(kernel(y[i], y[j]) for i in range(other) for j in range(other) if i != j) / (other * (other - 1))
    return within_x + within_y - 2 * sum(kernel(a, b) for a in x for b in y) / (num * other)


@pytest.mark.parametrize("rows", [4, 1024])
def test_kid_is_the_double_sum(monkeypatch, rows):
    monkeypatch.setattr(statistics, "BLOCK_ROWS", rows)
    x, y = features(23, 5, 8), features(17, 5, 9) + 0.5
    expected = double_sum(x, y, lambda a, b: (a @ b / 5 + 1) ** 3)
    assert kernel_distance(x, y) == pytest.approx(expected, abs=1e-6)
    assert abs(expected) > 0.01


@pytest.mark.parametrize("rows", [4, 1024])
def test_cmmd_is_the_double_sum_over_normalised_embeddings(monkeypatch, rows):
    monkeypatch.setattr(statistics, "BLOCK_ROWS", rows)
    x, y = features(19, 6, 10) * 7, features(22, 6, 11) + 1
    a_unit, b_unit = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
    expected = 1000 * double_sum(a_unit, b_unit, lambda a, b: np.exp(-np.square(a - b).sum() / 200))
    assert cmmd(x, y) == pytest.approx(expected, abs=1e-6)
    assert expected > 0.5


def test_clip_scores_are_the_positive_cosines():
    images, texts = np.array([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), np.array([[5.0, 0.0], [0.0, -1.0], [1.0, 0.0]])
    np.testing.assert_allclose(clip_scores(images, texts), [100.0, 0.0, 100 / np.sqrt(2)])
