"""What came of the points of a sweep: a table, and a plot over each key that is varied."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.reports.run import Run, find_results, read_points, read_run
from diffusion.reports.tables import text_table
from diffusion.sweeps.definition import Goal, Metric
from diffusion.sweeps.points import Point

TABLE, PLOT = "points.csv", "points.png"

_LOSS_SHARE = 0.1
"""Part of the run at its end whose mean is its training loss."""

_DECADE = 10.0

Row = dict[str, Any]


def collect(points: Sequence[Point], metric: Metric, failed: Mapping[str, str]) -> list[Row]:
    """Numbers of each point.

    Args:
        points: of the sweep.
        metric: what they are ordered by, the best first and those without a number last.
        failed: names of points that did not finish, and why.

    Returns:
        For each point `point`, `status`, its values, `loss/train/total`, `metrics/...`, the metrics of evaluations
        (with the guidance scale), `gpu_hours` and `cost` (with `plan.price_per_gpu_hour`), as far as there are any.
    """
    rows = [_row(point, failed.get(point.name)) for point in points]
    sign = 1 if metric.goal is Goal.minimize else -1
    return sorted(rows, key=lambda row: sign * value if (value := row.get(metric.name)) is not None else math.inf)


def write_table(rows: Sequence[Row], path: Path) -> None:
    """Write all numbers as CSV; groups and lists as JSON."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def format_table(rows: Sequence[Row], keys: Sequence[str], metric: Metric) -> str:
    """A table for the terminal: values, training loss, the metric, GPU-hours and cost."""
    names = list(dict.fromkeys(["point", *keys, TRAIN_LOSS, metric.name, "gpu_hours", "cost", "status"]))
    return "\n".join(text_table([names, *([_short(row.get(name)) for name in names] for row in rows)]))


def draw(rows: Sequence[Row], keys: Sequence[str], metric: Metric, path: Path) -> None:
    """Draw the metric over each key, and over the cost where prices are known (GPU-hours where not)."""
    cost = "cost" if any("cost" in row for row in rows) else "gpu_hours"
    names = [*keys, cost]
    figure = Figure(figsize=(3.6 * len(names), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        known = [(row[name], row[metric.name]) for row in rows if name in row and metric.name in row]
        _scatter(axes, known)
        axes.set(xlabel=name, ylabel=metric.name)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def _row(point: Point, failure: str | None) -> Row:
    row: Row = {"point": point.name, "status": failure or "not begun", **point.values}
    if not (point.folder / "config.yaml").is_file():
        return row
    run = read_run(point.folder)
    numbers = {name: curve.last for name, curve in run.curves.items() if name.startswith("metrics/")}
    if (loss := run.curve(TRAIN_LOSS)) is not None and loss.num_values:
        numbers[TRAIN_LOSS] = loss.recent(_LOSS_SHARE)
    return {**row, "status": failure or run.status, **numbers, **_evaluations(point), **_costs(run)}


def _evaluations(point: Point) -> Row:
    """Metrics of the last checkpoint that was evaluated."""
    found = read_points(find_results(point.folder))[0]
    ordered = sorted(found, key=lambda one: one.step or 0)
    return {f"{one.metric} (guidance {one.guidance_scale})": one.value for one in ordered}


def _costs(run: Run) -> Row:
    price = run.config.plan.price_per_gpu_hour if run.config is not None else None
    return {"gpu_hours": run.gpu_hours, **({"cost": run.gpu_hours * price} if price is not None else {})}


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list | bool | None) else value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={_short(one)}" for key, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _scatter(axes: Axes, known: Sequence[tuple[Any, float]]) -> None:
    places = [place for place, _ in known]
    if all(isinstance(place, int | float) and not isinstance(place, bool) for place in places):
        axes.plot(places, [value for _, value in known], "o")
        if places and min(places) > 0 and max(places) >= _DECADE * min(places):
            axes.set_xscale("log")
        else:
            axes.locator_params(axis="x", nbins=4)
    else:
        axes.plot([_short(place) for place in places], [value for _, value in known], "o")
        axes.tick_params(axis="x", labelrotation=20)
