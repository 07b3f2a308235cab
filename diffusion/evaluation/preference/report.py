"""The report of a study: rates with intervals, agreement, consistency, strengths; as JSON, figures and a page."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from diffusion.evaluation.preference.images import BLANK, NOISE
from diffusion.evaluation.preference.statistics import (
    Array,
    Interval,
    bootstrap,
    bradley_terry,
    krippendorff_alpha,
    share_of_decided,
    wilson,
)
from diffusion.evaluation.preference.store import QUESTIONS, Kind
from diffusion.files import write_json
from diffusion.reports.figures import COLOURS, DARK, GREY, plain, save_png, subplots, svg_uri
from diffusion.reports.page import TEMPLATES, write_page

_QUESTION_NAMES = {"quality": "image quality", "alignment": "prompt alignment"}
_TIE = -9
"""In place of the preferred model."""


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
    """95 %, of the share of a, with independent votes."""

    bootstrap: Interval | None
    """95 %, of the share of a, with resampled prompts."""

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
    """Natural logarithm of the odds against the average model; None if the likelihood has no maximum."""

    interval: Interval | None
    """95 %, with resampled prompts."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """A part of some cases."""

    count: int
    total: int

    @property
    def interval(self) -> Interval | None:
        """95 % Wilson interval."""
        return wilson(self.count, self.total)


@dataclass(frozen=True, kw_only=True)
class RaterRow:
    """One rater."""

    rater: str
    num_votes: int
    failed_checks: int
    num_checks: int
    is_kept: bool
    median_seconds: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of `report.json`."""

    models: tuple[str, ...]
    raters: list[RaterRow]
    max_failed: float
    comparisons: list[Comparison]
    by_category: dict[str, list[Comparison]]
    """Empty without categories of prompts."""

    strengths: list[Strength]
    """Empty for two models."""

    agreement: dict[str, float | None]
    """Krippendorff's alpha (nominal) by question."""

    num_shared_pairs: int
    """Pairs with answers of several raters, on which the agreement is computed."""

    consistency: dict[str, Share]
    """Repeats with the answer of the first showing, by question."""

    first_side: dict[str, Share]
    """Votes for the image shown first, among those that prefer one, by question."""

    @property
    def num_raters(self) -> int:
        """Raters whose votes count."""
        return sum(row.is_kept for row in self.raters)

    @property
    def num_votes(self) -> int:
        """Votes that count: on pairs, without repeats and checks."""
        return sum(c.num_votes for c in self.comparisons if c.question == QUESTIONS[0])


def make_report(votes: pd.DataFrame, models: Sequence[str], *, max_failed: float = 0.25, seed: int = 17) -> Report:
    """Compute all results.

    Votes on pairs count, of raters who passed their checks; repeats measure consistency only.

    Args:
        votes: as `Store.votes` returns them.
        models: their names.
        max_failed: largest share of failed attention checks of a rater who counts.
        seed: of the bootstrap.
    """
    votes = preferred_models(votes)
    raters = _raters(votes, max_failed)
    valid = votes[votes["rater"].isin([row.rater for row in raters if row.is_kept])]
    counted = valid[valid["kind"] == Kind.pair.value]
    categories = sorted(set(counted["category"]) - {""})
    return Report(
        models=tuple(models),
        raters=raters,
        max_failed=max_failed,
        comparisons=compare(counted, models, seed),
        by_category={name: compare(counted[counted["category"] == name], models, seed) for name in categories},
        strengths=[row for question in QUESTIONS for row in strengths(counted, models, question, seed)],
        agreement={
            question: krippendorff_alpha(pd.crosstab(counted["pair"], counted[question]).to_numpy())
            for question in QUESTIONS
        },
        num_shared_pairs=int((counted["pair"].value_counts() > 1).sum()),
        consistency={question: _consistency(valid, question) for question in QUESTIONS},
        first_side={question: _first_side(counted, question) for question in QUESTIONS},
    )


def preferred_models(votes: pd.DataFrame) -> pd.DataFrame:
    """Replace the answers `first`, `second` and `neither` by the number of the preferred model, or _TIE."""
    preferred = {
        question: np.select(
            [votes[question] == "first", votes[question] == "second"], [votes["first"], votes["second"]], _TIE
        )
        for question in QUESTIONS
    }
    return votes.assign(**preferred)


def _raters(votes: pd.DataFrame, max_failed: float) -> list[RaterRow]:
    rows = []
    for rater, own in votes.groupby("rater", sort=False):
        checks = own[own["kind"] == Kind.check.value]
        failed = int((checks[list(QUESTIONS)] < 0).any(axis=1).sum())
        rows.append(
            RaterRow(
                rater=str(rater),
                num_votes=len(own),
                failed_checks=failed,
                num_checks=len(checks),
                is_kept=failed <= max_failed * len(checks),
                median_seconds=float((own["voted_at"] - own["shown_at"]).median()),
            )
        )
    return rows


