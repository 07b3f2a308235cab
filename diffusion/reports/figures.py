"""Figures of reports, drawn with matplotlib in one style; the same drawing gives the same bytes."""

import io
import itertools
import math
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
STYLES = [(line, colour) for line in ("-", "--", ":", "-.") for colour in COLOURS]
"""Line style and colour of the curves of a figure, in order; cycled."""

MAX_BESIDE = 12
"""Largest number of entries of a legend beside the axes."""

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
    for (line, colour), (name, points) in zip(itertools.cycle(STYLES), profiles.items(), strict=False):
        style = "steps-mid" if bins else "default"
        axes.plot(*np.transpose(points), f"o{line}", markersize=4, drawstyle=style, color=colour, label=plain(name))
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25, linewidth=0.6)
    if len(profiles) > 1:
        legend_beside(axes)
    return svg_uri(figure)


def legend_beside(axes: Axes) -> None:
    """Put the legend to the right of the axes; one of many entries in columns below them, where the figure grows."""
    handles, labels = axes.get_legend_handles_labels()
    options: Any = {"frameon": False, "fontsize": 8.5}
    if len(labels) <= MAX_BESIDE:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **options)
        return
    figure = axes.figure.get_figure(root=True)
    columns = max(1, int(figure.get_figwidth() / (0.6 + 0.075 * max(map(len, labels)))))  # Inches of handles, letters.
    figure.set_figheight(figure.get_figheight() + 0.19 * math.ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, **options)


def plain(text: str) -> str:
    """Text for matplotlib, where a dollar sign begins mathematics and a leading underscore hides a legend entry."""
    return ("\u200b" if text.startswith("_") else "") + text.replace("$", r"\$")
