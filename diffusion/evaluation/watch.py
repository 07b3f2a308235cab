"""Evaluation of a run during training: each complete checkpoint once, without delaying the run.

Evaluated checkpoints are recorded in `ledger.json`, after their results. After an interruption the watcher continues
from results and images. The run's removal of a checkpoint does not affect the one that is being read, which is linked
or copied to the output folder.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusion.callbacks.loggers import as_machine_error
from diffusion.checkpointing.find import checkpoint_folder, find_damage
from diffusion.checkpointing.layout import batch_of, is_half_written, list_checkpoints, remove_copy
from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoints
from diffusion.checkpointing.resume import FINISHED
from diffusion.config.checks import num_batches
from diffusion.config.schema import Config
from diffusion.config.secrets import redact_arguments
from diffusion.distributed import agree, barrier, on_first_rank, start_process_group
from diffusion.errors import DataError, MachineError
from diffusion.evaluation.config import EvaluationConfig
from diffusion.evaluation.evaluate import Evaluation
from diffusion.evaluation.generate import checkpoint_models
from diffusion.evaluation.protocol import Result, read_results
from diffusion.files import read_json, write_atomically, write_json
from diffusion.loading import load_config_of
from diffusion.storage import is_url

log = logging.getLogger(__name__)

COPIES = "copies"
"""Folder of the checkpoint that is being read, in the output folder."""

LEDGER = "ledger.json"
"""Record of evaluated checkpoints, in the output folder."""

METRICS = "metrics.jsonl"
"""Numbers of all results, a line per step, in the output folder."""

STEP = "trainer/step"
"""Step axis of the numbers in wandb."""


def watch(config: EvaluationConfig) -> None:
    """Evaluate the checkpoints of a run until it is finished; collective.

    Args:
        config: configuration whose `model` is a run folder, its `checkpoints` folder, or `s3://bucket/prefix`.

    Raises:
        UserError: on every rank, for errors of the configuration, the data or the machine.
    """
    start_process_group()
    Watcher(config).run()


class Watcher:
    """Evaluates new checkpoints of a run."""

    def __init__(self, config: EvaluationConfig) -> None:
        self.config, self.uri = config, str(config.model)
        self.folder = Path(config.output_folder).expanduser()
        self.evaluation = Evaluation(config=config)
        self.ledger = on_first_rank(lambda: read_ledger(self.folder / LEDGER, self.uri))
        self._loggers: WatchLoggers | None = None
        # Only a run folder has FINISHED; in a store, the checkpoint of the last step ends the run.
        self._is_finished = is_url(self.uri) and any(entry.get("is_last", False) for entry in self.ledger.values())
        self._pause = threading.Event()

    def run(self) -> None:
        """Evaluate until the run is finished; with `watch_forever`, until the process ends."""
        while True:
            is_finished, new = on_first_rank(self._find_new)
            for name in new:
                self._evaluate(name)
            if (is_finished or self._is_finished) and not self.config.watch_forever:
                break
            if not new:
                self._pause.wait(self.config.poll_seconds)
        if self._loggers is not None:
            self._loggers.close()
        log.info("run %s is finished; %d checkpoints in the ledger", self.uri, len(self.ledger))

    def _find_new(self) -> tuple[bool, list[str]]:
        """Whether the run is finished, and its new checkpoints."""
        run, checkpoints = locate(self.uri)
        finished = finished_step(run)  # Before the list of checkpoints, which is then complete.
        names = list_complete(checkpoints)
        # A finished run may have been continued.
        is_finished = finished is not None and (not names or step_of(names[-1]) <= finished)
        return is_finished, [name for name in names if name not in self.ledger]

    def _evaluate(self, name: str) -> None:
        """Evaluate a checkpoint and record it."""
        copy, is_last = self.folder / COPIES / name, False
        skipped = on_first_rank(lambda: copy_checkpoint(locate(self.uri)[1], name, copy.parent))
        if skipped is None:
            skipped = self._evaluate_weights(name, copy)
            is_last = step_of(name) >= num_batches(agree(lambda: load_config_of(copy)))
        self._is_finished = self._is_finished or is_last
        self.ledger[name] = {"step": step_of(name), "skipped": skipped, "is_last": is_last}
        barrier()  # All ranks have read the copy.

        def record() -> None:
            if skipped is None:
                self._log(copy)
            else:
                log.warning("checkpoint %s of %s is skipped: %s", name, self.uri, skipped)
            remove_copy(copy)
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / LEDGER, {"run": self.uri, "checkpoints": self.ledger})

        on_first_rank(record)

    def _evaluate_weights(self, name: str, copy: Path) -> str | None:
        """Evaluate each of the weights of a checkpoint; return the errors if none could be evaluated."""
        problems = []
        models = checkpoint_models(copy, self.config.weights)
        for model in models:
            try:
                self.evaluation.evaluate(replace(model, origin=f"{self.uri.rstrip('/')}/{name}"))
            except DataError as error:
                # An average may not have started yet; the other weights are evaluated.
                log.warning("%s of %s: %s", model.weights, name, error)
                problems.append(str(error))
        return "; ".join(problems) if len(problems) == len(models) else None

    def _log(self, copy: Path) -> None:
        rows = rows_of(read_results([self.folder]))
        write_atomically(self.folder / METRICS, "".join(json.dumps(row) + "\n" for row in rows))
        if self._loggers is None:
            self._loggers = WatchLoggers(self.config, load_config_of(copy))
        self._loggers.write(rows)


def read_ledger(path: Path, run: str) -> dict[str, dict[str, Any]]:
    """Read the ledger of an output folder: `step`, `skipped` and `is_last` by checkpoint name (`ep0-ba100`).

    `skipped` is the reason for skipping a checkpoint; null if it was evaluated. `is_last` is whether it is the
    checkpoint of the last step in the run's configuration.

    Raises:
        DataError: the ledger is of another run.
    """
    if not path.is_file():
        return {}
    content = read_json(path)
    try:
        owner, entries = content["run"], content["checkpoints"]
    except (LookupError, TypeError) as error:
        raise DataError(f"{path} is no ledger of a watcher: choose another output_folder") from error
    if owner != run:
        raise DataError(f"{path} is of the run {owner}, not of {run}: choose another output_folder")
    return entries


# The run


def locate(uri: str) -> tuple[Path | None, str]:
    """Find the folder of a run, if it is known, and the location of its checkpoints.

    Args:
        uri: run folder, `checkpoints` folder, or `s3://bucket/prefix`. The `trainer.checkpoint_folder` of a run folder
            is followed. A folder need not exist yet.
    """
    if is_url(uri):
        return None, uri
    path = Path(uri).expanduser()
    run = path.parent if path.name == "checkpoints" else path
    return run, checkpoint_folder(run) or str(run / "checkpoints")


def finished_step(run: Path | None) -> int | None:
    """Step after which a run was finished, or None."""
    path = run / FINISHED if run is not None else None
    return int(read_json(path)["step"]) if path is not None and path.is_file() else None


def step_of(name: str) -> int:
    """Step in the name of a checkpoint."""
    return batch_of(Path(name))


def list_complete(checkpoints: str) -> list[str]:
    """Names of the completely written checkpoints of a run, oldest first."""
    if is_url(checkpoints):
        remote = RemoteCheckpoints(checkpoints, timeout=READ_TIMEOUT)
        return [found.name for found in remote.present() if found.is_complete]
    folder = Path(checkpoints).expanduser()
    return [path.name for path in list_checkpoints(folder) if not is_half_written(path)]


def copy_checkpoint(checkpoints: str, name: str, folder: Path) -> str | None:
    """Download a checkpoint into a folder, or link its files.

    Returns:
        None; or the reason why there is no copy: the run has removed the checkpoint, or it is damaged.

    Raises:
        MachineError: the store cannot be read, or the folder not be written.
    """
    copy = folder / name
    remove_copy(copy)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if is_url(checkpoints):
            remote = RemoteCheckpoints(checkpoints, timeout=READ_TIMEOUT)
            for found in remote.present():
                if found.name == name:
                    remote.download(found, folder)
        elif (source := Path(checkpoints).expanduser() / name).is_dir():
            shutil.copytree(source, copy, copy_function=_link)
        else:
            _link(source, copy)
    except (OSError, DataError, MachineError) as error:
        if name in list_complete(checkpoints):
            raise MachineError(f"checkpoint {name} of {checkpoints} cannot be copied to {folder}: {error}") from error
    if (damage := find_damage(copy)) is None:
        return None
    remove_copy(copy)
    return damage if name in list_complete(checkpoints) else "it was removed before it could be read"


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        shutil.copyfile(source, target)


# Loggers


def rows_of(results: Sequence[Result]) -> list[dict[str, float]]:
    """Rows of the metrics file, one per step in order."""
    rows: dict[int, dict[str, float]] = {}
    for result in results:
        if result.step is not None:
            scale = "" if result.guidance_scale is None else f"/cfg{result.guidance_scale:g}"
            row = rows.setdefault(result.step, {"step": result.step})
            for name, number in result.numbers.items():
                row[f"evaluation/{result.weights or 'raw'}{scale}/{name}"] = number.value
    return [rows[step] for step in sorted(rows)]


class WatchLoggers:
    """TensorBoard and wandb of a watcher, separate from those of the run, with the steps of training.

    Each start logs the rows of all results, because the files of a killed process may lack its last rows. TensorBoard
    hides those of earlier starts (`purge_step`). A run of wandb is resumed at the step after its last one. Offline,
    wandb knows no earlier start, and the newest of its folders has all rows.

    Args:
        config: configuration of the watcher.
        run: configuration of the run.
    """

    def __init__(self, config: EvaluationConfig, run: Config) -> None:
        folder = Path(config.output_folder).expanduser()
        self._tensorboard = _open_tensorboard(folder, run) if config.loggers.tensorboard else None
        self._wandb = _open_wandb(folder, config, run) if config.loggers.wandb is not None else None
        self._steps: set[float] = set()
        """Steps that this start has logged."""

    def write(self, rows: Sequence[dict[str, float]]) -> None:
        """Log the rows that this start has not logged yet."""
        for row in rows:
            step = int(row["step"])
            values = {name: value for name, value in row.items() if name != "step"}
            if self._tensorboard is not None and step not in self._steps:
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, step)
                self._tensorboard.flush()
            if self._wandb is not None and step >= self._wandb.step:
                self._wandb.log({STEP: step, **values}, step=step, commit=True)
            self._steps.add(step)

    def close(self) -> None:
        """Close the event file, and finish the run in wandb."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _open_tensorboard(folder: Path, run: Config) -> Any:
    """Open an event file in a folder beside that of the run, or in the output folder."""
    from torch.utils.tensorboard.writer import SummaryWriter

    of_run = Path(run.output_folder).expanduser() / "tensorboard"
    parent = of_run if of_run.is_dir() else folder / "tensorboard"
    return SummaryWriter(str(parent / f"{run.run_name}.evaluation"), purge_step=0)


def _open_wandb(folder: Path, config: EvaluationConfig, run: Config) -> Any:
    import wandb

    settings = config.loggers.wandb
    assert settings is not None
    name = f"{run.run_name}-evaluation"
    with as_machine_error():
        started = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=run.group or run.run_name,
            name=name,
            tags=settings.tags,
            dir=str(folder),
            id=hashlib.sha256(f"{name} {folder.resolve()}".encode()).hexdigest()[:12],
            resume="allow",
            mode="offline" if settings.offline else "online",
            settings={"_args": redact_arguments(sys.argv[1:])},
        )
    started.define_metric(STEP)
    started.define_metric("evaluation/*", step_metric=STEP)
    return started
