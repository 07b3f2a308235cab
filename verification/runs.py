"""Run a recipe as real processes, disturb it, read what it leaves behind, and compare it with another run."""

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from demo.shapes import write_data_set
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.read import read_weights
from diffusion.config.model import Architecture, ModelConfig, Weights
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.models import load_frozen_parts
from diffusion.preparation.config import BucketsConfig, PrepareConfig, ScorerConfig
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.prepare import prepare
from diffusion.reports.tables import text_table
from verification.callbacks import MOMENTS, step_hashes
from verification.ways import RunSpec, resume_size

ROOT = Path(__file__).resolve().parent.parent
MAX_LOSS_DIFFERENCE = 1e-5
"""Relative; more is a failure."""

MAX_WEIGHT_DIFFERENCE = 5e-3
"""Of a tensor, relative to its largest value; more is a failure. Muon turns rounding into updates of full size."""

MAX_AVERAGE_DIFFERENCE = 1e-5
"""The same of averages; they may differ by twice as much as the weights do, if that is more."""

TIMEOUT = 900.0
"""Seconds that one start may take."""

Launcher = Callable[[int], list[str]]
"""The command that starts a program on so many ranks; the program and its arguments follow it."""


class VerificationError(Exception):
    """A run of the verification did not go as it should; says where its log is."""


def composer(num_ranks: int) -> list[str]:
    """Composer's launcher."""
    return [str(Path(sys.executable).parent / "composer"), "-n", str(num_ranks)]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A configuration that is run in several ways."""

    yaml: Path
    overrides: tuple[str, ...]
    """`key=value`, for all runs."""

    num_steps: int
    root: Path
    """Folder of the runs."""

    seed: int = 0
    """Determines the steps at which runs are disturbed."""

    launcher: Launcher = composer

    def command(self, spec: RunSpec, folder: Path, num_ranks: int, data: Sequence[str], *plugins: str) -> list[str]:
        """Command that starts a run in a folder, with its data as overrides and further plug-ins."""
        callbacks = [plugin("verification.callbacks.DrawTrace", folder=f"'{folder / 'trace'}'"), *plugins]
        return [
            *self.launcher(num_ranks),
            str(ROOT / "run.py"),
            str(self.yaml),
            *self.overrides,
            *data,
            f"output_folder={folder}",
            f"trainer.max_duration={self.num_steps}ba",
            f"trainer.device_train_microbatch_size={spec.microbatch}",
            f"trainer.parallelism={spec.parallelism}",
            f"data.num_workers={spec.workers}",
            f"plugins.callbacks=[{', '.join(callbacks)}]",
        ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves behind."""

    spec: RunSpec
    folder: Path
    hashes: dict[int, str]
    """Of what was drawn, by step."""

    losses: dict[int, float]
    """Training loss, by step."""

    interrupted_at: int | None
    """Step in which it was disturbed."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run against its reference."""

    outcome: Outcome
    num_wrong_steps: int
    """Steps in which something else was drawn than in the reference."""

    loss: float
    """Largest relative difference of the loss of a step."""

    weights: float
    """Largest over the tensors of max |difference| / max |weight|, at the end."""

    average: float
    """The same of the averaged weights."""

    @property
    def max_average(self) -> float:
        """Largest difference of an average that is not a failure."""
        return max(MAX_AVERAGE_DIFFERENCE, 2 * self.weights)

    @property
    def is_equal(self) -> bool:
        """Whether the promise was kept."""
        is_near = self.weights <= MAX_WEIGHT_DIFFERENCE and self.average <= self.max_average
        return self.num_wrong_steps == 0 and self.loss <= MAX_LOSS_DIFFERENCE and is_near


def make_data(folder: Path, resolution: int) -> Path:
    """Write small data into a folder and return it: drawn shapes in `prepared/` and `latents/`, and `vae/`.

    The VAE has random weights: it need not be good, only the same for all runs.
    """
    write_data_set(folder / "source", 400, seed=5)
    sources = [str(folder / "source" / layout) for layout in ("images", "webdataset", "parquet")]
    buckets = BucketsConfig(edges=[32, 64])
    scorers = [ScorerConfig(path="demo.shapes.Brightness", column="brightness")]
    out = str(folder / "prepared")
    prepare(PrepareConfig(sources=sources, out=out, buckets=buckets, workers=1, scorers=scorers), report=False)
    parts = load_frozen_parts(ModelConfig(architecture=Architecture.tiny))
    parts.vae.save_pretrained(folder / "vae")  # pyright: ignore[reportCallIssue]
    options = {"models": EncodingModels.of(parts), "resolutions": [resolution], "scores": ["brightness"]}
    encode(out, folder / "latents", **options)
    return folder


