"""Sweeps: one run at several points of its configuration, from a file in the format of `wandb sweep`.

`read_sweep` reads the file, `make_points` chooses the values and checks each configuration, `run_points` trains, and
`result_table` collects the metrics. Only methods without a server are here: `grid` and `random`.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import random
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from omegaconf import MISSING

from diffusion.callbacks.metrics_file import TRAIN_LOSS
from diffusion.checkpointing.resume import FINISHED
from diffusion.config.loading import from_dict, load_config, read_yaml, to_yaml
from diffusion.errors import ConfigurationError
from diffusion.files import open_lock
from diffusion.operations.supervisor import split_command
from diffusion.reports.run import find_results, read_points, read_run

log = logging.getLogger(__name__)

LOG = "sweep.log"
"""In the folder of a point: the output of its process."""

_LOCK = "sweep.lock"
_FINAL_SHARE = 0.1
"""Part of the run at its end over which the training loss is averaged."""


class Method(str, Enum):
    """How points are chosen."""

    grid = "grid"
    random = "random"


class Goal(str, Enum):
    """Whether small or large values of a metric are better."""

    minimize = "minimize"
    maximize = "maximize"


class Distribution(str, Enum):
    """Distribution of a random parameter."""

    uniform = "uniform"
    int_uniform = "int_uniform"
    log_uniform_values = "log_uniform_values"


@dataclass(kw_only=True)
class Parameter:
    """A key of the configuration that varies."""

    value: Any = MISSING
    """One value for all points."""

    values: list[Any] | None = None
    """Possible values. A grid takes all of them, a random sweep draws one."""

    distribution: Distribution | None = None
    """Distribution between `min` and `max`. null: `int_uniform` between integers, `uniform` between other numbers."""

    min: Any = None
    """Smallest value."""

    max: Any = None
    """Largest value, included."""


@dataclass(kw_only=True)
class Metric:
    """The order of the points in the table."""

    name: str = TRAIN_LOSS
    """Name in metrics.jsonl: the last value, and for the training loss the mean over the last tenth of the steps."""

    goal: Goal = Goal.minimize
    """Whether small or large values are better."""


@dataclass(kw_only=True)
class SweepConfig:
    """A sweep."""

    name: str | None = None
    """Name of the sweep. null: name of the file."""

    description: str | None = None
    """Description on wandb's pages."""

    project: str | None = None
    """wandb's project, for `wandb sweep`."""

    entity: str | None = None
    """wandb's entity, for `wandb sweep`."""

    program: str = "run.py"
    """Program in the command."""

    method: Method = Method.grid
    """`grid`: every combination of values. `random`: `run_cap` random points."""

    run_cap: int | None = None
    """Number of points of a random sweep."""

    metric: Metric = field(default_factory=Metric)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """Dotted keys of the run. `overrides` varies several keys together: each of its values is a group of keys."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep file."""

    name: str
    settings: SweepConfig
    command: list[str]
    """Words, among them `${interpreter}`, `${program}`, a YAML file and `${args_no_hyphens}`."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run of a sweep."""

    name: str
    """Hash of the configuration: the same point has the same name in every sweep."""

    values: Mapping[str, Any]
    command: list[str]
    folder: Path

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its end."""
        return (self.folder / FINISHED).is_file()


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        ConfigurationError: the method needs wandb's server, a key is unknown, or the command does not take parameters.
    """
    values = read_yaml(path)
    command = values.pop("command", None)  # Its ${...} are filled in for each point, and are no interpolations.
    if values.get("method") == "bayes" or "early_terminate" in values:
        raise ConfigurationError(
            f"{path} needs wandb's server (method bayes, early_terminate). Start it with `wandb sweep {path}` and "
            "`wandb agent`, or choose method grid or random without early_terminate."
        )
    settings = from_dict(SweepConfig, values, str(path))
    if not isinstance(command, list) or "${args_no_hyphens}" not in command:
        raise ConfigurationError(
            f"{path}: `command` does not pass the parameters on. Write command: ['${{env}}', '${{interpreter}}', "
            "'${program}', yamls/phase1.yaml, '${args_no_hyphens}']."
        )
    if not settings.parameters:
        raise ConfigurationError(f"{path}: no key below `parameters`. Name keys of the configuration.")
    return Sweep(name=settings.name or path.stem, settings=settings, command=[str(word) for word in command])


