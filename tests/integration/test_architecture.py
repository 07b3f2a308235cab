"""The imports of the package are those that docs/architecture.md allows."""

import ast
import re
from collections.abc import Collection, Iterator

from tests.tools.training_runs import ROOT

PACKAGE = ROOT / "diffusion"


def documented_order() -> list[list[str]]:
    """Parts of the package by line, from above."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    diffusion(\.[\w.]+(?:, \.[\w.]+)*)  ", text, flags=re.MULTILINE)
    return [[name.removeprefix(".") for name in line.split(", ")] for line in lines]


def part_of(module: str, known: Collection[str]) -> str:
    """The documented part that a module belongs to: `reports.run`, or else `reports`."""
    two = ".".join(module.split(".")[:2])
    return two if two in known else module.split(".")[0]


def imports(known: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Part, part that it imports anywhere in its code, and where."""
    for file in sorted(PACKAGE.rglob("*.py")):
        inside = file.relative_to(PACKAGE)
        own = part_of(".".join(inside.with_suffix("").parts), known)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            assert not getattr(node, "level", 0), f"{inside}:{node.lineno} is a relative import"
            for name in (prefix + alias.name for alias in node.names):
                if name.startswith("diffusion.") and (part := part_of(name.partition(".")[2], known)) != own:
                    yield own, part, f"{inside}:{node.lineno}"


def test_imports_point_downwards_or_to_the_right():
    place = {name: (row, column) for row, line in enumerate(documented_order()) for column, name in enumerate(line)}
    parts = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in PACKAGE.rglob("*.py")} - {"__init__"}
    assert {name for name in place if "." not in name} == parts, "each part of the package stands in one line"
    found = list(imports(place))
    assert len(found) > 500
    assert [where for own, part, where in found if place[part] <= place[own]] == []


def test_every_named_file_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Where is it decided?")[2].partition("## The way of the data")[0]
    absent = []
    for path in re.findall(r"`([\w./{},]+(?:\.py|/))`", table):
        before, _, rest = path.partition("{")
        names, _, after = rest.partition("}")
        for name in names.split(","):
            file = before + name + after
            absent += [] if any((root / file).exists() for root in (PACKAGE, ROOT)) else [file]
    assert absent == []
