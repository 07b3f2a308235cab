"""Filters: what is kept of the images that could be decoded, and in which words the others are refused.

A filter that looks at a column which an image may lack comes in two: with `missing: refuse` one named `missing_COLUMN`
goes before it, so that a score that nobody computed is a line of its own in the manifest.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diffusion.config.training import Plugin
from diffusion.errors import ConfigurationError
from diffusion.plugins import build_plugin
from diffusion.preparation.config import ConditionConfig, FiltersConfig, Missing

SHOWN = 60
"""Letters of a value that a detail shows."""


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """What filters know of an image."""

    key: str
    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    captions: list[str]
    """At least one, non-empty."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the source knew, and over it the measures and the scores."""

    def value(self, column: str) -> Any:
        """Return `width`, `height`, or an entry of the metadata; None where there is none."""
        if column in ("width", "height"):
            return getattr(self, column)
        return self.metadata.get(column)


class Filter(Protocol):
    """One reason to refuse images."""

    @property
    def name(self) -> str:
        """The reason, as the manifest counts it."""
        ...

    def refuse(self, sample: SampleFacts) -> str | None:
        """Return why an image is refused, in a few words, or None if it is not."""
        ...


@dataclass(frozen=True)
class Rule:
    """A filter made of a function."""

    name: str
    decide: Callable[[SampleFacts], str | None]

    def refuse(self, sample: SampleFacts) -> str | None:
        """Return why an image is refused, or None."""
        return self.decide(sample)


def build_filters(config: FiltersConfig) -> list[Filter]:
    """Make the filters that a configuration asks for, the cheap ones first.

    Args:
        config: The configuration.

    Returns:
        The filters, in the order in which they are to be applied; the first that refuses gives the reason. No two have
        the same name.

    Raises:
        ConfigurationError: A limit is out of range or contradicts another, or a predicate cannot be loaded.
    """
    rules = [
        *_size_rules(config),
        *_caption_rules(config),
        *_column_rules(config),
        *(_condition(i, condition) for i, condition in enumerate(config.conditions)),
    ]
    filters: list[Filter] = []
    present: set[str] = set()
    for column, rule in rules:
        if column is not None and config.missing is Missing.refuse and column not in present:
            present.add(column)
            filters.append(Rule(f"missing_{column}", lambda sample, column=column: _absent(sample, column)))
        filters.append(rule)
    filters += [_predicate(i, plugin) for i, plugin in enumerate(config.predicates)]
    return _with_names_of_their_own(filters)


def _size_rules(config: FiltersConfig) -> Iterator[tuple[None, Rule]]:
    shortest, ratio = config.min_shorter_side, config.max_aspect_ratio
    if shortest is not None:
        _check_range("filters.min_shorter_side", shortest, 1)
        yield None, Rule("shorter_side", lambda sample: _below(min(sample.width, sample.height), shortest, " px"))
    if ratio is not None:
        _check_range("filters.max_aspect_ratio", ratio, 1)
        yield (
            None,
            Rule(
                "aspect_ratio",
                lambda sample: _above(max(sample.width, sample.height) / min(sample.width, sample.height), ratio),
            ),
        )


def _caption_rules(config: FiltersConfig) -> Iterator[tuple[None, Rule]]:
    units: tuple[tuple[str, Callable[[str], int]], ...] = (
        ("characters", len),
        ("words", lambda caption: len(caption.split())),
    )
    for unit, length in units:
        low, high = getattr(config, f"min_caption_{unit}"), getattr(config, f"max_caption_{unit}")
        if low is None and high is None:
            continue
        _check_limits(f"filters.min_caption_{unit}", low, f"filters.max_caption_{unit}", high, least=1)
        yield None, Rule(f"caption_{unit}", _each_caption(length, low, high, f" {unit}"))
    if config.keywords:
        if not all(word.strip() for word in config.keywords):
            raise ConfigurationError("filters.keywords holds an empty text, which is in every caption; take it out")
        words = "|".join(r"\s+".join(map(re.escape, word.split())) for word in config.keywords)
        pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        yield None, Rule("keyword", lambda sample: _found(pattern, sample, config.keyword_columns))
    elif config.keyword_columns:
        raise ConfigurationError("filters.keyword_columns are given, but filters.keywords are not; give both")


def _column_rules(config: FiltersConfig) -> Iterator[tuple[str, Rule]]:
    if config.licences is not None:
        yield config.licence_column, _allowed("licence", "filters.licences", config.licence_column, config.licences)
    if config.languages is not None:
        yield (
            config.language_column,
            _allowed("language", "filters.languages", config.language_column, config.languages),
        )
    if config.min_aesthetic is not None:
        _check_range("filters.min_aesthetic", config.min_aesthetic, -math.inf)
        column = config.aesthetic_column
        yield column, Rule("aesthetic", _between(column, config.min_aesthetic, None))


