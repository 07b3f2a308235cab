"""Files that a run writes about itself: metrics, starts and ends."""

import datetime
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from composer import Logger, State
from composer.loggers import LoggerDestination

from diffusion.distributed import first_ranks, is_first_rank, world_size
from diffusion.errors import explained_writes
from diffusion.files import append_json_lines, atomic_path, read_json_lines
from diffusion.formats.run_folder import STARTS, preemption_signal
from diffusion.launch import package_versions

log = logging.getLogger(__name__)


class MetricsFile(LoggerDestination):
    """Write metrics as JSON lines `{"step": 10, "loss/train/total": 0.3}`, on rank 0.

    The row of the current step is part of checkpoints, so that a resumed run completes it. Rows that cannot be
    written, as on a full disk, follow later.

    Args:
        path: the file; a resumed run continues it, without the rows of the steps that it repeats.

    Attributes:
        row: the numbers of the current step.
        reached: the last step in the file before this start, and when it was written; None for a new file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.row: dict[str, float] = {}
        self.reached: tuple[float, datetime.datetime] | None = None
        self._loaded: dict[str, float] = {}
        self._step: float = 0
        self._rows: list[dict[str, float]] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the rows from the checkpoint's step on; the row of its step comes from the checkpoint.

        Raises:
            MachineError: the file cannot be written.
        """
        if is_first_rank():
            with explained_writes(self.path, "Make room"):
                self._begin(state)

    def _begin(self, state: State) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._step = state.timestamp.batch.value
        self.row = self._loaded
        written = self.path.stat().st_mtime if self.path.is_file() else 0.0
        with atomic_path(self.path) as partial, partial.open("w", encoding="utf-8") as file:
            for row in filter(None, read_json_lines(self.path)):  # The last line may be cut off.
                self.reached = row["step"], datetime.datetime.fromtimestamp(written, datetime.UTC)
                if row["step"] < self._step:
                    file.write(json.dumps(row) + "\n")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Collect the numbers of a step; they are written when the next step begins."""
        if not is_first_rank() or step is None:
            return
        if step != self._step:
            self.flush()
            self._step = step
        self.row |= {name: float(value) for name, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the row of the current step as text: one entry, whatever its metrics are."""
        return {"row": json.dumps({"step": self._step, **self.row}) if self.row else ""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the row of the checkpoint's step until training continues."""
        self._loaded = json.loads(state.get("row") or "{}")
        self._loaded.pop("step", None)

    def flush(self) -> None:
        """Append the row of the current step to the file, and those before that could not be written."""
        if self.row:
            self._rows.append({"step": self._step, **self.row})
            self.row = {}
        if not self._rows:
            return
        size = self.path.stat().st_size if self.path.is_file() else 0
        try:
            append_json_lines(self.path, self._rows)
            self._rows = []
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, size)  # A part of them may be written.
            if len(self._rows) == 1:
                log.warning("%s cannot be written: %s. Its rows follow when there is room", self.path, error.strerror)

    def close(self, state: State, logger: Logger) -> None:
        """Write the last row; that of a whole run gets the last evaluation after the end of the training."""
        self.flush()


class StartsFile(LoggerDestination):
    """Write JSON lines on rank 0, `{"event": "start", "step": 5, ...}` and `{"event": "end", "step": 9, ...}`.

    A start without an end was killed; the row of the next start has the last step that it logged, and when. The metrics
    file, if there is one, comes before this logger.
    """

    def __init__(self, folder: Path, metrics: MetricsFile | None) -> None:
        self.folder, self.metrics = folder, metrics
        self._is_running = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Write the row of a start."""
        num_nodes = len(first_ranks())
        if not is_first_rank():
            return
        self._is_running = True
        row: dict[str, Any] = {
            "event": "start",
            "time": _text(datetime.datetime.now(datetime.UTC)),
            "step": state.timestamp.batch.value,
            "world_size": world_size(),
            "num_nodes": num_nodes,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "versions": package_versions(),
        }
        if self.metrics is not None and self.metrics.reached is not None:
            step, written = self.metrics.reached
            row |= {"reached_before": step, "written_before": _text(written)}
        self._append(row)

    def close(self, state: State, logger: Logger) -> None:
        """Write the row of an end, and why: a signal, the end of the run, or (neither) an error."""
        if not self._is_running:
            return
        self._is_running = False
        now = _text(datetime.datetime.now(datetime.UTC))
        row: dict[str, Any] = {"event": "end", "time": now, "step": state.timestamp.batch.value}
        if signal := preemption_signal(self.folder):
            row["signal"] = signal
        elif state.max_duration is not None and state.timestamp >= state.max_duration:
            row["is_finished"] = True
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            append_json_lines(self.folder / STARTS, [row])
        except OSError as error:
            log.warning("%s cannot be written: %s", self.folder / STARTS, error.strerror)


def _text(time: datetime.datetime) -> str:
    return time.isoformat(timespec="milliseconds")
