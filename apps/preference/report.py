"""The report of a study: rates with intervals, strengths, reliability and raters; as JSON, a figure and a page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apps.preference.images import BLANK, NOISE
from apps.preference.statistics import (
    Array,
    bootstrap,
    bradley_terry,
    krippendorff_alpha,
    share_of_decided,
    standard_errors,
    wilson,
)
from apps.preference.store import QUESTIONS, ScreenKind
from diffusion.files import csv_text, write_json
from diffusion.reports.figures import COLOURS, GREY, plain, save_png, subplots, svg_uri
from diffusion.reports.page import write_page

_TIE = -9
"""In place of the preferred model."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Tables of a report. Intervals (`low`, `high`) are of 95 %; numbers that the votes do not determine are NaN."""

    rates: pd.DataFrame
    """Each two models `a` and `b` on each `question`: `prompts`, `votes`, `wins_a`, `wins_b`, `ties`, and the `share`
    of `a` in the votes with a preference. Its interval has the outer ends of Wilson's interval and of a bootstrap over
    prompts: votes on a prompt may depend on each other, and prompts may be few."""

    categories: pd.DataFrame
    """The same by `category` of the prompts; empty without categories."""

    strengths: pd.DataFrame
    """Bradley-Terry `strength` of each `model` on each `question`: natural logarithm of the odds against the average
    model. Its interval has the outer ends of that of the likelihood and of the bootstrap. Empty for two models, where
    the share says the same."""

    reliability: pd.DataFrame
    """`value` and number of `cases` of each `measure` and `question`. `agreement` is Krippendorff's alpha (nominal)
    over pairs with answers of several raters: one model, the other or a tie. `consistency` is the share of repeats with
    the first answer, and `first side` the share of votes for the first image among those with a preference."""

    raters: pd.DataFrame
    """Each `rater`: `votes`, attention `checks` and how many `failed`, `median_seconds`, and whether it `counts`."""

    @property
    def num_raters(self) -> int:
        """Raters whose votes count."""
        return int(self.raters["counts"].sum())

    @property
    def num_votes(self) -> int:
        """Votes that count: on pairs, without repeats and checks."""
        return int(self.rates.loc[self.rates["question"] == QUESTIONS[0], "votes"].sum())


