"""Where a watcher's numbers go: each writer is its own, so that it never meets the run's.

Results are files; everything here is written from them, and again after an interruption, without a point twice.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusion.callbacks.continued_loggers import as_machine_error, tensorboard_points, wandb_points
from diffusion.config.evaluation import EvaluationConfig
from diffusion.config.schema import Config
from diffusion.config.secrets import redact_arguments
from diffusion.evaluation.protocol import protocol_hash
from diffusion.evaluation.results import Result
from diffusion.files import write_atomically

METRICS = "metrics.jsonl"
STEP = "trainer/step"
"""Step axis of the numbers in wandb."""

TABLE = "evaluation/numbers"
"""Name of the table in wandb, one for each step."""

COLUMNS = ("model", "weights", "guidance_scale", "number", "category", "value", "protocol")

TENSORBOARD_SUFFIX = ".evaluation"


def rows_of(results: Sequence[Result]) -> list[dict[str, float]]:
    """One row for each step, in their order, as in a run's metrics file."""
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
    """The numbers of a step, a row with `COLUMNS` each; compositional checks have a category."""
    rows = []
    for result in results:
        for name, number in result.numbers.items() if result.step == step else ():
            kind, _, category = name.partition("/")
            of_model = [result.name, result.weights or "raw", result.guidance_scale]
            rows.append([*of_model, kind, category, number.value, protocol_hash(number.protocol)])
    return rows


class Writers:
    """Writes the numbers of all results, those that are not there yet; on one rank.

    Args:
        config: of the watcher.
        run: configuration of the run.
    """

    def __init__(self, config: EvaluationConfig, run: Config) -> None:
        self.config, self.run = config, run
        self.folder = Path(config.output_folder).expanduser()
        self._wandb: Any = None
        self._wandb_step = -1

    def write(self, results: Sequence[Result]) -> None:
        """Write to all that are configured."""
        rows = rows_of(results)
        write_atomically(self.folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        if self.config.loggers.tensorboard:
            self._to_tensorboard(rows)
        if self.config.loggers.wandb is not None:
            self._to_wandb(rows, results)

    def close(self) -> None:
        """Finish the run in wandb."""
        if self._wandb is not None:
            self._wandb.finish()

    def _to_tensorboard(self, rows: Sequence[dict[str, float]]) -> None:
        """Into event files of its own in the folder of the run's, so that both share a chart."""
        from torch.utils.tensorboard.writer import SummaryWriter

        own = Path(self.run.output_folder).expanduser() / "tensorboard" / self.run.run_name
        folder = own if own.is_dir() else self.folder / "tensorboard"
        points = tensorboard_points(folder, 0)
        with SummaryWriter(str(folder), filename_suffix=TENSORBOARD_SUFFIX) as writer:
            for row in rows:
                for name, value in row.items():
                    if name != "step" and not points.has(name, int(row["step"])):
                        writer.add_scalar(name, value, int(row["step"]))

    def _to_wandb(self, rows: Sequence[dict[str, float]], results: Sequence[Result]) -> None:
        """Into a run of its own; its steps are those of training, and the server refuses one that it has."""
        import wandb

        if self._wandb is None:
            self._wandb, self._wandb_step = self._open_wandb()
        for row in rows:
            step = int(row["step"])
            if step > self._wandb_step:
                values = {name: value for name, value in row.items() if name != "step"}
                table = wandb.Table(columns=list(COLUMNS), data=table_of(results, step))
                self._wandb.log({STEP: step, **values, TABLE: table}, step=step, commit=True)
                self._wandb_step = step

    def _open_wandb(self) -> tuple[Any, int]:
        """The run, and the last step that its files hold."""
        import wandb

        settings = self.config.loggers.wandb
        assert settings is not None
        name = f"{self.run.run_name}-evaluation"
        run_id = hashlib.sha256(f"{name} {self.folder.resolve()}".encode()).hexdigest()[:12]
        last = wandb_points(self.folder, run_id).last_step if settings.offline else -1
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
                    # Else a table offline asks the server for its version, and hangs.
                    "allow_offline_artifacts": False,
                    "_args": redact_arguments(sys.argv[1:]),
                },
            )
        run.define_metric(STEP)
        run.define_metric("evaluation/*", step_metric=STEP)
        return run, last
