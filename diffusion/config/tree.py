"""YAML files and command-line overrides, merged into one tree whose values know where they were written."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from yaml.reader import ReaderError

from diffusion.errors import ConfigurationError

COMMAND_LINE = "command line"
EXTENDS = "extends"
OVERRIDES = "overrides"
"""`overrides={a.b: 1, c: 2}` is `a.b=1 c=2`: a sweep varies keys together with it."""


class _Loader(yaml.SafeLoader):
    """YAML with numbers as people write them.

    1e-4 is one; YAML 1.1 takes it for text. 010 (octal there) and 1:30 (to base 60) are none, and there are no dates.
    """


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would take for a number."""


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
class Node:
    """A value of the configuration."""

    value: Any
    """A scalar, a dictionary of nodes, or a list of nodes."""

    where: str
    """File and line, or `command line`."""

    text: str | None = None
    """A scalar as it was written: `1e3`, where the value is 1000.0."""

    def children(self) -> Iterator[tuple[str, "Node"]]:
        """Keys (or indices) and nodes one level below."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from ((str(index), node) for index, node in enumerate(self.value))

    def plain(self) -> Any:
        """The value without its origin."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value


def from_plain(value: Any, where: str) -> Node:
    """Give plain containers and scalars an origin."""
    if isinstance(value, dict):
        return Node({str(key): from_plain(child, where) for key, child in value.items()}, where)
    if isinstance(value, list | tuple | ListConfig):
        return Node([from_plain(child, where) for child in value], where)
    return Node(value, where)


def read_file(path: str | Path, *, said_by: str = "", chain: Sequence[Path] = ()) -> Node:
    """Read a YAML file and the files that it extends.

    Args:
        path: the file.
        said_by: where the file was named, if in another file.
        chain: the files that led here by `extends`.

    Returns:
        The merged tree: dictionaries are merged key by key, everything else is replaced.

    Raises:
        ConfigurationError: a file is missing, malformed, or extends itself.
    """
    path = Path(path)
    named = f" (named in {said_by})" if said_by else ""
    if path.resolve() in chain:
        loop = " -> ".join(file.name for file in [*chain, path])
        raise ConfigurationError(f"{path}{named} extends itself: {loop}. Take one `extends` out of this circle.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"The configuration file {path}{named} does not exist.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The configuration file {path}{named} cannot be read: {error}.") from None
    root = _parse(text, str(path))
    if not isinstance(root.value, dict):
        raise ConfigurationError(f"{path} must hold keys and values (`key: value`), not a list or a single value.")
    extends = root.value.pop(EXTENDS, None)
    if extends is None:
        return root
    if not isinstance(extends.value, str):
        raise ConfigurationError(f"`{EXTENDS}` ({extends.where}) must be the path of one YAML file.")
    base = read_file(path.parent / extends.value, said_by=extends.where, chain=[*chain, path.resolve()])
    return merge(base, root)


def dump(values: dict[str, Any]) -> str:
    """Write plain containers as YAML that `read_file` reads back to the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def merge(base: Node, over: Node) -> Node:
    """Lay one tree over another: dictionaries are merged, lists and scalars replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, over.where)


def apply_override(root: Node, override: str) -> None:
    """Set one value in place.

    Args:
        root: the tree.
        override: `key.sub=value`; the value is YAML, a number in the key addresses an element of a list.
            `overrides={...}` sets several.

    Raises:
        ConfigurationError: the text is not of this form, or the key does not lead anywhere.
    """
    key, equals, text = override.partition("=")
    key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigurationError(f"'{override}' ({COMMAND_LINE}) is not of the form key.sub=value.")
    if not text.strip():
        raise ConfigurationError(f"'{override}' ({COMMAND_LINE}) has no value: write {key}=null or {key}=\"''\".")
    if key == OVERRIDES:
        _apply_several(root, override, _parse(text, COMMAND_LINE, override))
        return
    parent = root
    siblings: Any
    index: Any
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth])
        if depth and (parent.value is None or parent.value == MISSING):
            if part.isdigit():
                raise _no_element(key, here)
            parent.value, parent.where, parent.text = {}, COMMAND_LINE, None
        if isinstance(parent.value, list):
            if not parent.value:
                raise _no_element(key, here)
            if not (part.isdigit() and int(part) < len(parent.value)):
                raise ConfigurationError(
                    f"{key} ({COMMAND_LINE}): {here} is a list of {len(parent.value)}, whose elements are addressed "
                    f"{here}.0 to {here}.{len(parent.value) - 1}, not '{part}'."
                )
            siblings, index, present = parent.value, int(part), True
        elif isinstance(parent.value, dict):
            siblings, index, present = parent.value, part, part in parent.value
        else:
            raise ConfigurationError(
                f"{key} ({COMMAND_LINE}): {here} is {parent.value!r} ({parent.where}) and has no keys below it."
            )
        if depth < len(parts) - 1:
            if not present:
                siblings[index] = Node({}, COMMAND_LINE)
            parent = siblings[index]
        else:
            node = _parse(text, COMMAND_LINE, override)
            siblings[index] = merge(siblings[index], node) if present else node


