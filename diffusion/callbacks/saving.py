"""Writing checkpoints: which stay, and what happens when one cannot be written."""

import errno
import logging
import os
from pathlib import Path

from composer import Logger, State
from composer.callbacks import CheckpointSaver
from composer.utils import checkpoint, dist
from torch.distributed.checkpoint.api import CheckpointException

from diffusion.checkpoints import batch_of, find_damage, is_complete, list_checkpoints, remove_checkpoint, superseded
from diffusion.errors import MachineError
from diffusion.launch import agree

log = logging.getLogger(__name__)


class SaveCheckpoints(CheckpointSaver):
    """Write a checkpoint at intervals and at the end, and remove older ones, also those of earlier starts of the run.

    A checkpoint that cannot be written ends the run: it would go on without being able to continue.

    Args:
        folder: the run's `checkpoints` folder.
        interval: Composer time string.
        newest: so many of the newest whole checkpoints stay; None keeps all.
        every: the first checkpoint at or after each multiple of so many steps stays for ever.
    """

    def __init__(self, folder: Path, interval: str, *, newest: int | None = None, every: float | None = None) -> None:
        super().__init__(
            folder=str(folder),
            filename="ep{epoch}-ba{batch}.pt",
            remote_file_name=None,
            latest_filename=None,
            latest_remote_file_name=None,
            save_interval=interval,
            overwrite=True,
        )
        self.place = folder
        self.newest, self.every = newest, every
        self._known_whole: set[Path] = set()

    @property
    def last_saved(self) -> Path | None:
        """The checkpoint that was written last."""
        return Path(self.saved_checkpoints[-1]) if self.saved_checkpoints else None

    def state_dict(self) -> dict[str, object]:
        """Nothing: which checkpoints there are is seen in their folder."""
        return {}

    def save(self, state: State, logger: Logger) -> None:
        """Write a checkpoint of this step, unless there is one. To be called by all ranks."""
        if self.last_checkpoint_batch != state.timestamp.batch:
            self._save_checkpoint(state, logger)

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        is_sharded = state.fsdp_sharded_state_dict_enabled
        stem = f"ep{state.timestamp.epoch.value}-ba{state.timestamp.batch.value}"
        path = self.place / (stem if is_sharded else f"{stem}.pt")
        self.last_checkpoint_batch = state.timestamp.batch
        agree(lambda: self._make_room(path))
        failure: MachineError | None = None
        try:
            checkpoint.save_checkpoint(state, str(self.place / "ep{epoch}-ba{batch}.pt"))
        except (OSError, RuntimeError, CheckpointException) as error:
            cause = _cause(error)
            if cause is None:
                raise
            failure = MachineError(
                f"checkpoint {path} cannot be written: {cause}. Make room (or mend the disk) and start the same "
                f"command again: it continues from {self._previous(path)}"
            )
            if not is_sharded:
                dist.barrier()  # Composer's, at which the other ranks wait for rank 0's file.
        agree(lambda: self._finish(path, failure))

    def _make_room(self, path: Path) -> None:
        """Remove a checkpoint of the same name, whose index would stand beside new shards until these are whole."""
        if dist.get_global_rank() != 0:
            return
        try:
            if path.exists():
                remove_checkpoint(path)
            (path if path.suffix == "" else path.parent).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"checkpoint {path} cannot be written: {error.strerror}") from error

    def _previous(self, path: Path) -> str:
        others = [other for other in list_checkpoints(self.place) if batch_of(other) < batch_of(path)]
        return str(others[-1]) if others else "the beginning"

    def _finish(self, path: Path, failure: MachineError | None) -> None:
        """Tell of a failure, or remove what the new checkpoint supersedes."""
        if dist.get_global_rank() == 0:
            if failure is not None:
                _remove(path)
            else:
                if damage := find_damage(path):
                    raise MachineError(f"checkpoint {path} is not what was written: {damage}. Check the disk")
                self._known_whole.add(path)
                self.saved_checkpoints.append(str(path))
                if self.newest is not None:
                    for old in superseded(
                        list_checkpoints(self.place), newest=self.newest, every=self.every, is_whole=self._is_whole
                    ):
                        log.info("removing %s", old)
                        _remove(old)
        if failure is not None:
            raise failure

    def _is_whole(self, path: Path) -> bool:
        if path not in self._known_whole and is_complete(path):
            self._known_whole.add(path)
        return path in self._known_whole


def _remove(path: Path) -> None:
    try:
        remove_checkpoint(path)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error.strerror)


def _cause(error: BaseException | None) -> str | None:
    """What the operating system said, if that is why a checkpoint could not be written."""
    while error is not None:
        if isinstance(error, CheckpointException):
            return next((found for cause, _ in error.failures.values() if (found := _cause(cause))), None)
        if isinstance(error, OSError) and error.errno is not None:
            return os.strerror(error.errno)
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" in str(error) and error.__context__ is None:
            return f"{os.strerror(errno.EIO)} or {os.strerror(errno.ENOSPC).lower()}"
        error = error.__cause__ or error.__context__
    return None
