"""docs/operations.md says of every event and of every verdict what it means, and of nothing that does not exist."""

import ast
import re
from collections.abc import Iterator

from diffusion.operations.checks.nodes import FIGURES
from diffusion.operations.events import EventKind
from tests.tools.training_runs import ROOT

GUIDE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
OF_STREAMS = {"stream NAME", "data"}
"""Verdicts whose names hold that of a stream, or of a data set."""


def first_cells(head: str) -> set[str]:
    """What is set as code in the first column of the table with a heading."""
    rows = GUIDE.partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])}


def alarms() -> Iterator[str]:
    """Names of the verdicts that can be a warning or a problem, as the package's code gives them."""
    for path in (ROOT / "diffusion/operations/checks").glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or isinstance(call.func, ast.Attribute):
                continue
            makes_verdict = re.search(r"\b(warning|problem|_attempt|_speed)\b", ast.unparse(call.func))
            if makes_verdict and isinstance(call.args[0], ast.Constant):
                yield str(call.args[0].value)


def test_every_event_is_explained():
    assert {name for name in first_cells("event") if re.fullmatch("[a-z_]+", name)} == {
        kind.value for kind in EventKind
    }


def test_every_verdict_is_explained():
    known = set(alarms()) | {figure[0] for figure in FIGURES} | OF_STREAMS
    assert first_cells("check") == known
    assert len(known) > 25, "the code gives names otherwise"
