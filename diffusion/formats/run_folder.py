"""The run folder: names of its files and folders, who writes them and when, and readers.

Rank 0 writes unless a line says otherwise.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusion.config.loading import from_dict, read_yaml
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import append_json_lines, read_json, read_json_lines, write_json

# At each start

CONFIG = "config.yaml"
"""Resolved configuration of the last start, without secrets."""

STARTS = "starts.jsonl"
"""A row when training starts or resumes, and one when it ends otherwise than by SIGKILL."""

LEASE = "lease.json"
"""The active start, renewed by a thread."""

HEARTBEATS = "heartbeats"
"""Folder of a small file per rank, written by that rank in each phase; elsewhere with
`operations.heartbeat_folder`."""

# While it trains

CHECKPOINTS = "checkpoints"
"""Folder of checkpoints, written by all ranks; elsewhere with `trainer.checkpoint_folder`."""

UPLOADS, DOWNLOADS = "uploads", "downloads"
"""Folders of checkpoints on their way to and from an object store, on each node."""

METRICS = "metrics.jsonl"
"""A row per step, without repeated steps, written when the next step begins."""

TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Folders of the loggers."""

SAMPLES = "samples"
"""Folder of image grids, `step-N.png`."""

AVERAGES, RECONSTRUCTED = "averages", "reconstructed"
"""Folders of stored power averages, and of averages of other widths that later commands make of them."""

COSTS = "costs.jsonl"
"""Seconds of each start by activity."""

BAD_IMAGES = "bad_images.jsonl"
"""A row per image that could not be decoded."""

WRONG_LOSSES = "wrong_losses.jsonl"
"""Samples of the steps whose loss was not finite or too high."""

ROLLBACK, ROLLBACKS = "rollback.json", "rollbacks.jsonl"
"""The rollback that the next start carries out, and a row per rollback."""

# At the end

FINISHED = "finished.json"
"""The step at which the run ended, written when everything after it is done."""

PREEMPTED = "preempted.json"
"""The run was interrupted by a signal and resumes when it is started again; written after the checkpoint."""

BUDGET = "budget.json"
"""The budget is spent."""

VAE, RECONSTRUCTIONS = "vae", "reconstructions.png"
"""Result of `task: autoencoder`."""

# By the supervisor and later commands

SUPERVISED = "supervised.lock"
"""Locked by the supervisor: its process and command."""

EVENTS = "events.jsonl"
"""A row per event that the supervisor noticed."""

REPORT = "report.html"
"""Written by `scripts/report.py`."""

# Names in the rows of METRICS

TRAIN_LOSS = "loss/train/total"
STALL = "time/checkpoint_stall"
"""Seconds for which a step waited for a checkpoint."""


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return (folder / CONFIG).is_file()


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Find run folders among some folders and up to three levels below them: `runs/sweeps/NAME/POINT`.

    Raises:
        ConfigurationError: a folder does not exist.
    """
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is no folder: give run folders, or folders that contain them")
        paths = (path for depth in ("", "*/", "*/*/", "*/*/*/") for path in folder.glob(f"{depth}{CONFIG}"))
        found |= {path.parent for path in paths if WANDB not in path.relative_to(folder).parts}
    return sorted(found)


def read_config(run: Path) -> Config:
    """Read the resolved configuration of a run.

    Raises:
        ConfigurationError: it is no run folder, or was written by a version with other keys.
    """
    check_is_run(run)
    return from_dict(Config, read_yaml(run / CONFIG), str(run / CONFIG))


def check_is_run(folder: Path) -> None:
    """Raise a ConfigurationError if a folder is no run folder."""
    if not is_run(folder):
        raise ConfigurationError(f"{folder} is not a run folder: it has no {CONFIG}")


def checkpoint_folder(run: Path) -> str | None:
    """Return the folder or URI of a run's checkpoints, if it is not in the run folder.

    Reads any version's configuration.

    Raises:
        ConfigurationError: it is damaged.
    """
    if not is_run(run):
        return None
    return (read_yaml(run / CONFIG).get("trainer") or {}).get("checkpoint_folder")


def finished_step(run: Path) -> int | None:
    """Return the step at which a run ended; None if it has not."""
    try:
        return int(json.loads((run / FINISHED).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def preemption_signal(run: Path) -> str | None:
    """Return the name of the signal that interrupted a run, as far as its marker says it; None without a marker."""
    try:
        return json.loads((run / PREEMPTED).read_text(encoding="utf-8"))["signal"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return "a signal"


# Metrics


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the rows of a metrics file in order, without a last line that was cut off."""
    return list(filter(None, read_json_lines(path)))


def series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of one metric."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [value for _, value in pairs]


# Rollbacks


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A return to an earlier checkpoint."""

    step: int
    """The step of the wrong loss, from 0."""

    loss: str
    limit: int
    """Checkpoints of more steps are removed."""

    skipped: tuple[int, ...] = ()
    """Steps whose updates are skipped from now on."""

    time: float
    """Seconds since 1970."""


def request_rollback(run: Path, rollback: Rollback) -> None:
    """Let the next start of a run roll back."""
    write_json(run / ROLLBACK, asdict(rollback))


def read_request(run: Path) -> Rollback | None:
    """Read the rollback that the next start carries out; a DataError if the request is damaged."""
    path = run / ROLLBACK
    return _to_rollback(read_json(path), path) if path.is_file() else None


def read_rollbacks(run: Path) -> list[Rollback]:
    """Read all rollbacks that a run has carried out; a DataError if a row is none."""
    path = run / ROLLBACKS
    return [_to_rollback(row, path) for row in read_json_lines(path) if row is not None]


def record_rollback(run: Path, rollback: Rollback) -> None:
    """Move the request to the record; it is recorded only once, even if an earlier start was interrupted here."""
    if rollback not in read_rollbacks(run):
        append_json_lines(run / ROLLBACKS, [asdict(rollback)])
    (run / ROLLBACK).unlink()


def _to_rollback(fields: Any, path: Path) -> Rollback:
    try:
        return Rollback(**{**fields, "skipped": tuple(fields["skipped"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is damaged, it holds no rollback: {error}. Remove it, or restore it") from error
