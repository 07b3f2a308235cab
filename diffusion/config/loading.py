"""YAML files and overrides of the command line, merged into the dataclasses of a schema, and back to YAML.

Files and overrides are merged in order as plain values, which are then checked against the types of the schema.
OmegaConf resolves interpolations (`${key}`, `${oc.env:NAME}`, `${times:2,${key}}`). A problem names its key, and the
file and line that the value comes from or the command line; the line is looked up only then.
"""

import dataclasses
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from diffusion.config.keys import (
    describe_type,
    element_type,
    field_types,
    find_field,
    schema_keys,
    split_optional,
)
from diffusion.config.schema import Config
from diffusion.config.secrets import redact, redact_arguments
from diffusion.errors import ConfigurationError, first_line, raise_all, similar_names

COMMAND_LINE = "command line"
EXTENDS = "extends"
_END = "...\n"
"""End of a YAML document that is a scalar."""

OVERRIDES = "overrides"
"""`overrides={a.b: 1, c: 2}` is `a.b=1 c=2`: a sweep varies several keys together with it."""

with warnings.catch_warnings(action="ignore"):  # OmegaConf 2.4 calls it `register_resolver`, and 2.3 does not.
    OmegaConf.register_new_resolver("times", lambda *factors: math.prod(int(str(one)) for one in factors), replace=True)

Schema = TypeVar("Schema")


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, may_lack: Callable[[str], bool] = lambda key: False
) -> Config:
    """Load the configuration of a run; arguments and errors as in `load_complete`."""
    return load_complete(Config, path, overrides, may_lack=may_lack)


def load_complete(
    schema: type[Schema],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    may_lack: Callable[[str], bool] = lambda key: False,
) -> Schema:
    """Load a YAML file as `load` does into a dataclass whose values are all set, but for keys that `may_lack`.

    Raises:
        ConfigurationError: a file or an override is wrong, or a value is missing.
    """
    config = load(schema, path, overrides)
    missing = {key: doc for key, doc in missing_keys(config).items() if not may_lack(key)}
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
        schema: a dataclass whose fields have defaults and are scalars, enums, dataclasses, and lists and dictionaries
            of them.
        path: a YAML file; `extends: other.yaml` in it names a base file, relative to itself.
        overrides: `key.sub=value` strings, applied in order after the files.

    Raises:
        ConfigurationError: a file or an override is wrong.
    """
    return _merge(schema, [*_read_files(Path(path)), *(one for text in overrides for one in _read_override(text))])


def from_dict(schema: type[Schema], values: dict[str, Any], where: str) -> Schema:
    """Build a dataclass as `load` does from plain containers, such as the configuration in a checkpoint.

    Interpolations stay text: the author of a file must not read this machine's environment. `where` is their origin,
    for messages.

    Raises:
        ConfigurationError: the values do not fit the schema.
    """
    return _merge(schema, [_Source(where, values)], resolves=False)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Raises:
        ConfigurationError: the file is missing, malformed, or not a mapping.
    """
    return _read_file(Path(path)).values


def to_dict(config: Any) -> Any:
    """Convert a configuration to plain containers and scalars; enums become their values."""
    if isinstance(config, Enum):
        return config.value
    if dataclasses.is_dataclass(config):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, dict):
        return {key: to_dict(child) for key, child in config.items()}
    return [to_dict(child) for child in config] if isinstance(config, list) else config


def to_yaml(config: Any) -> str:
    """Write a configuration as YAML, in the order of the schema; `load` reads it back to an equal configuration."""
    return dump(to_dict(config))


def to_public_yaml(config: Any) -> str:
    """Write a configuration as YAML without secrets, for files that others may read."""
    return dump(redact(to_dict(config)))


