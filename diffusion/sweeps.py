"""Sweeps: one run at several points of its configuration, from a file in the format of `wandb sweep`.

Grids and random points need no server. Everything else of the format does: `wandb sweep FILE` and `wandb agent`.
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
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from diffusion.config.checks import check
from diffusion.config.loading import leaves, load_config, read_yaml, to_dict, to_yaml
from diffusion.config.schema import Config
from diffusion.config.secrets import redact
from diffusion.errors import ConfigurationError, similar_names
from diffusion.files import open_lock
from diffusion.formats.run_folder import FINISHED, TRAIN_LOSS, is_run, read_config
from diffusion.operations.supervisor import split_command
from diffusion.reports.run import read_run

log = logging.getLogger(__name__)

LOG = "sweep.log"
"""In the folder of a point: the output of its process."""

_LOCK_SECONDS = 1.0
"""Interval at which a point that waits for its folder looks for the end of the sweep."""

_FINAL_SHARE = 0.1
"""Part of the run at its end over which the training loss is averaged."""

Sweep = Mapping[str, Any]
"""Content of a sweep file."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run of a sweep."""

    name: str
    """Hash of the configuration, by the version that began the point: equal in every sweep."""

    values: Mapping[str, Any]
    command: list[str]
    folder: Path


_OF_CHOICES = ("categorical", "constant")
"""Distributions of listed values."""


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file; what needs wandb's server is a `ConfigurationError`."""
    sweep = {"method": "grid", "program": "run.py", "metric": {}, **read_yaml(path)}
    if sweep["method"] not in ("grid", "random") or "early_terminate" in sweep:
        raise ConfigurationError(
            f"{path}: method {sweep['method']} or early_terminate needs wandb's server: `wandb sweep {path}` and "
            "`wandb agent`; method grid and random run here"
        )
    kinds: dict[str, tuple[type, str]] = {
        "program": (str, "a text"),
        "name": (str, "a text"),
        "run_cap": (int, "a whole number"),
        "command": (list, "a list"),
        "metric": (Mapping, "a group of keys"),
        "parameters": (Mapping, "a group of keys"),
    }
    for name, (kind, words) in kinds.items():
        if name in sweep and not isinstance(sweep[name], kind):
            raise ConfigurationError(f"{path}: {name} is {sweep[name]!r}, and must be {words}")
    keys = [*kinds, "method", "entity", "project", "description"]
    for key, section, known in (("", sweep, keys), ("metric.", sweep["metric"], ["name", "goal", "target"])):
        for name in section.keys() - {*known}:
            meant = " or ".join(key + one for one in similar_names(name, known))
            remedy = f"did you mean {meant}?" if meant else f"here there are {', '.join(known)}"
            raise ConfigurationError(f"{path}: unknown key {key}{name}: {remedy}")
    for word in sweep.get("command", ()):
        if not isinstance(word, str | int | float):
            raise ConfigurationError(f"{path}: command has {word!r}, and must be a list of texts")
    if sweep.get("run_cap", 1) < 1:
        raise ConfigurationError(f"{path}: run_cap is {sweep['run_cap']}, and must be at least 1")
    if not sweep.get("parameters") or "${args_no_hyphens}" not in sweep.get("command", ()):
        raise ConfigurationError(
            f"{path} needs `parameters`, which are keys of the configuration, and a `command` that passes them on: "
            "['${env}', '${interpreter}', '${program}', yamls/phase1.yaml, '${args_no_hyphens}']"
        )
    for key, parameter in sweep["parameters"].items():
        if (
            not isinstance(parameter, Mapping)
            or not isinstance(parameter.get("values", []), list)
            or not all(isinstance(parameter.get(limit, 0), int | float) for limit in ("min", "max"))
        ):
            raise ConfigurationError(
                f"{path}: parameters.{key} must be a group of keys, such as {{values: [1, 2]}} or {{min: 1, max: 2}}"
            )
        unknown = parameter.keys() - {"value", "values", "min", "max", "distribution"}
        if unknown or (_choices(parameter) and parameter.get("distribution", "categorical") not in _OF_CHOICES):
            names = ", ".join(sorted(unknown)) or "values and a distribution"
            raise ConfigurationError(f"{path}: parameters.{key} has {names}, which needs `wandb sweep {path}`")
    if not isinstance(name := sweep["metric"].get("name", TRAIN_LOSS), str):
        raise ConfigurationError(f"{path}: metric.name is {name!r}, and must be a text")
    if (goal := sweep["metric"].get("goal", "minimize")) not in ("minimize", "maximize"):
        raise ConfigurationError(f"{path}: metric.goal is {goal}, not minimize or maximize")
    return sweep


