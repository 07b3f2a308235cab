"""YAML files and overrides of the command line, merged into the dataclasses of a schema, and back to YAML.

OmegaConf holds the merged values, knows their types and resolves interpolations (`${key}`, `${oc.env:NAME}`). Files and
overrides are merged in order and value by value, so that each problem names its key, and its file and line or the
command line.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_origin

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from diffusion.config.documentation import (
    describe_type,
    element_type,
    field_types,
    key_doc,
    schema_keys,
    split_optional,
)
from diffusion.config.schema import Config
from diffusion.config.sources import EXTENDS, Source, dump, read_files, read_override, read_yaml
from diffusion.errors import ConfigurationError, raise_all, similar_names

__all__ = [
    "dump",
    "from_dict",
    "load",
    "load_complete",
    "load_config",
    "missing_keys",
    "read_yaml",
    "to_dict",
    "to_yaml",
]

log = logging.getLogger(__name__)

RENAMED = {  # until 0.3
    "data.download_retry": "data.download_attempts",
    "operations.supervision.check_patience": "operations.supervision.check_timeout",
    "operations.supervision.data_patience": "operations.supervision.data_timeout",
    "operations.supervision.pause_patience": "operations.supervision.pause_timeout",
    "trainer.store_patience": "trainer.store_timeout",
}
"""Former names of keys, which are still read, and their names today in the same section."""

Schema = TypeVar("Schema")


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, may_miss: Callable[[str], bool] = lambda key: False
) -> Config:
    """Load the configuration of a run; arguments and errors as in `load_complete`."""
    return load_complete(Config, path, overrides, may_miss=may_miss)


def load_complete(
    schema: type[Schema],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    may_miss: Callable[[str], bool] = lambda key: False,
) -> Schema:
    """Load a YAML file into a dataclass that has all values.

    Args:
        schema: a dataclass as in `load`.
        path: a YAML file.
        overrides: `key.sub=value` strings.
        may_miss: whether a key may remain without a value (`???`).

    Raises:
        ConfigurationError: a file or an override is wrong, or a value is missing.
    """
    config = load(schema, path, overrides)
    missing = {key: doc for key, doc in missing_keys(config).items() if not may_miss(key)}
    if missing:
        listed = "; ".join(f"{key} ({doc.rstrip('.')})" if doc else key for key, doc in missing.items())
        raise ConfigurationError(
            f"Missing in {path}: {listed}. Set a value in the file, or on the command line as in "
            f"{next(iter(missing))}=VALUE."
        )
    return config


def load(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Load a YAML file into a dataclass; values may be missing (`???`) afterwards.

    Args:
        schema: a dataclass whose fields are scalars, enums, dataclasses, and lists and dictionaries of them.
        path: a YAML file; `extends: other.yaml` in it names a base file, relative to itself.
        overrides: `key.sub=value` strings, applied in order after the files.

    Raises:
        ConfigurationError: a file or an override is wrong.
    """
    sources = read_files(Path(path))
    for override in overrides:
        sources += read_override(override)
    return _merge(schema, sources)


