"""A study's report as files: index.html, report.json, and the figures as PNG."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from diffusion.evaluation.preference.figure import rates_figure, strengths_figure
from diffusion.evaluation.preference.report import Comparison, Report, Share
from diffusion.evaluation.preference.statistics import Interval
from diffusion.evaluation.preference.store import QUESTIONS

_HEAD = ("models", "prompts", "votes", "first", "second", "no diff.", "first's share", "bootstrap 95 %", "Wilson 95 %")


def write_report(report: Report, folder: Path) -> None:
    """Write the report into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    page = Page(f"Which is preferred: {', '.join(report.models)}")
    page.text(
        f"{report.num_votes:,} votes of {report.num_raters} raters, each on image quality and prompt alignment, blind. "
        f"{len(report.raters) - report.num_raters} raters are left out for failing more than "
        f"{100 * report.max_failed:.0f} % of their attention checks."
    )
    _figures(page, report, folder)
    _rates(page, report)
    if report.strengths:
        _strengths(page, report)
    _categories(page, report)
    _trust(page, report)
    page.write(folder / "index.html")


def _figures(page: Page, report: Report, folder: Path) -> None:
    pairs = list(dict.fromkeys((c.a, c.b) for c in report.comparisons))
    for i, (a, b) in enumerate(pairs):
        image = rates_figure([c for c in report.comparisons if (c.a, c.b) == (a, b)])
        image.save(folder / ("preference.png" if len(pairs) == 1 else f"preference-{i}.png"))
        page.image(image, f"{a} against {b}. Whiskers: 95 %, the outer ends of both intervals below.", width=640)
    if report.strengths:
        image = strengths_figure(report.strengths)
        image.save(folder / "strengths.png")
        page.image(image, "Bradley-Terry strengths. Lines: 95 %, prompts drawn anew.", width=800)


def _rates(page: Page, report: Report) -> None:
    page.heading("Rates")
    for question in QUESTIONS:
        page.table(question, _HEAD, [_row(c) for c in report.comparisons if c.question == question])
    page.text(
        "The share is of the votes that prefer one of the two. The bootstrap draws prompts anew, 2,000 times, and so "
        "allows for votes on one prompt that depend on each other; Wilson's interval takes all votes as independent."
    )


def _strengths(page: Page, report: Report) -> None:
    page.heading("Strengths")
    rows = [(s.question, s.model, _number(s.strength), _interval(s.interval, 1)) for s in report.strengths]
    page.table("Bradley-Terry", ("question", "model", "log odds against the average", "bootstrap 95 %"), rows)
    page.text(
        "A tie counts as half a win of each. No strength is given where a model, or a group of them, was never "
        "preferred to the others; no interval where that happens in a resample."
    )


def _categories(page: Page, report: Report) -> None:
    if not report.by_category:
        return
    page.heading("By category of the prompt")
    for question in QUESTIONS:
        rows = [
            (name, *_row(c))
            for name, comparisons in report.by_category.items()
            for c in comparisons
            if c.question == question and c.num_votes
        ]
        page.table(question, ("category", *_HEAD), rows)
    page.text("Of 20 categories without any difference, about one is outside of its 95 % interval by chance.")


def _trust(page: Page, report: Report) -> None:
    page.heading("How far the votes can be trusted")
    rows: list[Sequence[object]] = [
        (f"Krippendorff's alpha, {report.num_shared_pairs} pairs with several raters", *_numbers(report.agreement)),
        ("same answer on a repeat, sides exchanged", *(_share(report.consistency[q]) for q in QUESTIONS)),
        ("chose the image shown first", *(_share(report.first_side[q]) for q in QUESTIONS)),
    ]
    page.table("Agreement, consistency, sides", ("", *QUESTIONS), rows)
    page.text("Alpha is nominal (first model, second model, no difference): 1 is full agreement, 0 what chance gives.")
    page.table(
        "Raters",
        ("rater", "votes", "checks failed", "median time", ""),
        [
            (
                row.rater,
                row.num_votes,
                f"{row.failed_checks} of {row.num_checks}",
                f"{row.median_seconds:.1f} s",
                "" if row.is_kept else "left out",
            )
            for row in report.raters
        ],
    )


def _row(c: Comparison) -> tuple[object, ...]:
    return (
        f"{c.a} / {c.b}",
        c.num_prompts,
        c.num_votes,
        c.wins_a,
        c.wins_b,
        c.ties,
        _percent(c.share),
        _interval(c.bootstrap),
        _interval(c.wilson),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _interval(interval: Interval | None, scale: float = 100) -> str:
    if interval is None:
        return "-"
    digits = 1 if scale == 100 else 2
    return f"{scale * interval.low:.{digits}f} to {scale * interval.high:.{digits}f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _numbers(values: dict[str, float | None]) -> Iterable[str]:
    return (_number(values[question]) for question in QUESTIONS)


def _share(share: Share) -> str:
    if not share.total:
        return "-"
    return f"{_percent(share.count / share.total)} of {share.total} ({_interval(share.interval)})"
