"""Run a recipe as real processes, disturb it, and read what it left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from diffusion.callbacks.metrics_file import TRAIN_LOSS, read_metrics, series
from diffusion.verification.plan import RunSpec, resume_size
from diffusion.verification.trace import step_hashes

POLL_SECONDS = 0.1


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
    """Steps that were done when it was disturbed."""

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


def run(recipe: Recipe, spec: RunSpec, data: Sequence[str]) -> Outcome:
    """Run a recipe in one way, from the beginning.

    Args:
        recipe: what is run.
        spec: the way.
        data: overrides that name the data of this setting.

    Raises:
        VerificationError: it failed, or was over before it could be disturbed.
    """
    folder = recipe.root / spec.name
    trace = folder / "trace"
    own = [
        *recipe.overrides,
        *data,
        f"output_folder={folder}",
        f"trainer.max_duration={recipe.num_steps}ba",
        f"trainer.device_train_microbatch_size={spec.microbatch}",
        f"trainer.parallelism={spec.parallelism}",
        f"data.num_workers={spec.workers}",
        f"plugins.callbacks=[{{path: diffusion.verification.trace.DrawTrace, arguments: {{folder: '{trace}'}}}}]",
    ]
    start = time.monotonic()
    interrupted_at = None
    folder.mkdir(parents=True)
    if spec.interruption != "none":
        step = random.Random(f"{recipe.seed} {spec.name}").randrange(recipe.num_steps // 6, recipe.num_steps * 5 // 6)
        interrupted_at = _disturb(recipe, spec, own, folder, step)
        _finish(recipe, resume_size(spec), own, folder)
    else:
        _finish(recipe, spec.world_size, own, folder)
    steps, losses = series(read_metrics(folder / "metrics.jsonl"), TRAIN_LOSS)
    if steps != list(range(recipe.num_steps)):
        raise VerificationError(f"{spec.name}: the losses are of steps {steps}, each once was expected; see {folder}")
    return Outcome(
        spec=spec,
        folder=folder,
        hashes=step_hashes(trace),
        losses=dict(zip(map(int, steps), losses, strict=True)),
        interrupted_at=interrupted_at,
        seconds=time.monotonic() - start,
    )


def _start(recipe: Recipe, num_ranks: int, overrides: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    command = [
        str(Path(sys.executable).parent / "composer"),
        *("-n", str(num_ranks)),
        str(recipe.program),
        str(recipe.yaml),
        *overrides,
    ]
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def _finish(recipe: Recipe, num_ranks: int, overrides: Sequence[str], folder: Path) -> None:
    process = _start(recipe, num_ranks, overrides, folder)
    try:
        code = process.wait(recipe.timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise VerificationError(f"{folder.name}: not over after {recipe.timeout:g} s; see {folder}/log.txt") from None
    if code:
        raise VerificationError(f"{folder.name}: ended with exit code {code}; see {folder}/log.txt")


def _disturb(recipe: Recipe, spec: RunSpec, overrides: Sequence[str], folder: Path, step: int) -> int:
    """Start a run, and kill it or send it SIGTERM when it has done so many steps. Returns how many it had done."""
    process = _start(recipe, spec.world_size, overrides, folder)
    deadline = time.monotonic() + recipe.timeout
    lines = folder / "trace" / "rank-0.jsonl"
    done = 0
    while done < step:
        if process.poll() is not None:
            raise VerificationError(f"{spec.name}: ended before step {step}; see {folder}/log.txt")
        if time.monotonic() > deadline:
            _kill(process)
            raise VerificationError(f"{spec.name}: did not reach step {step} in time; see {folder}/log.txt")
        done = lines.read_bytes().count(b"\n") if lines.is_file() else 0
        time.sleep(POLL_SECONDS)
    if spec.interruption == "kill":
        _kill(process)
        return done
    for rank in _ranks(process):
        rank.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise VerificationError(f"{spec.name}: went on for 60 s after SIGTERM; see {folder}/log.txt") from None
    if not (folder / "preempted.json").is_file():
        raise VerificationError(f"{spec.name}: left no marker after SIGTERM; see {folder}/log.txt")
    return done


def _ranks(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The launcher's children: one process per rank."""
    return psutil.Process(process.pid).children()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and everything that it started, at once."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        if member.is_running():
            member.kill()
    psutil.wait_procs(family, timeout=30)
    process.wait(30)
