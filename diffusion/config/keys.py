"""Types and meanings of configuration keys, from the dataclasses and the docstrings below their fields."""

import ast
import dataclasses
import inspect
import itertools
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
    """Split `None` off a type: `int | None` is (`int`, True), `int` is (`int`, False)."""
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
    """Describe a type in terms of YAML."""
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
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a group of keys"}
    return names.get(origin, "any value")


@cache
def field_docs(cls: type) -> dict[str, str]:
    """Meaning of each field of a dataclass, in one line and in the order of the fields.

    A section without a docstring below its field has the docstring of its class.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in itertools.pairwise(definition.body):
            text = below.value if isinstance(below, ast.Expr) else None
            if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Constant):
                docs[ast.unparse(statement.target)] = str(text.value)
    for name, annotation in field_types(cls).items():
        kind, _ = split_optional(annotation)
        docs.setdefault(name, summary(kind) if dataclasses.is_dataclass(kind) else "")  # type: ignore[arg-type]
    return {name: " ".join(docs[name].split()) for name in field_types(cls)}


def summary(cls: type) -> str:
    """First paragraph of the docstring of a dataclass, in one line."""
    return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())


@cache
def schema_keys(cls: type) -> dict[str, tuple[dataclasses.Field[Any], str]]:
    """Every dotted key of a schema, with its field and meaning; elements of lists are numbered 0."""
    keys: dict[str, tuple[dataclasses.Field[Any], str]] = {}
    for field in dataclasses.fields(cls):
        keys[field.name] = (field, field_docs(cls)[field.name])
        section, is_several = section_of(field_types(cls)[field.name])
        if section is not None:
            prefix = f"{field.name}.0" if is_several else field.name
            keys |= {f"{prefix}.{below}": found for below, found in schema_keys(section).items()}
    return keys


def find_field(cls: type, key: str) -> tuple[dataclasses.Field[Any] | None, str]:
    """Field and meaning of a dotted key such as `data.streams.3.name`; None and an empty text for an unknown key."""
    return schema_keys(cls).get(".".join("0" if part.isdigit() else part for part in key.split(".")), (None, ""))


def section_of(annotation: Any) -> tuple[type | None, bool]:
    """Dataclass of a section, or of the elements of a list or dictionary of sections."""
    kind, _ = split_optional(annotation)
    is_several = get_origin(kind) in (list, dict)
    kind = element_type(kind) if is_several else kind
    return (kind, is_several) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else (None, is_several)