def _condition(index: int, condition: ConditionConfig) -> tuple[str, Rule]:
    """A condition on any column."""
    key, column = f"filters.conditions.{index}", condition.column
    if not column or column == "???":
        raise ConfigurationError(f"{key}.column is missing: give a measure, a score or a key of the metadata")
    limited = condition.min is not None or condition.max is not None
    if limited == (condition.one_of is not None):
        raise ConfigurationError(f"{key} on '{column}': give one_of, or min and max or one of them")
    if condition.one_of is not None:
        allowed = {str(value) for value in condition.one_of}
        return column, Rule(f"condition_{column}", lambda sample: _outside(sample.value(column), allowed, str))
    _check_limits(f"{key}.min", condition.min, f"{key}.max", condition.max)
    return column, Rule(f"condition_{column}", _between(column, condition.min, condition.max))


def _predicate(index: int, plugin: Plugin) -> Rule:
    """A filter of the user's own."""
    key = f"filters.predicates.{index}"
    decide = build_plugin(plugin, key)
    if not callable(decide):
        raise ConfigurationError(f"{key}.path={plugin.path}: what it makes cannot be called with a SampleFacts")

    def refuse(sample: SampleFacts) -> str | None:
        detail = decide(sample)
        if detail is not None and not isinstance(detail, str):
            raise ConfigurationError(
                f"{key}.path={plugin.path} returned {detail!r} for '{sample.key}'; it must return why the image is "
                "refused, as text, or None"
            )
        return detail

    return Rule(getattr(decide, "name", None) or plugin.path.rpartition(".")[2], refuse)


def _with_names_of_their_own(filters: Sequence[Filter]) -> list[Filter]:
    """Number the filters whose name another one before them has."""
    names: set[str] = set()
    result: list[Filter] = []
    for one in filters:
        name, number = one.name, 2
        while name in names:
            name, number = f"{one.name}_{number}", number + 1
        names.add(name)
        result.append(one if name == one.name else Rule(name, one.refuse))
    return result


def _each_caption(
    length: Callable[[str], int], low: int | None, high: int | None, unit: str
) -> Callable[[SampleFacts], str | None]:
    """Refuse an image if any of its captions is too short or too long."""

    def refuse(sample: SampleFacts) -> str | None:
        lengths = [length(caption) for caption in sample.captions]
        return _below(min(lengths), low, unit) or _above(max(lengths), high, unit)

    return refuse


def _between(column: str, low: float | None, high: float | None) -> Callable[[SampleFacts], str | None]:
    """Refuse an image whose value in a column is no number, or is out of limits; not one without a value."""

    def refuse(sample: SampleFacts) -> str | None:
        value = sample.value(column)
        if value is None:
            return None
        number = _number(value)
        if number is None:
            return f"{column} is {_shown(value)}, which is not a number"
        return _below(number, low) or _above(number, high)

    return refuse


def _allowed(name: str, key: str, column: str, values: list[str]) -> Rule:
    """Refuse an image whose text in a column is none of these, in either case; not one without a value."""
    if not values:
        raise ConfigurationError(f"{key} is an empty list, which no image passes; give some, or null")
    allowed = {_folded(value) for value in values}
    return Rule(name, lambda sample: _outside(sample.value(column), allowed, _folded))


def _outside(value: Any, allowed: set[str], fold: Callable[[Any], str]) -> str | None:
    return None if value is None or fold(value) in allowed else _shown(value)


def _absent(sample: SampleFacts, column: str) -> str | None:
    return f"no {column}" if sample.value(column) is None else None


def _found(pattern: re.Pattern[str], sample: SampleFacts, columns: Sequence[str]) -> str | None:
    """Return the first keyword and where it is."""
    places = [("caption", caption) for caption in sample.captions]
    places += [(column, str(sample.value(column))) for column in columns if sample.value(column) is not None]
    for place, text in places:
        if match := pattern.search(text):
            return f"'{match[0]}' in {place}: {_shown(text)}"
    return None


def _folded(value: Any) -> str:
    return str(value).strip().casefold()


def _below(value: float, low: float | None, unit: str = "") -> str | None:
    return f"{value:g}{unit} < {low:g}" if low is not None and value < low else None


def _above(value: float, high: float | None, unit: str = "") -> str | None:
    return f"{value:g}{unit} > {high:g}" if high is not None and value > high else None


def _number(value: Any) -> float | None:
    """Return a finite number, also one that a table holds as text."""
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def _check_range(key: str, value: float, low: float) -> None:
    if not (low <= value < math.inf):
        limits = "finite" if low == -math.inf else f"finite, and at least {low:g}"
        raise ConfigurationError(f"{key} is {value}; it must be {limits}")


def _check_limits(
    low_key: str, low: float | None, high_key: str, high: float | None, *, least: float = -math.inf
) -> None:
    for key, value in ((low_key, low), (high_key, high)):
        if value is not None:
            _check_range(key, value, least)
    if low is not None and high is not None and low > high:
        raise ConfigurationError(f"{low_key} is {low} and {high_key} is {high}: no image passes both")
