"""What a run records of itself: its configuration in each checkpoint, and a row for each start and each end."""

import copy
import datetime
import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.utils import dist

from diffusion.callbacks.metrics_file import last_step
from diffusion.checkpointing.resume import PREEMPTED
from diffusion.models.latent_diffusion import LatentDiffusion

STARTS = "starts.jsonl"
"""In the run folder: one row when training starts or resumes, and one when it ends otherwise than by SIGKILL."""

_PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "diffusers", "transformers")


class RunRecord(Callback):
    """Store in each checkpoint what is needed to understand and use it.

    Args:
        record: plain containers: the resolved configuration, latent scaling, noise schedule.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the record: a sharded checkpoint is loaded into what this returns."""
        return copy.deepcopy(self.record)


def model_record(model: ComposerModel) -> dict[str, Any]:
    """Describe what a reader of a checkpoint needs beside the weights."""
    if not isinstance(model, LatentDiffusion):
        return {}
    schedule = dict(model.noise_scheduler.config)
    return {
        "latent_scaling": {"mean": list(model.latent_scaling.mean), "std": list(model.latent_scaling.std)},
        "noise_schedule": {key: value for key, value in schedule.items() if not key.startswith("_")},
    }


class StartsFile(LoggerDestination):
    """Write JSON lines on rank 0, `{"event": "start", "step": 5, ...}` and `{"event": "end", "step": 9, ...}`.

    A start without an end was killed. The row of a start has time, step, world size, device and versions; from the
    metrics file, the last step of the start before it and when that was written. This logger comes first: the others
    change the metrics file.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.metrics, self.marker = folder / STARTS, folder / "metrics.jsonl", folder / PREEMPTED
        self._is_running = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Write the row of a start."""
        if dist.get_global_rank() != 0:
            return
        self._is_running = True
        row: dict[str, Any] = {
            "event": "start",
            "time": _now(),
            "step": state.timestamp.batch.value,
            "world_size": dist.get_world_size(),
            "num_nodes": dist.get_world_size() // dist.get_local_world_size(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in _PACKAGES},
        }
        if (reached := last_step(self.metrics)) is not None:
            written = datetime.datetime.fromtimestamp(self.metrics.stat().st_mtime, datetime.timezone.utc)
            row |= {"reached_before": reached, "written_before": written.isoformat(timespec="seconds")}
        self._append(row)

    def close(self, state: State, logger: Logger) -> None:
        """Write the row of an end, and why: a signal, the end of the run, or (neither) an error."""
        if not self._is_running:
            return
        self._is_running = False
        row: dict[str, Any] = {"event": "end", "time": _now(), "step": state.timestamp.batch.value}
        if self.marker.is_file():
            row["signal"] = json.loads(self.marker.read_text(encoding="utf-8")).get("signal")
        elif state.max_duration is not None and state.timestamp >= state.max_duration:
            row["is_finished"] = True
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        """Append a row, on a line of its own also after a line that a kill has cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")


def last_logged_step(folder: Path) -> float:
    """Return the last step that any earlier start of a run has written to its metrics file; -1 for none."""
    steps = [-1.0]
    for line in (folder / STARTS).read_text(encoding="utf-8").splitlines():
        try:
            steps.append(json.loads(line).get("reached_before", -1))
        except json.JSONDecodeError:  # A line that a kill has cut off.
            continue
    return max(steps)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
