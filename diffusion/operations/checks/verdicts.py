"""What a check says, and many of them as a table."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from diffusion.errors import UserError

WIDTH = 100
"""Columns that a table's texts are wrapped to."""


class Level(str, Enum):
    """How bad it is."""

    ok = "ok"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one check found."""

    check: str
    """Name of the check."""

    level: Level
    what: str
    """What was found, in one sentence."""

    remedy: str = ""
    """What to do about it; empty where nothing is to be done, or where `what` says it."""

    where: str = ""
    """Machines that it concerns; empty where it concerns the whole job."""

    @property
    def sentence(self) -> str:
        """What was found, and what to do about it."""
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


def ok(check: str, what: str) -> Verdict:
    """A check that found nothing."""
    return Verdict(check=check, level=Level.ok, what=what)


def warning(check: str, what: str, remedy: str) -> Verdict:
    """A check that found what may become a problem, or costs time."""
    return Verdict(check=check, level=Level.warning, what=what, remedy=remedy)


def problem(check: str, what: str, remedy: str = "") -> Verdict:
    """A check that found what ends the run, or spoils it."""
    return Verdict(check=check, level=Level.problem, what=what, remedy=remedy)


def merge(by_machine: Sequence[tuple[str, Sequence[Verdict]]]) -> list[Verdict]:
    """Put the verdicts of several machines together; those that all machines share appear once.

    Args:
        by_machine: name of each machine and its verdicts.

    Returns:
        In the order in which they first appear, with the machines that they concern unless those are all.
    """
    machines: dict[Verdict, list[str]] = {}
    for name, verdicts in by_machine:
        for verdict in verdicts:
            machines.setdefault(verdict, []).append(name)
    everywhere = len(by_machine)
    return [
        verdict if len(names) == everywhere else replace(verdict, where=", ".join(names))
        for verdict, names in machines.items()
    ]


def format_table(verdicts: Sequence[Verdict]) -> str:
    """Write verdicts for a terminal: check, verdict, and what and remedy below each other."""
    checks = [f"{verdict.check} ({verdict.where})" if verdict.where else verdict.check for verdict in verdicts]
    width, levels = max(map(len, checks), default=0), max(len(level.value) for level in Level)
    indent = " " * (width + levels + 4)
    lines = []
    for check, verdict in zip(checks, verdicts, strict=True):
        text = textwrap.wrap(verdict.what, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
        if verdict.remedy:
            text += textwrap.wrap(f"-> {verdict.remedy}", WIDTH, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{check:<{width}}  {verdict.level.value:<{levels}}  {text[0]}")
        lines += [indent + line for line in text[1:]]
    return "\n".join(lines)


def to_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """As plain containers."""
    return [asdict(verdict) | {"level": verdict.level.value} for verdict in verdicts]


def from_json(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """What `to_json` has written."""
    return [Verdict(**{**row, "level": Level(row["level"])}) for row in rows]


def raise_problems(verdicts: Sequence[Verdict], kind: type[UserError]) -> None:
    """Raise one error with all problems among the verdicts, if there are any."""
    texts = [verdict.sentence for verdict in verdicts if verdict.level is Level.problem]
    if len(texts) == 1:
        raise kind(texts[0])
    if texts:
        raise kind(f"{len(texts)} problems:\n" + "\n".join(f"  - {text}" for text in texts))


def warnings_of(verdicts: Sequence[Verdict]) -> list[str]:
    """The warnings among the verdicts, each as one line of text."""
    return [verdict.sentence for verdict in verdicts if verdict.level is Level.warning]


def size_text(num_bytes: float) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
