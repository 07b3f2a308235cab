"""Networks of diffusers whose keyword arguments a configuration replaces."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from diffusion.errors import ConfigurationError, raise_all, similar_names

Network = TypeVar("Network")

_SCALARS = (bool, int, float, str, type(None))


def construct(kind: type[Network], arguments: Mapping[str, Any], changes: Mapping[str, Any], key: str) -> Network:
    """Build a network.

    Args:
        kind: its class, whose constructor has annotations.
        arguments: keyword arguments of the architecture.
        changes: keyword arguments that replace them.
        key: where the changes stand in the configuration.

    Raises:
        ConfigurationError: there is no such argument, or no network can be built with them.
    """
    parameters = inspect.signature(kind).parameters
    problems = []
    for name, value in changes.items():
        if name not in parameters:
            meant = [f"{key}.{one}" for one in similar_names(name, parameters)]
            remedy = f": did you mean {' or '.join(meant)}?" if meant else f". Its keys are {', '.join(parameters)}."
            problems.append(f"Unknown key {key}.{name} (no argument of {kind.__name__}){remedy}")
        elif not _fits(value, parameters[name].annotation):
            expected = inspect.formatannotation(parameters[name].annotation)
            problems.append(f"{key}.{name} is {value!r}, but {kind.__name__} takes {expected} there.")
    raise_all(ConfigurationError, problems)
    try:
        return kind(**{**arguments, **changes})
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not changes:
            raise
        raise ConfigurationError(
            f"{key} is {dict(changes)}, of which no {kind.__name__} can be built with the other arguments of the "
            f"architecture: {str(error).rstrip('.')}. Change these keys, or leave them out."
        ) from error


def _fits(value: Any, annotation: Any) -> bool:
    """Whether all numbers and texts in a value are of types that an annotation names anywhere."""
    expected = {one for one in _leaves(annotation) if one in _SCALARS}
    if float in expected:
        expected.add(int)
    return not expected or all(type(one) in expected for one in _elements(value))


def _leaves(annotation: Any) -> Iterable[Any]:
    arguments = get_args(annotation)
    return [leaf for one in arguments for leaf in _leaves(one)] if arguments else [annotation]


def _elements(value: Any) -> Iterable[Any]:
    return [leaf for one in value for leaf in _elements(one)] if isinstance(value, list | tuple) else [value]