def choose_values(sweep: Sweep, seed: int) -> list[dict[str, Any]]:
    """Choose the values of each point, by key.

    A random value depends on seed, key and number of the point only.
    """
    parameters: dict[str, dict[str, Any]] = sweep["parameters"]
    if sweep["method"] == "grid":
        choices = [_choices(parameter) for parameter in parameters.values()]
        if [] in choices:
            raise ConfigurationError(f"parameters.{list(parameters)[choices.index([])]}: a grid needs `values`")
        points = [dict(zip(parameters, values, strict=True)) for values in itertools.product(*choices)]
        if len(points) > sweep.get("run_cap", len(points)):
            raise ConfigurationError(
                f"run_cap is {sweep['run_cap']}, but the grid has {len(points)}: remove it, or set method: random"
            )
        return points
    if "run_cap" not in sweep:
        raise ConfigurationError("a random sweep needs run_cap, its number of points")
    return [
        {key: _draw(key, one, random.Random(f"{seed}/{key}/{number}").random()) for key, one in parameters.items()}
        for number in range(sweep["run_cap"])
    ]


def _choices(parameter: Mapping[str, Any]) -> list[Any]:
    return [parameter["value"]] if "value" in parameter else parameter.get("values", [])


def _draw(key: str, parameter: Mapping[str, Any], uniform: float) -> Any:
    """Map a number in [0, 1) to a value of a parameter."""
    if values := _choices(parameter):
        return values[int(uniform * len(values))]
    low, high = parameter.get("min", math.nan), parameter.get("max", math.nan)
    are_integers = isinstance(low, int) and isinstance(high, int)
    distribution = parameter.get("distribution", "int_uniform" if are_integers else "uniform")
    if distribution == "int_uniform" and low <= high:
        return low + int(uniform * (high - low + 1))
    if distribution == "uniform" and low <= high:
        return low + uniform * (high - low)
    if distribution == "log_uniform_values" and 0 < low <= high:
        return math.exp(math.log(low) + uniform * (math.log(high) - math.log(low)))
    raise ConfigurationError(
        f"parameters.{key} needs `values`, or `min` and `max` with the distribution uniform, int_uniform or "
        "log_uniform_values; others need `wandb sweep`"
    )


def make_points(
    sweep: Sweep, folder: Path, *, interpreter: Sequence[str], overrides: Sequence[str], seed: int
) -> list[Point]:
    """Make the points of a sweep, and check the configuration of each.

    Run folders lie in the folder, whose name is the group of the runs. `interpreter` replaces `${interpreter}`, the
    overrides are for all points, and the seed is that of a random sweep, which may draw a point of a list again.
    """
    points: dict[str, Point] = {}
    checkpoint_folders: set[str | None] = set()
    begun = _read_begun(folder)
    chosen = choose_values(sweep, seed)
    for values in chosen:
        words = {
            "${env}": ["/usr/bin/env"],
            "${interpreter}": interpreter,
            "${program}": [sweep["program"]],
            "${args_no_hyphens}": [*_overrides(values), *overrides],
        }
        command = [part for word in sweep["command"] for part in words.get(word, [str(word)])]
        yaml, given = split_command(command)
        unnamed = _overrides({"run_name": folder.name, "group": folder.name, "output_folder": "point"})
        config = load_config(yaml, [*given, *unnamed])
        name = hashlib.sha256(to_yaml(config).encode()).hexdigest()[:10]
        if not is_run(folder / name):  # Another version hashes other keys.
            name = begun.get(_as_recorded(config, folder.name), name)
        if not (folder / name / FINISHED).is_file():
            check(config, world_size=None, may_be_random=True)  # The program may build its own model.
        if name in points and sweep["method"] == "random":
            continue
        if name in points:
            same = redact([points[name].values, values])
            raise ConfigurationError(f"the points {same[0]} and {same[1]} are the same run: remove one")
        own = {"run_name": f"{folder.name}-{name}", "group": folder.name, "output_folder": str(folder / name)}
        checkpoint_folder = load_config(yaml, [*given, *_overrides(own)]).trainer.checkpoint_folder
        if checkpoint_folder is not None and checkpoint_folder in checkpoint_folders:
            raise ConfigurationError(
                f"several points have trainer.checkpoint_folder {checkpoint_folder}, and would continue one another: "
                "write ${run_name} into it"
            )
        checkpoint_folders.add(checkpoint_folder)
        points[name] = Point(name=name, values=values, command=[*command, *_overrides(own)], folder=folder / name)
    if num_repeated := len(chosen) - len(points):
        log.warning("%d of %d points repeat others: %d run", num_repeated, len(chosen), len(points))
    return list(points.values())


