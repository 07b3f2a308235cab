"""The sections of a run's report: what was learned, from which data, on how busy machines."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.callbacks.saving import STALL
from diffusion.curves import Curve
from diffusion.evaluation.run_report.data_mix import data_mix
from diffusion.evaluation.run_report.figures import Line, draw_bars, draw_lines, draw_profiles, line
from diffusion.evaluation.run_report.run_folder import Run
from diffusion.evaluation.run_report.summary import MFU, THROUGHPUT, UNKNOWN, VALIDATION_LOSS, WAITING
from diffusion.html_page import Page
from diffusion.planning.plan_text import size_text

GRIDS_SHOWN = 8
"""Sample grids of a phase."""

GRID_WIDTH = 1280
"""Pixels that a grid is reduced to."""

PROFILES_SHOWN = 5
"""Evaluations whose loss by timestep is drawn."""

HIT_RATE = "storage/cache_hit_rate"
_TIERS = ("fetched_bytes", "fetched_shards", "read_bytes")
_TIMESTEPS = re.compile(r"timesteps?[-_/ ](\d+)(?:-|_|to)(\d+)$")
_MACHINES = {
    "utilisation/gpu": "GPUs",
    "utilisation/gpu_memory": "GPU memory",
    "utilisation/cpu": "cores",
    "utilisation/memory": "memory",
    "utilisation/loader_workers": "loader workers",
    HIT_RATE: "found in the cache",
    MFU: "model FLOPs (MFU)",
}


def add_loss(page: Page, runs: Sequence[Run]) -> None:
    """Add the training loss, of all samples and of each stream."""
    page.heading("Training loss")
    whole = line(runs, TRAIN_LOSS, "all samples", has_band=True)
    if whole is None:
        page.note("No training loss yet: it is in metrics.jsonl after the first steps, unless loggers.file is false.")
        return
    width = max(curve.width for _, curve in whole.curves)
    mean = f" Each point is the mean of {width} steps; the shaded band reaches from their least to their largest."
    page.drawing(draw_lines([whole], runs, label="loss", clip=True), "Loss over the phases." + mean * (width > 1))
    for run in runs:
        curve = run.curve(TRAIN_LOSS)
        if curve is not None and curve.num_not_finite:
            page.text(
                f"{run.name}: the loss was not finite in {curve.num_not_finite:,} steps, first after step "
                f"{curve.first_not_finite:,.0f}."
            )
        if run.num_damaged:
            page.note(f"{run.name}: lines of metrics.jsonl that cannot be read, and are left out: {run.num_damaged}.")
    prefix = "loss/train/stream/"
    streams = list(dict.fromkeys(name for run in runs for name in run.below(prefix)))
    lines = [one for name in streams if (one := line(runs, prefix + name, name)) is not None]
    if lines:
        page.drawing(draw_lines(lines, runs, label="loss", clip=True), "Loss of the samples of each stream (bucket).")
    else:
        page.note("Loss of each stream: logged where data.streams names more than one.")


def add_validation(page: Page, runs: Sequence[Run]) -> None:
    """Add metrics of held-out data, over steps and by timestep."""
    page.heading("Validation")
    whole = line(runs, VALIDATION_LOSS, "all held-out data", has_points=True)
    others = [one for run in runs for one in run.below("metrics/") if not _TIMESTEPS.search(one)]
    names = [name for name in dict.fromkeys(others) if "metrics/" + name != VALIDATION_LOSS]
    of_streams = [name for name in names if name.startswith("validation/loss/")]
    lines = [whole] if whole is not None else []
    lines += _lines(runs, "metrics/", of_streams, lambda name: name.removeprefix("validation/loss/"))
    if lines:
        caption = "Loss of held-out data, at noise and timesteps that are the same in each evaluation."
        page.drawing(draw_lines(lines, runs, label="validation loss"), caption)
    else:
        page.note("No validation loss: give held-out data with `validation`, evaluated each trainer.eval_interval.")
    for name in names:
        if name not in of_streams and (one := line(runs, "metrics/" + name, name, has_points=True)) is not None:
            page.drawing(draw_lines([one], runs, label=name.rpartition("/")[2]), name)
    _add_timesteps(page, runs)


def _lines(runs: Sequence[Run], prefix: str, names: Sequence[str], label: Callable[[str], str]) -> list[Line]:
    found = (line(runs, prefix + name, label(name), has_points=True) for name in names)
    return [one for one in found if one is not None]


def _add_timesteps(page: Page, runs: Sequence[Run]) -> None:
    """Add the validation loss by timestep, at some evaluations of the last phase that has it."""
    bins: dict[tuple[int, int], Curve] = {}
    for run in runs:
        found = {(int(match[1]), int(match[2])): run.curves[name] for name, match in _timestep_metrics(run).items()}
        bins = found or bins
    if not bins:
        page.note("Validation loss by timestep: not logged.")
        return
    steps = next(iter(bins.values())).steps
    shown = spread(len(steps), PROFILES_SHOWN)
    profiles = {
        f"step {steps[i]:,.0f}": [((low + high) / 2, curve.means[i]) for (low, high), curve in sorted(bins.items())]
        for i in shown
        if all(len(curve.steps) == len(steps) for curve in bins.values())
    }
    if profiles:
        svg = draw_profiles(profiles, x="timestep", y="validation loss", bars=True)
        page.drawing(
            svg, "Validation loss by timestep: little noise on the left, almost nothing but noise on the right."
        )


def _timestep_metrics(run: Run) -> dict[str, re.Match[str]]:
    matches = {name: _TIMESTEPS.search(name) for name in run.curves if name.startswith("metrics/")}
    return {name: match for name, match in matches.items() if match is not None}


def add_samples(page: Page, runs: Sequence[Run]) -> None:
    """Add grids of images for the same prompts and seeds over time."""
    page.heading("Samples over time")
    if not any(run.samples for run in runs):
        page.note("No sample grids: give prompts with samples.prompts, drawn each samples.interval.")
        return
    for run in runs:
        steps = list(run.samples)
        prompts: list[str] = []
        for i in spread(len(steps), GRIDS_SHOWN):
            grid, shown = read_grid(run.samples[steps[i]])
            prompts = shown.get("prompts", prompts)
            weights = {"ema": ", average of the weights (EMA)", "raw": ", weights of that step"}
            more = weights.get(str(shown.get("weights")), "")
            guidance = f", guidance {shown['guidance_scale']:g}" if "guidance_scale" in shown else ""
            page.image(grid, f"{run.name}, step {steps[i]:,}{more}{guidance}", jpeg_quality=88)
        if prompts:
            page.note("Prompts, in the order of the images: " + "; ".join(prompts) + ".")
        if len(steps) > GRIDS_SHOWN:
            page.note(f"{GRIDS_SHOWN} of {len(steps)} grids; all are in {run.folder / 'samples'}.")


def read_grid(path: Path) -> tuple[Image.Image, dict[str, Any]]:
    """A sample grid, reduced to the page, and what it says of itself."""
    with Image.open(path) as image:
        text = getattr(image, "text", {}).get("samples", "{}")
        grid = image.convert("RGB")
    if grid.width > GRID_WIDTH:
        grid = grid.resize((GRID_WIDTH, round(grid.height * GRID_WIDTH / grid.width)), Image.Resampling.LANCZOS)
    elif grid.width < GRID_WIDTH // 2:
        factor = max(1, min(4, GRID_WIDTH // 2 // grid.width))
        grid = grid.resize((grid.width * factor, grid.height * factor), Image.Resampling.NEAREST)
    return grid, json.loads(text)


def add_data(page: Page, runs: Sequence[Run]) -> None:
    """Add what was drawn of each stream, against the plan."""
    page.heading("Data mix")
    for run in runs:
        if run.config is None or run.num_planned is None:
            page.note(f"{run.name}: not known, since its configuration was written by another version.")
            continue
        mix = data_mix(run.config, run.num_steps, run.num_planned * run.config.data.global_batch_size)
        if not mix.streams:
            page.note(f"{run.name}: its data is a plug-in, which has no streams.")
            continue
        planned_total = sum(stream.planned or 0 for stream in mix.streams)
        drawn_total = sum(stream.drawn or 0 for stream in mix.streams)
        rows = [
            (
                stream.name,
                f"{stream.num_samples:,}" if stream.num_samples is not None else UNKNOWN,
                f"{stream.planned:,.0f}" if stream.planned is not None else UNKNOWN,
                f"{stream.drawn:,}" if stream.drawn is not None else UNKNOWN,
                f"{stream.drawn / stream.num_samples:,.2f}" if stream.drawn is not None and stream.num_samples else "",
                _share(stream.planned, planned_total),
                _share(stream.drawn, drawn_total),
            )
            for stream in mix.streams
        ]
        head = ["stream", "samples in it", "planned draws", "drawn", "times seen", "planned share", "drawn share"]
        page.table(run.name, head, rows)
        if drawn_total and planned_total and len(mix.streams) > 1:
            shares = {
                "planned": [(stream.planned or 0) / planned_total for stream in mix.streams],
                "drawn": [(stream.drawn or 0) / drawn_total for stream in mix.streams],
            }
            names = [stream.name for stream in mix.streams]
            page.drawing(draw_bars(names, shares, x="share of the samples"), "Share of each stream (bucket).")
        if not drawn_total:
            page.note("What was drawn is computed from the streams' index.json, which cannot be read on this machine.")
        elif not mix.is_exact:
            page.note("The part of an epoch that was not finished is worked out in proportion.")


def _share(part: float | None, whole: float) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else ""


def add_machines(page: Page, runs: Sequence[Run]) -> None:
    """Add throughput, how busy the machines were, and what steps waited for."""
    page.heading("Throughput and machines")
    speed = line(runs, THROUGHPUT, "images/s", has_band=True)
    if speed is not None:
        svg = draw_lines([speed], runs, label="images per second", from_zero=True)
        page.drawing(svg, "Throughput of all ranks together.")
    else:
        page.note("Throughput: logged after 20 steps of a start.")
    waiting = line(runs, WAITING, "waiting for data")
    busy = [one for name, label in _MACHINES.items() if (one := line(runs, name, label)) is not None]
    shares = ([waiting] if waiting is not None else []) + busy
    if shares:
        svg = draw_lines(shares, runs, label="share", share=True, from_zero=True)
        page.drawing(svg, "How busy the machines were, and the share of the steps' time that waited for data.")
    else:
        page.note("Utilisation: logged each loggers.utilisation_interval steps.")
    for run in runs:
        _add_tiers(page, run)
    if not any(run.curve(MFU) for run in runs):
        page.note("MFU: logged where the model counts its FLOPs and the GPU is known to Composer.")
    if (stall := line(runs, STALL, "seconds", has_points=True)) is not None:
        svg = draw_lines([stall], runs, label="seconds", from_zero=True)
        page.drawing(svg, "Seconds for which a step waited for its checkpoint.")
    else:
        page.note("Waiting for checkpoints: logged at the first one.")


def _add_tiers(page: Page, run: Run) -> None:
    """Add what came from the store and from the disks, where data has a remote."""
    fetched, shards, read = (run.curve(f"storage/{name}") for name in _TIERS)
    rate = run.curve(HIT_RATE)
    if fetched is None or shards is None or read is None or rate is None:
        return
    page.note(
        f"{run.name}: {size_text(fetched.total)} in {shards.total:,.0f} shards came from the store, and samples of "
        f"{size_text(read.total)} from local disks; of {rate.mean:.1%} of them the shard was there when the loader "
        "looked for it. Steps after the last interval are not counted."
    )


def add_configurations(page: Page, runs: Sequence[Run]) -> None:
    """Add the resolved configurations, of later phases what is different."""
    page.heading("Configuration")
    for before, run in zip([None, *runs], runs, strict=False):
        if before is None:
            page.preformatted(run.config_text, f"{run.name}: resolved configuration, without secrets")
        else:
            old, new = set(before.config_text.splitlines()), set(run.config_text.splitlines())
            page.note(f"{run.name}: {len(new - old)} lines differ from {before.name}.")
            page.preformatted(run.config_text, f"{run.name}: resolved configuration, without secrets")


def spread(number: int, most: int) -> list[int]:
    """Indices of so many of a number of things: the first, the last, and others evenly between them."""
    if number <= most:
        return list(range(number))
    return sorted(set(np.linspace(0, number - 1, most).round().astype(int).tolist()))
