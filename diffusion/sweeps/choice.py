"""The values of the points of a sweep: all combinations, or random ones that depend on seed, key and number only."""

import itertools
import math
import random
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from omegaconf import MISSING

from diffusion.errors import ConfigurationError
from diffusion.sweeps.definition import Distribution, Method, Parameter, SweepConfig

_LOGARITHMIC = (Distribution.log_uniform, Distribution.log_uniform_values, Distribution.q_log_uniform_values)
_QUANTISED = (Distribution.q_uniform, Distribution.q_log_uniform_values)


def choose_values(settings: SweepConfig, seed: int) -> list[dict[str, Any]]:
    """Choose the values of each point.

    Args:
        settings: the sweep.
        seed: of a random sweep. Adding points or keys leaves the other values as they are.

    Returns:
        For each point the varied keys and their values.

    Raises:
        ConfigurationError: a parameter cannot be used with the method.
    """
    for key, parameter in settings.parameters.items():
        _check(key, parameter, settings.method)
    if settings.method is Method.grid:
        choices = [_fixed(parameter) or [] for parameter in settings.parameters.values()]
        return [dict(zip(settings.parameters, values, strict=True)) for values in itertools.product(*choices)]
    if settings.run_cap is None or settings.run_cap < 1:
        raise ConfigurationError(
            f"run_cap is {settings.run_cap}: a random sweep has that many points; set it to 1 or more."
        )
    return [_draw_all(settings.parameters, seed, number) for number in range(settings.run_cap)]


def _fixed(parameter: Parameter) -> list[Any] | None:
    return parameter.values if parameter.value == MISSING else [parameter.value]


def _draw_all(parameters: Mapping[str, Parameter], seed: int, number: int) -> dict[str, Any]:
    return {key: _draw(one, random.Random(f"{seed}/{key}/{number}").random()) for key, one in parameters.items()}


def _draw(parameter: Parameter, uniform: float) -> Any:
    """Map a number from [0, 1) to a value."""
    values = _fixed(parameter)
    if values is not None:
        shares = parameter.probabilities or [1.0] * len(values)
        ends = list(itertools.accumulate(shares))
        return next((value for value, end in zip(values, ends, strict=True) if uniform * ends[-1] < end), values[-1])
    if parameter.distribution is Distribution.normal:
        return NormalDist(parameter.mu, parameter.sigma).inv_cdf(max(uniform, 2**-53))
    low, high = float(parameter.min or 0.0), float(parameter.max or 0.0)
    if _is_integer(parameter):
        return int(low) + int(uniform * (int(high) - int(low) + 1))
    if parameter.distribution in _LOGARITHMIC:
        if parameter.distribution is not Distribution.log_uniform:
            low, high = math.log(low), math.log(high)
        value = math.exp(low + uniform * (high - low))
    else:
        value = low + uniform * (high - low)
    return round(value / parameter.q) * parameter.q if parameter.distribution in _QUANTISED else value


def _is_integer(parameter: Parameter) -> bool:
    limits = (parameter.min, parameter.max)
    whole = all(isinstance(limit, int) for limit in limits)
    return parameter.distribution is Distribution.int_uniform or (parameter.distribution is None and whole)


def _check(key: str, parameter: Parameter, method: Method) -> None:
    values, kind = _fixed(parameter), parameter.distribution
    if values is not None:
        if not values or len(parameter.probabilities or values) != len(values):
            raise ConfigurationError(f"parameters.{key} has no values, or not as many probabilities as values.")
        return
    if method is Method.grid:
        raise ConfigurationError(
            f"parameters.{key} has no `values`, which a grid needs: list them, or use method: random."
        )
    if kind is Distribution.normal:
        return
    low, high = parameter.min, parameter.max
    if not all(isinstance(limit, int | float) for limit in (low, high)) or low > high:
        raise ConfigurationError(f"parameters.{key} needs `values`, or numbers `min` and `max`, which is no smaller.")
    if kind in (Distribution.log_uniform_values, Distribution.q_log_uniform_values) and low <= 0:
        raise ConfigurationError(f"parameters.{key}.min is {low}, but a logarithm needs a number above 0.")