def run(recipe: Recipe, spec: RunSpec, data: Sequence[str]) -> Outcome:
    """Run a recipe in one way, from the beginning, with overrides that name its data.

    Raises:
        VerificationError: The run failed, or did not end as a disturbed run should.
    """
    folder, num_ranks, interrupted_at = recipe.root / spec.name, spec.world_size, None
    folder.mkdir(parents=True)
    start = time.monotonic()
    if spec.interruption != "none":
        chance = random.Random(f"{recipe.seed} {spec.name}")
        interrupted_at = chance.randrange(recipe.num_steps // 6, recipe.num_steps * 5 // 6)
        moment = chance.choice(MOMENTS)
        settings = {"step": interrupted_at, "moment": moment, "kind": spec.interruption}
        disturbance = plugin("verification.callbacks.Disturbance", **settings)
        code = _run(recipe.command(spec, folder, num_ranks, data, disturbance), folder)
        if not code:
            raise VerificationError(f"{spec.name}: the disturbed run ended with exit code 0; see {folder}/log.txt")
        if spec.interruption == "term" and not (folder / "preempted.json").is_file():
            raise VerificationError(f"{spec.name}: no preempted.json after SIGTERM; see {folder}/log.txt")
        num_ranks = resume_size(spec)
    if code := _run(recipe.command(spec, folder, num_ranks, data), folder):
        raise VerificationError(f"{spec.name}: exit code {code}; see {folder}/log.txt")
    return read_outcome(recipe, spec, folder, interrupted_at=interrupted_at, seconds=time.monotonic() - start)


def plugin(path: str, **arguments: object) -> str:
    """An entry of `plugins.callbacks`."""
    values = ", ".join(f"{key}: {value}" for key, value in arguments.items())
    return f"{{path: {path}, arguments: {{{values}}}}}"


def _run(command: Sequence[str], folder: Path) -> int:
    """Return the exit code of a job."""
    with (folder / "log.txt").open("ab") as log:
        process = psutil.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONWARNINGS": "ignore"}, start_new_session=True
        )
    try:
        return process.wait(TIMEOUT)
    except psutil.TimeoutExpired:
        for member in [*process.children(recursive=True), process]:
            member.kill()
        raise VerificationError(f"{folder.name}: still running after {TIMEOUT:g} s; see {folder}/log.txt") from None


def read_outcome(
    recipe: Recipe, spec: RunSpec, folder: Path, *, interrupted_at: int | None = None, seconds: float = 0.0
) -> Outcome:
    """Read what a run has left in its folder.

    Raises:
        VerificationError: The loss of a step is missing or recorded twice.
    """
    steps, losses = series(read_metrics(folder / "metrics.jsonl"), TRAIN_LOSS)
    if steps != list(range(recipe.num_steps)):
        raise VerificationError(f"{folder.name}: losses of steps {steps} instead of each step once; see {folder}")
    return Outcome(
        spec=spec,
        folder=folder,
        hashes=step_hashes(folder / "trace"),
        losses=dict(zip(map(int, steps), losses, strict=True)),
        interrupted_at=interrupted_at,
        seconds=seconds,
    )


def compare(outcome: Outcome, reference: Outcome) -> Comparison:
    """Compare a run with the reference of its data setting."""
    steps = sorted(reference.losses)
    return Comparison(
        outcome=outcome,
        num_wrong_steps=sum(outcome.hashes.get(step) != reference.hashes.get(step) for step in steps),
        loss=float(np.max([abs(outcome.losses[step] / reference.losses[step] - 1.0) for step in steps])),
        weights=_largest_difference(outcome.folder, reference.folder, Weights.raw),
        average=_largest_difference(outcome.folder, reference.folder, Weights.ema),
    )


def _largest_difference(run: Path, reference: Path, weights: Weights) -> float:
    found, expected = (read_weights(resolve_checkpoint(str(folder)), weights) for folder in (run, reference))
    assert expected.keys() == found.keys()
    tiny = torch.finfo(torch.float32).tiny
    differences = [
        ((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=tiny)).item()
        for name in expected
    ]
    return float(np.max(differences))  # NaN if one is, unlike max.


def format_table(comparisons: Sequence[Comparison]) -> str:
    """One line per run, aligned."""
    head = ("run", "resumed at", "draws", "loss", "weights", "EMA", "seconds")
    return "\n".join(text_table([head, *(_row(comparison) for comparison in comparisons)]))


def _row(comparison: Comparison) -> tuple[str, ...]:
    outcome, wrong = comparison.outcome, comparison.num_wrong_steps
    return (
        outcome.spec.name,
        "" if outcome.interrupted_at is None else f"step {outcome.interrupted_at}",
        "equal" if wrong == 0 else f"{wrong} of {len(outcome.losses)} DIFFER",
        _difference(comparison.loss, MAX_LOSS_DIFFERENCE),
        _difference(comparison.weights, MAX_WEIGHT_DIFFERENCE),
        _difference(comparison.average, comparison.max_average),
        f"{outcome.seconds:.0f}",
    )


def _difference(value: float, limit: float) -> str:
    return f"{value:.1e}" + ("" if value <= limit else " TOO MUCH")
