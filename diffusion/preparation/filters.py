"""Filters and `where` as SQL conditions (DuckDB), with the reason and the wording of each rejection.

With `missing: reject`, a filter on an optional column is preceded by a rule `missing_COLUMN`, so that the manifest
counts missing values separately.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from diffusion.config.fields import section_problems
from diffusion.errors import ConfigurationError, first_line, raise_all
from diffusion.formats.data_set import METADATA
from diffusion.preparation.buckets import build_buckets
from diffusion.preparation.config import ConditionConfig, FiltersConfig, Missing, PrepareConfig
from diffusion.preparation.metadata import (
    MEASURES,
    MetadataDatabase,
    add_table,
    fetch_arrays,
    identifier,
    literal,
    unknown_column,
)
from diffusion.preparation.records import WITHOUT_CAPTION, Reason

ColumnSql = Callable[[str], str]
"""Makes the SQL expression of a column's value from its name, null where an image has none."""

WHERE = "where"
"""Reason of the images for which `where` is not true."""

_SHOWN = 60
"""Letters of a value that a detail shows."""

_SPACE = r"\s\v\x1c-\x1f\x{85}\pZ"
"""White space as Python's `str.split` takes it, for a class of a regular expression of RE2."""

_WORD = r"\pL\pM\pN_"
"""Characters of words, with the marks that combine with letters."""

_UNSPACED = {
    "CJK": r"\p{Han}",
    "IDEOGRAPHIC": r"\p{Han}",
    "HIRAGANA": r"\p{Hiragana}",
    "KATAKANA": r"\p{Katakana}\x{30FC}\x{FF70}",
    "BOPOMOFO": r"\p{Bopomofo}",
    "HANGUL": r"\p{Hangul}",
    "THAI": r"\p{Thai}",
    "LAO": r"\p{Lao}",
    "KHMER": r"\p{Khmer}",
    "MYANMAR": r"\p{Myanmar}",
    "TIBETAN": r"\p{Tibetan}",
    "YI": r"\p{Yi}",
}
"""Scripts without a space on both sides of a word: a word of their characters' names, and their class in RE2."""

_EDGE = f"[^{_WORD}]|[{''.join(_UNSPACED.values())}]"
"""A character beside a word."""

_VARIATIONS = r"\x{FE00}-\x{FE0F}\x{E0100}-\x{E01EF}"
"""Selectors of the look of the character before them, which are marks."""

_TRIMMED = " \t\n\r\v\f\xa0"

_WHOLE, _DIGITS = r"^(-?\d+)\.0$", r"\1"

