"""Drawings of a run's report, as SVG."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffusion.curves import Curve
from diffusion.evaluation.run_report.happenings import WENT_BACK
from diffusion.evaluation.run_report.run_folder import Run

WIDTH, HEIGHT = 9.6, 3.3
"""Of a figure across the page, in inches."""

COLOURS = ("#2f6fb2", "#d98a29", "#3f8f4f", "#b0413e", "#7a5ea8", "#5c6b73", "#c2639b", "#8a8a2b")
MARKS = {"pre-empted": ("#d98a29", "pre-empted"), "killed": ("#b0413e", "killed"), "ended": ("#5c6b73", "ended early")}
"""Colour and name of each kind of end that a resumption follows, by its first word."""

_SETTINGS: Any = {"svg.hashsalt": "run", "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric as it is drawn, over all phases."""

    label: str
    curves: Sequence[tuple[int, Curve]]
    """The first step of each phase, and the curve in it."""

    has_band: bool = False
    """Shade the extremes of each interval."""

    has_points: bool = False


def line(
    runs: Sequence[Run], name: str, label: str, *, has_band: bool = False, has_points: bool = False
) -> Line | None:
    """A metric of all phases; None if none has it."""
    found = [(run.first_step, curve) for run in runs if (curve := run.curve(name)) is not None and curve.num_values]
    return Line(label=label, curves=found, has_band=has_band, has_points=has_points) if found else None


def draw_lines(
    lines: Sequence[Line],
    runs: Sequence[Run],
    *,
    label: str,
    clip: bool = False,
    share: bool = False,
    from_zero: bool = False,
) -> bytes:
    """Draw metrics over steps, with the beginnings of phases and what interrupted the run.

    Args:
        lines: what is drawn.
        runs: the phases.
        label: of the vertical axis.
        clip: leave out the largest values at the beginning, that would flatten the rest.
        share: show values from 0 to 1 as percentages.
        from_zero: begin the vertical axis at 0.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, one in enumerate(lines):
            _draw_line(axes, one, COLOURS[number % len(COLOURS)])
        if clip:
            _clip(axes, lines)
        if from_zero:
            axes.set_ylim(bottom=0)
        if share:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        marked = draw_marks(axes, runs)
        finish_step_axis(axes, label)
        if len(lines) > 1 or marked:
            axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return to_svg(draw)


def _draw_line(axes: Axes, one: Line, colour: str) -> None:
    for i, (first, curve) in enumerate(one.curves):
        steps = np.array(curve.steps) + first
        if one.has_band and curve.width > 1:
            axes.fill_between(steps, *curve.extremes, color=colour, alpha=0.18, linewidth=0)
        label = one.label if i == 0 else None
        style = "o-" if one.has_points else "-"
        axes.plot(steps, curve.means, style, markersize=4, color=colour, linewidth=1.3, label=label)


def _clip(axes: Axes, lines: Sequence[Line]) -> None:
    """Show all but the outermost means of the curves: 2 in 100 at the top, where training began."""
    means = np.concatenate([curve.means for one in lines for _, curve in one.curves])
    if len(means) >= 20:
        low, high = np.quantile(means, [0.0, 0.98])
        margin = 0.08 * (high - low) or 0.05 * abs(high)
        axes.set_ylim(low - margin, high + margin)


def draw_marks(axes: Axes, runs: Sequence[Run]) -> bool:
    """Mark resumptions by how the start before them ended, and the beginnings of phases; whether there are any."""
    placed: dict[str, list[int]] = {}
    for run in runs:
        for before, after in zip(run.starts, run.starts[1:], strict=False):
            if (kind := before.end.split(" ")[0]) in MARKS and after.step < max(run.num_steps, 1):
                placed.setdefault(kind, []).append(run.first_step + after.step)
    for kind, steps in placed.items():
        colour, text = MARKS[kind]
        bottom = axes.get_xaxis_transform()
        axes.plot(steps, [0.03] * len(steps), "^", color=colour, markersize=6, transform=bottom, clip_on=False,
                  label=f"continued, {text} before")  # fmt: skip
        if len(steps) <= 30:
            for step in steps:
                axes.axvline(step, color=colour, linewidth=0.6, alpha=0.5)
    wrong = [
        run.first_step + one.step
        for run in runs
        for one in run.happenings
        if one.kind == WENT_BACK and one.step is not None
    ]
    if wrong:
        top = axes.get_xaxis_transform()
        label = "loss was wrong, went back"
        axes.plot(wrong, [0.97] * len(wrong), "v", color=COLOURS[4], markersize=6, transform=top, label=label)
    for run in runs[1:]:
        axes.axvline(run.first_step, color="#1b1f24", linewidth=0.9, linestyle="--")
    if len(runs) > 1:
        for run in runs:
            middle = run.first_step + run.num_steps / 2
            axes.text(middle, 1.01, plain(run.name), transform=axes.get_xaxis_transform(), ha="center", fontsize=8.5)
    return bool(placed or wrong)


def finish_step_axis(axes: Axes, label: str) -> None:
    """Name the axes; steps in thousands or millions where there are many."""
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: step_text(value)))
    axes.margins(x=0.01)


def draw_profiles(profiles: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, bars: bool) -> bytes:
    """Draw y over x for several things beside one another.

    Args:
        profiles: points (x, y) of each.
        x: label.
        y: label.
        bars: draw steps between the points, for bins.
    """

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for number, (name, points) in enumerate(profiles.items()):
            places, values = zip(*points, strict=True)
            colour = COLOURS[number % len(COLOURS)]
            style = "steps-mid" if bars else "default"
            axes.plot(places, values, "o-", markersize=4, drawstyle=style, color=colour, label=plain(name))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: step_text(value)))
        axes.grid(alpha=0.25, linewidth=0.6)
        if len(profiles) > 1:
            axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return to_svg(draw)


def draw_bars(names: Sequence[str], groups: Mapping[str, Sequence[float]], *, x: str) -> bytes:
    """Draw horizontal bars of each name, one for each group; values are shares."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        height = 0.8 / len(groups)
        places = np.arange(len(names))
        for number, (group, values) in enumerate(groups.items()):
            axes.barh(places + (number + 0.5) * height - 0.4, values, height, color=COLOURS[number], label=plain(group))
        axes.set_yticks(places, [plain(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel(x)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return to_svg(draw, height=0.9 + 0.42 * len(names))


def to_svg(draw: Callable[[Figure], None], height: float = HEIGHT) -> bytes:
    """Make a figure across the page, the same bytes for the same drawing."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def plain(text: str) -> str:
    """Text for matplotlib, in which a dollar sign begins mathematics."""
    return text.replace("$", r"\$")


def step_text(step: float) -> str:
    """A number of steps in few characters."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if abs(step) >= factor:
            return f"{step / factor:g}{unit}"
    return f"{step:g}"