def choose_values(settings: SweepConfig, seed: int) -> list[dict[str, Any]]:
    """Choose the values of each point.

    Args:
        settings: the sweep.
        seed: of a random sweep. A value depends on seed, key and number of the point only.

    Returns:
        For each point the keys and their values.

    Raises:
        ConfigurationError: a parameter does not fit the method.
    """
    for key, parameter in settings.parameters.items():
        _check(key, parameter, settings.method)
    if settings.method is Method.grid:
        choices = [_values(parameter) or [] for parameter in settings.parameters.values()]
        return [dict(zip(settings.parameters, values, strict=True)) for values in itertools.product(*choices)]
    if settings.run_cap is None or settings.run_cap < 1:
        raise ConfigurationError(f"run_cap is {settings.run_cap}: set it to the number of random points.")
    return [
        {key: _draw(one, random.Random(f"{seed}/{key}/{number}").random()) for key, one in settings.parameters.items()}
        for number in range(settings.run_cap)
    ]


def make_points(
    sweep: Sweep, folder: Path, *, interpreter: Sequence[str], overrides: Sequence[str], seed: int
) -> list[Point]:
    """Make the points of a sweep, and check the configuration of each.

    Args:
        sweep: the sweep file.
        folder: parent of the run folders.
        interpreter: words of the launcher, for `${interpreter}`.
        overrides: `key.sub=value` for all points.
        seed: of a random sweep.

    Raises:
        ConfigurationError: a configuration is wrong, or two points have the same one.
    """
    points: dict[str, Point] = {}
    for values in choose_values(sweep.settings, seed):
        words = {
            "${env}": ["/usr/bin/env"],
            "${interpreter}": interpreter,
            "${program}": [sweep.settings.program],
            "${args_no_hyphens}": [*(f"{key}={json.dumps(value)}" for key, value in values.items()), *overrides],
        }
        command = [part for word in sweep.command for part in words.get(word, [word])]
        yaml, given = split_command(command)
        config = load_config(yaml, [*given, f"run_name={sweep.name}", f"group={sweep.name}", "output_folder=point"])
        name = hashlib.sha256(to_yaml(config).encode()).hexdigest()[:10]
        if name in points:
            raise ConfigurationError(
                f"{sweep.name}: the points {dict(points[name].values)} and {dict(values)} are the same run. Remove a "
                "value, or the override of a varied key."
            )
        own = [f"run_name={sweep.name}-{name}", f"group={sweep.name}", f"output_folder={folder / name}"]
        points[name] = Point(name=name, values=values, command=[*command, *own], folder=folder / name)
    return list(points.values())


def run_points(points: Sequence[Point], *, num_jobs: int) -> dict[str, str]:
    """Run the unfinished points, each in a process of its own.

    The process inherits a lock on the folder of its point. A point outlives a killed sweep, and the next sweep waits
    for it.

    Args:
        points: all points.
        num_jobs: number of simultaneous points.

    Returns:
        Names of the unfinished points, and the reason.
    """
    running: set[subprocess.Popen] = set()
    failed: dict[str, str] = {}

    def run(point: Point, wait: bool) -> None:
        if point.name in failed or point.is_finished:
            return
        point.folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = open_lock(point.folder / _LOCK, timeout=None if wait else 0.0)
        except TimeoutError:
            log.info("point %s runs already", point.name)
            return
        try:
            if point.is_finished:
                return
            log.info("point %s begins: %s", point.name, dict(point.values))
            with (point.folder / LOG).open("ab") as output:
                process = subprocess.Popen(
                    point.command, stdout=output, stderr=output, start_new_session=True, pass_fds=[lock]
                )
            running.add(process)
            code = process.wait()
            running.discard(process)
        finally:
            os.close(lock)
        if code or not point.is_finished:
            failed[point.name] = f"exit code {code}" if code else "not finished at the end of its command"
        log.info("point %s: %s", point.name, failed.get(point.name, "finished"))

    pool = ThreadPoolExecutor(num_jobs)
    try:
        for wait in (False, True):
            list(pool.map(lambda point, wait=wait: run(point, wait), points))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(running):
            process.send_signal(signal.SIGTERM)
        pool.shutdown()
    return failed