def _read_begun(folder: Path) -> dict[str, str]:
    """Read the points that have been begun: their names by configuration, as `_as_recorded` has it."""
    begun = {}
    for run in filter(is_run, folder.glob("*")):
        with suppress(ConfigurationError):
            config = read_config(run)
            if config.run_name == f"{folder.name}-{run.name}":  # It is no copy.
                begun[_as_recorded(config, folder.name)] = run.name
    return begun


def _as_recorded(config: Config, group: str) -> str:
    """Write a configuration as a run records it, without secrets and with absolute paths, whatever the run's name."""
    values = dict(leaves(redact(to_dict(config))))
    for key, value in values.items():
        if isinstance(value, str):
            path = os.path.abspath(os.path.expanduser(value))  # noqa: PTH100, PTH111 -- of any text
            values[key] = path.replace(config.run_name, group)
    return repr(values | dict.fromkeys(("run_name", "group", "output_folder")))


def _overrides(values: Mapping[str, Any]) -> list[str]:
    """Write values by key as the overrides of a command, in YAML."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def run_points(points: Sequence[Point], *, num_jobs: int) -> dict[str, str]:
    """Run the unfinished points, `num_jobs` at a time; return the reason of each that is unfinished then, by name.

    The process of a point inherits a lock on its folder. It outlives a killed sweep, and the next sweep waits for it.
    An exception of this thread, as by a signal, ends the running points, and no other one begins.
    """
    running: set[subprocess.Popen] = set()
    ended, starting = threading.Event(), threading.Lock()

    def run(point: Point) -> None:
        lock = None
        try:
            point.folder.mkdir(parents=True, exist_ok=True)
            while lock is None:
                if ended.is_set():
                    return
                with suppress(TimeoutError):
                    lock = open_lock(point.folder / "sweep.lock", timeout=_LOCK_SECONDS)
            with starting:
                if ended.is_set() or (point.folder / FINISHED).is_file():
                    return
                log.info("point %s begins: %s", point.name, redact(point.values))
                with (point.folder / LOG).open("ab") as output:
                    process = subprocess.Popen(
                        point.command, stdout=output, stderr=output, start_new_session=True, pass_fds=[lock]
                    )
                running.add(process)
            code = process.wait()
            running.discard(process)
            if code or not (point.folder / FINISHED).is_file():
                failed[point.name] = f"not finished, exit code {code}"
                log.warning("point %s: %s; see %s", point.name, failed[point.name], point.folder / LOG)
        except OSError as error:  # The launcher is missing, or the folder cannot be written.
            failed[point.name] = f"not begun: {error}"
        finally:
            if lock is not None:
                os.close(lock)

    failed: dict[str, str] = {}
    with ThreadPoolExecutor(num_jobs) as pool:
        try:
            list(pool.map(run, points))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            with starting:
                ended.set()
                for process in list(running):
                    process.send_signal(signal.SIGTERM)
    return failed


def result_table(points: Sequence[Point], metric: Mapping[str, str], failed: Mapping[str, str]) -> pd.DataFrame:
    """Table of the points, the best first: status, values, GPU-hours, training loss and the metric of the sweep.

    The metric has a `name` in metrics.jsonl and a `goal`, minimize or maximize.
    """
    rows = []
    name = metric.get("name", TRAIN_LOSS)
    for point in points:
        values = {key: json.dumps(value) if isinstance(value, dict) else value for key, value in point.values.items()}
        rows.append({"point": point.name, "status": "not begun", **values})
        if is_run(point.folder):
            run = read_run(point.folder)
            rows[-1] |= {"status": run.status, "gpu_hours": run.gpu_hours}
            if curve := run.curve(name):
                rows[-1][name] = curve.last if math.isfinite(curve.last) else math.nan
            if loss := run.curve(TRAIN_LOSS):
                rows[-1][TRAIN_LOSS] = loss.recent(_FINAL_SHARE)
        rows[-1]["status"] = failed.get(point.name, rows[-1]["status"])
    table = pd.DataFrame(rows)
    return table.sort_values(name, ascending=metric.get("goal") != "maximize") if name in table else table
