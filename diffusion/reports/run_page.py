"""The page of a run, or of phases that follow one another: what the template `run.html` shows."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.callbacks.saving import STALL
from diffusion.checkpointing.layout import list_checkpoints
from diffusion.config.stores import is_store
from diffusion.datasets.sample_order import GlobalOrder
from diffusion.errors import DataError, MachineError
from diffusion.planning.plan import Plan, plan_run
from diffusion.planning.plan_text import size_text
from diffusion.planning.provenance import build_order, find_folders
from diffusion.planning.streams import plan_epoch
from diffusion.reports.curves import Curve
from diffusion.reports.figures import (
    COLOURS,
    DARK,
    cycle,
    legend_beside,
    plain,
    plot_profiles,
    step_text,
    subplots,
    svg_uri,
)
from diffusion.reports.page import TEMPLATES, image_uri, write_page
from diffusion.reports.run import CATEGORY, ROLLBACK, Point, Run, find_results, read_points

VALIDATION_LOSS = "metrics/validation/loss"
THROUGHPUT = "throughput/samples_per_sec"
MFU = "throughput/device/mfu"
WAITING = "time/data_waiting_share"
HIT_RATE = "storage/cache_hit_rate"
UTILISATION = {
    WAITING: "waiting for data",
    "utilisation/gpu": "GPUs",
    "utilisation/gpu_memory": "GPU memory",
    "utilisation/cpu": "cores",
    "utilisation/memory": "memory",
    "utilisation/loader_workers": "loader workers",
    HIT_RATE: "cache hits",
    MFU: "model FLOPs (MFU)",
}
"""Shares from 0 to 1, drawn in one figure."""

ENDS = {"pre-empted": COLOURS[1], "killed": COLOURS[3], "ended": COLOURS[5]}
"""Colour of the mark of a resumption, by the first word of how the start before it ended."""

UNKNOWN = "unknown"
ROWS_SHOWN = 40
"""Rows of a table that grows with the length of the run."""

GRIDS_SHOWN, GRID_WIDTH = 8, 1280
"""Sample grids of a phase, and their largest width in pixels."""

CURVES_SHOWN = 6
"""Checkpoints, guidance scales or evaluations that one figure compares."""

MAX_COUNTED = 4_000_000
"""Samples of an unfinished epoch that are counted one by one, in seconds; beyond, in proportion."""

MAX_EPOCHS = 64
"""Epochs whose order is opened; the others count as the first."""

_TIMESTEPS = re.compile(r"timesteps?[-_/ ](\d+)(?:-|_|to)(\d+)$")


def write_report(runs: Sequence[Run], path: Path, evaluations: Sequence[Path] = ()) -> None:
    """Write the page of a run, or of consecutive phases.

    Args:
        runs: the phases, first to last.
        path: the HTML file.
        evaluations: output folders of evaluate.py outside of the run folders.

    Raises:
        MachineError: the file cannot be written.
    """
    names = " and ".join([*filter(None, [", ".join(run.name for run in runs[:-1])]), runs[-1].name])
    values = {
        "title": f"{'Run' if len(runs) == 1 else 'Phases'} {names}",
        "runs": runs,
        "facts": facts(runs[-1]),
        "plans": [plan_section(run) for run in runs],
        "loss": loss_section(runs),
        "validation": validation_section(runs),
        "metrics": metrics_section(runs, evaluations),
        "samples": [samples_section(run) for run in runs],
        "data": [data_section(run) for run in runs],
        "machines": machines_section(runs),
        "starts": [starts_section(run) for run in runs],
        "timelines": [shortened(timeline_table(run)) for run in runs],
        "changed_lines": changed_lines(runs),
    }
    try:
        write_page(path, TEMPLATES / "run.html", values)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}. Choose another file with --out") from error


def facts(run: Run) -> list[tuple[str, str, str]]:
    """The numbers that a reader looks for first: name, value and comparison."""
    share = f" ({run.num_steps / run.num_planned:.0%})" if run.num_planned else ""
    planned = f"of {run.num_planned:,}{share}" if run.num_planned else ""
    rows = [("Status", run.status.split(";")[0], ""), ("Optimizer steps", f"{run.num_steps:,}", planned)]
    if run.config is not None:
        batch = run.config.data.global_batch_size
        rows.append(("Images seen", number_text(run.num_steps * batch), f"{batch:,} in each step"))
    if loss := run.curve(TRAIN_LOSS):
        rows.append(("Training loss", f"{loss.recent():.4f}", "mean of the last 2 % of steps"))
    if loss := run.curve(VALIDATION_LOSS):
        rows.append(("Validation loss", f"{loss.last:.4f}", f"at step {loss.last_step:,.0f}"))
    if speed := run.curve(THROUGHPUT):
        rows.append(("Throughput", f"{speed.recent():,.4g} images/s", f"mean of the run {speed.mean:,.4g}"))
    if mfu := run.curve(MFU):
        rows.append(("MFU", f"{mfu.recent():.1%}", f"mean of the run {mfu.mean:.1%}"))
    if waiting := run.curve(WAITING):
        rows.append(("Waiting for data", f"{waiting.mean:.1%}", "of the steps' time"))
    if run.starts:
        unit = "rank" if all(start.device == "CPU" for start in run.starts) else "GPU"
        rows.append(("Wall-clock time", hours_text(run.wall_hours), f"{number_text(run.gpu_hours)} {unit}-hours"))
        num = sum(start.end not in ("", "finished") for start in run.starts)
        rows.append(("Starts", f"{len(run.starts)}", f"{num} interrupted, {run.num_steps_redone:,} steps redone"))
    return rows


def plan_section(run: Run) -> dict[str, Any]:
    """Table of plan and actual, and the configuration keys that leave the plan open; no table without a plan."""
    if run.config is None:
        return {"table": None}
    plan = plan_run(run.config, world_size=run.starts[-1].world_size if run.starts else 1)
    inputs = {
        "plan.images_per_second": plan.images_per_second,
        "plan.price_per_gpu_hour": run.config.plan.price_per_gpu_hour,
    }
    return {"table": plan_table(run, plan), "unknown": [key for key, value in inputs.items() if value is None]}


def plan_table(run: Run, plan: Plan) -> pd.DataFrame:
    """Planned and actual amounts, as text."""
    assert run.config is not None
    price = run.config.plan.price_per_gpu_hour
    hours, gpu_hours = (run.wall_hours, run.gpu_hours) if run.starts else (None, None)
    speed = run.curve(THROUGHPUT)
    world_sizes = [str(size) for size, _ in itertools.groupby(start.world_size for start in run.starts)]
    amounts: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        ("optimizer steps", plan.num_iterations, run.num_steps, "{:,}".format),
        ("images", plan.num_images, run.num_steps * plan.global_batch_size, "{:,}".format),
        ("throughput", plan.images_per_second, speed.mean if speed else None, "{:,.4g} images/s".format),
        ("time", plan.days * 24 if plan.days is not None else None, hours, hours_text),
        ("GPU-hours", plan.gpu_hours, gpu_hours, number_text),
        ("cost", plan.cost, gpu_hours * price if price is not None and gpu_hours is not None else None,
         "${:,.2f}".format),
    ]  # fmt: skip
    rows = [
        (name, _optional(planned, form), _optional(actual, form), _percent(actual, planned))
        for name, planned, actual, form in amounts
        if planned is not None or actual is not None
    ]
    rows += [
        ("ranks", f"{plan.num_ranks}", ", then ".join(world_sizes) or UNKNOWN, ""),
        ("parameters trained", f"{plan.num_parameters:,}", "", ""),
        (
            "checkpoints kept",
            _optional(plan.num_checkpoints, "{:,}".format),
            _optional(_num_checkpoints(run), "{:,}".format),
            "",
        ),
    ]
    if stall := run.curve(STALL):
        text = f"{hours_text(stall.total / 3600)} in {stall.num_values} checkpoints"
        rows.append(("waiting for checkpoints", "", text, ""))
    return pd.DataFrame(rows, columns=["", "planned", "actual", "actual / planned"])


def _num_checkpoints(run: Run) -> int | None:
    """Checkpoints on this machine; None for those in an object store, which is not listed."""
    folder = run.config.trainer.checkpoint_folder if run.config is not None else None
    if folder is not None and is_store(folder):
        return None
    return len(list_checkpoints(Path(folder).expanduser() if folder is not None else run.folder / "checkpoints"))


def _optional(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _percent(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.1%}" if whole and part is not None else ""


def loss_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Training loss of all samples and by stream."""
    whole = find_line(runs, TRAIN_LOSS, "all samples", has_band=True)
    prefix = "loss/train/stream/"
    streams = list(dict.fromkeys(name for run in runs for name in run.below(prefix)))
    lines = [find_line(runs, prefix + name, name) for name in streams]
    return {
        "figure": plot_lines([whole], runs, label="loss", clip=True),
        "interval": max((curve.width for _, curve in whole.curves), default=1),
        "not_finite": [run.curves.get(TRAIN_LOSS) for run in runs],
        "streams": plot_lines(lines, runs, label="loss", clip=True),
    }


