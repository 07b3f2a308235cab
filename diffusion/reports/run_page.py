"""The page of a run, or of consecutive phases: what the template `run.html` shows."""

import datetime
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from PIL import Image

from diffusion.config.schema import Task
from diffusion.errors import DataError
from diffusion.evaluation.protocol import Result, is_of_category, protocol_hash
from diffusion.formats.run_folder import RECONSTRUCTIONS, STALL, TRAIN_LOSS
from diffusion.planning.amounts import plan_amounts, plan_epoch
from diffusion.reports.figures import (
    COLOURS,
    DARK,
    STYLES,
    legend_beside,
    plain,
    plot_profiles,
    subplots,
    svg_uri,
)
from diffusion.reports.page import TEMPLATES, image_uri, write_page
from diffusion.reports.run import ROLLBACK, Run, find_results

VALIDATION_LOSS = "metrics/validation/loss"
STREAM_LOSS = "loss/train/stream/"
THROUGHPUT = "throughput/samples_per_sec"
MFU = "throughput/device/mfu"
WAITING = "time/data_waiting_share"
UTILISATION = {
    WAITING: "waiting for data",
    "utilisation/gpu": "GPUs",
    "utilisation/gpu_memory": "GPU memory",
    "utilisation/cpu": "cores",
    "utilisation/memory": "memory",
    "utilisation/loader_workers": "loader workers",
    "storage/cache_hit_rate": "cache hits",
    MFU: "model FLOPs (MFU)",
}
"""Shares from 0 to 1, drawn in one figure."""

MARKS = {"pre-empted": COLOURS[1], "killed": COLOURS[3], "ended early": COLOURS[5], ROLLBACK: COLOURS[4]}
"""Colours of marks: how the start before a resumption ended, and rollbacks."""

UNKNOWN = "unknown"

GRIDS_SHOWN, GRID_WIDTH = 8, 1280
"""Sample grids of a phase, and their largest width in pixels."""

WORLD_SIZES_SHOWN = 4
"""Largest number of world sizes of a run that are listed one by one."""

CURVES_SHOWN = 6
"""Checkpoints, guidance scales or evaluations in one figure."""

LETTERS = 90
"""Letters of the names of phases in the width of a figure."""

POINTS_MARKED = 40
"""Largest number of values of a curve that are marked one by one."""

_TIMESTEPS = re.compile(r"^metrics/.*timesteps?[-_/ ](\d+)(?:-|_|to)(\d+)$")


def write_report(runs: Sequence[Run], path: Path, evaluations: Sequence[Path] = ()) -> None:
    """Write the HTML page of a run, or of consecutive phases, also with evaluations outside of the run folders."""
    values = {
        "title": f"{'Run' if len(runs) == 1 else 'Phases'} {', '.join(run.name for run in runs)}",
        "runs": runs,
        "facts": facts(runs[-1]),
        "is_autoencoder": runs[-1].config is not None and runs[-1].config.task is Task.autoencoder,
        "plans": [plan_table(run) for run in runs],
        "loss": loss_section(runs),
        "validation": validation_section(runs),
        "metrics": metrics_section(runs, evaluations),
        "samples": [samples_section(run) for run in runs],
        "data": [data_table(run) for run in runs],
        "machines": machines_section(runs),
        "starts": [starts_table(run) for run in runs],
        "timelines": [timeline_table(run) for run in runs],
    }
    write_page(path, TEMPLATES / "run.html", values)