def _no_element(key: str, here: str) -> ConfigurationError:
    return ConfigurationError(
        f"{key} ({COMMAND_LINE}) addresses an element of {here}, which has none yet: give the whole list, "
        f"{here}=[...], or write it in the YAML file."
    )


def _apply_several(root: Node, override: str, several: Node) -> None:
    if not isinstance(several.value, dict):
        raise ConfigurationError(f"'{override}' ({COMMAND_LINE}) is not of the form {OVERRIDES}={{key.sub: value}}.")
    for key, node in several.children():
        apply_override(root, f"{key}={json.dumps(node.plain())}")


def resolve_interpolations(root: Node) -> None:
    """Replace `${key}` and `${oc.env:NAME}` by their values, in place.

    A reference to a value that is still missing stays as it is.

    Raises:
        ConfigurationError: a reference leads nowhere, in a circle, or is malformed.
    """
    places = [(path, node) for path, node in _walk(root) if isinstance(node.value, str) and "${" in node.value]
    for path, node in places:
        try:
            OmegaConf.create({"value": node.value})
        except OmegaConfBaseException as error:
            raise _interpolation_error(path, node, error) from None
    container = OmegaConf.create(root.plain()) if places else None
    resolved: list[tuple[Node, Node]] = []
    for path, node in places:
        value: Any = container
        try:
            for part in path:
                value = value[int(part) if isinstance(value, ListConfig) else part]
        except InterpolationToMissingValueError:
            continue
        except (OmegaConfBaseException, RecursionError) as error:
            raise _interpolation_error(path, node, error) from None
        plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        resolved.append((node, from_plain(plain, node.where)))
    for node, new in resolved:
        node.value, node.text = new.value, None


def _interpolation_error(path: Sequence[str], node: Node, error: Exception) -> ConfigurationError:
    reason = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0].rstrip(".")
    return ConfigurationError(f"{'.'.join(path)} is '{node.value}' ({node.where}), which cannot be resolved: {reason}.")


def _walk(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield path, node
    for key, child in node.children():
        yield from _walk(child, (*path, key))


def _parse(text: str, file: str, override: str | None = None) -> Node:
    """Parse YAML; `file` is `COMMAND_LINE` for an override, whose lines are not counted."""
    try:
        loader = _Loader(text)
        top = loader.get_single_node()
        return _convert(loader, top, file, counted=override is None) if top else Node({}, file)
    except (yaml.YAMLError, RecursionError) as error:
        problem, line = _problem(error, text)
        if override is not None:
            raise ConfigurationError(f"The value of '{override}' ({COMMAND_LINE}) is not YAML: {problem}.") from None
        raise ConfigurationError(f"{file}{line} is not well-formed YAML: {problem}.") from None


def _problem(error: yaml.YAMLError | RecursionError, text: str) -> tuple[str, str]:
    """What is wrong with a text, and the line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or refers to itself (`&name`, `*name`)", ""
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"the character U+{ord(text[error.position]):04X} cannot stand there; take it out", f", line {line},"
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    problem += " (between braces, write '???' in quotes)" if "found '?'" in problem else ""
    return problem, f", line {mark.line + 1}, column {mark.column + 1}," if mark else ""


def _convert(loader: _Loader, node: yaml.Node, file: str, *, counted: bool, line: int | None = None) -> Node:
    line = node.start_mark.line + 1 if line is None else line
    where = f"{file}, line {line}" if counted else file
    if isinstance(node, yaml.SequenceNode):
        return Node([_convert(loader, child, file, counted=counted) for child in node.value], where)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a single word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' comes twice", problem_mark=key.start_mark)
            seen.add(key.value)
        loader.flatten_mapping(node)
        return Node(
            {
                key.value: _convert(loader, child, file, counted=counted, line=key.start_mark.line + 1)
                for key, child in node.value
            },
            where,
        )
    try:
        value = loader.construct_object(node)
    except (ValueError, LookupError, AttributeError):  # What PyYAML raises for `!!int many`, or for 5000 digits.
        shown = node.value if len(node.value) <= 40 else f"{node.value[:40]}..."
        kind = node.tag.rpartition(":")[2]
        problem = f"'{shown}' cannot be read as {kind}"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return Node(value if is_plain else node.value, where, text=node.value)