def result_table(points: Sequence[Point], metric: Metric, failed: Mapping[str, str]) -> pd.DataFrame:
    """Collect the numbers of each point.

    Args:
        points: of the sweep.
        metric: order of the points, the best first.
        failed: names of the unfinished points, and the reason.

    Returns:
        A row for each point, with the columns `point`, `status`, its values, `loss/train/total`, `metrics/...`, the
        metrics of evaluations, `gpu_hours` and `cost` (with `plan.price_per_gpu_hour`) where they are known.
    """
    table = pd.DataFrame([_row(point, failed.get(point.name)) for point in points])
    if metric.name in table:
        table = table.sort_values(metric.name, ascending=metric.goal is Goal.minimize, na_position="last")
    return table


def format_table(table: pd.DataFrame, keys: Sequence[str], metric: Metric) -> str:
    """Format values, training loss, metric, GPU-hours and cost for a terminal."""
    names = dict.fromkeys(["point", *keys, TRAIN_LOSS, metric.name, "gpu_hours", "cost", "status"])
    return table[[name for name in names if name in table]].to_string(index=False, na_rep="", float_format="%.4g")


def draw(table: pd.DataFrame, keys: Sequence[str], metric: Metric, path: Path) -> None:
    """Draw the metric over each key, and over the cost (over GPU-hours where no price is known)."""
    names = [*keys, "cost" if "cost" in table else "gpu_hours"]
    figure = Figure(figsize=(3.6 * len(names), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        axes.set(xlabel=name, ylabel=metric.name)
        axes.grid(alpha=0.3)
        if not {name, metric.name} <= set(table):
            continue
        known = pd.DataFrame(table, columns=[name, metric.name]).dropna()
        if pd.api.types.is_numeric_dtype(known[name]):
            axes.plot(known[name], known[metric.name], "o")
            if not known.empty and 0 < 10 * known[name].min() <= known[name].max():
                axes.set_xscale("log")
        else:
            axes.plot(known[name].astype(str), known[metric.name], "o")
            axes.tick_params(axis="x", labelrotation=20)
    figure.savefig(path, dpi=110)


def _values(parameter: Parameter) -> list[Any] | None:
    return parameter.values if parameter.value == MISSING else [parameter.value]


def _check(key: str, parameter: Parameter, method: Method) -> None:
    low, high = parameter.min, parameter.max
    if (values := _values(parameter)) is not None:
        if not values:
            raise ConfigurationError(f"parameters.{key}.values is empty.")
    elif method is Method.grid:
        raise ConfigurationError(f"parameters.{key}: a grid needs `values`. List them, or use method: random.")
    elif not all(isinstance(limit, int | float) for limit in (low, high)) or low > high:
        raise ConfigurationError(f"parameters.{key} needs `values`, or numbers `min` and `max` with min <= max.")
    elif parameter.distribution is Distribution.log_uniform_values and low <= 0:
        raise ConfigurationError(f"parameters.{key}.min is {low}: log_uniform_values needs a number above 0.")


def _draw(parameter: Parameter, uniform: float) -> Any:
    """Map a number in [0, 1) to a value."""
    if (values := _values(parameter)) is not None:
        return values[int(uniform * len(values))]
    low, high, distribution = parameter.min, parameter.max, parameter.distribution
    if distribution is Distribution.log_uniform_values:
        return math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
    are_integers = isinstance(low, int) and isinstance(high, int)
    if distribution is Distribution.int_uniform or (distribution is None and are_integers):
        return int(low) + int(uniform * (int(high) - int(low) + 1))
    return low + uniform * (high - low)


def _row(point: Point, failure: str | None) -> dict[str, Any]:
    values = {
        key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in point.values.items()
    }
    row = {"point": point.name, "status": failure or "not begun", **values}
    if not (point.folder / "config.yaml").is_file():
        return row
    run = read_run(point.folder)
    row["status"] = failure or run.status
    row |= {name: curve.last for name, curve in run.curves.items() if name.startswith("metrics/")}
    if (loss := run.curve(TRAIN_LOSS)) is not None and loss.num_values:
        row[TRAIN_LOSS] = loss.recent(_FINAL_SHARE)
    evaluated = sorted(read_points(find_results(point.folder))[0], key=lambda one: one.step or 0)
    row |= {f"{one.metric} (guidance {one.guidance_scale})": one.value for one in evaluated}
    row["gpu_hours"] = run.gpu_hours
    if run.config is not None and run.config.plan.price_per_gpu_hour is not None:
        row["cost"] = row["gpu_hours"] * run.config.plan.price_per_gpu_hour
    return row