def validation_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Validation metrics over steps, and the loss by timestep."""
    found = (one for run in runs for one in run.below("metrics/") if not _TIMESTEPS.search(one))
    names = [name for name in dict.fromkeys(found) if "metrics/" + name != VALIDATION_LOSS]
    prefix = "validation/loss/"
    lines = [find_line(runs, VALIDATION_LOSS, "all validation data", has_points=True)]
    lines += [
        find_line(runs, "metrics/" + name, name.removeprefix(prefix), has_points=True)
        for name in names
        if name.startswith(prefix)
    ]
    others = {
        name: plot_lines(
            [find_line(runs, "metrics/" + name, name, has_points=True)], runs, label=name.rpartition("/")[2]
        )
        for name in names
        if not name.startswith(prefix)
    }
    return {
        "loss": plot_lines(lines, runs, label="validation loss"),
        "others": {name: figure for name, figure in others.items() if figure is not None},
        "by_timestep": _loss_by_timestep(runs),
    }


def _loss_by_timestep(runs: Sequence[Run]) -> str | None:
    """Figure of the validation loss by timestep, at some evaluations of the last phase that logged it."""
    bins: dict[tuple[int, int], Curve] = {}
    for run in runs:
        matches = {name: _TIMESTEPS.search(name) for name in run.curves if name.startswith("metrics/")}
        bins = {(int(m[1]), int(m[2])): run.curves[name] for name, m in matches.items() if m is not None} or bins
    if not bins:
        return None
    steps = next(iter(bins.values())).steps
    if any(len(curve.steps) != len(steps) for curve in bins.values()):
        return None
    profiles = {
        f"step {steps[i]:,.0f}": [((low + high) / 2, curve.means[i]) for (low, high), curve in sorted(bins.items())]
        for i in spread(len(steps), CURVES_SHOWN)
    }
    return plot_profiles(profiles, x="timestep", y="validation loss", bins=True)


def metrics_section(runs: Sequence[Run], folders: Sequence[Path]) -> dict[str, Any]:
    """Image metrics over guidance scales and checkpoints, a part for each metric and protocol."""
    sources = [(run.folder, run.name if len(runs) > 1 else "") for run in runs] + [(folder, "") for folder in folders]
    found = [read_points(find_results(folder), phase) for folder, phase in sources]
    points = [asdict(point) for points, _ in found for point in points]
    frame = pd.DataFrame(points, columns=list(Point.__dataclass_fields__)).astype({"step": "Int64"})
    frame = frame.sort_values(["step", "model", "guidance_scale"], na_position="first", kind="stable")
    by_category = frame["metric"].str.startswith(CATEGORY)
    return {
        "num_damaged": sum(num for _, num in found),
        "metrics": [
            _metric_part(str(metric), str(protocol), part)
            for (metric, protocol), part in frame[~by_category].groupby(["metric", "protocol"], sort=False)
        ],
        "categories": {
            str(protocol)[:12]: _category_table(part)
            for protocol, part in frame[by_category].groupby("protocol", sort=False)
        },
    }


def _metric_part(metric: str, protocol: str, points: pd.DataFrame) -> dict[str, Any]:
    """Figures and the table of one metric by one protocol."""
    guided = points.dropna(subset="guidance_scale")
    scales = sorted(guided["guidance_scale"].unique())
    over_guidance = over_steps = None
    if len(scales) > 1:
        last_models = guided["model"].unique()[-CURVES_SHOWN:]
        profiles = {model: _pairs(guided[guided["model"] == model], "guidance_scale", "value") for model in last_models}
        over_guidance = plot_profiles(profiles, x="guidance scale", y=metric)
    stepped = points.dropna(subset="step")
    if stepped["step"].nunique() > 1:
        if stepped.groupby(["weights", "guidance_scale"], dropna=False).ngroups > CURVES_SHOWN and scales:
            middle = scales[len(scales) // 2]
            stepped = stepped[stepped["guidance_scale"].isna() | (stepped["guidance_scale"] == middle)]
        labels = [
            weights if pd.isna(scale) else f"{weights} at guidance {scale:g}".strip()
            for weights, scale in zip(stepped["weights"], stepped["guidance_scale"], strict=True)
        ]
        curves = {
            str(label): _pairs(part, "step", "value")
            for label, part in stepped.groupby(np.array(labels, dtype=object), sort=False)
        }
        over_steps = plot_profiles(curves, x="optimizer step", y=metric)
    return {
        "name": metric,
        "protocol": protocol[:12],
        "over_guidance": over_guidance,
        "over_steps": over_steps,
        "table": _metric_table(points),
    }


def _pairs(points: pd.DataFrame, x: str, y: str) -> list[tuple[float, float]]:
    return list(zip(points[x].astype(float), points[y], strict=True))


def _metric_table(points: pd.DataFrame) -> pd.DataFrame:
    """A row for each model, a column for each guidance scale."""
    columns = points.assign(
        column=["" if pd.isna(scale) else f"guidance {scale:g}" for scale in points["guidance_scale"]],
        text=[f"{value:.4g}" for value in points["value"]],
        step=["" if pd.isna(step) else step_text(step) for step in points["step"]],
    )
    order = columns.sort_values("guidance_scale", na_position="first")["column"].unique()
    table = columns.groupby(["model", "step", "column"], sort=False)["text"].last().unstack(fill_value="")
    models = columns.drop_duplicates(["model", "step"])[["model", "step"]]
    return table.loc[list(models.itertuples(index=False, name=None)), order].reset_index()


def _category_table(points: pd.DataFrame) -> pd.DataFrame:
    """Shares of images that show what was asked for: a row for each model and guidance scale."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for point in points.to_dict("records"):
        model, scale = point["model"], point["guidance_scale"]
        guidance = "" if pd.isna(scale) else f"{scale:g}"
        row = rows.setdefault((model, guidance), {"model": model, "guidance": guidance})
        row[point["metric"].removeprefix(CATEGORY)] = f"{point['value']:.0%}"
    return pd.DataFrame(list(rows.values())).fillna("")