def dump(values: Any) -> str:
    """Write plain containers as YAML that `read_yaml` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def missing_keys(config: Any) -> dict[str, str]:
    """Find dotted keys whose value is `???` and their meanings, in the order of the schema.

    A run with `plugins.train_dataset` needs no streams.
    """
    keys = [key for key, value in leaves(to_dict(config)) if value == MISSING]
    if isinstance(config, Config) and getattr(config.plugins, "train_dataset", None) is not None:
        keys = [key for key in keys if key not in ("data.local", "data.streams")]
    return {key: find_field(type(config), key)[1] for key in keys}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """List the values of nested dictionaries and lists by their dotted keys."""
    if not isinstance(value, dict | list):
        yield key, value
        return
    for name, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(child, _join(key, name))


def _join(key: str, name: str | int) -> str:
    return f"{key}.{name}" if key else str(name)


# Files and overrides


class _Loader(yaml.SafeLoader):
    """YAML whose keys are text and come once, with numbers as people write them.

    1e-4 is a number, which YAML 1.1 takes for text. 010 (octal there), 1:30 (base 60) and dates are text.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a single word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' is repeated", problem_mark=key.start_mark)
            seen.add(key.value)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(child, deep=deep) for key, child in node.value}


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0b[01]+)$",
    "tag:yaml.org,2002:float": r"^[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+|[0-9][0-9_]*\.[0-9_]*"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, text) for tag, text in resolvers if tag not in {*_NUMBERS, "tag:yaml.org,2002:timestamp"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    for _tag, _text in _NUMBERS.items():
        _class.add_implicit_resolver(_tag, re.compile(_text), list("-+0123456789."))


@dataclass
class _Source:
    """One file, or one override of the command line."""

    name: str
    """Path of the file, or `command line`."""

    values: dict[str, Any]
    """Nested plain values."""

    text: str = ""
    """The YAML text that they come from, if there is one."""

    def find(self, key: str) -> tuple[yaml.Node | None, int | None]:
        """Node of a dotted key, if it is in the text, and line of the key or of the nearest section above it."""
        node, line = yaml.compose(self.text, Loader=_Loader), None
        parts = key.split(".")
        for depth, part in enumerate(parts):
            found = []
            if isinstance(node, yaml.MappingNode):
                names = (part, ".".join(parts[depth:]))  # A dotted key is a mistake, which has a line, too.
                found = [(name, child) for name, child in node.value if name.value in names]
            elif isinstance(node, yaml.SequenceNode) and part.isdecimal():
                found = [(child, child) for child in node.value[int(part) : int(part) + 1]]
            if not found:
                return None, line
            name, node = found[0]
            line = name.start_mark.line + 1
        return node, line

    def where(self, key: str) -> str:
        """Name the file and the line of a key, or the command line."""
        line = self.find(key)[1]
        return self.name if line is None or self.name == COMMAND_LINE else f"{self.name}, line {line}"


def _read_files(path: Path, named_in: str = "", chain: Sequence[Path] = ()) -> list[_Source]:
    """Read a file and the files that it extends, bases first."""
    if path.resolve() in chain:
        loop = " -> ".join(file.name for file in [*chain, path])
        raise ConfigurationError(f"{path} ({named_in}) extends itself: {loop}. Remove one `{EXTENDS}`.")
    source = _read_file(path, named_in)
    if EXTENDS not in source.values:
        return [source]
    base, where = source.values.pop(EXTENDS), source.where(EXTENDS)
    if not isinstance(base, str):
        raise ConfigurationError(f"`{EXTENDS}` ({where}) must be the path of one YAML file.")
    return [*_read_files(path.parent / base, f"named in {where}", [*chain, path.resolve()]), source]


def _read_file(path: Path, named_in: str = "") -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        named = f" ({named_in})" if named_in else ""
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"The configuration file {path}{named} cannot be read: {reason}.") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold keys and values (`key: value`), not a list or a single value.")
    return _Source(str(path), values, text)


def _read_override(override: str) -> list[_Source]:
    """Parse `key.sub=value`, whose value is YAML. A number in the key addresses an element of a list."""
    where = f"'{redact_arguments([override])[0]}' ({COMMAND_LINE})"
    key, equals, text = override.partition("=")
    names = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
    if not equals or not all(names):
        raise ConfigurationError(f"{where} is not of the form key.sub=value.")
    if not text.strip():
        raise ConfigurationError(f"{where} has no value: write {key}=null or {key}=\"''\".")
    if names == [OVERRIDES]:
        values = _parse(text, where)
        if not isinstance(values, dict):
            raise ConfigurationError(f"{where} is not of the form {OVERRIDES}={{key.sub: value}}.")
        nodes = yaml.compose(text, Loader=_Loader).value  # Text stays as written.
        overrides = [f"{one.value}={yaml.serialize(child, Dumper=_Dumper).removesuffix(_END)}" for one, child in nodes]
        return [source for one in overrides for source in _read_override(one)]
    for name in reversed(names):
        text = f"{name}:\n{textwrap.indent(text, ' ')}"
    return [_Source(COMMAND_LINE, _parse(text, where), text)]


