"""Fields of configuration sections: limits, times and sizes, and the check of all sections.

A section is a dataclass. `bounded`, `time` and `location` declare the limits of a field. The method `problems(key)` of
a section, if it has one, gets the key of the section and yields a sentence for each wrong relation between its fields.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from omegaconf import MISSING

from diffusion.config.secrets import redact
from diffusion.errors import ConfigurationError, raise_all

MAX_SEED = 2**32 - 2**16
"""Seeds have 32 bits, and those of ranks and of prompts follow the one of the configuration."""

MAX_SECONDS = 1e9
"""Timeouts of Python and torch overflow at about ten times as many."""

TIME_UNITS = {"ba": "batches", "sp": "samples", "ep": "epochs", "dur": "fraction of the run"}
SIZE_UNITS = {"b": 1, "kb": 2**10, "mb": 2**20, "gb": 2**30, "tb": 2**40, "pb": 2**50}

CHECK = "check"
"""Entry of a field's metadata: `Limits`, `TimeLimits` or `LocationLimits`."""

_NUMBER_AND_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Time:
    """A point in a run, or a length of it."""

    value: float
    """Number of units: a whole number, or for `dur` a fraction in [0, 1]."""

    unit: str
    """One of `TIME_UNITS`."""

    def in_steps(self, *, num_steps: int, global_batch_size: int) -> float | None:
        """Convert to optimizer steps, in a run of `num_steps`; None for epochs, whose length depends on the data."""
        factors = {"ba": 1.0, "sp": 1 / global_batch_size, "dur": num_steps}
        if self.unit not in factors:
            return None
        steps = self.value * factors[self.unit]
        return round(steps) if math.isclose(steps, round(steps)) else steps  # 0.07 * 100 is more than 7.


def parse_time(text: str, key: str, units: Collection[str] = TIME_UNITS) -> Time:
    """Parse a time string of Composer: a number and a unit, such as `10ba`.

    Raises:
        ConfigurationError: the text is not such a time.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2].lower() not in units:
        named = ", ".join(f"{unit} ({TIME_UNITS[unit]})" for unit in units)
        raise ConfigurationError(f"{key} is '{text}', but must be a number and a unit: {named}.")
    value, unit = float(match[1]), match[2].lower()
    if unit == "dur" and value > 1:
        raise ConfigurationError(f"{key} is '{text}', but must be between 0dur and 1dur.")
    if unit != "dur" and not value.is_integer():
        raise ConfigurationError(f"{key} is '{text}', but must be a whole number of {TIME_UNITS[unit]}.")
    return Time(value, unit)


def parse_size(text: str, key: str) -> int:
    """Parse a size such as `500gb` (1 gb is 2^30 bytes, as in Streaming), or a number of bytes, into bytes.

    Raises:
        ConfigurationError: the text is not such a size.
    """
    match = _NUMBER_AND_UNIT.fullmatch(f"{text}b" if text.isdecimal() else text)
    size = float(match[1]) * SIZE_UNITS.get(match[2].lower(), math.nan) if match is not None else math.nan
    if not math.isfinite(size):
        units = ", ".join(SIZE_UNITS)
        raise ConfigurationError(f"{key} is '{text}', but must be a number and a unit ({units}), as in 500gb.")
    return int(size)


def size_text(num_bytes: float, digits: int = 1) -> str:
    """Write bytes in decimal units, such as `1.5 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:,.{digits}f} {unit}"
    return f"{num_bytes:,.0f} B"


@dataclass(frozen=True)
class Limits:
    """Limits of a finite number; `above` and `below` exclude the limit itself."""

    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        if self.min is not None and self.max is not None:
            return f"between {self.min:.10g} and {self.max:.10g}"
        limits = {"at least": self.min, "greater than": self.above, "at most": self.max, "less than": self.below}
        return " and ".join(f"{words} {limit:.10g}" for words, limit in limits.items() if limit is not None) or "finite"

    def problem(self, value: float, key: str) -> str | None:
        """Describe a violation, if there is one."""
        is_finite = -math.inf < value < math.inf  # Also an integer of 400 digits.
        holds = (
            is_finite
            and (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        limits = str(self) if is_finite or str(self) == "finite" else f"finite, and {self}"
        return None if holds else f"{key} is {value}, but must be {limits}."


@dataclass(frozen=True)
class TimeLimits:
    """Units of a time, and whether it must be longer than 0."""

    units: tuple[str, ...]
    positive: bool

    def __str__(self) -> str:
        return f"a time in {' or '.join(self.units)}"

    def problem(self, value: str, key: str) -> str | None:
        """Describe a violation, if there is one."""
        try:
            time = parse_time(value, key, self.units)
        except ConfigurationError as error:
            return str(error)
        return f"{key} is '{value}', but must be longer than 0." if self.positive and time.value == 0 else None


@dataclass(frozen=True)
class LocationLimits:
    """A path or URI; `local` refuses URIs."""

    local: bool

    def problem(self, value: str, key: str) -> str | None:
        """Describe a violation, if there is one."""
        if not value.strip():
            return f"{key} is empty. Set a value, or remove the key."
        if self.local and "://" in value:
            remote = f" Set {key.removesuffix('local')}remote to this URI, and {key} to a cache."
            return f"{key} is '{value}', but must be a local folder.{remote if key.endswith('local') else ''}"
        return None


def bounded(default: Any, **limits: float) -> Any:
    """Declare a field that holds a number, or a list of numbers, within `Limits`."""
    return _checked(default, Limits(**limits))


def time(default: Any, *, units: str = "ba sp ep dur", positive: bool = False) -> Any:
    """Declare a field that holds a time such as `10000ba`."""
    return _checked(default, TimeLimits(tuple(units.split()), positive))


def location(default: Any, *, local: bool = False) -> Any:
    """Declare a field that holds a path or URI. A dry run of training does not need its value."""
    return _checked(default, LocationLimits(local))


def _checked(default: Any, check: Limits | TimeLimits | LocationLimits) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={CHECK: check})
    return dataclasses.field(default=default, metadata={CHECK: check})


@dataclass(kw_only=True)
class Plugin:
    """A user-defined object."""

    path: str = MISSING
    """Import path of a class or function, `package.module.Name`, which is called with `arguments`."""

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments."""


def section_problems(section: Any, key: str = "") -> Iterator[str]:
    """Describe everything that is wrong within a section and the sections below it.

    Missing values (`???`) are skipped. A number without limits must be finite, unless values may have any type.
    Relations between the fields of a section are checked when each field by itself is right. The dotted key of the
    section is empty for a whole configuration.
    """
    own: list[str] = []
    for field in dataclasses.fields(section):
        check = field.metadata.get(CHECK)
        for child_key, child in _elements(f"{key}.{field.name}".lstrip("."), getattr(section, field.name)):
            if dataclasses.is_dataclass(child):
                yield from section_problems(child, child_key)
            elif check is None and isinstance(child, float) and Any not in get_args(field.type):
                own += filter(None, [Limits().problem(child, child_key)])
            elif check is not None and child is not None and child != MISSING:
                own += filter(None, [check.problem(child, child_key)])
    yield from own
    if not own and hasattr(section, "problems"):
        yield from section.problems(key)


def check_sections(config: Any) -> None:
    """Raise a ConfigurationError with all problems of a configuration, section by section, if there are any."""
    raise_all(ConfigurationError, redact(list(section_problems(config))))


def _elements(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        yield from ((f"{key}.{index}", element) for index, element in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{key}.{name}", element) for name, element in value.items())
    else:
        yield key, value