def samples_section(run: Run) -> dict[str, Any]:
    """Grids of images for the same prompts and seeds over time."""
    steps = list(run.samples)
    grids, prompts = [], []
    for step in (steps[i] for i in spread(len(steps), GRIDS_SHOWN)):
        grid, settings = read_grid(run.samples[step])
        prompts = settings.get("prompts", prompts)
        weights = {"ema": ", average of the weights (EMA)", "raw": ", weights of that step"}
        caption = f"{run.name}, step {step:,}{weights.get(str(settings.get('weights')), '')}"
        if "guidance_scale" in settings:
            caption += f", guidance {settings['guidance_scale']:g}"
        grids.append((image_uri(grid, jpeg_quality=88), caption))
    return {"grids": grids, "prompts": prompts, "num_grids": len(steps)}


def read_grid(path: Path) -> tuple[Image.Image, dict[str, Any]]:
    """Sample grid at the size of the page, and the settings that the file holds."""
    with Image.open(path) as image:
        text = getattr(image, "text", {}).get("samples", "{}")
        grid = image.convert("RGB")
    if grid.width > GRID_WIDTH:
        grid = grid.resize((GRID_WIDTH, round(grid.height * GRID_WIDTH / grid.width)), Image.Resampling.LANCZOS)
    elif grid.width < GRID_WIDTH // 2:
        factor = max(1, min(4, GRID_WIDTH // 2 // grid.width))
        grid = grid.resize((grid.width * factor, grid.height * factor), Image.Resampling.NEAREST)
    return grid, json.loads(text)


def data_section(run: Run) -> dict[str, Any]:
    """Draws of each stream against the plan."""
    if run.config is None or run.num_planned is None:
        return {"is_known": False}
    plan = plan_epoch(run.config, run.num_planned * run.config.data.global_batch_size)
    drawn: Sequence[int | None] = [None] * len(plan.streams)
    is_exact = True
    if plan.streams and plan.problem is None and plan.num_steps is not None:
        with suppress(DataError):  # The data is on another machine.
            drawn, is_exact = count_draws(build_order(run.config, find_folders(run.config, None)), run.num_steps)
    planned = [
        stream.epochs * stream.num_samples if stream.epochs is not None and stream.num_samples else None
        for stream in plan.streams
    ]
    sums = {"planned": sum(number or 0 for number in planned), "drawn": sum(number or 0 for number in drawn)}
    rows = [
        {
            "stream": stream.name,
            "samples in it": _optional(stream.num_samples, "{:,}".format),
            "planned draws": _optional(num_planned, "{:,.0f}".format),
            "drawn": _optional(num_drawn, "{:,}".format),
            "times seen": f"{num_drawn / stream.num_samples:,.2f}" if num_drawn and stream.num_samples else "",
            "planned share": _percent(num_planned, sums["planned"]),
            "drawn share": _percent(num_drawn, sums["drawn"]),
        }
        for stream, num_planned, num_drawn in zip(plan.streams, planned, drawn, strict=True)
    ]
    return {
        "is_known": True,
        "table": pd.DataFrame(rows),
        "num_drawn": sums["drawn"],
        "is_exact": is_exact,
    }


def count_draws(order: GlobalOrder, num_steps: int, max_counted: int = MAX_COUNTED) -> tuple[list[int], bool]:
    """Samples that the first steps of a run draw from each stream.

    Args:
        order: of the run.
        num_steps: steps from the beginning of the run.
        max_counted: samples of an unfinished epoch that are counted one by one; beyond, in proportion.

    Returns:
        The numbers, and whether they are exact.
    """
    epochs, rest = divmod(num_steps, order.num_steps)
    draws = np.array([stream.draws for stream in order.streams], np.int64)
    of_epoch = [draws - np.array(order.epoch(epoch).dropped) for epoch in range(min(max(epochs, 1), MAX_EPOCHS))]
    total = sum(of_epoch[:epochs], np.zeros_like(draws)) + max(0, epochs - MAX_EPOCHS) * of_epoch[0]
    if rest * order.settings.global_batch_size > max_counted:
        part = of_epoch[0] * rest / order.num_steps
        return [round(number) for number in (total + part).tolist()], False
    for first in range(0, rest, 256):
        stream = order.epoch(epochs).slots(first, min(first + 256, rest)).stream
        total = total + np.bincount(stream.ravel(), minlength=len(draws))
    return total.tolist(), epochs <= MAX_EPOCHS


def machines_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Throughput, utilisation, storage, and waiting for checkpoints."""
    speed = find_line(runs, THROUGHPUT, "images/s", has_band=True)
    shares = [find_line(runs, name, label) for name, label in UTILISATION.items()]
    stall = find_line(runs, STALL, "seconds", has_points=True)
    return {
        "throughput": plot_lines([speed], runs, label="images per second", from_zero=True),
        "utilisation": plot_lines(shares, runs, label="share", share=True, from_zero=True),
        "stall": plot_lines([stall], runs, label="seconds", from_zero=True),
        "has_mfu": any(run.curve(MFU) for run in runs),
        "storage": [text for run in runs if (text := _storage_text(run)) is not None],
    }


def _storage_text(run: Run) -> str | None:
    """Bytes from the store and from local disks; None without a remote."""
    names = ("fetched_bytes", "fetched_shards", "read_bytes", "cache_hit_rate")
    curves = [curve for name in names if (curve := run.curves.get(f"storage/{name}")) is not None]
    if len(curves) < len(names):
        return None
    fetched, shards, read, hit_rate = curves
    return (
        f"{run.name}: {size_text(fetched.total)} in {shards.total:,.0f} shards came from the store, and samples of "
        f"{size_text(read.total)} from local disks. {hit_rate.mean:.1%} of the samples were in a shard that was in the "
        "cache already. Steps after the last interval are not counted."
    )


def starts_section(run: Run) -> dict[str, Any]:
    """Table of the starts, and versions of the software."""
    table = pd.DataFrame(
        {
            "": str(number),
            "began (UTC)": f"{start.began:%Y-%m-%d %H:%M:%S}",
            "from step": f"{start.step:,}",
            "to step": f"{start.reached:,}" if start.reached is not None else "",
            "ran": hours_text(start.hours) if start.ended is not None else UNKNOWN,
            "ranks": str(start.world_size),
            "device": start.device,
            "ended": start.end or "running, or killed",
        }
        for number, start in enumerate(run.starts, start=1)
    )
    latest = run.starts[-1].versions if run.starts else {}
    changed = {name for start in run.starts for name in start.versions if start.versions[name] != latest.get(name)}
    versions = [f"{name} {version}" for name, version in latest.items()]
    return {"table": shortened(table), "versions": versions, "changed": sorted(changed)}


def timeline_table(run: Run) -> pd.DataFrame:
    """Events of the supervisor and rollbacks."""
    return pd.DataFrame(
        {
            "time (UTC)": f"{entry.time:%Y-%m-%d %H:%M:%S}",
            "step": f"{entry.step:,}" if entry.step is not None else "",
            "event": entry.kind.replace("_", " "),
            "details": entry.text,
            "time lost": hours_text(entry.seconds_lost / 3600) if entry.seconds_lost is not None else "",
        }
        for entry in run.timeline
    )


def shortened(table: pd.DataFrame) -> pd.DataFrame:
    """The first and the last rows of a long table."""
    hidden = len(table) - ROWS_SHOWN
    if hidden <= 0:
        return table
    gap = pd.DataFrame([["...", f"{hidden} more", *[""] * (table.shape[1] - 2)]], columns=table.columns)
    return pd.concat([table[: ROWS_SHOWN // 2], gap, table[-ROWS_SHOWN // 2 :]])


def changed_lines(runs: Sequence[Run]) -> list[int]:
    """For each phase, the lines of its configuration that the phase before does not have."""
    lines = [set(run.config_text.splitlines()) for run in runs]
    return [len(own - before) for before, own in zip([set(), *lines], lines, strict=False)]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A metric over all phases."""

    label: str
    curves: Sequence[tuple[int, Curve]]
    """First step of each phase that has the metric, and its curve."""

    has_band: bool
    """Shade the extremes of each interval."""

    has_points: bool


def find_line(runs: Sequence[Run], name: str, label: str, *, has_band: bool = False, has_points: bool = False) -> Line:
    """A metric of all phases."""
    curves = [(run.first_step, curve) for run in runs if (curve := run.curve(name)) is not None]
    return Line(label=label, curves=curves, has_band=has_band, has_points=has_points)


def plot_lines(
    lines: Sequence[Line],
    runs: Sequence[Run],
    *,
    label: str,
    clip: bool = False,
    share: bool = False,
    from_zero: bool = False,
) -> str | None:
    """Draw metrics over steps, with the beginnings of phases, resumptions and rollbacks.

    Args:
        lines: metrics; those that no phase has are skipped.
        runs: the phases.
        label: of the vertical axis.
        clip: cut off the largest values, from the beginning of training, which would flatten the rest.
        share: show values from 0 to 1 as percentages.
        from_zero: begin the vertical axis at 0.

    Returns:
        The data URI of an SVG; None without a metric.
    """
    lines = [line for line in lines if line.curves]
    if not lines:
        return None
    figure, axes = subplots()
    for colour, line in zip(cycle(len(lines)), lines, strict=True):
        for i, (first, curve) in enumerate(line.curves):
            steps = np.array(curve.steps) + first
            if line.has_band and curve.width > 1:
                axes.fill_between(steps, *curve.extremes, color=colour, alpha=0.18, linewidth=0)
            style = "o-" if line.has_points else "-"
            name = plain(line.label) if i == 0 else None
            axes.plot(steps, curve.means, style, markersize=4, color=colour, linewidth=1.3, label=name)
    if clip:
        _clip(axes, np.concatenate([curve.means for line in lines for _, curve in line.curves]))
    if from_zero:
        axes.set_ylim(bottom=0)
    if share:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
    has_marks = _mark_resumptions(axes, runs) | _mark_rollbacks(axes, runs)
    _mark_phases(axes, runs)
    axes.set(xlabel="optimizer step", ylabel=label)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: step_text(value)))
    last = max(runs[-1].first_step + runs[-1].num_steps, 1)
    axes.set_xlim(-0.01 * last, 1.01 * last)
    if len(lines) > 1 or has_marks:
        legend_beside(axes)
    return svg_uri(figure)


