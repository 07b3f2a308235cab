"""The metrics file, which any tool reads, and the loss curve."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from composer import Callback, Logger, State
from composer.loggers import LoggerDestination
from composer.utils import dist

from diffusion.files import atomic_path
from diffusion.reports.curves import Curve

TRAIN_LOSS = "loss/train/total"

_TAIL = 2**20
"""Bytes at the end of a metrics file that are searched for its last row."""


class MetricsFile(LoggerDestination):
    """Write metrics as JSON lines `{"step": 10, "loss/train/total": 0.3}`, on rank 0.

    The row of the current step is part of checkpoints, so that a resumed run completes it.

    Args:
        path: the file; a resumed run continues it, without the rows of the steps that it repeats.

    Attributes:
        losses: in training and validation, since the first step of the run, by the name of the metric; on rank 0.
        row: the numbers of the current step.
        last_row: the last row that the file had before this start; empty for a new run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: dict[str, Curve] = {}
        self.row: dict[str, float] = {}
        self.last_row: dict[str, float] = {}
        self._step: float = 0
        self._loaded = ""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the rows after the checkpoint, and restore the row of its step."""
        if dist.get_global_rank() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._step = state.timestamp.batch.value
        self.losses, self.row, self.last_row = {}, {}, {}
        with atomic_path(self.path) as partial, partial.open("w", encoding="utf-8") as file:
            for row in _rows(self.path):
                self.last_row = row
                if row["step"] < self._step:
                    file.write(json.dumps(row) + "\n")
                    self._add(row["step"], row)
                elif row["step"] == self._step:
                    self.row |= row
        if self._loaded:
            self.row |= json.loads(self._loaded)
            self._loaded = ""
        self.row.pop("step", None)
        self._add(self._step, self.row)

    def _add(self, step: float, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name == TRAIN_LOSS or (name.startswith("metrics/") and name.endswith("/loss")):
                self.losses.setdefault(name, Curve()).add(step, value)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Collect the numbers of a step; they are written when the next step begins."""
        if dist.get_global_rank() != 0 or step is None:
            return
        if step != self._step:
            self.flush()
            self._step = step
        numbers = {name: float(value) for name, value in metrics.items()}
        self.row |= numbers
        self._add(step, numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the row of the current step as text: one entry, whatever its metrics are."""
        return {"row": json.dumps({"step": self._step, **self.row}) if self.row else ""}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the row until training continues."""
        self._loaded = state.get("row", "")

    def flush(self) -> None:
        """Append the row of the current step to the file."""
        if self.row:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self._step, **self.row}) + "\n")
            self.row = {}

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the last row."""
        self.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Write the last row of a run that ends early."""
        self.flush()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the rows of a metrics file in order, without a last line that was cut off."""
    return list(_rows(path))


def _rows(path: Path) -> Iterator[dict[str, float]]:
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


def last_step(path: Path) -> float | None:
    """Read the last step from the end of a metrics file; None for no file or an empty one."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
    return None


def series(rows: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of one metric."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each value, of fewer at the beginning."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        result.append(total / min(i + 1, window))
    return result


def draw_loss_curve(losses: Mapping[str, Curve], path: Path, title: str) -> None:
    """Draw the training loss (each step, or extremes of many, and a running mean) and the validation loss as a PNG.

    Args:
        losses: curves by the metric's name.
        path: the PNG.
        title: above it, with the number of values that are not finite.
    """
    from diffusion.reports.figures import COLOURS, save_png, subplots  # Imports matplotlib.

    figure, axes = subplots(width=8, height=4.5)
    if training := losses.get(TRAIN_LOSS):
        steps, means = training.steps, training.means
        window = max(1, len(means) // 50)
        if window > 1:
            axes.plot(steps, means, color=COLOURS[0], alpha=0.25, linewidth=0.8, label="training")
        if training.width > 1:
            axes.fill_between(steps, *training.extremes, color=COLOURS[0], alpha=0.15, linewidth=0)
        averaged = window * training.width
        label = f"training, mean of {averaged} steps" if averaged > 1 else "training"
        axes.plot(steps, running_mean(means, window), color=COLOURS[0], label=label)
        if len(means) >= 100:  # The few large losses at the beginning would flatten the rest.
            ordered = sorted(means)
            axes.set_ylim(0.9 * ordered[0], 1.1 * ordered[int(0.99 * (len(ordered) - 1))])
        if training.num_not_finite:
            title += f" (not finite: {training.num_not_finite:,} steps from step {training.first_not_finite:,.0f} on)"
    for name in sorted(losses.keys() - {TRAIN_LOSS}):
        label = name.removeprefix("metrics/").removesuffix("/loss")
        axes.plot(losses[name].steps, losses[name].means, "o-", color=COLOURS[1], label=label)
    axes.set(xlabel="optimizer step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    if losses:
        axes.legend()
    save_png(figure, path)


class LossCurve(Callback):
    """Draw the loss curve of the run into its folder, after each evaluation and at the end.

    Args:
        metrics: the run's metrics file.
        path: the PNG.
        title: the run's name.
    """

    def __init__(self, metrics: MetricsFile, path: Path, title: str) -> None:
        self.metrics, self.path, self.title = metrics, path, title

    def _draw(self) -> None:
        if dist.get_global_rank() == 0:
            draw_loss_curve(self.metrics.losses, self.path, self.title)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Draw."""
        self._draw()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Draw."""
        self._draw()
