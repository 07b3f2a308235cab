"""Write docs/configuration.md, the reference of all keys: `python scripts/document.py`."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

from omegaconf import MISSING

from diffusion.config.fields import CHECK, Limits, TimeLimits
from diffusion.config.keys import describe_type, field_docs, field_types, section_of, split_optional, summary
from diffusion.config.resumption import effect_of
from diffusion.config.schema import Config
from diffusion.evaluation.config import EvaluationConfig
from diffusion.launch import CommandParser, run_command
from diffusion.preparation.config import PrepareConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration

Written by `python scripts/document.py` from the dataclasses; do not edit.

A YAML file may extend another (`extends: phase1.yaml`). On the command line `a.b=1` sets a key, `a.0.b=1` a key of an
element of a list, and `overrides={a.b: 1, c: 2}` several. A group of keys, such as `samples.scores={a: 7}`, replaces
these keys and keeps the others of the group. `{}` clears the group, also in a YAML that extends another.
`${a.b}` is the value of another key, `${times:2,${a.b}}` a product, `${oc.env:NAME}` the value of an environment
variable. `N` stands for the number (or name) of an element. Times are `10ba` (optimizer steps), `1000sp` (samples),
`1ep` (epochs) and `0.94dur` (a share of the run). What is often asked: [faq.md](faq.md).

For a run that is started again with another value of a key, the last column of [run.py](#runpy) says whether the new
value takes effect, is refused, or has no effect, so that records keep that of the checkpoint. A refused change needs
another run, which may begin with the weights (`init_from.checkpoint`). Keys that a task does not use may change.
"""


def page() -> str:
    """A chapter for each command, with a table for each section."""
    lines = []
    commands = {"run.py": Config, "evaluate.py": EvaluationConfig, "scripts/prepare.py": PrepareConfig}
    for name, schema in commands.items():
        lines += [f"\n## {name}", *_table(schema, "", resumes=schema is Config)]
        for key, section in _sections(schema, ""):
            table = _table(section, f"{key}.", resumes=schema is Config)
            lines += [f"\n### {key}\n\n{summary(section)}", *table]
    return _HEAD + "".join(line + "\n" for line in lines)


def _sections(schema: type, prefix: str) -> Iterator[tuple[str, type]]:
    for name, annotation in field_types(schema).items():
        section, is_several = section_of(annotation)
        if section is not None:
            key = f"{prefix}{name}.N" if is_several else f"{prefix}{name}"
            yield key, section
            yield from _sections(section, f"{key}.")


def _table(schema: type, prefix: str, *, resumes: bool) -> Iterator[str]:
    head = ["key", "type", "default", "meaning"] + ["changed on resumption"] * resumes
    yield "\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|"
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        default = _shown_default(field)
        cells = [f"`{field.name}`", _shown_type(schema, field), default, field_docs(schema)[field.name]]
        if resumes:  # A group that is always there changes by its keys.
            cells.append(effect_of(f"{prefix}{field.name}".replace(".N.", ".0.")).value if default else "")
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _shown_type(schema: type, field: dataclasses.Field[Any]) -> str:
    annotation = field_types(schema)[field.name]
    section, is_several = section_of(annotation)
    kind, optional = split_optional(annotation)
    check = field.metadata.get(CHECK)
    if section is not None and is_several:
        shown = "named groups" if get_origin(kind) is dict else "a list of groups"
    elif section is not None:
        shown = "a group"
    elif isinstance(check, Limits):
        shown = f"{describe_type(kind)}, {check}"
    else:
        shown = str(check) if isinstance(check, TimeLimits) else describe_type(kind)
    return f"{shown}, or null" if optional else shown


def _shown_default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if dataclasses.is_dataclass(value):
        return ""
    return "to be set" if value == MISSING else f"`{json.dumps(value, ensure_ascii=False)}`"


def main() -> None:
    """Write the page."""
    CommandParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
