"""Evaluation of a run during training: each complete checkpoint once, without delaying the run.

Evaluated checkpoints are recorded in `ledger.json`, after their results. After an interruption the watcher continues
from results and images. The run's removal of a checkpoint does not affect the one that is being read, which is linked
or copied to the output folder.
"""

import logging
import os
import shutil
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import yaml

from diffusion.checkpointing.find import find_damage
from diffusion.checkpointing.layout import batch_of, is_half_written, list_checkpoints, remove_copy
from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoints
from diffusion.config.checks import num_batches
from diffusion.config.stores import is_store
from diffusion.distributed import agree, barrier, broadcast, is_first_rank, start_process_group
from diffusion.errors import DataError, MachineError
from diffusion.evaluation.config import EvaluationConfig
from diffusion.evaluation.evaluate import Evaluation
from diffusion.evaluation.generate import checkpoint_models
from diffusion.evaluation.protocol import read_results
from diffusion.evaluation.watch_loggers import WatchLoggers
from diffusion.files import read_json, write_json
from diffusion.loading import load_config_of

log = logging.getLogger(__name__)

COPIES = "copies"
"""Folder of the checkpoint that is being read, in the output folder."""

FINISHED = "finished.json"
"""File in a finished run's folder (`diffusion.checkpointing.resume`)."""

LEDGER = "ledger.json"
"""Record of evaluated checkpoints, in the output folder."""


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
    """Evaluates new checkpoints of a run.

    Args:
        config: configuration of the evaluation.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        assert config.model is not None
        self.config, self.uri = config, config.model
        self.folder = Path(config.output_folder).expanduser()
        self.evaluation = Evaluation(config=config)
        self.ledger = agree(lambda: Ledger.open(self.folder, self.uri))
        self._loggers: WatchLoggers | None = None
        # Only a run folder has FINISHED; in a store, the checkpoint of the last step ends the run.
        self._is_finished = is_store(self.uri) and any(entry.is_last for entry in self.ledger.entries.values())
        self._pause = threading.Event()

    def run(self) -> None:
        """Evaluate until the run is finished; with `watch_forever`, until the process ends."""
        while True:
            finished, new = broadcast(agree(self._find_new))
            for name in new:
                self._evaluate(name)
            if (finished or self._is_finished) and not self.config.watch_forever:
                break
            if not new:
                self._pause.wait(self.config.poll_seconds)
        if self._loggers is not None:
            self._loggers.close()
        log.info("run %s is finished; %d checkpoints in the ledger", self.uri, len(self.ledger.entries))

    def _find_new(self) -> tuple[bool, list[str]]:
        """Whether the run is finished, and its new checkpoints; on the first rank."""
        if not is_first_rank():
            return False, []
        run = open_run(self.uri)
        finished = run.finished_step()  # Before the list of checkpoints, which is then complete.
        names = run.list_checkpoints()
        # A finished run may have been continued.
        is_finished = finished is not None and (not names or step_of(names[-1]) <= finished)
        return is_finished, [name for name in names if name not in self.ledger.entries]

    def _evaluate(self, name: str) -> None:
        """Evaluate a checkpoint and record it."""
        copy = self.folder / COPIES / name
        entry = Entry(step=step_of(name), skipped="it was removed before it could be read")
        if broadcast(agree(lambda: self._copy(name))):
            entry = self._evaluate_copy(name, copy)
            self._is_finished = self._is_finished or entry.is_last
        barrier()

        def record() -> None:
            if not is_first_rank():
                return
            if entry.skipped is None:
                self._log(copy)
            else:
                log.warning("checkpoint %s of %s is skipped: %s", name, self.uri, entry.skipped)
            remove_copy(copy)
            self.ledger.add(name, entry)

        agree(record)

    def _copy(self, name: str) -> bool:
        return is_first_rank() and open_run(self.uri).copy(name, self.folder / COPIES) is not None

    def _evaluate_copy(self, name: str, copy: Path) -> "Entry":
        """Evaluate each of the weights of a checkpoint; return its entry for the ledger."""
        config = agree(lambda: load_config_of(copy))
        problems = []
        models = checkpoint_models(copy, self.config.weights)
        for model in models:
            try:
                self.evaluation.evaluate(replace(model, origin=f"{self.uri.rstrip('/')}/{name}"))
            except DataError as error:
                # An average may not have started yet; the other weights are evaluated.
                log.warning("%s of %s: %s", model.weights, name, error)
                problems.append(str(error))
        skipped = "; ".join(problems) if len(problems) == len(models) else None
        step = step_of(name)
        return Entry(step=step, skipped=skipped, is_last=step >= num_batches(config))

    def _log(self, copy: Path) -> None:
        if self._loggers is None:
            self._loggers = WatchLoggers(self.config, load_config_of(copy))
        self._loggers.write(read_results([self.folder]))


# The ledger


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint in the ledger."""

    step: int
    skipped: str | None = None
    """Reason for skipping it; None if it was evaluated."""

    is_last: bool = False
    """Whether it is the checkpoint of the last step in the run's configuration."""


