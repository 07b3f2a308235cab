"""YAML files and overrides of the command line, as plain values that know their file and line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from diffusion.errors import ConfigurationError

COMMAND_LINE = "command line"
EXTENDS = "extends"
OVERRIDES = "overrides"
"""`overrides={a.b: 1, c: 2}` is `a.b=1 c=2`: a sweep varies several keys together with it."""


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

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError):  # PyYAML raises these for `!!int many`, or for 5000 digits.
            problem = f"'{str(node.value)[:40]}' is not of type {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


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


def dump(values: Any) -> str:
    """Write plain containers as YAML that `read_yaml` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


@dataclass
class Source:
    """One file, or one override of the command line."""

    name: str
    """Path of the file, or `command line`."""

    values: dict[str, Any]
    """Nested plain values."""

    text: str = ""
    """The YAML text that they come from, if there is one."""

    prefix: str = ""
    """The key that the text stands for, in an override."""

    def written(self, key: str) -> str | None:
        """Text of a scalar as it was written: `1e3`, whose value is 1000.0."""
        node = self._find(key)[0]
        return node.value if isinstance(node, yaml.ScalarNode) else None

    def holds(self, key: str) -> bool:
        """Whether a dotted key is in this source; without text, it may be."""
        return not self.text or self._find(key)[0] is not None

    def where(self, key: str) -> str:
        """Name the file and the line of a dotted key, or the command line."""
        line = self._find(key)[1]
        return self.name if line is None else f"{self.name}, line {line}"

    def _find(self, key: str) -> tuple[yaml.Node | None, int | None]:
        """Node of a key, if it is in the text, and line of the key or of the nearest section above it."""
        if not self.text or not f"{key}.".startswith(f"{self.prefix}." if self.prefix else ""):
            return None, None
        node, line = yaml.compose(self.text, Loader=_Loader), None
        parts = [part for part in key.removeprefix(self.prefix).split(".") if part]
        for depth, part in enumerate(parts):
            found = []
            if isinstance(node, yaml.MappingNode):
                names = (part, ".".join(parts[depth:]))  # A dotted key is a mistake, which has a line, too.
                found = [(name, child) for name, child in node.value if name.value in names]
            elif isinstance(node, yaml.SequenceNode) and part.isdigit():
                found = [(child, child) for child in node.value[int(part) : int(part) + 1]]
            if not found:
                return None, line
            name, node = found[0]
            line = None if self.prefix else name.start_mark.line + 1
        return node, line


def read_yaml(path: str | Path, *, named_in: str = "") -> dict[str, Any]:
    """Read the keys and values of a YAML file.

    Args:
        path: the file.
        named_in: the file and line that name it, if any.

    Raises:
        ConfigurationError: the file is missing, malformed, or not a mapping.
    """
    return _read_file(Path(path), named_in).values


def _read_file(path: Path, named_in: str) -> Source:
    named = f" (named in {named_in})" if named_in else ""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"The configuration file {path}{named} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The configuration file {path}{named} cannot be read: {error}.") from None
    values = _parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold keys and values (`key: value`), not a list or a single value.")
    return Source(str(path), values, text)


def _parse(text: str, where: str, *, has_lines: bool = True) -> Any:
    """Parse YAML; an empty text is an empty mapping."""
    line = ""
    try:
        values = yaml.load(text, Loader=_Loader)
        return {} if values is None and yaml.compose(text, Loader=_Loader) is None else values
    except RecursionError:
        problem = "it is nested too deeply"
    except ReaderError as error:
        line = f", line {len(text[: error.position + 1].splitlines())}"
        problem = f"the character U+{ord(text[error.position]):04X} is not allowed"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        problem += " (between braces, write '???' in quotes)" if "found '?'" in problem else ""
    raise ConfigurationError(f"{where}{line if has_lines else ''} is not well-formed YAML: {problem}.")


def read_files(path: Path, named_in: str = "", chain: Sequence[Path] = ()) -> list[Source]:
    """Read a file and the files that it extends, bases first."""
    if path.resolve() in chain:
        loop = " -> ".join(file.name for file in [*chain, path])
        raise ConfigurationError(f"{path} (named in {named_in}) extends itself: {loop}. Remove one `{EXTENDS}`.")
    source = _read_file(path, named_in)
    if EXTENDS not in source.values:
        return [source]
    base, where = source.values.pop(EXTENDS), source.where(EXTENDS)
    if not isinstance(base, str):
        raise ConfigurationError(f"`{EXTENDS}` ({where}) must be the path of one YAML file.")
    return [*read_files(path.parent / base, where, [*chain, path.resolve()]), source]


def read_override(override: str) -> list[Source]:
    """Parse `key.sub=value`, whose value is YAML. A number in the key addresses an element of a list."""
    key, equals, text = override.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
    if not equals or not all(key.split(".")):
        raise ConfigurationError(f"'{override}' ({COMMAND_LINE}) is not of the form key.sub=value.")
    if not text.strip():
        raise ConfigurationError(f"'{override}' ({COMMAND_LINE}) has no value: write {key}=null or {key}=\"''\".")
    value = _parse(text, f"'{override}' ({COMMAND_LINE})", has_lines=False)
    if key != OVERRIDES:
        return [Source(COMMAND_LINE, _nested(key, value), text, prefix=key)]
    if not isinstance(value, dict):
        raise ConfigurationError(f"'{override}' ({COMMAND_LINE}) is not of the form {OVERRIDES}={{key.sub: value}}.")
    return [Source(COMMAND_LINE, _nested(one, child), dump(child), prefix=one) for one, child in value.items()]


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value