def _clip(axes: Axes, means: np.ndarray) -> None:
    """Cut off the largest 2 % of the values."""
    if len(means) >= 20:
        low, high = np.quantile(means, [0.0, 0.98])
        margin = 0.08 * (high - low) or 0.05 * abs(high)
        axes.set_ylim(low - margin, high + margin)


def _mark_resumptions(axes: Axes, runs: Sequence[Run]) -> bool:
    """Mark resumptions by how the start before them ended."""
    marks: dict[str, list[int]] = {}
    for run in runs:
        for before, after in itertools.pairwise(run.starts):
            if (kind := before.end.split(" ")[0]) in ENDS and after.step < max(run.num_steps, 1):
                marks.setdefault(kind, []).append(run.first_step + after.step)
    for kind, steps in marks.items():
        label = f"continued, {'ended early' if kind == 'ended' else kind} before"
        axes.plot(steps, [0.03] * len(steps), "^", color=ENDS[kind], markersize=6,
                  transform=axes.get_xaxis_transform(), clip_on=False, label=label)  # fmt: skip
        for step in steps if len(steps) <= 30 else []:
            axes.axvline(step, color=ENDS[kind], linewidth=0.6, alpha=0.5)
    return bool(marks)


def _mark_rollbacks(axes: Axes, runs: Sequence[Run]) -> bool:
    entries = [(run.first_step, entry) for run in runs for entry in run.timeline if entry.kind == ROLLBACK]
    steps = [first + entry.step for first, entry in entries if entry.step is not None]
    if steps:
        axes.plot(steps, [0.97] * len(steps), "v", color=COLOURS[4], markersize=6,
                  transform=axes.get_xaxis_transform(), label="rollback of a wrong loss")  # fmt: skip
    return bool(steps)


def _mark_phases(axes: Axes, runs: Sequence[Run]) -> None:
    """Mark the beginnings of later phases, and name all."""
    for run in runs[1:]:
        axes.axvline(run.first_step, color=DARK, linewidth=0.9, linestyle="--")
    for run in runs if len(runs) > 1 else []:
        middle = run.first_step + run.num_steps / 2
        axes.text(middle, 1.01, plain(run.name), transform=axes.get_xaxis_transform(), ha="center", fontsize=8.5)


def spread(number: int, most: int) -> list[int]:
    """Evenly spaced indices, at most so many, with the first and the last."""
    if number <= most:
        return list(range(number))
    return sorted(set(np.linspace(0, number - 1, most).round().astype(int).tolist()))


def hours_text(hours: float) -> str:
    """Duration in a suitable unit."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.3g} s"


def number_text(number: float) -> str:
    """Number with four significant digits, and all digits before the point."""
    for factor, unit in ((1e9, " billion"), (1e6, " million")):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"