_DATES = {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
"""Functions that look like columns."""

_BETWEEN_CAPTIONS = "\x01"

SCAN_REASON = f"""CASE WHEN reason IN ({", ".join(literal(reason.value) for reason in WITHOUT_CAPTION)})
    AND len(captions) > 0 THEN '' ELSE reason END"""
"""SQL of the reason of the scan, which comes before the rules; none for images that a captioner has given captions."""


@dataclass(frozen=True)
class Rule:
    """A reason to reject images."""

    name: str
    """The reason, as the manifest counts it."""

    rejects: str
    """SQL condition."""

    detail: str
    """SQL expression of a few words for an image that is rejected."""


@dataclass(frozen=True)
class Conditions:
    """All conditions of a configuration, and what they look at."""

    rules: list[Rule]
    """In the order in which they are applied."""

    keys: list[str]
    """Columns of the sources' metadata that filters read."""

    types: Mapping[str, str]
    """SQL type of the keys that `where` names."""

    def images(self, database: MetadataDatabase, parts: Sequence[int]) -> str:
        """Write a query of the images of some parts that the rules can look at, with the column `_bucket`."""
        return f"({database.images(parts, self.keys, self.types)} LEFT JOIN sizes USING (width, height))"

    @property
    def reason(self) -> str:
        """SQL of the first reason to reject an image, empty for none."""
        rules = " ".join(f"WHEN {rule.rejects} THEN {literal(rule.name)}" for rule in self.rules)
        return f"CASE WHEN {SCAN_REASON} <> '' THEN {SCAN_REASON} {rules} ELSE '' END"


def load_conditions(
    database: MetadataDatabase, config: PrepareConfig, parts: Sequence[int], types: Mapping[str, str] | None = None
) -> Conditions:
    """Write the conditions on the images of some parts, and make the table `sizes` with the bucket of each size.

    `types` are those of the keys that `where` named in earlier generations, which later ones keep.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    keys: list[str] = []

    def column(name: str) -> str:
        if name in MEASURES or name in database.scores:
            return identifier(name)
        if name not in keys:
            keys.append(name)
        return f"_keys[{keys.index(name) + 1}]"

    buckets = build_buckets(config.buckets)
    sizes = f"SELECT DISTINCT width, height FROM {database.metadata(parts)} WHERE width IS NOT NULL"
    columns = fetch_arrays(database.connection, sizes)
    names = np.array([*buckets.names, None])[buckets.indices(columns["width"], columns["height"])]
    add_table(database.connection, "sizes", pa.table({**columns, "_bucket": pa.array(names, pa.string())}))
    too_small = Rule(Reason.TOO_SMALL.value, "_bucket IS NULL", "printf('%d x %d', width, height)")
    rules, types = [too_small, *build_rules(config.filters, column)], types or {}
    if config.where is not None:
        types = _where_types(database, config.where, parts, types)
        rules.append(Rule(WHERE, f"(\n{config.where}\n) IS NOT TRUE", "''"))
    return Conditions(rules, keys, types)


@contextmanager
def explained_values(config: PrepareConfig) -> Iterator[None]:
    """Report values of the metadata that a condition cannot take as a ConfigurationError."""
    import duckdb

    try:
        yield
    except (duckdb.ConversionException, duckdb.OutOfRangeException, duckdb.InvalidInputException) as error:
        raise ConfigurationError(f"{'where' if config.where else METADATA}: {first_line(error)}") from error


def build_rules(config: FiltersConfig, column: ColumnSql) -> list[Rule]:
    """Make the rules that a configuration asks for, in the order in which they are applied: the cheap ones first.

    Rules on columns come after one for their missing values, if that is asked for.

    Raises:
        ConfigurationError: a limit is out of range or contradicts another.
    """
    raise_all(ConfigurationError, list(section_problems(config, "filters")))
    side, ratio = "least(width, height)", "greatest(width, height) / least(width, height)"
    ranges: list[tuple[str, str, str, float | None, float | None, str]] = [
        ("shorter_side", side, side, config.min_shorter_side, None, " px"),
        ("aspect_ratio", ratio, ratio, None, config.max_aspect_ratio, ""),
    ]
    words = f"len(regexp_extract_all(caption, '[^{_SPACE}]+'))"
    for unit, length in (("characters", "length(caption)"), ("words", words)):
        lengths = f"list_transform(captions, lambda caption: {length})"
        low, high = getattr(config, f"min_caption_{unit}"), getattr(config, f"max_caption_{unit}")
        ranges.append((f"caption_{unit}", f"list_min({lengths})", f"list_max({lengths})", low, high, f" {unit}"))
    rules = [_within(*one) for one in ranges if one[3:5] != (None, None)]
    if config.keywords:
        rules.append(_keyword_rule(config.keywords, [(name, column(name)) for name in config.keyword_columns]))

    present = set[str]()
    for name, condition in (
        ("licence", ConditionConfig(column=config.licence_column, one_of=config.licences)),
        ("language", ConditionConfig(column=config.language_column, one_of=config.languages)),
        ("aesthetic", ConditionConfig(column=config.aesthetic_column, min=config.min_aesthetic)),
        *((f"condition_{one.column}", one) for one in config.conditions),
    ):
        if condition.min is None and condition.max is None and not condition.one_of:
            continue
        value = column(condition.column)
        if config.missing is Missing.reject and condition.column not in present:
            present.add(condition.column)
            detail, key, keys = literal(f"no {condition.column}"), literal(condition.column), "json_keys(metadata)"
            if value != identifier(condition.column):  # A key of the metadata.
                detail = f"""concat({detail}, CASE WHEN len({keys}) > 0 AND {key} NOT IN {keys}
                    THEN '; its metadata have ' || array_to_string({keys}[:20], ', ') END)"""
            rules.append(Rule(f"missing_{condition.column}", f"{value} IS NULL", detail))
        if condition.one_of:
            rules.append(_text_rule(name, value, condition.one_of, any_case=name in ("licence", "language")))
        else:
            rules.append(_number_rule(name, value, condition))
    return _with_distinct_names(rules)


def _where_types(
    database: MetadataDatabase, where: str, parts: Sequence[int], earlier: Mapping[str, str]
) -> Mapping[str, str]:
    """Find the SQL types of the keys of the sources' metadata that `where` names, and check it against the columns."""
    import duckdb

    known = {*map(str.lower, database.columns)}
    keys = [name for name in parse_where(where) if name.lower() not in known]
    if len({key.lower() for key in keys}) < len(keys):
        raise ConfigurationError(f"where: {where!r} names keys that differ in upper and lower case only; name one")
    types = {**earlier, **database.key_types([key for key in keys if key not in earlier], parts)}
    try:
        images = database.images(parts[:1], types=types)
        database.connection.execute(f"EXPLAIN SELECT 1 FROM {images} WHERE (\n{where}\n)").fetchall()
    except duckdb.Error as error:
        message = first_line(error)
        column = re.search(r'Referenced column "(.*)" not found', message)
        raise ConfigurationError(f"where: {unknown_column(database, column[1]) if column else message}") from error
    return types


def parse_where(where: str) -> list[str]:
    """List the names in `where`.

    Raises:
        ConfigurationError: it is not a single expression without queries.
    """
    import duckdb

    try:
        duckdb.SQLExpression(where)
    except duckdb.Error as error:
        raise ConfigurationError(f"where: {where!r} is not one SQL expression: {error}") from error
    with duckdb.connect() as connection:
        [(parsed,)] = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {where}"]).fetchall()
        varying = "SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'"
        functions = {name for (name,) in connection.execute(varying).fetchall()}
    nodes: list[dict[str, Any]] = []
    json.loads(parsed, object_hook=nodes.append)
    names = list(dict.fromkeys(node["column_names"][0] for node in nodes if node.get("class") == "COLUMN_REF"))
    called = functions.intersection(node["function_name"] for node in nodes if node.get("class") == "FUNCTION")
    if called := called.union(_DATES.intersection(map(str.lower, names))):
        raise ConfigurationError(f"where: {where!r}: {min(called)} is not the same at each run; remove it")
    if not {"SUBQUERY", "WINDOW", "STAR", "PARAMETER"}.isdisjoint(node.get("class") for node in nodes):
        raise ConfigurationError(
            f"where: {where!r}: give one expression on the columns of an image, without queries, windows or parameters"
        )
    return names


def _keyword_rule(keywords: Sequence[str], columns: Sequence[tuple[str, str]]) -> Rule:
    """Search captions and columns for whole words in either case and Unicode form.

    In `_UNSPACED` scripts, any part of the text counts.
    """
    sides: dict[tuple[str, str], list[str]] = {}
    for keyword in map(_composed, keywords):
        words = keyword.split()
        before = "" if _is_unspaced(words[0][0]) else f"(?:^|{_EDGE})"
        after = rf"(?:$|\PM|[{_VARIATIONS}])" if _is_unspaced(words[-1][-1]) else f"(?:$|{_EDGE})"
        sides.setdefault((before, after), []).append(f"[{_SPACE}]+".join(map(re.escape, words)))
    rejects, details = [], []
    for (before, after), alternatives in sides.items():
        pattern = literal(f"(?i){before}({'|'.join(alternatives)}){after}")  # RE2 has no look-around.
        first = f"list_filter(captions, lambda caption: regexp_matches({_composed_sql('caption')}, {pattern}))[1]"
        texts = [("caption", f"array_to_string(captions, {literal(_BETWEEN_CAPTIONS)})", first)]
        texts += [(name, f"CAST({sql} AS VARCHAR)", sql) for name, sql in columns]
        for name, given, shown in texts:
            text = _composed_sql(given)
            rejects.append(f"coalesce(regexp_matches({text}, {pattern}), false)")
            place = literal(f"' in {name}: ")
            detail = f"concat('''', regexp_extract({text}, {pattern}, 1), {place}, {_shown(shown)})"
            details.append(f"WHEN {rejects[-1]} THEN {detail}")
    return Rule("keyword", f"({' OR '.join(rejects)})", f"CASE {' '.join(details)} END")


def _is_unspaced(character: str) -> bool:
    return not _UNSPACED.keys().isdisjoint(re.split("[ -]", unicodedata.name(character, "")))


def _within(name: str, lowest: str, highest: str, low: float | None, high: float | None, unit: str = "") -> Rule:
    """Reject numbers of which the lowest is below `low` or the highest above `high`; null is neither."""
    rejects, details = [], []
    for number, sign, limit in ((lowest, "<", low), (highest, ">", high)):
        if limit is not None:
            rejects.append(f"{number} {sign} {limit!r}")
            details.append(
                f"WHEN {rejects[-1]} THEN printf('%g{unit} {sign} %g', ({number})::DOUBLE, {limit!r}::DOUBLE)"
            )
    return Rule(name, f"({' OR '.join(rejects)})", f"CASE {' '.join(details)} END")


def _number_rule(name: str, value: str, condition: ConditionConfig) -> Rule:
    """Reject what is no number, or out of limits; not an image without a value."""
    number = f"TRY_CAST({value} AS DOUBLE)"
    limits = _within(name, number, number, condition.min, condition.max)
    is_other = f"({value} IS NOT NULL AND NOT coalesce(isfinite({number}), false))"
    other = f"concat({literal(f'{condition.column} is ')}, {_shown(value)}, ', which is not a number')"
    return Rule(
        name, f"({is_other} OR {limits.rejects})", f"CASE WHEN {is_other} THEN {other} ELSE {limits.detail} END"
    )


def _text_rule(name: str, value: str, allowed: Sequence[Any], *, any_case: bool) -> Rule:
    """Reject what is none of some values, compared as texts; not an image without a value."""
    text = f"CAST({value} AS VARCHAR)"
    if any_case:
        text, texts = f"lower(trim({text}, {literal(_TRIMMED)}))", [str(one).strip().lower() for one in allowed]
    else:  # 1.0 is 1.
        text = f"regexp_replace({text}, {literal(_WHOLE)}, {literal(_DIGITS)})"
        texts = [str(one).lower() if isinstance(one, bool) else re.sub(_WHOLE, _DIGITS, str(one)) for one in allowed]
    listed = ", ".join(literal(_composed(one)) for one in texts)
    detail = f"concat({literal(name.removeprefix('condition_') + ' is ')}, {_shown(value)})"
    return Rule(name, f"{_composed_sql(text)} NOT IN ({listed})", detail)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _composed_sql(text: str) -> str:
    return f"nfc_normalize(replace({text}, chr(0), ' '))"  # DuckDB's function ends at a null character.


def _shown(value: str) -> str:
    """Put a value into quotes, its beginning if it is long."""
    text = f"CAST({value} AS VARCHAR)"
    return f"concat('''', {text}[:{_SHOWN}], CASE WHEN length({text}) > {_SHOWN} THEN '...' ELSE '' END, '''')"


def _with_distinct_names(rules: Sequence[Rule]) -> list[Rule]:
    """Number the rules whose name another one before them has."""
    names: set[str] = set()
    result: list[Rule] = []
    for rule in rules:
        name, number = rule.name, 2
        while name in names:
            name, number = f"{rule.name}_{number}", number + 1
        names.add(name)
        result.append(replace(rule, name=name))
    return result
