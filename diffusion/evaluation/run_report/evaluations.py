"""Image metrics of a run's checkpoints, as evaluate.py has written them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import DataError
from diffusion.evaluation.results import COMPOSITIONAL
from diffusion.evaluation.run_report.figures import draw_profiles, step_text
from diffusion.evaluation.run_report.run_folder import Run
from diffusion.files import read_json
from diffusion.html_page import Page

_CATEGORY = f"{COMPOSITIONAL}/"

CURVES_SHOWN = 6
"""Checkpoints, or guidance scales, that a drawing compares."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A metric of one model at one guidance scale."""

    metric: str
    protocol: str
    """Hash of how it was computed; numbers of two are not compared."""

    value: float
    model: str
    weights: str
    step: int | None
    guidance_scale: float | None


def find_results(folder: Path) -> list[Path]:
    """Files of results in the run folder, or one or two folders below it."""
    return sorted(path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}results/*.json"))


def read_points(paths: Sequence[Path], phase: str = "") -> tuple[list[Point], int]:
    """Read files of results; the number of files that could not be read comes with them.

    Args:
        paths: the files.
        phase: put before the names of models.
    """
    points: list[Point] = []
    num_damaged = 0
    for path in paths:
        try:
            points += _points(read_json(path), phase)
        except (DataError, KeyError, TypeError, ValueError, AttributeError):
            num_damaged += 1
    return points, num_damaged


def _points(content: Mapping[str, Any], phase: str) -> list[Point]:
    return [
        Point(
            metric=metric,
            protocol=str(number["protocol"]),
            value=float(number["value"]),
            model=f"{phase} {content['name']}".strip(),
            weights=f"{phase} {content.get('weights') or ''}".strip(),
            step=content.get("step"),
            guidance_scale=content.get("guidance_scale"),
        )
        for metric, number in content["numbers"].items()
        if "/" not in metric or metric.startswith(_CATEGORY)
    ]


def add_evaluations(page: Page, runs: Sequence[Run], folders: Sequence[Path]) -> None:
    """Add image metrics over guidance scales and over checkpoints.

    Args:
        page: the page.
        runs: the phases.
        folders: further folders in which results are looked for.
    """
    page.heading("Image metrics")
    points: list[Point] = []
    num_damaged = 0
    places = [(run.folder, run.name if len(runs) > 1 else "") for run in runs] + [(folder, "") for folder in folders]
    for folder, phase in places:
        found, damaged = read_points(find_results(folder), phase)
        points += found
        num_damaged += damaged
    if num_damaged:
        page.note(f"Files of results that cannot be read, and are left out: {num_damaged}.")
    if not points:
        page.note("No image metrics: measure checkpoints with evaluate.py (and name its output folder: --evaluations).")
        return
    whole = [point for point in points if not point.metric.startswith(_CATEGORY)]
    for (metric, protocol), of_one in _grouped(whole, lambda point: (point.metric, point.protocol)).items():
        _add_metric(page, metric, protocol, of_one)
    by_category = [point for point in points if point.metric.startswith(_CATEGORY)]
    for protocol, of_one in _grouped(by_category, lambda point: point.protocol).items():
        _add_categories(page, protocol, of_one)


def _add_categories(page: Page, protocol: str, points: Sequence[Point]) -> None:
    """Add a table of the shares of images that show what was asked for, by category."""
    categories = list(dict.fromkeys(point.metric for point in points))
    points = sorted(points, key=_order)
    rows = []
    for (model, scale), of_one in _grouped(points, lambda point: (point.model, point.guidance_scale)).items():
        values = {point.metric: f"{point.value:.0%}" for point in of_one}
        rows.append([model, "" if scale is None else f"{scale:g}", *(values.get(name, "") for name in categories)])
    head = ["model", "guidance", *(name.removeprefix(_CATEGORY) for name in categories)]
    page.table(f"Images that show what was asked for, protocol {protocol[:12]}", head, rows)


def _add_metric(page: Page, metric: str, protocol: str, points: Sequence[Point]) -> None:
    """Add the drawings and the table of one metric by one protocol."""
    points = sorted(points, key=_order)
    scales = sorted({point.guidance_scale for point in points if point.guidance_scale is not None})
    beside = f"protocol {protocol[:12]}"
    models = _grouped(points, lambda point: point.model)
    profiles = {
        model: [(point.guidance_scale, point.value) for point in of_one if point.guidance_scale is not None]
        for model, of_one in list(models.items())[-CURVES_SHOWN:]
    }
    if len(scales) > 1:
        shown = {model: curve for model, curve in profiles.items() if curve}
        page.drawing(
            draw_profiles(shown, x="guidance scale", y=metric, bars=False),
            f"{metric} over the guidance scale, {beside}.",
        )
    if len({point.step for point in points if point.step is not None}) > 1:
        page.drawing(
            draw_profiles(_over_steps(points, scales), x="optimizer step", y=metric, bars=False),
            f"{metric} over checkpoints, {beside}.",
        )
    columns: list[float | None] = [*([None] if any(point.guidance_scale is None for point in points) else []), *scales]
    head = ["model", "step", *("" if scale is None else f"guidance {scale:g}" for scale in columns)]
    rows = []
    for model, of_one in models.items():
        values = {point.guidance_scale: f"{point.value:.4g}" for point in of_one}
        step = of_one[0].step
        rows.append([model, "" if step is None else step_text(step), *(values.get(scale, "") for scale in columns)])
    page.table(f"{metric}, {beside}", head, rows)


def _over_steps(points: Sequence[Point], scales: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """Curves over steps by weights and guidance scale; of the middle scale only where there would be too many."""
    with_steps = [point for point in points if point.step is not None]
    curves = _grouped(with_steps, lambda point: (point.weights, point.guidance_scale))
    if len(curves) > CURVES_SHOWN and scales:
        curves = {key: of_one for key, of_one in curves.items() if key[1] in (None, scales[len(scales) // 2])}
    return {
        f"{weights}{'' if scale is None else f' at guidance {scale:g}'}".strip(): [
            (point.step or 0, point.value) for point in of_one
        ]
        for (weights, scale), of_one in curves.items()
    }


def _order(point: Point) -> tuple[int, str, float]:
    return point.step or 0, point.model, point.guidance_scale or 0.0


def _grouped(points: Sequence[Point], key: Callable[[Point], Any]) -> dict[Any, list[Point]]:
    groups: dict[Any, list[Point]] = {}
    for point in points:
        groups.setdefault(key(point), []).append(point)
    return groups