def compare(votes: pd.DataFrame, models: Sequence[str], seed: int) -> list[Comparison]:
    """Compare each two models on each question."""
    result = []
    for question, (a, b) in product(QUESTIONS, combinations(range(len(models)), 2)):
        between = votes[votes["first"].isin((a, b)) & votes["second"].isin((a, b))]
        wins = pd.DataFrame({"a": between[question] == a, "b": between[question] == b}, dtype=float)
        by_prompt = wins.groupby(between["prompt"], sort=False).sum().to_numpy()
        wins_a, wins_b = int(wins["a"].sum()), int(wins["b"].sum())
        result.append(
            Comparison(
                question=question,
                a=models[a],
                b=models[b],
                num_prompts=len(by_prompt),
                wins_a=wins_a,
                wins_b=wins_b,
                ties=len(between) - wins_a - wins_b,
                wilson=wilson(wins_a, wins_a + wins_b),
                bootstrap=bootstrap(by_prompt, share_of_decided, seed=seed)[0] if len(by_prompt) else None,
            )
        )
    return result


def strengths(votes: pd.DataFrame, models: Sequence[str], question: str, seed: int) -> list[Strength]:
    """Bradley-Terry strengths of more than two models; nothing for two, where the share says the same."""
    num = len(models)
    if num < 3 or votes.empty:
        return []

    def fit(sums: Array) -> Array:
        return np.stack([bradley_terry(wins.reshape(num, num)) for wins in sums])

    by_prompt = _win_matrices(votes, question, num).reshape(-1, num * num)
    values = fit(by_prompt.sum(axis=0, keepdims=True))[0]
    intervals = bootstrap(by_prompt, fit, seed=seed)
    return [
        Strength(
            question=question, model=name, strength=float(value) if np.isfinite(value) else None, interval=interval
        )
        for name, value, interval in zip(models, values, intervals, strict=True)
    ]


def _win_matrices(votes: pd.DataFrame, question: str, num_models: int) -> Array:
    """Wins of the row's model over the column's, by prompt: [P, M, M]; a tie is half a win of each."""
    prompts, names = pd.factorize(votes["prompt"])
    first, second, preferred = (votes[name].to_numpy(int) for name in ("first", "second", question))
    wins = np.zeros((len(names), num_models, num_models))
    np.add.at(wins, (prompts, first, second), np.where(preferred == _TIE, 0.5, preferred == first))
    np.add.at(wins, (prompts, second, first), np.where(preferred == _TIE, 0.5, preferred == second))
    return wins


def _consistency(votes: pd.DataFrame, question: str) -> Share:
    pairs, repeats = (
        votes[votes["kind"] == kind.value].set_index(["rater", "pair"])[[question]] for kind in (Kind.pair, Kind.repeat)
    )
    both = repeats.join(pairs, how="inner", rsuffix="_before")
    return Share(count=int((both[question] == both[f"{question}_before"]).sum()), total=len(both))


def _first_side(votes: pd.DataFrame, question: str) -> Share:
    decided = votes[votes[question] != _TIE]
    return Share(count=int((decided[question] == decided["first"]).sum()), total=len(decided))


def to_csv(votes: pd.DataFrame, models: Sequence[str]) -> str:
    """The votes as CSV: models by name, `noise` and `blank` in checks, empty for no difference."""
    names = {NOISE: "noise", BLANK: "blank", _TIE: "", **dict(enumerate(models))}
    table = preferred_models(votes)
    for column in ("first", "second", *QUESTIONS):
        table[column] = table[column].map(names)
    table["seconds"] = [f"{seconds:.1f}" for seconds in table["voted_at"] - table["shown_at"]]
    times = [datetime.fromtimestamp(seconds, timezone.utc) for seconds in table["voted_at"]]
    table["voted_at"] = [time.isoformat(timespec="milliseconds") for time in times]
    return table.drop(columns="shown_at").to_csv(index=False, lineterminator="\r\n")