def facts(run: Run) -> list[tuple[str, str, str]]:
    """The numbers that a reader looks for first: name, value and comparison."""
    planned = f"of {run.num_planned:,} ({run.num_steps / run.num_planned:.0%})" if run.num_planned else ""
    rows = [("Status", run.status.split(";")[0], ""), ("Optimizer steps", f"{run.num_steps:,}", planned)]
    if run.config is not None:
        batch = run.config.data.global_batch_size
        rows.append(("Images seen", f"{run.num_steps * batch:,}", f"{batch:,} in each step"))
    if loss := run.curves.get(TRAIN_LOSS):
        rows.append(("Training loss", _loss(loss.recent()), "mean of the last 2 % of steps"))
    if loss := run.curves.get(VALIDATION_LOSS):
        rows.append(("Validation loss", _loss(loss.last), f"at step {loss.last_step:,.0f}"))
    if speed := run.curve(THROUGHPUT):
        rows.append(("Throughput", _throughput(speed.rate(0.02)), f"mean of the run {_throughput(speed.rate())}"))
    if mfu := run.curve(MFU):
        rows.append(("MFU", f"{mfu.rate(0.02):.1%}", f"mean of the run {mfu.rate():.1%}"))
    if waiting := run.curve(WAITING):
        rows.append(("Waiting for data", f"{waiting.mean:.1%}", "of the steps' time"))
    if run.starts:
        rows.append(("Wall-clock time", duration(run.wall_hours), f"{run.gpu_hours:,.2f} {_hours_unit(run)}"))
        num = sum(start.end not in ("", "finished") for start in run.starts)
        rows.append(("Starts", f"{len(run.starts)}", f"{num} interrupted, {run.num_steps_redone:,} steps redone"))
    return rows


def plan_table(run: Run) -> pd.DataFrame | None:
    """Planned and actual amounts; None for the configuration of another version."""
    if run.config is None:
        return None
    plan = plan_amounts(run.config, world_size=run.starts[-1].world_size if run.starts else 1)
    hours, gpu_hours = (run.wall_hours, run.gpu_hours) if run.starts else (None, None)
    speed = run.curve(THROUGHPUT)
    amounts: list[tuple[str, float | None, float | None, Callable[[float], str]]] = [
        ("optimizer steps", plan.num_iterations, run.num_steps, "{:,}".format),
        ("images", plan.num_images, run.num_steps * plan.global_batch_size, "{:,}".format),
        ("throughput", plan.images_per_second, speed.rate() if speed else None, _throughput),
        ("time", plan.days * 24 if plan.days is not None else None, hours, duration),
        (_hours_unit(run), plan.gpu_hours, gpu_hours, "{:,.2f}".format),
        ("cost", plan.cost, run.dollars, "${:,.2f}".format),
    ]
    rows = [
        (
            name,
            _optional(planned, form),
            _optional(actual, form),
            f"{actual / planned:.1%}" if planned and actual is not None else "",
        )
        for name, planned, actual, form in amounts
        if planned is not None or actual is not None
    ]
    sizes = [size for size, _ in itertools.groupby(start.world_size for start in run.starts)]
    ranks = ", then ".join(map(str, sizes)) or UNKNOWN
    if len(sizes) > WORLD_SIZES_SHOWN:
        ranks = f"{min(sizes)} to {max(sizes)}, {len(sizes) - 1} changes"
    rows.append(("ranks", f"{plan.num_ranks}", ranks, ""))
    return pd.DataFrame(rows, columns=["", "planned", "actual", "actual / planned"])