def _parse(text: str, where: str) -> Any:
    """Parse YAML; an empty text is an empty mapping."""
    try:
        values = yaml.load(text, Loader=_Loader)
        return {} if values is None and yaml.compose(text, Loader=_Loader) is None else values
    except RecursionError:
        raise ConfigurationError(f"{where} is nested too deeply.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # `!!bool maybe`; 5000 digits.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        problem = problem or first_line(error)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark and COMMAND_LINE not in where else ""
        hint = " (between braces, write '???' in quotes)" if "found '?'" in problem else ""
        raise ConfigurationError(f"{where}{line} is not well-formed YAML: {problem}{hint}.") from None


# Merging


def _merge(schema: type[Schema], sources: Sequence[_Source], *, resolves: bool = True) -> Schema:
    """Merge sources in order into the defaults of a schema: sections key by key, everything else is replaced."""
    merger = _Merger(schema, sources)
    values = to_dict(schema())
    for source in sources:
        try:
            values = merger.overlay(values, source.values, "", source)
        except RecursionError:
            raise ConfigurationError(f"{source.name} is nested too deeply, or refers to itself.") from None
    config = merger.build(schema, values, "")
    if resolves and not merger.problems and any(_is_interpolation(value) for _, value in leaves(to_dict(config))):
        config = merger.build(schema, merger.resolve(to_dict(config)), "")
    raise_all(ConfigurationError, redact(merger.problems))
    return config


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


_SCALARS: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
"""Types of the YAML values of a field."""


class _Merger:
    """Merges plain values, builds dataclasses of them, and collects the problems."""

    def __init__(self, schema: type, sources: Sequence[_Source]):
        self.schema = schema
        self.sources = sources
        self.problems: list[str] = []

    def source_of(self, key: str) -> _Source:
        """The last source that a key is in."""
        holding = [source for source in self.sources if not source.text or source.find(key)[0] is not None]
        return [*self.sources, *holding][-1]

    def overlay(self, base: Any, value: Any, key: str, source: _Source) -> Any:
        """Lay values over others. Dictionaries merge, `{1: value}` over a list replaces its element 1, `{}` clears."""
        if isinstance(value, list):
            return [self.overlay(None, child, _join(key, index), source) for index, child in enumerate(value)]
        if not isinstance(value, dict) or (key and not value):
            return value
        if isinstance(base, list):
            return self.overlay_elements(base, value, key, source)
        result = dict(base) if isinstance(base, dict) else {}
        for name, child in value.items():
            result[name] = self.overlay(result.get(name), child, _join(key, name), source)
        return result

    def overlay_elements(self, elements: list[Any], values: dict[str, Any], key: str, source: _Source) -> list[Any]:
        result = list(elements)
        for name, child in values.items():
            child_key = _join(key, name)
            if name.isdecimal() and int(name) < len(elements):
                result[int(name)] = self.overlay(result[int(name)], child, child_key, source)
            else:
                has = f"elements 0 to {len(elements) - 1}" if elements else "no elements"
                self.problems.append(
                    f"{child_key} ({source.where(child_key)}): {key} has {has}, no '{name}'. Address one of them, or "
                    f"give the whole list, {key}=[...]."
                )
        return result

    def build(self, annotation: Any, value: Any, key: str) -> Any:
        """Build a value of a type. Missing values and interpolations stay text."""
        kind, is_optional = split_optional(annotation)
        origin = get_origin(kind) or kind
        if kind is Any or value == MISSING or _is_interpolation(value) or (value is None and is_optional):
            return value
        if isinstance(value, dict) and dataclasses.is_dataclass(origin):
            return self.build_section(origin, value, key)  # type: ignore[arg-type]
        if isinstance(value, list) and origin is list:
            return [self.build(element_type(kind), child, _join(key, index)) for index, child in enumerate(value)]
        if isinstance(value, dict) and origin is dict:
            return {name: self.build(element_type(kind), child, _join(key, name)) for name, child in value.items()}
        try:
            return self.build_scalar(origin, value, key)
        except (TypeError, ValueError, OverflowError, yaml.YAMLError):
            self.problems.append(self.wrong_type(annotation, value, key))
            return None

    def build_section(self, kind: type, values: dict[str, Any], key: str) -> Any:
        types = field_types(kind)
        self.problems += [self.unknown_key(kind, key, name) for name in values if name not in types]
        return kind(
            **{
                name: self.build(types[name], child, _join(key, name))
                for name, child in values.items()
                if name in types
            }
        )

    def build_scalar(self, kind: Any, value: Any, key: str) -> Any:
        """Convert a YAML scalar; TypeError or ValueError if it does not fit."""
        if kind is str and isinstance(value, bool | int | float):
            text = self.node_text(key)  # `1e3`, whose value is 1000.0.
            return str(value) if text is None or _is_interpolation(text) else text
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value)
        if kind is not str and isinstance(value, str) and _is_interpolation(self.node_text(key)):
            value = yaml.load(value, Loader=_Loader)  # An environment variable is text.
        if type(value) not in _SCALARS.get(kind, ()):
            raise TypeError
        return float(value) if kind is float else value

    def node_text(self, key: str) -> str | None:
        node, _ = self.source_of(key).find(key)
        return node.value if isinstance(node, yaml.ScalarNode) else None

    def resolve(self, values: dict[str, Any]) -> dict[str, Any]:
        """Resolve interpolations. One that refers to a missing value stays text."""
        try:
            tree = OmegaConf.create(values)
        except OmegaConfBaseException as error:  # Wrong grammar, as in `${a`.
            key = getattr(error, "full_key", None) or ""
            self.problems.append(self.unresolved(key, error))
            return values
        return {name: self.resolve_child(tree, name, value, name) for name, value in values.items()}

    def resolve_child(self, parent: Any, name: str | int, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {one: self.resolve_child(parent[name], one, value[one], _join(key, one)) for one in value}
        if isinstance(value, list):
            return [self.resolve_child(parent[name], i, one, _join(key, i)) for i, one in enumerate(value)]
        if not _is_interpolation(value):
            return value
        try:
            found = parent[name]
            return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except InterpolationToMissingValueError:
            return value
        except (OmegaConfBaseException, RecursionError) as error:
            self.problems.append(self.unresolved(key, error))
            return value

    def unknown_key(self, kind: type, section: str, name: str) -> str:
        """Describe an unknown key and the keys that may be meant."""
        key, known = _join(section, name), schema_keys(self.schema)
        problem = f"Unknown key {key} ({self.source_of(key).where(key)})"
        if key == EXTENDS:
            return f"{problem}: it names the base of a YAML file, in that file."
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

    def wrong_type(self, annotation: Any, value: Any, key: str) -> str:
        kind, _ = split_optional(annotation)
        hint = ""
        if isinstance(value, dict | list):
            shown = "a group of keys" if isinstance(value, dict) else "a list"
        else:
            shown = "null" if value is None else f"'{self.node_text(key) or value}'"
        if get_origin(kind) is list and value is not None:
            hint = f" Give the whole list, {key}=[...]."
        elif isinstance(kind, type) and issubclass(kind, Enum):
            close = similar_names(str(value), [str(member.value) for member in kind])
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
        return f"{key} is {shown} ({self.source_of(key).where(key)}), but must be {describe_type(annotation)}.{hint}"

    def unresolved(self, key: str, error: Exception) -> str:
        source = self.source_of(key)
        reason = "it refers to itself" if isinstance(error, RecursionError) else first_line(error).rstrip(".")
        return f"{key} is '{self.node_text(key) or ''}' ({source.where(key)}), which cannot be resolved: {reason}."
