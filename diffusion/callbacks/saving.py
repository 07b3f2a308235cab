"""Checkpoints of a run: when they are written, in the background or not, what they hold, and which stay."""

import concurrent.futures
import errno
import io
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from composer import Callback, Event, Logger, State
from composer.utils import create_interval_scheduler, reproducibility
from torch.distributed.checkpoint.api import CheckpointException

from diffusion.callbacks.guards import LossGuard
from diffusion.checkpointing.find import (
    Checkpoints,
    LocalCheckpoints,
    find_damage,
    is_complete,
    read_damaged,
    write_damaged,
)
from diffusion.checkpointing.layout import remove_checkpoint, remove_copy, superseded
from diffusion.checkpointing.read import load_safely
from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.checkpointing.save import HostCopy, write_file, write_sharded
from diffusion.distributed import agree, is_first_rank, local_rank, new_long_group, rank
from diffusion.errors import ConfigurationError, DataError, MachineError, UserError, explained_writes
from diffusion.formats.run_folder import STALL
from diffusion.optimizers import AdamW
from diffusion.trainer import LateLogger

log = logging.getLogger(__name__)


class RunRecord(Callback):
    """Store the configuration (YAML) and the identities of the frozen parts in each checkpoint."""

    def __init__(self, config: str, identities: Mapping[str, str]) -> None:
        self.config, self.identities = config, dict(identities)
        self._has_begun = False

    def fit_start(self, state: State, logger: Logger) -> None:
        """Keep the identities from now on; those of the checkpoint to resume from, if it has any, are loaded."""
        self._has_begun = True

    def state_dict(self) -> dict[str, Any]:
        """Return both, where `read_config_values` and `read_identities` find them."""
        return {"config": self.config, **({"identities": self.identities} if self._has_begun else {})}


class SaveCheckpoints(Callback):
    """Write a checkpoint at intervals and at the end, and remove older ones, also those of earlier starts of the run.

    A checkpoint that cannot be written ends the run, which could not be resumed from there.

    In the background, a step waits only for a copy of the state in host memory. The next save, a pre-emption and the
    end of the run wait for the one before, and raise its error. The ranks of a write communicate in a process group of
    their own, apart from the collective operations of training.

    Args:
        folder: the run's `checkpoints` folder; with `remote`, that of checkpoints until they are uploaded.
        interval: Composer time string.
        newest: number of newest complete checkpoints to keep; None keeps all.
        every: steps; the first checkpoint at or after each multiple is kept forever.
        remote: the store of the checkpoints; None is `folder`.
        background: write while training goes on.
        guard: checks the loss of the step before the checkpoint is written.
    """

    def __init__(
        self,
        folder: Path,
        interval: str,
        *,
        newest: int | None = None,
        every: float | None = None,
        remote: RemoteCheckpoints | None = None,
        background: bool = False,
        guard: LossGuard | None = None,
    ) -> None:
        self.local, self.remote = folder, remote
        self.newest, self.every, self.guard = newest, every, guard
        self.last_saved: str | None = None
        """Path or URI of the checkpoint that was written last."""

        self._is_due = create_interval_scheduler(interval)
        self._last_step = -1
        self._group: Any = None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint", _take_device) if background else None
        self._host_copy = HostCopy()
        self._pending: concurrent.futures.Future[None] | None = None

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Write a checkpoint at an interval in steps, samples or fractions of the run, and at the end."""
        if self._is_due(state, Event.BATCH_CHECKPOINT):
            self._save(state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Write a checkpoint at an interval in epochs."""
        if self._is_due(state, Event.EPOCH_CHECKPOINT):
            self._save(state, logger)

    def save(self, state: State, logger: Logger) -> None:
        """Write a checkpoint of this step, unless there is one, and wait for it. To be called by all ranks.

        Raises:
            ConfigurationError: on all ranks: the state of a callback or algorithm could not be loaded.
            MachineError: on all ranks: it cannot be written.
        """
        self._save(state, logger)
        self._wait()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait for the last checkpoint."""
        self._wait()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for a write in the background also when the run ends for another reason."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])

    @property
    def is_writing(self) -> bool:
        """Return whether a write in the background has not ended."""
        return self._pending is not None and not self._pending.done()

    def _save(self, state: State, logger: Logger) -> None:
        """Write a checkpoint of this step, or begin to; nothing if there is one."""
        if self._last_step == state.timestamp.batch.value:
            return
        if isinstance(logger, LateLogger):  # The row of the metrics file is part of the checkpoint.
            logger.release()
        if self.guard is not None:
            self.guard.check(state)
        start = time.perf_counter()
        self._wait()
        is_first = self._last_step < 0
        self._last_step = state.timestamp.batch.value
        is_sharded = state.fsdp_sharded_state_dict_enabled
        stem = f"ep{state.timestamp.epoch.value}-ba{self._last_step}"
        path = self.local / (stem if is_sharded else f"{stem}.pt")
        if self._group is None:
            self._group = new_long_group()
        content = _collect(state, is_sharded)
        if is_first:
            agree(lambda: _check_loadable(content.get("state", {})), group=self._group)
        if self._pool is None:
            self._write(path, content, is_sharded)
        else:
            self._pending = self._pool.submit(self._write, path, self._host_copy.update(content), is_sharded)
            self._pending.add_done_callback(self._log_failure)
        logger.log_metrics({STALL: time.perf_counter() - start})

    def _wait(self) -> None:
        """Wait for the write in the background; on all ranks."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _log_failure(self, written: concurrent.futures.Future[None]) -> None:
        """Log at once why a write failed that nothing waits for yet; the run ends at its next save."""
        if self._pending is written and (error := written.exception()) is not None and is_first_rank():
            log.error("%s", error)

    # In the background, if asked for

    def _write(self, path: Path, content: dict[str, Any], is_sharded: bool) -> None:
        """Write, upload and prune; on all ranks."""
        try:
            self._on_first_rank(lambda: _make_room(path))
            agree(lambda: self._write_files(path, content, is_sharded), group=self._group)
            if self.remote is None or not is_sharded:  # Else each node may have its own ranks' files only.
                self._on_first_rank(lambda: _check_written(path))
        except MachineError:
            if is_first_rank() or (self.remote is not None and local_rank() == 0):
                _remove(path)
            raise
        if self.remote is not None:
            self._upload(self.remote, path, is_sharded)
        self._on_first_rank(lambda: self._prune(path))

    def _on_first_rank(self, step: Callable[[], None]) -> None:
        """Run a step on rank 0, and fail together."""
        agree(lambda: step() if is_first_rank() else None, group=self._group)

    def _write_files(self, path: Path, content: dict[str, Any], is_sharded: bool) -> None:
        try:
            if is_sharded:
                write_sharded(path, content, self._group)
            elif is_first_rank():
                write_file(path, content)
        except (OSError, RuntimeError, CheckpointException) as error:
            if (cause := _cause(error)) is None:
                raise
            raise MachineError(
                f"checkpoint {path} cannot be written: {cause}. Make room (or repair the disk) and start the same "
                "command again: it continues from the checkpoint before"
            ) from error

    def _upload(self, remote: RemoteCheckpoints, path: Path, is_sharded: bool) -> None:
        """Upload the files of this rank, then the index, and remove the files here."""
        mine = sorted(file.name for file in path.glob(f"__{rank()}_*")) if is_sharded else []
        try:
            self._on_first_rank(lambda: remote.remove_named(path.name))
            agree(lambda: remote.upload_parts(path, mine), group=self._group)
            self._on_first_rank(lambda: _finish_upload(remote, path))
        except UserError as error:  # A bucket that is gone is a DataError.
            failure = MachineError(
                f"checkpoint {remote.uri_of(path.name)} cannot be written: {error}. Its files are kept in {path}: "
                "start the same command again when the store answers, and it uploads them and continues"
            )
            failure.is_agreed = True
            raise failure from error
        if local_rank() == 0:
            remove_copy(path)

    def _prune(self, path: Path) -> None:
        """Remove the checkpoints that a new one supersedes."""
        remote = self.remote
        self.last_saved = str(path) if remote is None else remote.uri_of(path.name)
        kept: Checkpoints = remote or LocalCheckpoints(self.local)
        try:
            damaged = read_damaged(kept.uri)
            if path.name in damaged:  # It is written anew.
                damaged.remove(path.name)
                write_damaged(kept.uri, damaged)
            if self.newest is None:
                return

            def is_whole(one: Any) -> bool:
                return one.name not in damaged and is_complete(one)

            present: list[Any] = kept.present()
            for old in superseded(present, newest=self.newest, every=self.every, is_whole=is_whole):
                log.info("removing %s", old)
                _remove(old) if remote is None else remote.remove(old)
        except UserError as error:
            log.warning("older checkpoints cannot be removed: %s", error)