def make_report(votes: pd.DataFrame, models: Sequence[str], *, max_failed: float = 0.25, seed: int = 17) -> Report:
    """Compute all results.

    Votes on pairs count, of raters who failed at most the share `max_failed` of their attention checks; repeats measure
    consistency only. The seed is that of the bootstrap.
    """
    votes = preferred_models(votes)
    raters = _raters(votes, max_failed)
    valid = votes[votes["rater"].isin(raters.loc[raters["counts"], "rater"])]
    pairs = valid[valid["kind"] == ScreenKind.pair.value]
    categories = [
        {"category": name, **row}
        for name in sorted(set(pairs["category"]) - {""})
        for row in compare(pairs[pairs["category"] == name], models, seed)
        if row["votes"]
    ]
    return Report(
        rates=pd.DataFrame(compare(pairs, models, seed)),
        categories=pd.DataFrame(categories),
        strengths=pd.DataFrame([row for question in QUESTIONS for row in strengths(pairs, models, question, seed)]),
        reliability=pd.DataFrame([row for question in QUESTIONS for row in _reliability(valid, question)]),
        raters=raters,
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


def _raters(votes: pd.DataFrame, max_failed: float) -> pd.DataFrame:
    is_check = votes["kind"] == ScreenKind.check.value
    table = votes.assign(
        checks=is_check,
        failed=is_check & (votes[list(QUESTIONS)] < 0).any(axis=1),
        seconds=votes["voted_at"] - votes["shown_at"],
    )
    raters = table.groupby("rater", sort=False).agg(
        votes=("kind", "size"), checks=("checks", "sum"), failed=("failed", "sum"), median_seconds=("seconds", "median")
    )
    raters["counts"] = raters["failed"] <= max_failed * raters["checks"]
    return raters.reset_index()


def compare(votes: pd.DataFrame, models: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Rows of `Report.rates`."""
    rows = []
    for question, (a, b) in product(QUESTIONS, combinations(range(len(models)), 2)):
        between = votes[votes["first"].isin((a, b)) & votes["second"].isin((a, b))]
        wins = pd.DataFrame({"a": between[question] == a, "b": between[question] == b}, dtype=float)
        by_prompt = wins.groupby(between["prompt"], sort=False).sum().to_numpy()
        wins_a, wins_b = int(wins["a"].sum()), int(wins["b"].sum())
        low, high = wilson(wins_a, wins_a + wins_b)
        if len(by_prompt):
            ((boot_low, boot_high),) = bootstrap(by_prompt, share_of_decided, seed=seed)
            low, high = float(np.fmin(low, boot_low)), float(np.fmax(high, boot_high))
        rows.append(
            {
                "question": question,
                "a": models[a],
                "b": models[b],
                "prompts": len(by_prompt),
                "votes": len(between),
                "wins_a": wins_a,
                "wins_b": wins_b,
                "ties": len(between) - wins_a - wins_b,
                "share": wins_a / (wins_a + wins_b) if wins_a + wins_b else np.nan,
                "low": low,
                "high": high,
            }
        )
    return rows


def strengths(votes: pd.DataFrame, models: Sequence[str], question: str, seed: int) -> list[dict[str, Any]]:
    """Rows of `Report.strengths`."""
    num = len(models)
    if num < 3 or votes.empty:
        return []

    def fit(sums: Array) -> Array:
        return np.stack([bradley_terry(wins.reshape(num, num)) for wins in sums])

    # Wins of the row's model over the column's, by prompt: [P, M, M]; a tie is half a win of each.
    prompts, names = pd.factorize(votes["prompt"])
    first, second, preferred = (votes[name].to_numpy(int) for name in ("first", "second", question))
    wins = np.zeros((len(names), num, num))
    for one, other in ((first, second), (second, first)):
        np.add.at(wins, (prompts, one, other), np.where(preferred == _TIE, 0.5, preferred == one))
    by_prompt = wins.reshape(-1, num * num)
    values = fit(by_prompt.sum(axis=0, keepdims=True))[0]
    margins = 1.96 * standard_errors(wins.sum(axis=0), values)
    lows, highs = bootstrap(by_prompt, fit, seed=seed).T
    lows, highs = np.minimum(lows, values - margins), np.maximum(highs, values + margins)
    return [
        {"question": question, "model": model, "strength": value, "low": low, "high": high}
        for model, value, low, high in zip(models, values, lows, highs, strict=True)
    ]


def _reliability(votes: pd.DataFrame, question: str) -> list[dict[str, Any]]:
    pairs, repeats = (votes[votes["kind"] == kind.value] for kind in (ScreenKind.pair, ScreenKind.repeat))
    models = pairs[["first", "second"]].agg(frozenset, axis=1)  # Chance agrees on one of the two.
    alpha = krippendorff_alpha(
        *(pd.crosstab(votes["pair"], votes[question]).to_numpy() for _, votes in pairs.groupby(models))
    )
    num_shared = int((pairs["pair"].value_counts() > 1).sum())
    both = repeats.merge(pairs, on=["rater", "pair"], suffixes=("", "_before"))
    decided = pairs[pairs[question] != _TIE]
    values = {
        "agreement": (alpha, num_shared),
        "consistency": ((both[question] == both[f"{question}_before"]).mean(), len(both)),
        "first side": ((decided[question] == decided["first"]).mean(), len(decided)),
    }
    return [
        {"measure": measure, "question": question, "value": value, "cases": cases}
        for measure, (value, cases) in values.items()
    ]


def to_csv(votes: pd.DataFrame, models: Sequence[str]) -> str:
    """The votes as CSV: models by name, `noise` and `blank` in checks, empty for no difference."""
    names = {NOISE: "noise", BLANK: "blank", _TIE: "", **dict(enumerate(models))}
    table = preferred_models(votes)
    for column in ("first", "second", *QUESTIONS):
        table[column] = table[column].map(names)
    table["seconds"] = [f"{seconds:.1f}" for seconds in table["voted_at"] - table["shown_at"]]
    times = [datetime.fromtimestamp(seconds, UTC) for seconds in table["voted_at"]]
    table["voted_at"] = [time.isoformat(timespec="milliseconds") for time in times]
    table = table.drop(columns="shown_at").map(lambda value: csv_text(value) if isinstance(value, str) else value)
    return table.to_csv(index=False, lineterminator="\r\n")


def write_report(report: Report, folder: Path) -> None:
    """Write `index.html`, `report.json` and `preference.png` into a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: json.loads(table.to_json(orient="records")) for name, table in vars(report).items()}
    write_json(folder / "report.json", tables)
    figure = rates_figure(report.rates)
    save_png(figure, folder / "preference.png")
    raters = report.raters.assign(counts=np.where(report.raters["counts"], "yes", "no"))
    values = {
        "title": f"Preferred: {', '.join(dict.fromkeys([*report.rates['a'], *report.rates['b']]))}",
        "report": report,
        "figure": svg_uri(figure),
        "rates": _shown(report.rates, ["share", "low", "high"], "{:.1%}"),
        "categories": _shown(report.categories, ["share", "low", "high"], "{:.1%}"),
        "strengths": _shown(report.strengths, ["strength", "low", "high"], "{:.2f}"),
        "reliability": _shown(report.reliability, ["value"], "{:.2f}"),
        "raters": _shown(raters, ["median_seconds"], "{:.1f}"),
    }
    write_page(folder / "index.html", Path(__file__).with_suffix(".html"), values)


def _shown(table: pd.DataFrame, columns: Sequence[str], pattern: str) -> pd.DataFrame:
    """Table for the page, with formatted numbers."""
    if table.empty:
        return table
    texts = {name: ["-" if pd.isna(one) else pattern.format(one) for one in table[name]] for name in columns}
    return table.assign(**texts).rename(columns=lambda name: name.replace("_", " "))


def rates_figure(rates: pd.DataFrame) -> Figure:
    """Draw the share of the votes with a preference that each first model has, with its interval."""
    figure, axes = subplots(width=8, height=1.0 + 0.45 * len(rates))
    positions = np.arange(len(rates))
    share, low, high = (100 * rates[name] for name in ("share", "low", "high"))
    whiskers = [(share - low).clip(lower=0), (high - share).clip(lower=0)]
    axes.errorbar(share, positions, xerr=whiskers, fmt="o", color=COLOURS[0], capsize=4)
    axes.axvline(50, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    labels = [
        f"{row.a} over {row.b}, {row.question}\n{num:,} votes with a preference"
        for row, num in zip(rates.itertuples(), rates["wins_a"] + rates["wins_b"], strict=True)
    ]
    axes.set_yticks(positions, [plain(label) for label in labels])
    axes.set_ylim(len(rates) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the votes with a preference")
    return figure