def _loss(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _throughput(value: float) -> str:
    return f"{value:,.0f} images/s" if value >= 1000 else f"{value:.4g} images/s"


def _hours_unit(run: Run) -> str:
    is_cpu = run.starts and all(start.device == "CPU" for start in run.starts)
    return "rank-hours" if is_cpu else "GPU-hours"


def _optional(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def loss_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Training loss of all samples and by stream."""
    streams = {name: name.removeprefix(STREAM_LOSS) for name in find_metrics(runs, STREAM_LOSS)}
    curves = [run.curves.get(TRAIN_LOSS) for run in runs]
    return {
        "figure": plot_metrics({TRAIN_LOSS: "all samples"}, runs, y="loss", clip=True),
        "interval": max((curve.width for curve in curves if curve is not None), default=1),
        "curves": curves,
        "streams": plot_metrics(streams, runs, y="loss", clip=True),
    }


def validation_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Validation metrics over steps, and the loss by timestep."""
    names = [name for name in find_metrics(runs, "metrics/") if not _TIMESTEPS.search(name)]
    of_loss = [name for name in names if name.startswith(VALIDATION_LOSS + "/")]
    losses = {name: name.removeprefix(VALIDATION_LOSS + "/") for name in of_loss}
    others = [name for name in names if name not in (VALIDATION_LOSS, *losses)]
    labels = {name: name.rpartition("/")[2].replace("psnr", "PSNR, dB") for name in names}
    return {
        "loss": plot_metrics({VALIDATION_LOSS: "all validation data", **losses}, runs, y="validation loss"),
        "others": {name: plot_metrics({name: name}, runs, y=labels[name]) for name in others},
        "by_timestep": _loss_by_timestep(runs[-1]),
    }


def _loss_by_timestep(run: Run) -> str | None:
    """Figure of the validation loss by timestep, at some evaluations."""
    matches = {name: match for name in run.curves if (match := _TIMESTEPS.search(name))}
    bins = {(int(match[1]), int(match[2])): run.curves[name] for name, match in matches.items()}
    if len({curve.num_values for curve in bins.values()}) != 1:  # None, or some are not finite.
        return None
    steps = next(iter(bins.values())).steps
    profiles = {
        f"step {steps[i]:,.0f}": [((low + high) / 2, curve.means[i]) for (low, high), curve in sorted(bins.items())]
        for i in spread(len(steps), CURVES_SHOWN)
    }
    return plot_profiles(profiles, x="timestep", y="validation loss", bins=True)


def metrics_section(runs: Sequence[Run], folders: Sequence[Path]) -> dict[str, Any]:
    """Image metrics over guidance scales and checkpoints, and a table of all numbers."""
    points, num_damaged = read_evaluations([*(run.folder for run in runs), *folders])
    is_category = points["metric"].map(is_of_category).astype(bool)
    figures: dict[str, str] = {}
    for metric, part in points[~is_category].groupby("metric", sort=False):
        for over, x, by in (
            ("the guidance scale", "guidance scale", "model"),
            ("checkpoints", "optimizer step", "weights"),
        ):
            rows = part.dropna(subset=x)
            if rows[x].nunique() < 2:
                continue
            curves = [(str(name), some[[x, "value"]].to_numpy()) for name, some in rows.groupby(by, sort=False)]
            shown = spread(len(curves), CURVES_SHOWN)
            counts = f", {len(shown)} of {len(curves)} curves" if len(shown) < len(curves) else ""
            figures[f"{metric} over {over}{counts}"] = plot_profiles(dict(curves[i] for i in shown), x=x, y=str(metric))
    return {
        "num_damaged": num_damaged,
        "figures": figures,
        "table": points.pivot_table("text", ["model", "guidance"], "metric", "last", fill_value="", sort=False)
        .rename_axis(columns=None)
        .reset_index(),
    }


def read_evaluations(folders: Sequence[Path]) -> tuple[pd.DataFrame, int]:
    """Read results of evaluations in run folders, and in output folders of evaluate.py.

    Returns:
        A row for each number: metric (with the beginning of its protocol's hash: only numbers of one protocol are
        comparable), value, model, weights, step and guidance scale; and the number of damaged files.
    """
    rows: list[dict[str, Any]] = []
    num_damaged = 0
    outputs = {path: path.parents[1].relative_to(parent.parent) for parent in folders for path in find_results(parent)}
    has_several = len(set(outputs.values())) > 1
    for path, output in outputs.items():
        try:
            result = Result.read(path)
        except DataError:
            num_damaged += 1
            continue
        guidance = "" if result.guidance_scale is None else f"{result.guidance_scale:g}"
        of_output = f"{output} " if has_several else ""
        common = {
            "model": f"{of_output}{result.name}",
            "weights": f"{of_output}{result.weights}" + (f" at guidance {guidance}" if guidance else ""),
            "guidance": guidance,
            "optimizer step": result.step,
            "guidance scale": result.guidance_scale,
        }
        for name, number in result.numbers.items():
            metric = f"{name} ({protocol_hash(number.protocol)[:8]})"
            rows.append({"metric": metric, "value": number.value, "text": f"{number.value:.4g}", **common})
    axes = ["optimizer step", "guidance scale"]
    frame = pd.DataFrame(rows, columns=["metric", "value", "text", "model", "weights", "guidance", *axes])
    frame = frame.astype({"metric": str, **dict.fromkeys(axes, float)})
    return frame.sort_values(axes, na_position="first", kind="stable"), num_damaged


def samples_section(run: Run) -> dict[str, Any]:
    """Grids of images for the same prompts and seeds over time."""
    steps = list(run.samples)
    grids, prompts = [], []
    paths = {run.samples[steps[i]]: f", step {steps[i]:,}" for i in spread(len(steps), GRIDS_SHOWN)}
    if (path := run.folder / RECONSTRUCTIONS).is_file():
        paths[path] = ": images (above) and their reconstructions from latents (below)"
    for path, content in paths.items():
        try:
            with Image.open(path, formats=["PNG"]) as image:  # Others run programs.
                settings = json.loads(image.info.get("samples", "{}"))
                grid = image.convert("RGB")
            grid.thumbnail((GRID_WIDTH, grid.height))
            prompts = list(map(str, settings.get("prompts", prompts)))
            weights = {"ema": ", average of the weights (EMA)", "raw": ", weights of that step"}
            caption = f"{run.name}{content}{weights.get(settings.get('weights'), '')}"
            if "guidance_scale" in settings:
                caption += f", guidance {settings['guidance_scale']:g}"
            grids.append((image_uri(grid, jpeg_quality=88), caption))
        except (OSError, SyntaxError, ValueError, TypeError, AttributeError, Image.DecompressionBombError):  # Damaged.
            continue
    return {"grids": grids, "prompts": prompts, "num_grids": len(steps)}


def data_table(run: Run) -> pd.DataFrame | None:
    """Count the samples read of each stream; None for the configuration of another version."""
    if run.config is None:
        return None
    streams = plan_epoch(run.config, run.num_steps * run.config.data.global_batch_size).streams
    return pd.DataFrame(
        {
            "stream": stream.name,
            "samples": _optional(stream.num_samples, "{:,}".format),
            "share of the images seen": _optional(stream.share, "{:.1%}".format),
            "times seen": _optional(stream.epochs, "{:,.2f}".format),
        }
        for stream in streams
    )


def machines_section(runs: Sequence[Run]) -> dict[str, Any]:
    """Throughput, utilisation, and waiting for checkpoints."""
    return {
        "throughput": plot_metrics({THROUGHPUT: "images/s"}, runs, y="images per second", from_zero=True),
        "utilisation": plot_metrics(UTILISATION, runs, y="share", share=True, from_zero=True),
        "stall": plot_metrics({STALL: "seconds"}, runs, y="seconds", from_zero=True),
        "has_mfu": any(run.curve(MFU) for run in runs),
    }


def starts_table(run: Run) -> pd.DataFrame:
    """The starts of a run; packages are named where their versions have changed."""
    versions = [{}, *(start.versions for start in run.starts)]
    return pd.DataFrame(
        {
            "": str(number),
            "began (UTC)": f"{start.began:%Y-%m-%d %H:%M:%S}",
            "from step": f"{start.step:,}",
            "to step": f"{start.reached:,}" if start.reached is not None else "",
            "ran": duration(start.hours) if start.ended is not None else UNKNOWN,
            "ranks": str(start.world_size),
            "device": start.device,
            "ended": start.end or "running, or killed",
            "versions": ", ".join(
                f"{name} {version}" for name, version in sorted(start.versions.items() - before.items())
            ),
        }
        for number, (before, start) in enumerate(zip(versions, run.starts, strict=False), start=1)
    )


def timeline_table(run: Run) -> pd.DataFrame:
    """Events of the supervisor and rollbacks."""
    return pd.DataFrame(
        {
            "": [str(number) for number in range(1, len(run.timeline) + 1)],
            "time (UTC)": run.timeline["time"].map("{:%Y-%m-%d %H:%M:%S}".format),
            "step": run.timeline["step"].map("{:,}".format, na_action="ignore").fillna(""),
            "event": run.timeline["event"].str.replace("_", " "),
            "details": run.timeline["details"],
        }
    )


def find_metrics(runs: Sequence[Run], prefix: str) -> list[str]:
    """Names of the metrics of any phase with a prefix, numbers in them by their value."""

    def order(name: str) -> list[tuple[str, int]]:
        return [(text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name)]

    return sorted({name for run in runs for name in run.curves if name.startswith(prefix)}, key=order)


def plot_metrics(
    names: Mapping[str, str],
    runs: Sequence[Run],
    *,
    y: str,
    clip: bool = False,
    share: bool = False,
    from_zero: bool = False,
) -> str | None:
    """Draw metrics over steps, with the beginnings of phases, resumptions and rollbacks.

    A metric by itself has a band between the extremes of each interval.

    Args:
        names: labels by the name of the metric; metrics that no phase has are skipped.
        runs: the phases.
        y: label of the vertical axis.
        clip: cut off the largest values, from the beginning of training, which would flatten the rest.
        share: show values from 0 to 1 as percentages.
        from_zero: begin the vertical axis at 0.

    Returns:
        The data URI of an SVG; None without a metric.
    """
    curves = {
        label: [(run.first_step, curve) for run in runs if (curve := run.curve(name))] for name, label in names.items()
    }
    curves = {label: of_phases for label, of_phases in curves.items() if of_phases}
    if not curves:
        return None
    figure, axes = subplots()
    for (line, colour), (label, of_phases) in zip(itertools.cycle(STYLES), curves.items(), strict=False):
        for i, (first_step, curve) in enumerate(of_phases):
            steps = np.array(curve.steps) + first_step
            if len(curves) == 1 and curve.width > 1:
                axes.fill_between(steps, *curve.extremes, color=colour, alpha=0.18, linewidth=0)
            marker = "o" if len(steps) <= POINTS_MARKED else ""
            name = plain(label) if i == 0 else None
            axes.plot(steps, curve.means, marker + line, markersize=4, color=colour, linewidth=1.3, label=name)
    if clip:
        _clip(axes, [mean for of_phases in curves.values() for _, curve in of_phases for mean in curve.means])
    if from_zero:
        axes.set_ylim(bottom=0)
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    has_marks = _mark_events(axes, runs)
    _mark_phases(axes, runs)
    last = max(runs[-1].first_step + runs[-1].num_steps, 1)
    axes.set(xlabel="optimizer step", ylabel=y, xlim=(-0.01 * last, 1.01 * last))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if len(curves) > 1 or has_marks:
        legend_beside(axes)
    return svg_uri(figure)


def _clip(axes: Axes, means: Sequence[float]) -> None:
    """Cut off the largest 2 % of the values."""
    if len(means) >= 20:
        low, high = np.quantile(means, [0.0, 0.98])
        margin = 0.08 * (high - low) or 0.05 * abs(high)
        axes.set_ylim(low - margin, high + margin)


def _mark_events(axes: Axes, runs: Sequence[Run]) -> bool:
    """Mark resumptions, by how the start before them ended, and rollbacks."""
    marks: dict[str, list[int]] = {}
    for run in runs:
        for before, after in itertools.pairwise(run.starts):
            if (kind := before.end.split(" (")[0]) in MARKS:
                marks.setdefault(kind, []).append(run.first_step + after.step)
        if rollbacks := run.timeline.loc[run.timeline["event"] == ROLLBACK, "step"].tolist():
            marks.setdefault(ROLLBACK, []).extend(run.first_step + step for step in rollbacks)
    for kind, steps in marks.items():
        label = "rollback of a wrong loss" if kind == ROLLBACK else f"resumed, before: {kind}"
        height, marker = (0.97, "v") if kind == ROLLBACK else (0.03, "^")
        axes.plot(steps, [height] * len(steps), marker, color=MARKS[kind], markersize=6,
                  transform=axes.get_xaxis_transform(), clip_on=False, label=label)  # fmt: skip
    return bool(marks)


def _mark_phases(axes: Axes, runs: Sequence[Run]) -> None:
    """Mark the beginnings of later phases, and name all, or number them if a name does not fit."""
    for run in runs[1:]:
        axes.axvline(run.first_step, color=DARK, linewidth=0.9, linestyle="--")
    per_step = LETTERS / max(sum(run.num_steps for run in runs), 1)
    fits = all(len(run.name) < run.num_steps * per_step for run in runs)
    for number, run in enumerate(runs if len(runs) > 1 else [], start=1):
        middle, name = run.first_step + run.num_steps / 2, plain(run.name) if fits else str(number)
        axes.text(middle, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", fontsize=8.5)


def spread(number: int, limit: int) -> list[int]:
    """Evenly spaced indices, at most `limit`, with the first and the last."""
    return np.linspace(0, number - 1, min(number, limit)).round().astype(int).tolist()


def duration(hours: float) -> str:
    """Hours as days, hours, minutes and seconds."""
    return str(datetime.timedelta(seconds=round(3600 * hours)))
