"""Profiles of averages, the share of each past weight: exponential and power functions.

The power functions are those of Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion
Models", section 3.1: at time t, the weight of time tau is proportional to tau^gamma. Time counts the weights that are
averaged: those at the start of the averaging have time 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffusion.config.training import MAX_WIDTH
from diffusion.errors import ConfigurationError


@dataclass(frozen=True)
class Exponential:
    """avg <- decay * avg + (1 - decay) * weights.

    Args:
        decay: in [0, 1).
    """

    decay: float

    @property
    def label(self) -> str:
        """Such as `decay-0.9999`."""
        return f"decay-{self.decay!r}"

    def step(self, time: int) -> float:
        """The fraction by which the average moves towards the weights, the same at all times."""
        return 1.0 - self.decay


@dataclass(frozen=True)
class PowerFunction:
    """beta(t) = (1 - 1/t)^(gamma + 1), equation 2 of the paper.

    Args:
        width: relative width sigma_rel, the profile's standard deviation over its length, in (0, `MAX_WIDTH`), which is
            that of the plain mean (gamma = 0).
    """

    width: float

    def __post_init__(self) -> None:
        if not 0 < self.width < MAX_WIDTH:
            raise ConfigurationError(
                f"the relative width of an average is {self.width}, but must be above 0 and below {MAX_WIDTH:.4f}, "
                "that of the plain mean. Usual are 0.05 to 0.10"
            )

    @property
    def label(self) -> str:
        """Such as `width-0.05`."""
        return f"width-{self.width!r}"

    @property
    def gamma(self) -> float:
        """The exponent."""
        return width_to_gamma(self.width)

    def step(self, time: int) -> float:
        """The fraction 1 - beta(t) by which the average moves towards the weights of time t = 2, 3, ..."""
        return -math.expm1((self.gamma + 1.0) * math.log1p(-1.0 / time))


Profile = Exponential | PowerFunction
"""The rule of an average: its label in files and commands, and its step towards the weights of a time."""


def width_to_gamma(width: float) -> float:
    """The exponent of a relative width in (0, `MAX_WIDTH`).

    Equation 3 is width = (gamma + 1)^(1/2) (gamma + 2)^(-1) (gamma + 3)^(-1/2). Squared it is
    (gamma + 2)^2 (gamma + 3) - (gamma + 1) / width^2 = 0, whose largest root is the exponent.
    """
    inverse = width**-2
    return float(np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse]).real.max())


def build_profiles(decays: Sequence[float], widths: Sequence[float]) -> list[Profile]:
    """The profiles of a configuration: exponential ones first."""
    return [*(Exponential(decay) for decay in decays), *(PowerFunction(width) for width in widths)]
