"""The beginning of a run's report: where it stands, the plan against what came of it, and its starts."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.callbacks.saving import STALL
from diffusion.checkpointing.layout import list_checkpoints
from diffusion.config.stores import is_store
from diffusion.evaluation.run_report.run_folder import Run, Start
from diffusion.html_page import Page
from diffusion.planning.plan import Plan, plan_run

VALIDATION_LOSS = "metrics/validation/loss"
THROUGHPUT = "throughput/samples_per_sec"
MFU = "throughput/device/mfu"
WAITING = "time/data_waiting_share"
UNKNOWN = "not known"
ROWS_SHOWN = 40
"""Of a table that grows with the time that a run takes."""


def plan_of(run: Run) -> Plan | None:
    """What the run was planned to be; None for a configuration of another version."""
    if run.config is None:
        return None
    num_ranks = run.starts[-1].world_size if run.starts else 1
    return plan_run(run.config, world_size=num_ranks)


def add_facts(page: Page, runs: Sequence[Run]) -> None:
    """Add the numbers that a reader looks for first, of the last phase."""
    run = runs[-1]
    planned = f"of {run.num_planned:,}" if run.num_planned else ""
    share = f" ({run.num_steps / run.num_planned:.0%})" if run.num_planned else ""
    facts = [("Status", run.status.split(";")[0], ""), ("Optimizer steps", f"{run.num_steps:,}", planned + share)]
    if run.config is not None:
        images = run.num_steps * run.config.data.global_batch_size
        facts.append(("Images seen", count_text(images), f"{run.config.data.global_batch_size:,} in each step"))
    if (loss := run.curve(TRAIN_LOSS)) is not None and loss.num_values:
        facts.append(("Training loss", f"{loss.recent():.4f}", "mean of the last 2 % of steps"))
    if (loss := run.curve(VALIDATION_LOSS)) is not None and loss.num_values:
        facts.append(("Validation loss", f"{loss.last:.4f}", f"at step {loss.last_step:,.0f}"))
    if (speed := run.curve(THROUGHPUT)) is not None and speed.num_values:
        facts.append(("Throughput", f"{speed.recent():,.4g} images/s", f"mean of the run {speed.mean:,.4g}"))
    if (mfu := run.curve(MFU)) is not None and mfu.num_values:
        facts.append(("MFU", f"{mfu.recent():.1%}", f"mean of the run {mfu.mean:.1%}"))
    if (waiting := run.curve(WAITING)) is not None and waiting.num_values:
        facts.append(("Waiting for data", f"{waiting.mean:.1%}", "of the steps' time"))
    if run.starts:
        interruptions = sum(start.end not in ("", "finished") for start in run.starts)
        facts.append(("Wall-clock time", hours_text(wall_hours(run)), f"{gpu_hours(run):,.4g} {_device(run)}-hours"))
        facts.append(("Starts", f"{len(run.starts)}", f"{interruptions} interrupted, {steps_lost(run):,} steps redone"))
    page.facts(facts)


def wall_hours(run: Run) -> float:
    """Hours that the run was running, as its starts tell."""
    return sum(start.hours for start in run.starts)


def gpu_hours(run: Run) -> float:
    """The same of all ranks together."""
    return sum(start.hours * start.world_size for start in run.starts)


def steps_lost(run: Run) -> int:
    """Steps that were done more than once, after a start that had no time to save."""
    pairs = zip(run.starts, run.starts[1:], strict=False)
    return sum(max(0, before.reached - after.step) for before, after in pairs if before.reached is not None)


def add_plan(page: Page, runs: Sequence[Run], plans: Sequence[Plan | None]) -> None:
    """Add a table of each phase's plan and what came of it."""
    page.heading("Plan and actual")
    for run, plan in zip(runs, plans, strict=True):
        if plan is None:
            page.note(f"{run.name}: its configuration was written by another version, so that there is no plan.")
            continue
        page.table(run.name, ["", "planned", "actual", "actual / planned"], _plan_rows(run, plan))
        unknown = [
            key
            for key, value in (
                ("plan.images_per_second", plan.images_per_second),
                ("plan.price_per_gpu_hour", run.config.plan.price_per_gpu_hour if run.config is not None else None),
            )
            if value is None
        ]
        if unknown:
            page.note(f"Time and cost are planned from {' and '.join(unknown)}, which the configuration leaves open.")
        if not run.starts:
            page.note("The actual time is not known: runs of this version write starts.jsonl, and this one has none.")


