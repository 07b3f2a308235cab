"""From votes to numbers: rates with intervals, attention, consistency, agreement, strengths."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import combinations

import numpy as np

from diffusion.evaluation.preference.images import BLANK, NOISE
from diffusion.evaluation.preference.pairs import Kind
from diffusion.evaluation.preference.statistics import (
    Array,
    Interval,
    bootstrap,
    bradley_terry,
    krippendorff_alpha,
    share_of_decided,
    wilson,
)
from diffusion.evaluation.preference.store import QUESTIONS, Vote


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models and one question."""

    question: str
    a: str
    b: str
    num_prompts: int
    wins_a: int
    wins_b: int
    ties: int
    wilson: Interval | None
    """95 %, of the share of a, as if votes were independent of each other."""

    bootstrap: Interval | None
    """95 %, of the share of a, with prompts drawn anew."""

    @property
    def num_votes(self) -> int:
        """Votes, with ties."""
        return self.wins_a + self.wins_b + self.ties

    @property
    def interval(self) -> Interval | None:
        """The outer ends of both intervals: votes on a prompt may depend on each other, and prompts may be few."""
        if self.wilson is None or self.bootstrap is None:
            return self.wilson
        return Interval(min(self.wilson.low, self.bootstrap.low), max(self.wilson.high, self.bootstrap.high))

    @property
    def share(self) -> float | None:
        """Share of a in the votes that prefer one of the two."""
        decided = self.wins_a + self.wins_b
        return self.wins_a / decided if decided else None


@dataclass(frozen=True, kw_only=True)
class Strength:
    """A model's Bradley-Terry strength."""

    question: str
    model: str
    strength: float | None
    """Natural logarithm of odds against the average model; None if the likelihood has no maximum."""

    interval: Interval | None
    """95 %, with prompts drawn anew."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """How many of some cases, with the 95 % Wilson interval."""

    count: int
    total: int

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the share."""
        return wilson(self.count, self.total)


@dataclass(frozen=True, kw_only=True)
class RaterRow:
    """What is known of a rater."""

    rater: str
    num_votes: int
    failed_checks: int
    num_checks: int
    is_kept: bool
    median_seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results of a study."""

    models: tuple[str, ...]
    raters: list[RaterRow]
    max_failed: float
    comparisons: list[Comparison]
    by_category: dict[str, list[Comparison]]
    """Empty if the prompts have no categories."""

    strengths: list[Strength]
    """Empty for two models."""

    agreement: dict[str, float | None]
    """Krippendorff's alpha (nominal) per question."""

    num_shared_pairs: int
    """Pairs that two raters or more have answered, which is what the agreement is of."""

    consistency: dict[str, Share]
    """Repeats on which the rater's answer was the first one, per question."""

    first_side: dict[str, Share]
    """Votes for the image shown first, among those that prefer one, per question."""

    @property
    def num_raters(self) -> int:
        """Raters whose votes count."""
        return sum(row.is_kept for row in self.raters)

    @property
    def num_votes(self) -> int:
        """Votes that count: on pairs, without repeats and checks."""
        return sum(c.num_votes for c in self.comparisons if c.question == QUESTIONS[0])


def make_report(votes: Sequence[Vote], models: Sequence[str], *, max_failed: float = 0.25, seed: int = 17) -> Report:
    """Work out all results.

    The votes that count are those on pairs of raters who are kept; a repeat measures consistency only.

    Args:
        votes: all votes of a study.
        models: their names.
        max_failed: raters who failed a larger share of their attention checks are left out.
        seed: of the bootstrap.
    """
    raters = _raters(votes, max_failed)
    kept = {row.rater for row in raters if row.is_kept}
    valid = [vote for vote in votes if vote.rater in kept]
    counted = [vote for vote in valid if vote.kind == Kind.pair]
    categories = sorted({vote.category for vote in counted} - {""})
    return Report(
        models=tuple(models),
        raters=raters,
        max_failed=max_failed,
        comparisons=compare(counted, models, seed),
        by_category={
            name: compare([vote for vote in counted if vote.category == name], models, seed) for name in categories
        },
        strengths=[row for question in QUESTIONS for row in strengths(counted, models, question, seed)],
        agreement={question: krippendorff_alpha(_units(counted, question)) for question in QUESTIONS},
        num_shared_pairs=sum(len(unit) > 1 for unit in _units(counted, QUESTIONS[0])),
        consistency={question: _consistency(valid, question) for question in QUESTIONS},
        first_side={question: _first_side(counted, question) for question in QUESTIONS},
    )


def compare(votes: Sequence[Vote], models: Sequence[str], seed: int) -> list[Comparison]:
    """Compare each two models on each question."""
    result = []
    for question in QUESTIONS:
        for a, b in combinations(range(len(models)), 2):
            between = [vote for vote in votes if {vote.first, vote.second} == {a, b}]
            chosen = Counter(vote.preferred(question) for vote in between)
            counts = _sums_by_prompt(between, 2, lambda vote: _wins(vote, question, a, b))  # noqa: B023
            intervals = bootstrap(counts, share_of_decided, seed=seed) if len(counts) else [None]
            result.append(
                Comparison(
                    question=question,
                    a=models[a],
                    b=models[b],
                    num_prompts=len(counts),
                    wins_a=chosen[a],
                    wins_b=chosen[b],
                    ties=chosen[None],
                    wilson=wilson(chosen[a], chosen[a] + chosen[b]),
                    bootstrap=intervals[0],
                )
            )
    return result


