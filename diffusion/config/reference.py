"""The reference of all keys as Markdown, from the dataclasses."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, get_origin

from omegaconf import MISSING

from diffusion.config.documentation import describe_type, element_type, field_docs, field_types, split_optional


def reference(commands: Mapping[str, type]) -> str:
    """Describe the configuration of commands.

    Args:
        commands: what is configured, such as `scripts/prepare.py`, and the dataclass of its YAML file.

    Returns:
        A chapter for each command, with a table for each group of keys.
    """
    return "".join(line + "\n" for name, schema in commands.items() for line in _chapter(name, schema))


def _chapter(name: str, schema: type) -> Iterator[str]:
    yield f"\n## {name}"
    yield from _table(schema)
    for key, group in _groups(schema, ""):
        yield f"\n### {key}\n\n{_first_sentences(group)}"
        yield from _table(group)


def _first_sentences(group: type) -> str:
    return " ".join((group.__doc__ or "").split("\n\n")[0].split())


def _table(schema: type) -> Iterator[str]:
    yield "\n| key | type | default | meaning |\n|---|---|---|---|"
    docs = field_docs(schema)
    for name, annotation in field_types(schema).items():
        cells = (f"`{name}`", _shown(annotation), _default(schema, name), docs[name])
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _shown(annotation: Any) -> str:
    kind, is_several = _group_type(annotation)
    plain, optional = split_optional(annotation)
    if kind is None:
        return describe_type(annotation)
    name = ("named groups" if get_origin(plain) is dict else "a list of groups") if is_several else "a group"
    return f"{name}, or null" if optional else name


def _groups(schema: type, prefix: str) -> Iterator[tuple[str, type]]:
    for name, annotation in field_types(schema).items():
        kind, is_several = _group_type(annotation)
        if kind is not None:
            key = f"{prefix}{name}.N" if is_several else f"{prefix}{name}"
            yield key, kind
            yield from _groups(kind, f"{key}.")


def _group_type(annotation: Any) -> tuple[type | None, bool]:
    """Dataclass of a group, or of the elements of a list or dictionary of groups."""
    kind, _ = split_optional(annotation)
    is_several = get_origin(kind) in (list, dict)
    kind = element_type(kind) if is_several else kind
    return (kind, is_several) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else (None, is_several)


def _default(schema: type, name: str) -> str:
    [field] = [field for field in dataclasses.fields(schema) if field.name == name]
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default is not dataclasses.MISSING:
        value = field.default
    else:
        return ""
    if dataclasses.is_dataclass(value):
        return ""
    if isinstance(value, str) and value == MISSING:
        return "to be set"
    return f"`{json.dumps(_plain(value), ensure_ascii=False)}`"


def _plain(value: Any) -> Any:
    """Plain containers of a default."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(one) for one in value] if isinstance(value, list) else value
