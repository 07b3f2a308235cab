"""Run a recipe as real processes, disturb it, and read what it left behind."""

import os
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from verification.disturbance import MOMENTS
from verification.forking import Launcher
from verification.plan import RunSpec, resume_size
from verification.trace import step_hashes


class VerificationError(Exception):
    """A run of the verification did not go as it should; says where its log is."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left behind."""

    spec: RunSpec
    folder: Path
    hashes: dict[int, str]
    """What was drawn in each step."""

    losses: dict[int, float]
    """Training loss of each step."""

    interrupted_at: int | None
    """Step in which it was disturbed."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is run."""

    yaml: Path
    overrides: tuple[str, ...]
    """`key=value`, for all runs."""

    num_steps: int
    root: Path
    """Folder of the runs."""

    program: Path
    """run.py."""

    seed: int = 0
    """Determines the steps at which runs are disturbed."""

    timeout: float = 900.0
    """Seconds that one start may take."""


def run(recipe: Recipe, spec: RunSpec, data: Sequence[str], launcher: Launcher) -> Outcome:
    """Run a recipe in one way, from the beginning.

    Args:
        recipe: what is run.
        spec: the way.
        data: overrides that name the data of this setting.
        launcher: starts its ranks.

    Raises:
        VerificationError: it failed, or did not end as a disturbed run should.
    """
    folder = recipe.root / spec.name
    trace = trace_plugin(folder)
    own = overrides_of(recipe, spec, [*data, f"output_folder={folder}"])
    start = time.monotonic()
    interrupted_at = None
    num_ranks = spec.world_size
    folder.mkdir(parents=True)
    if spec.interruption != "none":
        chance = random.Random(f"{recipe.seed} {spec.name}")
        interrupted_at = chance.randrange(recipe.num_steps // 6, recipe.num_steps * 5 // 6)
        moment = chance.choice(MOMENTS)
        disturbance = plugin("disturbance.Disturbance", step=interrupted_at, moment=moment, kind=spec.interruption)
        command = _command(recipe, launcher(num_ranks), [*own, f"plugins.callbacks=[{trace}, {disturbance}]"])
        _check_disturbed(_run(command, num_ranks, folder, recipe.timeout), spec, folder)
        num_ranks = resume_size(spec)
    command = _command(recipe, launcher(num_ranks), [*own, f"plugins.callbacks=[{trace}]"])
    if code := _run(command, num_ranks, folder, recipe.timeout):
        raise VerificationError(f"{folder.name}: ended with exit code {code}; see {folder}/log.txt")
    return read_outcome(recipe, spec, folder, interrupted_at=interrupted_at, seconds=time.monotonic() - start)


def overrides_of(recipe: Recipe, spec: RunSpec, data: Sequence[str]) -> list[str]:
    """Overrides of a run, without its plug-ins.

    Args:
        recipe: what is run.
        spec: the way.
        data: overrides that name its data and its folder.
    """
    return [
        *recipe.overrides,
        *data,
        f"trainer.max_duration={recipe.num_steps}ba",
        f"trainer.device_train_microbatch_size={spec.microbatch}",
        f"trainer.parallelism={spec.parallelism}",
        f"data.num_workers={spec.workers}",
    ]


def trace_plugin(folder: Path) -> str:
    """The entry of `plugins.callbacks` that writes what a run draws to `trace/` in its folder."""
    return plugin("trace.DrawTrace", folder=f"'{folder / 'trace'}'")


def read_outcome(
    recipe: Recipe, spec: RunSpec, folder: Path, *, interrupted_at: int | None = None, seconds: float = 0.0
) -> Outcome:
    """Read what a run has left in its folder.

    Raises:
        VerificationError: the loss of a step is missing or there twice.
    """
    steps, losses = series(read_metrics(folder / "metrics.jsonl"), TRAIN_LOSS)
    if steps != list(range(recipe.num_steps)):
        raise VerificationError(f"{folder.name}: the losses are of steps {steps}, each once was expected; see {folder}")
    return Outcome(
        spec=spec,
        folder=folder,
        hashes=step_hashes(folder / "trace"),
        losses=dict(zip(map(int, steps), losses, strict=True)),
        interrupted_at=interrupted_at,
        seconds=seconds,
    )


def _command(recipe: Recipe, launcher: Sequence[str], overrides: Sequence[str]) -> list[str]:
    return [*launcher, str(recipe.program), str(recipe.yaml), *overrides]


def _run(command: Sequence[str], num_ranks: int, folder: Path, timeout: float) -> int:
    """Return the exit code of a job."""
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "PYTHONWARNINGS": "ignore"}
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise VerificationError(f"{folder.name}: not over after {timeout:g} s; see {folder}/log.txt") from None


def plugin(name: str, **arguments: object) -> str:
    """An entry of `plugins.callbacks` for a callback of this package."""
    values = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return f"{{path: verification.{name}, arguments: {{{values}}}}}"


def _check_disturbed(code: int, spec: RunSpec, folder: Path) -> None:
    """A run that disturbs itself ends as it should."""
    if not code:
        raise VerificationError(
            f"{spec.name}: ended with exit code 0, as if nothing had happened; see {folder}/log.txt"
        )
    if spec.interruption == "term" and not (folder / "preempted.json").is_file():
        raise VerificationError(f"{spec.name}: left no marker after SIGTERM; see {folder}/log.txt")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and everything that it started, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family, timeout=30)
    process.wait(30)
