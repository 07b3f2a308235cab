"""An average of any width, made after the training from stored averages of a few widths at several times.

Karras et al. 2024, section 3.2 and appendix C: each stored average is the weights' trajectory integrated against a
known profile p(tau). A sum of stored averages is the trajectory integrated against the same sum of profiles; so the
coefficients are sought whose sum of profiles comes nearest to the profile that is wanted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TimedProfile:
    """p(tau) = (gamma + 1) tau^gamma / time^(gamma + 1) for tau in [0, time], which integrates to 1."""

    gamma: float
    time: float


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A sum of stored averages."""

    coefficients: np.ndarray
    """float64 [K], which sum to 1."""

    error: float
    """|sum of profiles - wanted profile| / |wanted profile|, in the L2 norm over time."""

    @property
    def amplification(self) -> float:
        """By how much rounding errors of the stored averages can grow: the sum of the coefficients' magnitudes."""
        return float(np.abs(self.coefficients).sum())


def inner_product(one: TimedProfile, other: TimedProfile) -> float:
    """Integral of the product of two profiles over time, in closed form.

    With m the smaller and M the larger time, and a, b the exponents:
    (a + 1) (b + 1) m^(a + b + 1) / ((a + b + 1) t_a^(a + 1) t_b^(b + 1))
    = (a + 1) (b + 1) / (a + b + 1) * (m / t_a)^a (m / t_b)^b / M.
    """
    a, b = one.gamma, other.gamma
    low, high = min(one.time, other.time), max(one.time, other.time)
    overlap = (low / one.time) ** a * (low / other.time) ** b / high
    return (a + 1) * (b + 1) / (a + b + 1) * overlap


def combine_profiles(stored: Sequence[TimedProfile], wanted: TimedProfile) -> Combination:
    """Find the combination of stored profiles that is nearest to a wanted one.

    Least squares in the L2 norm over time, under the condition that the coefficients sum to 1: without it, the part of
    the weights that does not move would be scaled.

    Args:
        stored: at least one.
        wanted: of a time up to the last stored one.
    """
    products = np.array([[inner_product(one, other) for other in stored] for one in stored])
    target = np.array([inner_product(one, wanted) for one in stored])
    # Profiles are scaled to unit norm, since the system is ill-conditioned enough.
    norms = np.sqrt(np.diag(products))
    system = np.zeros((len(stored) + 1, len(stored) + 1))
    system[:-1, :-1] = products / np.outer(norms, norms)
    system[:-1, -1] = system[-1, :-1] = norms.min() / norms
    solution = np.linalg.lstsq(system, np.append(target / norms, norms.min()), rcond=1e-13)[0]
    coefficients = solution[:-1] / norms
    coefficients /= coefficients.sum()
    square = inner_product(wanted, wanted)
    residual = coefficients @ products @ coefficients - 2 * coefficients @ target + square
    return Combination(coefficients=coefficients, error=math.sqrt(max(residual, 0.0) / square))