def _plan_rows(run: Run, plan: Plan) -> list[tuple[str, str, str, str]]:
    images = run.num_steps * plan.global_batch_size
    hours, of_gpus = (wall_hours(run), gpu_hours(run)) if run.starts else (None, None)
    price = run.config.plan.price_per_gpu_hour if run.config is not None else None
    cost = of_gpus * price if price is not None and of_gpus is not None else None
    speed = run.curve(THROUGHPUT)
    planned_hours = plan.days * 24 if plan.days is not None else None
    kept = _kept(run)
    rows = [
        (
            "optimizer steps",
            f"{plan.num_iterations:,}",
            f"{run.num_steps:,}",
            _done(run.num_steps, plan.num_iterations),
        ),
        ("images", f"{plan.num_images:,}", f"{images:,}", _done(images, plan.num_images)),
        _row("throughput", plan.images_per_second, speed.mean if speed is not None else None, "{:,.4g} images/s"),
        ("time", _optional(planned_hours, hours_text), _optional(hours, hours_text), _done(hours, planned_hours)),
        _row("GPU-hours", plan.gpu_hours, of_gpus, "{:,.4g}"),
        _row("cost", plan.cost, cost, "${:,.2f}"),
        ("ranks", f"{plan.num_ranks}", _ranks(run), ""),
        ("parameters trained", f"{plan.num_parameters:,}", "", ""),
        ("checkpoints kept", _optional(plan.num_checkpoints, "{:,}".format), _optional(kept, "{:,}".format), ""),
    ]
    if (stall := run.curve(STALL)) is not None and stall.num_values:
        text = f"{hours_text(stall.total / 3600)} in {stall.num_values} checkpoints"
        rows.append(("waiting for checkpoints", "", text, ""))
    return [row for row in rows if row[1:3] != (UNKNOWN, UNKNOWN)]


def _kept(run: Run) -> int | None:
    """Checkpoints that are there; None for those in an object store, which a report does not ask."""
    place = run.config.trainer.checkpoint_folder if run.config is not None else None
    if place is not None and is_store(place):
        return None
    return len(list_checkpoints(Path(place).expanduser() if place is not None else run.folder / "checkpoints"))


def _row(name: str, planned: float | None, actual: float | None, form: str) -> tuple[str, str, str, str]:
    return name, _optional(planned, form.format), _optional(actual, form.format), _done(actual, planned)


def _optional(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _done(actual: float | None, planned: float | None) -> str:
    return f"{actual / planned:.1%}" if planned and actual is not None else ""


def _ranks(run: Run) -> str:
    sizes = [size for size, _ in itertools.groupby(start.world_size for start in run.starts)]
    return ", then ".join(map(str, sizes)) if sizes else UNKNOWN


def _device(run: Run) -> str:
    return "rank" if all(start.device == "CPU" for start in run.starts) else "GPU"


def add_starts(page: Page, runs: Sequence[Run]) -> None:
    """Add a table of the times that the run was started."""
    page.heading("Starts and interruptions")
    for run in runs:
        if not run.starts:
            page.note(f"{run.name}: it has no starts.jsonl, which runs write when they begin, continue and end.")
            continue
        rows = [_start_row(number, start) for number, start in enumerate(run.starts, start=1)]
        head = ["", "began (UTC)", "from step", "to step", "ran", "ranks", "device", "ended"]
        page.table(run.name, head, _shortened(rows))
        latest = run.starts[-1].versions
        page.note(f"Versions at the last start: {', '.join(f'{name} {version}' for name, version in latest.items())}.")
        changed = sorted(
            {name for one in run.starts for name in one.versions if one.versions[name] != latest.get(name)}
        )
        if changed:
            page.note(f"Changed between starts: {', '.join(changed)}.")


def _shortened(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The first and the last of many rows."""
    hidden = len(rows) - ROWS_SHOWN
    if hidden <= 0:
        return list(rows)
    gap = ("...", f"{hidden} more", *[""] * (len(rows[0]) - 2))
    return [*rows[: ROWS_SHOWN // 2], gap, *rows[-ROWS_SHOWN // 2 :]]


def add_happenings(page: Page, runs: Sequence[Run]) -> None:
    """Add a table of what a supervisor has seen and done, and of each time that a run went back."""
    page.heading("What happened")
    for run in runs:
        if not run.happenings:
            page.note(f"{run.name}: nothing is known; scripts/supervise.py writes events.jsonl.")
            continue
        rows = [
            (
                f"{one.time:%Y-%m-%d %H:%M:%S}",
                f"{one.step:,}" if one.step is not None else "",
                one.kind,
                one.what,
                hours_text(one.seconds_lost / 3600) if one.seconds_lost is not None else "",
            )
            for one in run.happenings
        ]
        page.table(run.name, ["time (UTC)", "step", "", "what", "time lost"], _shortened(rows))


def _start_row(number: int, start: Start) -> tuple[str, ...]:
    return (
        str(number),
        f"{start.began:%Y-%m-%d %H:%M:%S}",
        f"{start.step:,}",
        f"{start.reached:,}" if start.reached is not None else "",
        hours_text(start.hours) if start.ended is not None else UNKNOWN,
        str(start.world_size),
        start.device,
        start.end or "still running, or killed",
    )


def hours_text(hours: float) -> str:
    """A time in the unit that suits it."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.3g} s"


def count_text(number: float) -> str:
    """A number of things in few characters."""
    for factor, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= factor:
            return f"{number / factor:,.4g} {unit}"
    return f"{number:,.0f}"
