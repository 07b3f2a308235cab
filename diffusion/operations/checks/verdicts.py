"""Verdicts of checks, merged over machines, as a table, as JSON and as an error."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from diffusion.errors import UserError

WIDTH = 100
"""Columns to which the texts of a table are wrapped."""


class Level(str, Enum):
    """Severity of a verdict."""

    ok = "ok"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of one check."""

    check: str = ""
    """Name of the check; the registry fills it in."""

    level: Level
    what: str
    """Finding, in one sentence."""

    remedy: str = ""
    """What to do; empty if there is nothing to do, or if `what` says it."""

    where: str = ""
    """Machines with this finding; empty if it concerns the whole job."""

    @property
    def sentence(self) -> str:
        """Finding and remedy."""
        return f"{self.what}: {self.remedy}" if self.remedy else self.what

    @property
    def line(self) -> str:
        """Machines, finding and remedy."""
        return f"{self.where}: {self.sentence}" if self.where else self.sentence


def ok(what: str, *, check: str = "") -> Verdict:
    """Return a verdict without a finding."""
    return Verdict(check=check, level=Level.ok, what=what)


def warning(what: str, remedy: str, *, check: str = "") -> Verdict:
    """Return a verdict on what may become a problem, or costs time."""
    return Verdict(check=check, level=Level.warning, what=what, remedy=remedy)


def problem(what: str, remedy: str = "", *, check: str = "") -> Verdict:
    """Return a verdict on what ends the run, or spoils it."""
    return Verdict(check=check, level=Level.problem, what=what, remedy=remedy)


def merge(by_machine: Sequence[tuple[str, Sequence[Verdict]]]) -> list[Verdict]:
    """Merge the verdicts of several machines; those that all machines share appear once.

    Args:
        by_machine: name of each machine and its verdicts.

    Returns:
        In the order of their first appearance, with the machines that they concern unless those are all.
    """
    machines: dict[Verdict, list[str]] = {}
    for name, verdicts in by_machine:
        for verdict in verdicts:
            machines.setdefault(verdict, []).append(name)
    return [
        verdict if len(names) == len(by_machine) else replace(verdict, where=", ".join(names))
        for verdict, names in machines.items()
    ]


def format_table(verdicts: Sequence[Verdict]) -> str:
    """Format verdicts for a terminal: check, level, and finding above remedy."""
    checks = [f"{verdict.check} ({verdict.where})" if verdict.where else verdict.check for verdict in verdicts]
    width, level_width = max(map(len, checks), default=0), max(len(level.value) for level in Level)
    indent = " " * (width + level_width + 4)
    lines = []
    for check, verdict in zip(checks, verdicts, strict=True):
        text = textwrap.wrap(verdict.what, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
        if verdict.remedy:
            text += textwrap.wrap(f"-> {verdict.remedy}", WIDTH, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{check:<{width}}  {verdict.level.value:<{level_width}}  {text[0]}")
        lines += [indent + line for line in text[1:]]
    return "\n".join(lines)


def to_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Convert verdicts to plain containers."""
    return [asdict(verdict) | {"level": verdict.level.value} for verdict in verdicts]


def from_json(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Invert `to_json`."""
    return [Verdict(**{**row, "level": Level(row["level"])}) for row in rows]


def raise_problems(verdicts: Sequence[Verdict], kind: type[UserError]) -> None:
    """Raise one error with all problems among the verdicts, if there are any."""
    texts = [verdict.line for verdict in verdicts if verdict.level is Level.problem]
    if len(texts) == 1:
        raise kind(texts[0])
    if texts:
        raise kind(f"{len(texts)} problems:\n" + "\n".join(f"  - {text}" for text in texts))


def size_text(num_bytes: float) -> str:
    """Format bytes in decimal units."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