def from_dict(schema: type[Schema], values: dict[str, Any], where: str) -> Schema:
    """Build a dataclass from plain containers, such as the configuration in a checkpoint.

    Args:
        schema: a dataclass as in `load`.
        values: result of `to_dict`.
        where: the origin, for messages.

    Raises:
        ConfigurationError: the values do not fit the schema.
    """
    return _merge(schema, [Source(where, values)])


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain containers and scalars; enums become their values."""
    return _plain(config)


def to_yaml(config: Any) -> str:
    """Write a configuration as YAML, in the order of the schema; `load` reads it back to an equal configuration."""
    return dump(to_dict(config))


def missing_keys(config: Any) -> dict[str, str]:
    """Find missing values.

    Args:
        config: a configuration.

    Returns:
        Dotted keys whose value is `???` and their meanings, in the order of the schema. A run with
        `plugins.train_dataset` needs no streams.
    """
    keys = list(_missing(config, ""))
    if isinstance(config, Config) and config.plugins.train_dataset is not None:
        keys = [key for key in keys if key not in ("data.local", "data.streams")]
    return {key: key_doc(type(config), key) for key in keys}


def _missing(value: Any, key: str) -> Iterator[str]:
    children: dict[Any, Any] = {}
    if isinstance(value, str) and value == MISSING:
        yield key
    elif dataclasses.is_dataclass(value):
        children = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, dict | list):
        children = value if isinstance(value, dict) else dict(enumerate(value))
    for name, child in children.items():
        yield from _missing(child, _join(key, name))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list) else value


_SCALARS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float)}
"""Types of the YAML values of a field."""


def _merge(schema: type[Schema], sources: Sequence[Source]) -> Schema:
    """Merge sources in order into the defaults of a schema: sections key by key, everything else is replaced."""
    config = OmegaConf.structured(schema)
    merger = _Merger(schema)
    for source in sources:
        try:
            merger.merge_section(config, schema, source.values, "", source)
        except RecursionError:
            raise ConfigurationError(f"{source.name} is nested too deeply, or refers to itself.") from None
    result = merger.build_section(config, schema, "", sources)
    raise_all(ConfigurationError, merger.problems)
    if merger.renamed:
        listed = ", ".join(f"{old} (now {RENAMED[old]})" for old in dict.fromkeys(merger.renamed))
        log.warning("%s: keys with former names, which are read until 0.3: %s", sources[-1].name, listed)
    return result


class _Merger:
    """Sets values one by one and collects the problems."""

    def __init__(self, schema: type):
        self.schema = schema
        self.problems: list[str] = []
        self.renamed: list[str] = []

    def merge_section(self, section: Any, kind: type, values: dict[str, Any], key: str, source: Source) -> None:
        """Set the values of a section, which is at `key`."""
        types = field_types(kind)
        for name, value in values.items():
            child_key = _join(key, name)
            if child_key in RENAMED:
                self.renamed.append(child_key)
                name = RENAMED[child_key].rpartition(".")[2]
            if name in types:
                self.merge_value(section, name, types[name], value, child_key, source)
            else:
                self.problems.append(self.unknown_key(kind, key, name, source))

    def merge_value(self, parent: Any, name: str | int, annotation: Any, value: Any, key: str, source: Source) -> None:
        """Set one value of a section, list or dictionary."""
        kind, _ = split_optional(annotation)
        origin = get_origin(kind) or kind
        present = _container(parent, name)
        if isinstance(value, dict) and (isinstance(present, ListConfig) or origin is list):
            self.merge_elements(present or [], kind, value, key, source)
            return
        try:
            if isinstance(value, list):
                parent[name] = [MISSING] * len(value)
            elif not isinstance(value, dict):
                parent[name] = _scalar(origin, value, key, source)
            elif present is None:
                parent[name] = origin if dataclasses.is_dataclass(origin) else {}
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            if isinstance(value, str) and "${" in value:
                self.problems.append(_unresolved(key, value, source.where(key), error))
            else:
                self.problems.append(_wrong_type(annotation, value, key, source))
            return
        if isinstance(value, list):
            for index, child in enumerate(value):
                self.merge_value(parent[name], index, element_type(kind), child, _join(key, index), source)
        elif isinstance(value, dict) and dataclasses.is_dataclass(origin):
            self.merge_section(parent[name], origin, value, key, source)  # type: ignore[arg-type]
        elif isinstance(value, dict):
            for child_name, child in value.items():
                self.merge_value(parent[name], child_name, element_type(kind), child, _join(key, child_name), source)

    def merge_elements(self, elements: Any, kind: Any, values: dict[str, Any], key: str, source: Source) -> None:
        """Set elements of a list that are addressed by their numbers."""
        for name, value in values.items():
            if name.isdigit() and int(name) < len(elements):
                self.merge_value(elements, int(name), element_type(kind), value, _join(key, name), source)
            else:
                has = f"elements 0 to {len(elements) - 1}" if len(elements) else "no elements"
                self.problems.append(
                    f"{_join(key, name)} ({source.where(_join(key, name))}): {key} has {has}, no '{name}'. Address one "
                    f"of them, or give the whole list, {key}=[...]."
                )

    def unknown_key(self, kind: type, section: str, name: str, source: Source) -> str:
        """Describe an unknown key and the keys that may be meant."""
        key, known = _join(section, name), schema_keys(self.schema)
        problem = f"Unknown key {key} ({source.where(key)})"
        if key in known:
            group, _, leaf = name.rpartition(".")
            return f"{problem}: in a YAML file write `{leaf}:` indented below `{group.replace('.', ':` and `')}:`."
        names = [*field_types(kind), *([] if section else [EXTENDS])]
        meant = [_join(section, one) for one in similar_names(name, names)]
        if not meant:
            leaves = similar_names(name, {one.rpartition(".")[2] for one in known})
            meant = [one for leaf in leaves for one in known if one.rpartition(".")[2] == leaf]
        if meant:
            return f"{problem}: did you mean {' or '.join(meant[:3])}?"
        return f"{problem}. The keys of {section or 'the configuration'} are {', '.join(field_types(kind))}."

    def build_section(self, section: Any, kind: type, key: str, sources: Sequence[Source]) -> Any:
        """Build a dataclass from merged values, with interpolations resolved."""
        values = {
            name: self.build(section, name, annotation, _join(key, name), sources)
            for name, annotation in field_types(kind).items()
        }
        return kind(**values)

    def build(self, parent: Any, name: str | int, annotation: Any, key: str, sources: Sequence[Source]) -> Any:
        """Build one value. A missing value, or a reference to one, stays text."""
        if OmegaConf.is_missing(parent, name):
            return MISSING
        kind, _ = split_optional(annotation)
        try:
            value = parent[name]
            if kind is Any:
                return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except InterpolationToMissingValueError:
            return OmegaConf.to_container(parent)[name]  # type: ignore[index]
        except (OmegaConfBaseException, RecursionError) as error:
            text = OmegaConf.to_container(parent)[name]  # type: ignore[index]
            origins = [source.where(key) for source in sources if source.holds(key)] or ["default"]
            self.problems.append(_unresolved(key, text, origins[-1], error))
            return None
        if isinstance(value, ListConfig):
            return [
                self.build(value, index, element_type(kind), _join(key, index), sources) for index in range(len(value))
            ]
        if not isinstance(value, DictConfig):
            return value
        if dataclasses.is_dataclass(kind):
            return self.build_section(value, kind, key, sources)  # type: ignore[arg-type]
        names = [str(one) for one in value]
        return {one: self.build(value, one, element_type(kind), _join(key, one), sources) for one in names}


def _join(key: str, name: str | int) -> str:
    return f"{key}.{name}" if key else str(name)


def _container(parent: Any, name: str | int) -> DictConfig | ListConfig | None:
    """Present section, dictionary or list of a name."""
    value = None if OmegaConf.is_interpolation(parent, name) else parent.get(name)
    return value if OmegaConf.is_config(value) else None


def _scalar(kind: Any, value: Any, key: str, source: Source) -> Any:
    """Convert a YAML scalar to the type of a field. OmegaConf would convert more, such as 2 to true.

    Raises:
        TypeError: the types do not fit.
        ValueError: an enum has no such value.
    """
    if value is None or (isinstance(value, str) and (value == MISSING or "${" in value)):
        return value
    if kind is str and isinstance(value, bool | int | float):
        return source.written(key) or str(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind in _SCALARS and type(value) not in _SCALARS[kind]:
        raise TypeError
    return float(value) if kind is float else value


def _wrong_type(annotation: Any, value: Any, key: str, source: Source) -> str:
    kind, _ = split_optional(annotation)
    hint = ""
    if isinstance(value, dict | list):
        shown = "a group of keys" if isinstance(value, dict) else "a list"
    else:
        shown = "null" if value is None else f"'{source.written(key) or value}'"
        if isinstance(kind, type) and issubclass(kind, Enum):
            close = similar_names(str(value), [str(member.value) for member in kind])
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
        elif get_origin(kind) is list and value is not None:
            hint = f" Write [{value}]."
    return f"{key} is {shown} ({source.where(key)}), but must be {describe_type(annotation)}.{hint}"


def _unresolved(key: str, text: Any, where: str, error: Exception) -> str:
    reason = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0].rstrip(".")
    return f"{key} is '{text}' ({where}), which cannot be resolved: {reason}."
