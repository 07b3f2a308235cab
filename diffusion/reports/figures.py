"""Figures of reports, drawn with matplotlib in one style; the same drawing gives the same bytes."""

import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from numpy.typing import ArrayLike

from diffusion.reports.page import data_uri

WIDTH, HEIGHT = 9.6, 3.3
"""Size of a figure across the page, in inches."""

COLOURS = ("#2f6fb2", "#d98a29", "#3f8f4f", "#b0413e", "#7a5ea8", "#5c6b73", "#c2639b", "#8a8a2b")
DARK, GREY = "#1b1f24", "#57606a"

_STYLE: Any = {"svg.hashsalt": "report", "font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False}


def subplots(rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Any]:
    """Make a figure and its axes; width and height are in inches."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns)


def svg_uri(figure: Figure) -> str:
    """Figure as the data URI of an SVG."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return data_uri(buffer.getvalue(), "image/svg+xml")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, dpi=110)


def plot_profiles(profiles: Mapping[str, ArrayLike], *, x: str, y: str, bins: bool = False) -> str:
    """Draw curves of points [N, 2], by name, over a common axis; with `bins` as steps between the points."""
    figure, axes = subplots()
    for colour, (name, points) in zip(itertools.cycle(COLOURS), profiles.items(), strict=False):
        style = "steps-mid" if bins else "default"
        axes.plot(*np.transpose(points), "o-", markersize=4, drawstyle=style, color=colour, label=plain(name))
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25, linewidth=0.6)
    if len(profiles) > 1:
        legend_beside(axes)
    return svg_uri(figure)


def legend_beside(axes: Axes) -> None:
    """Put the legend to the right of the axes."""
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def plain(text: str) -> str:
    """Text for matplotlib, where a dollar sign begins mathematics and a leading underscore hides a legend entry."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")
