"""The imports of the package are those that docs/architecture.md allows."""

import ast
import re
from collections.abc import Collection, Iterator
from importlib import import_module

from tests.tools.training_runs import ROOT

PACKAGE = ROOT / "diffusion"
PAGE = ROOT / "docs" / "architecture.md"

FOLDERS = ("apps", "benchmarks", "demo", "diffusion", "launchers", "scripts", "verification")

OF_OTHERS = {"_replace", "_fields", "_strip_protocol"}
"""Private names of named tuples and fsspec."""


def documented_order() -> list[list[str]]:
    """Parts of the package by line, from above."""
    text = PAGE.read_text(encoding="utf-8")
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


def test_the_package_imports_nothing_that_lies_beside_it():
    beside = {path.stem for path in (*ROOT.glob("*.py"), *(ROOT / folder for folder in FOLDERS))} - {"diffusion"}
    found = {
        (file, name)
        for file, tree in sources().items()
        if file.startswith("diffusion/")
        for name in imported_names(tree).values()
        if name.partition(".")[0] in beside
    }
    assert found == set()


def named_files(text: str) -> list[str]:
    """Files and folders in backticks, such as `a/{b,c}.py`, from the root; one that does not exist stays as it is."""
    files = []
    for path in re.findall(r"`([\w./{},]+(?:\.py|/))`", text):
        before, _, rest = path.partition("{")
        names, _, after = rest.partition("}")
        for file in (before + name + after for name in names.split(",")):
            found = [root / file for root in (PACKAGE, ROOT) if (root / file).exists()]
            files.append(found[0].relative_to(ROOT).as_posix() if found else file)
    return files


def test_every_named_file_exists():
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("## Where is it decided?")[2].partition("## The way of the data")[0]
    assert [file for file in named_files(table) if not (ROOT / file).exists()] == []


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table below a heading of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", section, flags=re.MULTILINE)
    assert table is not None, f"there is no table below {heading}"
    return [line.split("|")[1:-1] for line in table[0].splitlines()[2:]]


def sources() -> dict[str, ast.Module]:
    """All code but the tests, by file."""
    files = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Full names of what a file imports, by the names that it gives them."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname or alias.name: prefix + alias.name for alias in node.names}
    return names


def private_names(tree: ast.Module) -> set[str]:
    """Private names of Composer and torch that a file imports, reads or overrides.

    An attribute of a local variable counts as theirs unless the file defines one of its name.
    """
    names, nodes = imported_names(tree), list(ast.walk(tree))
    overridden = {name for node in nodes if isinstance(node, ast.ClassDef) for name in overridden_names(node, names)}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)} - overridden
    stored = [ast.unparse(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    own |= {name.removeprefix("self.") for name in stored}
    found = {part for name in names.values() if is_theirs(name) for part in name.split(".")} | overridden
    for node in nodes:
        if isinstance(node, ast.Attribute):
            is_local = ast.unparse(node).partition(".")[0] not in names
            if is_theirs(full_name(node, names)) or (is_local and node.attr not in own):
                found.add(node.attr)
    return {name for name in found if is_private(name)} - OF_OTHERS


def overridden_names(kind: ast.ClassDef, names: dict[str, str]) -> Iterator[str]:
    """Private methods of a class that a base of Composer or torch has, too."""
    methods = {line.name for line in kind.body if isinstance(line, ast.FunctionDef) and is_private(line.name)}
    for base in kind.bases if methods else []:
        module, _, name = full_name(base, names).rpartition(".")
        if is_theirs(module):
            yield from methods & set(dir(getattr(import_module(module), name)))


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """Dotted name of an expression, by what its file imports."""
    root, dot, rest = ast.unparse(node).partition("[")[0].partition(".")
    return names.get(root, root) + dot + rest


def is_theirs(name: str) -> bool:
    """Check that a full name belongs to Composer or torch."""
    return name.partition(".")[0] in ("composer", "torch")


def is_private(name: str) -> bool:
    """Check that a name has one underscore in front."""
    return name.startswith("_") and not name.startswith("__")


def test_the_page_names_what_is_imported_from_composer_with_its_files():
    full_names = [(file, name) for file, tree in sources().items() for name in imported_names(tree).values()]
    found = {(file, name.rpartition(".")[2]) for file, name in full_names if name.partition(".")[0] == "composer"}
    table = [(named_files(files), re.findall(r"\w+", names)) for names, files, *_ in rows("### Taken from Composer")]
    named = {(file, name) for files, names in table for file in files for name in names}
    assert found - named == set()
    assert {file for file, _ in named} == {file for file, _ in found}


def test_the_page_names_the_private_parts_of_composer_and_torch():
    found = {(file, name) for file, tree in sources().items() for name in private_names(tree)}
    named = {
        (file, name)
        for files, names, *_ in rows("### Private names")
        for file in named_files(files)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert named == found