def _make_room(path: Path) -> None:
    """Remove a checkpoint of the same name: its index would be beside new shards until these are complete."""
    with explained_writes(f"checkpoint {path}"):
        if path.exists():
            remove_checkpoint(path)
        (path if path.suffix == "" else path.parent).mkdir(parents=True, exist_ok=True)


def _take_device() -> None:
    """Let a new thread use this rank's GPU: by default it makes a context on the first one."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())


def _collect(state: State, is_sharded: bool) -> dict[str, Any]:
    """Collect this rank's part of a checkpoint, as Composer does."""
    for optimizer in state.optimizers:
        if isinstance(optimizer, AdamW):
            optimizer.complete_state()
    content = {"state": state.state_dict(), "rng": reproducibility.get_rng_state()}
    if is_first_rank():
        return content
    return {"state": content["state"]} if is_sharded else {}


def _check_loadable(state: Mapping[str, Any]) -> None:
    """Check that the states of callbacks and algorithms run no code when they are loaded, or no start could resume."""
    for kind in ("callbacks", "algorithms"):
        for name, content in dict(state.get(kind, {})).items():
            file = io.BytesIO()
            torch.save(_without_tensors(content), file)
            file.seek(0)
            try:
                load_safely(file, name)
            except DataError as error:
                raise ConfigurationError(
                    f"the run could not resume from a checkpoint with the state of {name} (plugins.{kind}): {error}. "
                    "Return tensors, numbers, text, lists and dictionaries from its state_dict"
                ) from error


def _without_tensors(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_tensors(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(child) for child in value]
    return None if isinstance(value, torch.Tensor) else value


def _check_written(path: Path) -> None:
    if damage := find_damage(path):
        raise MachineError(f"checkpoint {path} differs from what was written: {damage}. Check the disk")


def _finish_upload(remote: RemoteCheckpoints, path: Path) -> None:
    if missing := remote.find_missing(path):
        raise MachineError(f"{missing} is missing in the store, or too short")
    remote.finish_upload(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint, complete or not."""
    try:
        if path.exists():
            remove_checkpoint(path)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


def _cause(error: BaseException | None) -> str | None:
    """Find the error of the operating system behind a failed write; None for another cause."""
    while error is not None:
        if isinstance(error, CheckpointException):
            return next((found for cause, _ in error.failures.values() if (found := _cause(cause))), None)
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno)
        is_of_writer = any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
        if isinstance(error, RuntimeError) and is_of_writer and error.__context__ is None:
            return f"{os.strerror(errno.EIO)} or {os.strerror(errno.ENOSPC).lower()}"
        error = error.__cause__ or error.__context__
    return None
