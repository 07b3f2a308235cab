"""Verdicts of checks: merged over machines, as a table, as an error."""

import logging
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from diffusion.distributed import agree, all_gather, is_first_rank, local_rank
from diffusion.errors import UserError, raise_all

_TABLE_WIDTH = 100

log = logging.getLogger(__name__)


class Level(str, Enum):
    """Severity of a verdict."""

    ok = "ok"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True)
class Verdict:
    """Result of one check."""

    check: str
    level: Level
    what: str
    """Finding, in one sentence."""

    remedy: str = ""
    where: str = ""
    """Machines with this finding, separated by commas; empty if it concerns the whole job."""

    @property
    def sentence(self) -> str:
        """Finding and remedy."""
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


def ok(check: str, what: str) -> Verdict:
    """Return a verdict without a finding."""
    return Verdict(check, Level.ok, what)


def warning(check: str, what: str, remedy: str) -> Verdict:
    """Return a verdict on what may become a problem, or costs time."""
    return Verdict(check, Level.warning, what, remedy)


def problem(check: str, what: str, remedy: str = "") -> Verdict:
    """Return a verdict on what ends the run, or spoils it."""
    return Verdict(check, Level.problem, what, remedy)


def merge(by_machine: Sequence[tuple[str, Iterable[Verdict]]]) -> list[Verdict]:
    """Merge the verdicts of several machines, given with their names; those that all machines share appear once."""
    machines: dict[Verdict, list[str]] = {}
    for name, verdicts in by_machine:
        for verdict in verdicts:
            machines.setdefault(verdict, []).append(name)
    return [
        verdict if len(names) == len(by_machine) else replace(verdict, where=", ".join(names))
        for verdict, names in machines.items()
    ]


def on_each_machine(check: Callable[[], Iterable[Verdict]]) -> list[Verdict]:
    """Run a check on the first rank of each machine and merge the verdicts; called by all ranks."""
    found = agree(lambda: list(check()) if local_rank() == 0 else None)
    by_machine = [verdicts for verdicts in all_gather(found) if verdicts is not None]
    return merge([(f"node {node}", verdicts) for node, verdicts in enumerate(by_machine)])


def log_and_raise(verdicts: Sequence[Verdict], kind: type[UserError]) -> None:
    """Log the warnings on rank 0 and raise the problems on all ranks."""
    for verdict in verdicts:
        if verdict.level is Level.warning and is_first_rank():
            log.warning("%s%s", f"{verdict.where}: " if verdict.where else "", verdict.sentence)
    agree(lambda: raise_problems(verdicts, kind))


def raise_problems(verdicts: Iterable[Verdict], kind: type[UserError]) -> None:
    """Raise one error with all problems among the verdicts, if there are any."""
    problems = [verdict for verdict in verdicts if verdict.level is Level.problem]
    raise_all(kind, [f"{one.where}: {one.sentence}" if one.where else one.sentence for one in problems])


def format_table(verdicts: Sequence[Verdict]) -> str:
    """Format verdicts for a terminal: check, level, and finding above remedy."""
    checks = [f"{verdict.check} ({verdict.where})" if verdict.where else verdict.check for verdict in verdicts]
    width = max(map(len, checks), default=0)
    lines = []
    for check, verdict in zip(checks, verdicts, strict=True):
        text = textwrap.wrap(verdict.what, _TABLE_WIDTH, break_long_words=False) or [""]
        if verdict.remedy:
            text += textwrap.wrap(f"-> {verdict.remedy}", _TABLE_WIDTH, break_long_words=False)
        lines.append(f"{check:<{width}}  {verdict.level.value:<7}  {text[0]}")
        lines += [" " * (width + 11) + line for line in text[1:]]
    return "\n".join(lines)
