"""docs/operations.md explains every event and every check, and none that does not exist."""

import re

from diffusion.operations.checks.nodes import COMPARISONS
from diffusion.operations.events import EventKind
from tests.tools.training_runs import ROOT

GUIDE = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
VERDICT = re.compile(r'(?<![.\w])(?:ok|warning|problem)\)?\(\s*"([^"]+)"')


def first_cells(head: str) -> set[str]:
    """The code in the first column of the table with a heading."""
    rows = GUIDE.partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall("`([^`]+)`", row.split("|")[1])}


def test_every_event_is_explained():
    assert {name for name in first_cells("event") if re.fullmatch("[a-z_]+", name)} == {
        kind.value for kind in EventKind
    }


def test_every_check_is_explained():
    sources = [*(ROOT / "diffusion/operations/checks").glob("*.py"), ROOT / "diffusion/operations/hosts.py"]
    names = {name for source in sources for name in VERDICT.findall(source.read_text(encoding="utf-8"))}
    names |= {comparison.check for comparison in COMPARISONS}
    assert first_cells("check") == names | {"stream NAME", "versions", "configuration", "same data"}