def strengths(votes: Sequence[Vote], models: Sequence[str], question: str, seed: int) -> list[Strength]:
    """Bradley-Terry strengths of more than two models; nothing for two, where the share says the same."""
    num = len(models)
    if num < 3 or not votes:
        return []

    def fit(sums: Array) -> Array:
        return bradley_terry(sums.reshape(-1, num, num))

    counts = _sums_by_prompt(votes, num * num, lambda vote: _win_matrix(vote, question, num).ravel())
    values = fit(counts.sum(axis=0, keepdims=True))[0]
    intervals = bootstrap(counts, fit, seed=seed)
    return [
        Strength(
            question=question, model=name, strength=float(value) if np.isfinite(value) else None, interval=interval
        )
        for name, value, interval in zip(models, values, intervals, strict=True)
    ]


def csv_rows(votes: Sequence[Vote], models: Sequence[str]) -> Iterator[list[object]]:
    """The votes as a table, its head first; models by name, `noise` and `blank` in checks, "" for no difference."""
    names: dict[int | None, str] = {NOISE: "noise", BLANK: "blank", None: "", **dict(enumerate(models))}
    head = ["rater", "position", "kind", "pair", "prompt", "category", "first", "second"]
    yield [*head, *QUESTIONS, "voted_at", "seconds"]
    for vote in votes:
        yield [
            vote.rater,
            vote.position,
            vote.kind.value,
            "" if vote.pair is None else vote.pair,
            vote.prompt,
            vote.category,
            names[vote.first],
            names[vote.second],
            *(names[vote.preferred(question)] for question in QUESTIONS),
            datetime.fromtimestamp(vote.voted_at, timezone.utc).isoformat(timespec="milliseconds"),
            f"{vote.voted_at - vote.shown_at:.1f}",
        ]


def _raters(votes: Sequence[Vote], max_failed: float) -> list[RaterRow]:
    by_rater: dict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        by_rater[vote.rater].append(vote)
    rows = []
    for rater, own in by_rater.items():
        checks = [vote for vote in own if vote.kind == Kind.check]
        failed = sum(not _passed(vote) for vote in checks)
        rows.append(
            RaterRow(
                rater=rater,
                num_votes=len(own),
                failed_checks=failed,
                num_checks=len(checks),
                is_kept=failed <= max_failed * len(checks),
                median_seconds=float(np.median([vote.voted_at - vote.shown_at for vote in own])),
            )
        )
    return rows


def _passed(check: Vote) -> bool:
    """Whether the image of a model was chosen on both questions."""
    chosen = [check.preferred(question) for question in QUESTIONS]
    return all(model is not None and model >= 0 for model in chosen)


def _sums_by_prompt(votes: Sequence[Vote], width: int, values: Callable[[Vote], Sequence[float] | Array]) -> Array:
    """Sum what votes count, prompt by prompt: float64 [P, width]."""
    sums: dict[str, Array] = defaultdict(lambda: np.zeros(width))
    for vote in votes:
        sums[vote.prompt] += np.asarray(values(vote))
    return np.stack(list(sums.values())) if sums else np.zeros((0, width))


def _wins(vote: Vote, question: str, a: int, b: int) -> list[float]:
    chosen = vote.preferred(question)
    return [float(chosen == a), float(chosen == b)]


def _win_matrix(vote: Vote, question: str, num_models: int) -> Array:
    wins = np.zeros((num_models, num_models))
    chosen = vote.preferred(question)
    if chosen is None:
        wins[vote.first, vote.second] = wins[vote.second, vote.first] = 0.5
    else:
        wins[chosen, vote.first + vote.second - chosen] = 1
    return wins


def _units(votes: Sequence[Vote], question: str) -> list[list[int | None]]:
    units: dict[int | None, list[int | None]] = defaultdict(list)
    for vote in votes:
        units[vote.pair].append(vote.preferred(question))
    return list(units.values())


def _consistency(votes: Sequence[Vote], question: str) -> Share:
    answers = {(vote.rater, vote.pair): vote.preferred(question) for vote in votes if vote.kind == Kind.pair}
    repeats = [vote for vote in votes if vote.kind == Kind.repeat and (vote.rater, vote.pair) in answers]
    same = sum(vote.preferred(question) == answers[vote.rater, vote.pair] for vote in repeats)
    return Share(count=same, total=len(repeats))


def _first_side(votes: Sequence[Vote], question: str) -> Share:
    chosen = [(vote.preferred(question), vote.first) for vote in votes if vote.preferred(question) is not None]
    return Share(count=sum(model == first for model, first in chosen), total=len(chosen))
