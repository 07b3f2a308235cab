"""Loggers of a watcher: a metrics file, TensorBoard and wandb, separate from those of the run.

All are written from the result files. After an interruption no point is written twice.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion.callbacks.loggers import as_machine_error
from diffusion.config.schema import Config
from diffusion.config.secrets import redact_arguments
from diffusion.evaluation.config import EvaluationConfig
from diffusion.evaluation.protocol import Result, protocol_hash
from diffusion.files import write_atomically

METRICS = "metrics.jsonl"
STEP = "trainer/step"
"""Step axis of the numbers in wandb."""

TABLE = "evaluation/numbers"
"""Name of the tables in wandb, one per step."""

COLUMNS = ("model", "weights", "guidance_scale", "number", "category", "value", "protocol")

TENSORBOARD_SUFFIX = ".evaluation"


def rows_of(results: Sequence[Result]) -> list[dict[str, float]]:
    """Rows of the metrics file, one per step in order."""
    rows: dict[int, dict[str, float]] = {}
    for result in results:
        if result.step is not None:
            row = rows.setdefault(result.step, {"step": result.step})
            row |= {_tag(result, name): number.value for name, number in result.numbers.items()}
    return [rows[step] for step in sorted(rows)]


def _tag(result: Result, name: str) -> str:
    scale = "" if result.guidance_scale is None else f"/cfg{result.guidance_scale:g}"
    return f"evaluation/{result.weights or 'raw'}{scale}/{name}"


def table_of(results: Sequence[Result], step: int) -> list[list[Any]]:
    """Rows of `COLUMNS` with the numbers of a step; object checks have a category."""
    rows = []
    for result in results:
        for name, number in result.numbers.items() if result.step == step else ():
            kind, _, category = name.partition("/")
            of_model = [result.name, result.weights or "raw", result.guidance_scale]
            rows.append([*of_model, kind, category, number.value, protocol_hash(number.protocol)])
    return rows


class WatchLoggers:
    """Logs new numbers of all results; on one rank.

    Args:
        config: configuration of the watcher.
        run: configuration of the run.
    """

    def __init__(self, config: EvaluationConfig, run: Config) -> None:
        self.config, self.run = config, run
        self.folder = Path(config.output_folder).expanduser()
        self._tensorboard: Any = None
        self._in_tensorboard: set[tuple[int, str]] = set()
        self._wandb: Any = None
        self._wandb_step = -1

    def write(self, results: Sequence[Result]) -> None:
        """Write to all configured loggers."""
        rows = rows_of(results)
        write_atomically(self.folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        if self.config.loggers.tensorboard:
            self._to_tensorboard(rows)
        if self.config.loggers.wandb is not None:
            self._to_wandb(rows, results)

    def close(self) -> None:
        """Close the event file, and finish the run in wandb."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _to_tensorboard(self, rows: Sequence[dict[str, float]]) -> None:
        """Write one event file per start, which hides those of earlier starts, in a folder beside that of the run."""
        from torch.utils.tensorboard.writer import SummaryWriter

        if self._tensorboard is None:
            own = Path(self.run.output_folder).expanduser() / "tensorboard"
            folder = own if own.is_dir() else self.folder / "tensorboard"
            self._tensorboard = SummaryWriter(str(folder / f"{self.run.run_name}{TENSORBOARD_SUFFIX}"), purge_step=0)
        for row in rows:
            for name in row.keys() - {"step"}:
                step = int(row["step"])
                if (step, name) not in self._in_tensorboard:
                    self._tensorboard.add_scalar(name, row[name], step)
                    self._in_tensorboard.add((step, name))
        self._tensorboard.flush()

    def _to_wandb(self, rows: Sequence[dict[str, float]], results: Sequence[Result]) -> None:
        """Write to a separate wandb run. Its steps are those of training; the server rejects repeated ones."""
        import wandb

        if self._wandb is None:
            self._wandb = self._open_wandb()
        for row in rows:
            step = int(row["step"])
            if step > self._wandb_step:
                values = {name: value for name, value in row.items() if name != "step"}
                table = wandb.Table(columns=list(COLUMNS), data=table_of(results, step))
                self._wandb.log({STEP: step, **values, TABLE: table}, step=step, commit=True)
                self._wandb_step = step

    def _open_wandb(self) -> Any:
        """Start the run; offline, its new folder replaces those of earlier starts, since it holds all results."""
        import wandb

        settings = self.config.loggers.wandb
        assert settings is not None
        name = f"{self.run.run_name}-evaluation"
        run_id = hashlib.sha256(f"{name} {self.folder.resolve()}".encode()).hexdigest()[:12]
        if settings.offline:
            for earlier in self.folder.glob(f"wandb/offline-run-*-{run_id}"):
                shutil.rmtree(earlier)
        with as_machine_error():
            run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                group=self.run.group or self.run.run_name,
                name=name,
                tags=settings.tags,
                dir=str(self.folder),
                id=run_id,
                resume="allow",
                mode="offline" if settings.offline else "online",
                settings={
                    # Otherwise offline tables request their version from the server, and hang.
                    "allow_offline_artifacts": False,
                    "_args": redact_arguments(sys.argv[1:]),
                },
            )
        run.define_metric(STEP)
        run.define_metric("evaluation/*", step_metric=STEP)
        return run
