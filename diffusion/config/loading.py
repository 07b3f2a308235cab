"""From a YAML file and command-line overrides to the dataclasses of the schema, and back to YAML.

Mistakes are `ConfigurationError`s that name the key, where it was written, and the remedy.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_origin

from omegaconf import MISSING

from diffusion.config.documentation import (
    describe_type,
    element_type,
    field_docs,
    field_types,
    key_doc,
    schema_keys,
    split_optional,
)
from diffusion.config.names import nearest
from diffusion.config.schema import Config
from diffusion.config.tree import (
    EXTENDS,
    Node,
    apply_override,
    dump,
    from_plain,
    merge,
    read_file,
    resolve_interpolations,
)
from diffusion.errors import ConfigurationError

__all__ = [
    "field_docs",
    "from_dict",
    "load",
    "load_config",
    "missing_error",
    "missing_keys",
    "to_dict",
    "to_yaml",
]

Schema = TypeVar("Schema")


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, may_miss: Callable[[str], bool] = lambda key: False
) -> Config:
    """Load the configuration of a run.

    Args:
        path: a YAML file; `extends: other.yaml` in it names a file that it builds upon, relative to itself.
        overrides: `key.sub=value` strings, applied in order after the files.
        may_miss: whether a key may still be without a value (`???`) afterwards.

    Returns:
        The configuration; keys that are still missing hold the text `???`.

    Raises:
        ConfigurationError: anything is wrong with the files or the overrides, or a value is missing.
    """
    config = load(Config, path, overrides)
    missing = {key: doc for key, doc in missing_keys(config).items() if not may_miss(key)}
    if missing:
        raise missing_error(missing, str(path))
    return config


def load(schema: type[Schema], path: str | Path, overrides: Sequence[str] = ()) -> Schema:
    """Load a YAML file into a dataclass; values may be missing (`???`) afterwards.

    Args:
        schema: a dataclass whose fields are scalars, enums, dataclasses, and lists and dictionaries of them.
        path: a YAML file, with `extends` as in `load_config`.
        overrides: `key.sub=value` strings.

    Raises:
        ConfigurationError: anything is wrong with the files or the overrides.
    """
    root = merge(_defaults(schema), read_file(path))
    for override in overrides:
        apply_override(root, override)
    return _build(schema, root)


def from_dict(schema: type[Schema], values: dict[str, Any], where: str) -> Schema:
    """Build a dataclass from plain containers, such as the configuration in a checkpoint.

    Args:
        schema: a dataclass as in `load`.
        values: what `to_dict` gave.
        where: the origin, for messages.

    Raises:
        ConfigurationError: the values do not fit the schema.
    """
    return _build(schema, merge(_defaults(schema), from_plain(values, where)))


def to_dict(config: Any) -> dict[str, Any]:
    """Plain containers and scalars of a configuration; enums become their values."""
    return _plain(config)


def to_yaml(config: Any) -> str:
    """Write a configuration as YAML, in the order of the schema; `load` reads it back to an equal configuration."""
    return dump(to_dict(config))


def missing_keys(config: Any) -> dict[str, str]:
    """Find what has no value yet.

    Args:
        config: a configuration.

    Returns:
        Dotted keys whose value is `???` and their meanings, in the order of the schema. The streams of a run whose data
        is a plug-in (`plugins.train_dataset`) are not missing.
    """
    keys = dict(_missing(config, ""))
    if isinstance(config, Config) and config.plugins.train_dataset is not None:
        for key in ("data.local", "data.streams"):
            keys.pop(key, None)
    return {key: key_doc(type(config), key) for key in keys}


def missing_error(missing: dict[str, str], where: str) -> ConfigurationError:
    """The error about keys without a value.

    Args:
        missing: what `missing_keys` found.
        where: the file that was loaded.
    """
    listed = "; ".join(f"{key} ({doc.rstrip('.')})" if doc else key for key, doc in missing.items())
    count, them = ("1 value is", "it") if len(missing) == 1 else (f"{len(missing)} values are", "them")
    return ConfigurationError(
        f"{count} missing in {where}: {listed}. Write {them} there or on the command line, as in "
        f"{next(iter(missing))}=VALUE."
    )


def _missing(value: Any, key: str) -> Iterator[tuple[str, None]]:
    if isinstance(value, str) and value == MISSING:
        yield key, None
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _missing(getattr(value, field.name), f"{key}.{field.name}" if key else field.name)
    elif isinstance(value, dict):
        for name, child in value.items():
            yield from _missing(child, f"{key}.{name}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _missing(child, f"{key}.{index}")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list) else value


def _defaults(schema: type) -> Node:
    return from_plain(_plain(schema()), "default")


def _build(schema: type[Schema], root: Node) -> Schema:
    resolve_interpolations(root)
    builder = _Builder(schema)
    config = builder.build(schema, root, "")
    if len(builder.problems) == 1:
        raise ConfigurationError(builder.problems[0])
    if builder.problems:
        listed = "\n".join(f"  - {problem}" for problem in builder.problems)
        raise ConfigurationError(f"The configuration has {len(builder.problems)} mistakes:\n{listed}")
    return config


class _Builder:
    """Turns a tree into dataclasses and collects what is wrong with it."""

    def __init__(self, schema: type):
        self.schema = schema
        self.problems: list[str] = []

    def build(self, annotation: Any, node: Node, key: str) -> Any:
        """Convert one node to its type; after a problem the returned value is of no use."""
        kind, optional = split_optional(annotation)
        origin = get_origin(kind) or kind
        value = node.value
        if kind is Any:
            return node.plain()
        if (value is None and optional) or _is_open(value):
            return value
        if isinstance(origin, type) and dataclasses.is_dataclass(origin) and isinstance(value, dict):
            return self.build_dataclass(origin, node, key)
        if origin is list and isinstance(value, list):
            return [self.build(element_type(kind), child, f"{key}.{name}") for name, child in node.children()]
        if origin is dict and isinstance(value, dict):
            return {name: self.build(element_type(kind), child, f"{key}.{name}") for name, child in node.children()}
        if isinstance(origin, type) and issubclass(origin, Enum) and value in [member.value for member in origin]:
            return origin(value)
        if origin is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if origin is str and node.text is not None and isinstance(value, int | float):
            return node.text
        if origin in (bool, int, str) and type(value) is origin:
            return value
        self.problems.append(
            f"{key} is {_shown(node)} ({node.where}), but must be {describe_type(annotation)}.{_hint(origin, value)}"
        )
        return None

    def build_dataclass(self, cls: type, node: Node, key: str) -> Any:
        types = field_types(cls)
        prefix = f"{key}." if key else ""
        values: dict[str, Any] = {}
        for name, child in node.children():
            if name in types:
                values[name] = self.build(types[name], child, prefix + name)
            else:
                self.problems.append(self.unknown_key(cls, prefix, name, child.where))
        return cls(**values)

    def unknown_key(self, cls: type, prefix: str, name: str, where: str) -> str:
        problem = f"Unknown key {prefix}{name} ({where})"
        known = schema_keys(self.schema)
        if name in known and "." in name:
            group, leaf = name.rsplit(".", 1)
            return f"{problem}: in a YAML file write `{leaf}:` indented below `{group.replace('.', ':` and `')}:`."
        if not prefix and name == EXTENDS:
            return f"{problem}: `{EXTENDS}` is for YAML files."
        here = nearest(name, [*field_types(cls), *([] if prefix else [EXTENDS])])
        elsewhere = nearest(name, [key.rsplit(".", 1)[-1] for key in known])
        suggestions = [prefix + one for one in here] or [key for key in known if key.rsplit(".", 1)[-1] in elsewhere]
        suggestions = suggestions[:3]
        if suggestions:
            return f"{problem}: did you mean {' or '.join(suggestions)}?"
        group = f"The keys of {prefix[:-1]}" if prefix else "The keys at the top"
        return f"{problem}. {group} are {', '.join(field_types(cls))}."


def _is_open(value: Any) -> bool:
    """Whether a value is missing, or refers to one that is."""
    return isinstance(value, str) and (value == MISSING or "${" in value)


def _shown(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a group of keys"
    if isinstance(node.value, list):
        return "a list"
    return "null" if node.value is None else f"'{node.value if node.text is None else node.text}'"


def _hint(origin: Any, value: Any) -> str:
    if isinstance(origin, type) and issubclass(origin, Enum):
        close = nearest(str(value), [str(member.value) for member in origin])
        return f" Did you mean {' or '.join(close)}?" if close else ""
    if origin is list and value is not None and not isinstance(value, dict | list):
        return f" Write [{value}]."
    return ""
