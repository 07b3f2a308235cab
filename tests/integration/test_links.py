"""Links between the project's pages lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.training_runs import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("launchers/**/*.md")])
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def links(text: str) -> Iterator[str]:
    """Targets of links and images, without those in code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))
    yield from re.findall(r"\]\(([^()\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for title in re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title).lower()).replace(" ", "-")
        found[words] = found.get(words, -1) + 1
    return {f"{words}-{again}" if again else words for words, last in found.items() for again in range(last + 1)}


def problems(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert problems(page) == []


def test_every_page_is_named_in_another():
    named = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in links(page.read_text(encoding="utf-8"))
    }
    assert [page.name for page in PAGES if page.parent == ROOT / "docs" and page not in named] == []


def test_what_is_wrong_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# One, `two`: (three)\n## Again\n## Again\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](#here) [b](#there) [c](other.md#one-two-three) [d](other.md#no-heading) [e](other.md#again-1) "
        "[f](lost.md) ![g](lost.png) `[h](lost.md)` [i](https://host/lost)\n"
    )
    assert problems(page) == ["#there", "other.md#no-heading", "lost.md", "lost.png"]
