"""Profiles of averages, and sums of profiles, against numerical integration in float64."""

import math

import numpy as np
import pytest

from diffusion.ema.averaging import Exponential, PowerFunction
from diffusion.ema.posthoc import TimedProfile, combine_profiles, inner_product
from diffusion.errors import ConfigurationError

WIDTHS = (0.05, 0.10)


def density(profile: TimedProfile, times: np.ndarray) -> np.ndarray:
    inside = (times >= 0) & (times <= profile.time)
    return inside * (profile.gamma + 1) * (times / profile.time) ** profile.gamma / profile.time


def integrate(function, end: float, pieces: int = 200) -> float:
    """Gauss-Legendre quadrature of 20 points on each piece of [0, end]."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = np.linspace(0, end, pieces + 1)
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    return float((function(middle[:, None] + half[:, None] * nodes) * weights * half[:, None]).sum())


def weights_of(profile: PowerFunction, time: int, end: int) -> np.ndarray:
    """Share of each of the weights 1 to `end` in an average that was updated up to `time`, step by step."""
    counts = np.zeros(end)
    counts[0] = 1.0
    for t in range(2, time + 1):
        counts *= 1 - profile.step(t)
        counts[t - 1] += profile.step(t)
    return counts


@pytest.mark.parametrize(("width", "gamma"), [(0.05, 16.97), (0.10, 6.94)])
def test_exponents_of_the_paper(width, gamma):
    assert PowerFunction(width).gamma == pytest.approx(gamma, abs=0.005)


@pytest.mark.parametrize("width", [0.01, 0.05, 0.08, 0.2, 0.28])
def test_width_is_the_standard_deviation_of_the_profile(width):
    gamma = PowerFunction(width).gamma
    profile = TimedProfile(gamma, 1.0)
    mean = integrate(lambda t: t * density(profile, t), 1.0)
    variance = integrate(lambda t: (t - mean) ** 2 * density(profile, t), 1.0)
    assert math.sqrt(variance) == pytest.approx(width, rel=1e-6)
    assert math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2) == pytest.approx(width, rel=1e-12)


@pytest.mark.parametrize("width", [-0.1, 0.0, 0.2887, 1.0, math.nan])
def test_impossible_widths_are_refused(width):
    with pytest.raises(ConfigurationError, match=r"below 0\.2887"):
        PowerFunction(width)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((16.97, 1000.0), (6.94, 1000.0)),
        ((16.97, 400.0), (6.94, 1000.0)),
        ((3.2, 800.0), (3.2, 800.0)),
        ((0.1, 7), (5, 3)),
    ],
)
def test_inner_products_are_the_integrals(one, other):
    a, b = TimedProfile(*one), TimedProfile(*other)
    end = min(a.time, b.time)
    # The substitution t = s^2 makes the integrand smooth at 0 for small exponents.
    expected = integrate(lambda s: 2 * s * density(a, s * s) * density(b, s * s), math.sqrt(end))
    assert inner_product(a, b) == pytest.approx(expected, rel=1e-9)
    assert inner_product(a, b) == pytest.approx(inner_product(b, a), rel=1e-14)


@pytest.mark.parametrize("width", WIDTHS)
def test_updates_follow_the_profile_from_the_start_of_the_averaging(width):
    """The weights of each step are the integral of the profile over that step."""
    profile, end = PowerFunction(width), 300
    edges = np.arange(end + 1) / end
    expected = np.diff(edges ** (profile.gamma + 1))
    assert np.abs(weights_of(profile, end, end) - expected).max() < 1e-14
    assert profile.step(2) == pytest.approx(1 - 0.5 ** (profile.gamma + 1), rel=1e-14)
    assert profile.step(10**9) == pytest.approx((profile.gamma + 1) * 1e-9, rel=1e-7), "lost to rounding"


def test_labels_tell_averages_apart():
    profiles = (Exponential(0.9999), Exponential(0.99999999), PowerFunction(0.05), PowerFunction(0.1))
    assert [profile.label for profile in profiles] == ["decay-0.9999", "decay-0.99999999", "width-0.05", "width-0.1"]


@pytest.mark.parametrize(("width", "limit"), [(0.05, 1e-7), (0.1, 1e-7), (0.06, 0.004), (0.08, 0.004), (0.15, 0.012)])
def test_combined_profiles_come_near_to_the_wanted_one(width, limit):
    """Sixteen times of two widths, over 400 steps; the reported error is the real one."""
    times = range(25, 401, 25)
    stored = [TimedProfile(PowerFunction(w).gamma, time) for time in times for w in WIDTHS]
    combination = combine_profiles(stored, TimedProfile(PowerFunction(width).gamma, 400))
    assert combination.error < limit
    assert combination.coefficients.sum() == pytest.approx(1.0, abs=1e-12)
    assert combination.amplification < 2.5

    parts = [weights_of(PowerFunction(w), time, 400) for time in times for w in WIDTHS]
    found = sum(x * part for x, part in zip(combination.coefficients, parts, strict=True))
    expected = weights_of(PowerFunction(width), 400, 400)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error == pytest.approx(combination.error, rel=0.01, abs=1e-7)