@dataclass(kw_only=True)
class Ledger:
    """File of entries by checkpoint name (`ep0-ba100`).

    Args:
        path: the file, written at each change.
        run: path or URI of the run.
    """

    path: Path
    run: str
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, run: str) -> "Ledger":
        """Read the ledger of an output folder, or create one.

        Raises:
            DataError: the ledger is damaged, or of another run.
        """
        ledger = cls(path=folder / LEDGER, run=run)
        if not ledger.path.is_file():
            return ledger
        content = read_json(ledger.path)
        try:
            known, entries = content["run"], {name: Entry(**entry) for name, entry in content["checkpoints"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{ledger.path} is not the ledger of a watcher: {error!r}") from error
        if known != run:
            raise DataError(f"{ledger.path} is of the run {known}, not of {run}: choose another output_folder")
        return cls(path=ledger.path, run=run, entries=entries)

    def add(self, name: str, entry: Entry) -> None:
        """Add a checkpoint and write the file."""
        self.entries[name] = entry
        content = {name: asdict(entry) for name, entry in self.entries.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"run": self.run, "checkpoints": content})


# The run


class WatchedRun(Protocol):
    """A run and its checkpoints."""

    def list_checkpoints(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        ...

    def copy(self, name: str, folder: Path) -> Path | None:
        """Copy a checkpoint into a folder; None if it was removed."""
        ...

    def finished_step(self) -> int | None:
        """Step of `FINISHED`, or None."""
        ...


class LocalRun:
    """A run with checkpoints in a folder.

    Args:
        path: run folder, or its `checkpoints` folder; it need not exist yet.
        checkpoints: folder of the checkpoints, if it is outside of the run folder.
    """

    def __init__(self, path: Path, checkpoints: Path | None = None) -> None:
        self.run = path.parent if path.name == "checkpoints" else path
        self.checkpoints = checkpoints or self.run / "checkpoints"

    def list_checkpoints(self) -> list[str]:
        """Names of the completely written checkpoints."""
        return [path.name for path in list_checkpoints(self.checkpoints) if not _is_half_written(path)]

    def copy(self, name: str, folder: Path) -> Path | None:
        """Link the files, or copy them to another file system."""
        source, copied = self.checkpoints / name, folder / name
        remove_copy(copied)
        try:
            if source.is_dir():
                copied.mkdir(parents=True)
                for file in sorted(source.iterdir()):
                    _link(file, copied / file.name)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                _link(source, copied)
        except FileNotFoundError:
            remove_copy(copied)
            return None
        if damage := find_damage(copied):
            log.info("checkpoint %s: %s", source, damage)
            remove_copy(copied)
            return None
        return copied

    def finished_step(self) -> int | None:
        """Step of `FINISHED`, or None."""
        return _finished_step(self.run)


class RemoteRun:
    """A run with checkpoints in an object store.

    Args:
        url: `s3://bucket/prefix` of the checkpoints.
        run: run folder, if it is known.
    """

    def __init__(self, url: str, run: Path | None = None) -> None:
        self._remote, self._run = RemoteCheckpoints(url, timeout=READ_TIMEOUT), run

    def list_checkpoints(self) -> list[str]:
        """Names of the completely uploaded checkpoints."""
        return [found.name for found in self._remote.present() if found.is_complete]

    def copy(self, name: str, folder: Path) -> Path | None:
        """Download the checkpoint."""
        found = next((one for one in self._remote.present() if one.name == name and one.is_complete), None)
        if found is None:
            return None
        try:
            copied = self._remote.download(found, folder)
        except (DataError, MachineError):
            remove_copy(folder / name)
            if name in self.list_checkpoints():
                raise
            return None
        if find_damage(copied):
            remove_copy(copied)
            return None
        return copied

    def finished_step(self) -> int | None:
        """Step of `FINISHED` in the run folder; the store has checkpoints only."""
        return _finished_step(self._run) if self._run is not None else None


def open_run(uri: str) -> WatchedRun:
    """Open a run.

    Args:
        uri: run folder, `checkpoints` folder, or `s3://bucket/prefix`. The `trainer.checkpoint_folder` of a run folder
            is followed.
    """
    if is_store(uri):
        return RemoteRun(uri)
    path = Path(uri).expanduser()
    config = path / "config.yaml"
    if config.is_file():
        settings = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("trainer") or {}
        if folder := settings.get("checkpoint_folder"):
            return RemoteRun(folder, path) if is_store(folder) else LocalRun(path, Path(folder).expanduser())
    return LocalRun(path)


def step_of(name: str) -> int:
    """Step in the name of a checkpoint."""
    return batch_of(Path(name))


def _finished_step(run: Path) -> int | None:
    path = run / FINISHED
    return int(read_json(path)["step"]) if path.is_file() else None


def _is_half_written(path: Path) -> bool:
    try:
        return is_half_written(path)
    except FileNotFoundError:
        return True


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
