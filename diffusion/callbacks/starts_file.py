"""When a run was started and how each start ended, in a file beside the metrics."""

import datetime
import json
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from composer import Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist

from diffusion.callbacks.metrics_file import last_step
from diffusion.checkpointing.resume import PREEMPTED

STARTS = "starts.jsonl"
"""In the run folder: one row when training begins or continues, and one when it ends other than by being killed."""

_PACKAGES = ("torch", "mosaicml", "mosaicml-streaming", "diffusers", "transformers")


class StartsFile(LoggerDestination):
    """Write JSON lines on rank 0, `{"event": "start", "step": 5, ...}` and `{"event": "end", "step": 9, ...}`.

    A start that has no end was killed. A row of a start has the time, step, world size, device and versions, and of the
    start before it the last step in the metrics file and when that was written. It is logged before any
    other destination or callback touches the files of the start before: it comes first.

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
            "versions": _versions(),
        }
        if (reached := last_step(self.metrics)) is not None:
            written = datetime.datetime.fromtimestamp(self.metrics.stat().st_mtime, datetime.timezone.utc)
            row |= {"reached_before": reached, "written_before": written.isoformat(timespec="seconds")}
        self._append(row)

    def close(self, state: State, logger: Logger) -> None:
        """Write the row of an end, and why: a signal, or the end of the run, or (neither) an error."""
        if not self._is_running:
            return
        self._is_running = False
        step = state.timestamp.batch.value
        row: dict[str, Any] = {"event": "end", "time": _now(), "step": step}
        if self.marker.is_file():
            row["signal"] = json.loads(self.marker.read_text(encoding="utf-8")).get("signal")
        elif state.max_duration is not None and state.timestamp >= state.max_duration:
            row["is_finished"] = True
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        """Add a row; a last line that a kill has cut off is ended before it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **dict(_installed(_PACKAGES))}


def _installed(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
