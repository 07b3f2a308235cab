"""The figures of a study: shares of votes with error bars, and strengths of several models."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from diffusion.evaluation.preference.report import Comparison, Strength
from diffusion.evaluation.preference.statistics import Interval

COLOURS = ("#2f6fb2", "#e0862c")
_QUESTION_NAMES = {"quality": "image quality", "alignment": "prompt alignment"}
_GREY = "#57606a"


def rates_figure(comparisons: Sequence[Comparison]) -> Image.Image:
    """Draw, for each question, a bar of each of two models: share of the votes that prefer one, with 95 % intervals.

    Args:
        comparisons: of the same two models, one per question.
    """
    figure = Figure(figsize=(7, 4.4), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.36
    for side, name in enumerate((comparisons[0].a, comparisons[0].b)):
        shares = [_share_of(c, side) for c in comparisons]
        places = np.arange(len(comparisons)) + (side - 0.5) * (width + 0.04)
        axes.bar(places, [100 * (s or 0) for s, _ in shares], width, color=COLOURS[side], label=_plain(name))
        for place, (share, interval) in zip(places, shares, strict=True):
            _whisker(axes, float(place), share, interval)
    axes.axhline(50, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(comparisons)), [_under_bars(c) for c in comparisons])
    axes.set_xlim(-0.6, len(comparisons) - 0.4)
    axes.set_ylim(0, 100)
    axes.set_ylabel("preferred, % of votes that prefer one")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return _drawn(canvas)


def strengths_figure(strengths: Sequence[Strength]) -> Image.Image:
    """Draw Bradley-Terry strengths with 95 % intervals, a panel per question, the strongest on top."""
    questions = list(dict.fromkeys(row.question for row in strengths))
    num_models = len(strengths) // len(questions)
    figure = Figure(figsize=(4.2 * len(questions), 1.2 + 0.45 * num_models), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for i, question in enumerate(questions):
        axes = figure.add_subplot(1, len(questions), i + 1)
        rows = [row for row in strengths if row.question == question]
        rows.sort(key=lambda row: (row.strength is not None, row.strength or 0))
        for place, row in enumerate(rows):
            if row.strength is not None:
                axes.plot(row.strength, place, "o", color=COLOURS[0])
            if row.interval is not None:
                axes.plot([row.interval.low, row.interval.high], [place, place], color=COLOURS[0])
        axes.axvline(0, color=_GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_yticks(range(len(rows)), [_plain(row.model) for row in rows])
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel("log odds against the average")
        axes.set_title(_QUESTION_NAMES[question], fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
    return _drawn(canvas)


def _share_of(comparison: Comparison, side: int) -> tuple[float | None, Interval | None]:
    share, interval = comparison.share, comparison.interval
    if side == 0 or share is None or interval is None:
        return share, interval
    return 1 - share, Interval(1 - interval.high, 1 - interval.low)


def _whisker(axes: Axes, place: float, share: float | None, interval: Interval | None) -> None:
    top = 100 * (share or 0)
    if interval is not None:
        low, high = 100 * interval.low, 100 * interval.high
        axes.errorbar(place, top, [[max(0, top - low)], [max(0, high - top)]], color="#1b1f24", capsize=5)
        top = high
    axes.text(place, top + 1.5, "-" if share is None else f"{100 * share:.1f} %", ha="center", va="bottom")


def _under_bars(comparison: Comparison) -> str:
    ties = f"{100 * comparison.ties / comparison.num_votes:.0f} % no difference" if comparison.num_votes else "no votes"
    return f"{_QUESTION_NAMES[comparison.question]}\n{comparison.num_votes:,} votes, {ties}"


def _plain(name: str) -> str:
    """A name as it is: a dollar sign would begin mathematics, and a leading underscore hide it from the legend."""
    return name.replace("$", r"\$") if not name.startswith("_") else "\u200b" + name.replace("$", r"\$")


def _drawn(canvas: FigureCanvasAgg) -> Image.Image:
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
