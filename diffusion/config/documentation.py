"""The meaning of each configuration key, read from the docstrings below the fields of the dataclasses."""

import ast
import dataclasses
import inspect
import textwrap
import types
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Name and resolved type of each field of a dataclass, in the order of definition."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """Take `None` out of a type: `int | None` is (`int`, True), `int` is (`int`, False)."""
    if get_origin(annotation) in (Union, types.UnionType):
        others = [argument for argument in get_args(annotation) if argument is not type(None)]
        assert len(others) == 1, f"configuration fields have one type and perhaps null, not {annotation}"
        return others[0], True
    return annotation, False


def element_type(annotation: Any) -> Any:
    """Type of the elements of a list, or of the values of a dictionary."""
    arguments = get_args(annotation)
    return arguments[-1] if arguments else Any


def describe_type(annotation: Any) -> str:
    """A type in the words of someone who writes YAML."""
    kind, optional = split_optional(annotation)
    origin = get_origin(kind) or kind
    if optional:
        return f"{describe_type(kind)}, or null"
    if isinstance(origin, type) and issubclass(origin, Enum):
        return "one of " + ", ".join(str(member.value) for member in origin)
    if dataclasses.is_dataclass(origin):
        return f"a group of keys ({', '.join(field_types(origin))})"  # type: ignore[arg-type]
    if origin is list:
        return f"a list, each element {describe_type(element_type(kind))}"
    if origin is dict:
        return "a group of keys"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return names.get(origin, "any value")


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Meaning of each field of a dataclass.

    Args:
        cls: a dataclass whose source can be read.

    Returns:
        The docstring below each field, in one line; for a field without one whose type is a dataclass, that class's
        docstring; otherwise the empty string. Keys and order are those of the fields.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _docs_in_source(base)
    for name, annotation in field_types(cls).items():
        kind, _ = split_optional(annotation)
        if not docs.get(name) and dataclasses.is_dataclass(kind):
            docs[name] = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
    return {name: " ".join(docs.get(name, "").split()) for name in field_types(cls)}


def _docs_in_source(cls: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[statement.target.id] = str(below.value.value)
    return docs


def schema_keys(cls: type, prefix: str = "") -> dict[str, type]:
    """Every dotted key of a schema and the dataclass that its last part is a field of; list elements are numbered 0."""
    keys: dict[str, type] = {}
    for name, annotation in field_types(cls).items():
        key = f"{prefix}{name}"
        keys[key] = cls
        kind, _ = split_optional(annotation)
        if get_origin(kind) is list:
            kind, key = element_type(kind), f"{key}.0"
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            keys |= schema_keys(kind, f"{key}.")
    return keys


def key_doc(cls: type, key: str) -> str:
    """Meaning of a dotted key such as `data.streams.3.name`."""
    numbered = ".".join("0" if part.isdigit() else part for part in key.split("."))
    owner = schema_keys(cls).get(numbered)
    return field_docs(owner)[numbered.rsplit(".", 1)[-1]] if owner else ""