def write_report(report: Report, folder: Path) -> None:
    """Write `index.html`, `report.json` and the figures as PNG.

    Args:
        report: the results.
        folder: is made if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "report.json", asdict(report))
    figures = []
    pairs = list(dict.fromkeys((c.a, c.b) for c in report.comparisons))
    for i, (a, b) in enumerate(pairs):
        figure = rates_figure([c for c in report.comparisons if (c.a, c.b) == (a, b)])
        save_png(figure, folder / ("preference.png" if len(pairs) == 1 else f"preference-{i}.png"))
        figures.append((svg_uri(figure), f"{a} against {b}. Whiskers: 95 %, the outer ends of both intervals below."))
    strengths = None
    if report.strengths:
        figure = strengths_figure(report.strengths)
        save_png(figure, folder / "strengths.png")
        strengths = svg_uri(figure)
    values = {
        "title": f"Preferred: {', '.join(report.models)}",
        "report": report,
        "figures": figures,
        "strengths_figure": strengths,
        **_tables(report),
    }
    write_page(folder / "index.html", TEMPLATES / "preference.html", values)


def _tables(report: Report) -> dict[str, Any]:
    """Tables of the page."""
    rates = pd.DataFrame({"question": c.question, **_rate_row(c)} for c in report.comparisons)
    categories = pd.DataFrame(
        {"question": c.question, "category": name, **_rate_row(c)}
        for name, comparisons in report.by_category.items()
        for c in comparisons
        if c.num_votes
    )
    alpha = f"Krippendorff's alpha, {report.num_shared_pairs} pairs with several raters"
    trust = [
        {"": alpha, **{q: _number(report.agreement[q]) for q in QUESTIONS}},
        {"": "same answer on a repeat, sides exchanged", **{q: _share(report.consistency[q]) for q in QUESTIONS}},
        {"": "preferred the image shown first", **{q: _share(report.first_side[q]) for q in QUESTIONS}},
    ]
    return {
        "rates": _by_question(rates),
        "categories": _by_question(categories),
        "strengths": pd.DataFrame(
            {
                "question": row.question,
                "model": row.model,
                "log odds against the average": _number(row.strength),
                "bootstrap 95 %": f"{row.interval.low:.2f} to {row.interval.high:.2f}" if row.interval else "-",
            }
            for row in report.strengths
        ),
        "trust": pd.DataFrame(trust),
        "raters": pd.DataFrame(
            {
                "rater": row.rater,
                "votes": row.num_votes,
                "checks failed": f"{row.failed_checks} of {row.num_checks}",
                "median time": f"{row.median_seconds:.1f} s",
                "status": "counted" if row.is_kept else "excluded",
            }
            for row in report.raters
        ),
    }


def _by_question(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    if table.empty:
        return {}
    return {question: table[table["question"] == question].drop(columns="question") for question in QUESTIONS}


def _rate_row(c: Comparison) -> dict[str, object]:
    return {
        "models": f"{c.a} / {c.b}",
        "prompts": c.num_prompts,
        "votes": c.num_votes,
        "first": c.wins_a,
        "second": c.wins_b,
        "no difference": c.ties,
        "first's share": "-" if c.share is None else f"{c.share:.1%}",
        "bootstrap, 95 %": _interval(c.bootstrap),
        "Wilson, 95 %": _interval(c.wilson),
    }


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(share: Share) -> str:
    if not share.total:
        return "-"
    return f"{share.count / share.total:.1%} of {share.total} ({_interval(share.interval)})"


def rates_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Draw the share of the votes that prefer each of two models, with 95 % intervals.

    Args:
        comparisons: of the same two models, one for each question.
    """
    figure, axes = subplots(width=7, height=4)
    width = 0.36
    for side, name in enumerate((comparisons[0].a, comparisons[0].b)):
        shares = [_share_of(c, side) for c in comparisons]
        positions = np.arange(len(comparisons)) + (side - 0.5) * (width + 0.04)
        axes.bar(positions, [100 * (share or 0) for share, _ in shares], width, color=COLOURS[side], label=plain(name))
        for position, (share, interval) in zip(positions, shares, strict=True):
            _whisker(axes, float(position), share, interval)
    axes.axhline(50, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(comparisons)), [_votes_text(c) for c in comparisons])
    axes.set_xlim(-0.6, len(comparisons) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("preferred, % of votes that prefer one")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def _share_of(comparison: Comparison, side: int) -> tuple[float | None, Interval | None]:
    share, interval = comparison.share, comparison.interval
    if side == 0 or share is None or interval is None:
        return share, interval
    return 1 - share, Interval(1 - interval.high, 1 - interval.low)


def _whisker(axes: Axes, position: float, share: float | None, interval: Interval | None) -> None:
    top = 100 * (share or 0)
    if interval is not None:
        low, high = 100 * interval.low, 100 * interval.high
        axes.errorbar(position, top, [[max(0, top - low)], [max(0, high - top)]], color=DARK, capsize=5)
        top = high
    axes.text(position, top + 1.5, "-" if share is None else f"{share:.1%}", ha="center", va="bottom",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip


def _votes_text(comparison: Comparison) -> str:
    ties = f"{comparison.ties / comparison.num_votes:.0%} no difference" if comparison.num_votes else "no votes"
    return f"{_QUESTION_NAMES[comparison.question]}\n{comparison.num_votes:,} votes, {ties}"


def strengths_figure(strengths: Sequence[Strength]) -> Figure:
    """Draw Bradley-Terry strengths with 95 % intervals, the strongest on top."""
    num_models = len(strengths) // len(QUESTIONS)
    figure, panels = subplots(1, len(QUESTIONS), width=4.2 * len(QUESTIONS), height=1.1 + 0.4 * num_models)
    for axes, question in zip(panels, QUESTIONS, strict=True):
        rows = [row for row in strengths if row.question == question]
        rows.sort(key=lambda row: (row.strength is not None, row.strength or 0))
        for position, row in enumerate(rows):
            if row.strength is not None:
                axes.plot(row.strength, position, "o", color=COLOURS[0])
            if row.interval is not None:
                axes.plot([row.interval.low, row.interval.high], [position, position], color=COLOURS[0])
        axes.axvline(0, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(rows)), [plain(row.model) for row in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("log odds against the average")
        axes.set_title(_QUESTION_NAMES[question], fontsize=10.5)
    return figure
