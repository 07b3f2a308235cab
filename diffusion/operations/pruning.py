"""Checkpoints that no run needs any longer."""

from pathlib import Path

from diffusion.checkpointing.find import checkpoints_at, is_complete, read_damaged
from diffusion.checkpointing.layout import superseded
from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoint
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.formats.run_folder import LEASE, is_run, read_request
from diffusion.operations.lease import active_holder
from diffusion.operations.runs import absolute, checkpoints_of, is_running, read_supervisor
from diffusion.storage import is_url, join


def initial_checkpoint(run: Path, config: Config) -> tuple[str, ...]:
    """Return the parts of the location that `init_from` names; none without one.

    If it is relative to an unknown folder: the parts after `..`.
    """
    if config.init_from is None:
        return ()
    location = config.init_from.checkpoint
    if _is_guessed(run, location):
        return tuple(part for part in Path(location).parts if part != "..")
    return Path(absolute(run, location)).parts


def may_be(initial: tuple[str, ...], checkpoint: str) -> bool:
    """Return whether a checkpoint is, or may be, the one at `initial_checkpoint`."""
    return initial != () and Path(checkpoint).parts[-len(initial) :] == initial


def find_superseded(run: Path, config: Config, num_kept: int | None) -> list[Path | RemoteCheckpoint]:
    """Find the whole checkpoints that a run no longer needs, in a folder or an object store.

    The newest `num_kept` whole ones (None: `trainer.keep_checkpoints`) stay beside those of `trainer.keep_every`.

    Raises:
        UserError: the run is running, keeps all, or has its checkpoints in an unknown folder, or in that of another
            run; or the store cannot be read.
    """
    settings, location = config.trainer, checkpoints_of(run, config)
    num_kept = settings.keep_checkpoints if num_kept is None else num_kept
    if num_kept < 1:
        raise ConfigurationError(f"trainer.keep_checkpoints is {num_kept}, which keeps all: give --keep")
    if _is_guessed(run, settings.checkpoint_folder):
        raise ConfigurationError(
            f"trainer.checkpoint_folder is {settings.checkpoint_folder}, and the folder in which the run was started "
            "is not known"
        )
    folder = Path(location).resolve()
    owner = None if is_url(location) else next(filter(is_run, (folder, *folder.parents)), None)
    if owner not in (None, run.resolve()):
        raise ConfigurationError(f"its checkpoints are in {location}, a folder of the run {owner}")
    if is_running(run) or active_holder(join(location, LEASE) if is_url(location) else Path(location, LEASE)):
        raise MachineError("it is running")
    if (rollback := read_request(run)) is not None:
        raise MachineError(f"a rollback to step {rollback.limit} or before is pending: start the run first")
    every = None
    if settings.keep_every is not None:
        every = config.steps_of(settings.keep_every, "trainer.keep_every")
    present = checkpoints_at(location, timeout=READ_TIMEOUT).present()
    complete = {one.name for one in present if is_complete(one)}
    whole = complete - read_damaged(location)
    old = superseded(present, newest=num_kept, every=every, is_whole=lambda one: one.name in whole)
    return [one for one in old if one.name in complete]


def _is_guessed(run: Path, location: str | None) -> bool:
    """Return whether a location is relative to a folder that is not known."""
    is_relative = location is not None and not (is_url(location) or Path(location).expanduser().is_absolute())
    return is_relative and read_supervisor(run) is None


def num_bytes(checkpoint: Path | RemoteCheckpoint) -> int:
    """Return the size of a checkpoint."""
    if isinstance(checkpoint, RemoteCheckpoint):
        return sum(file.size for file in checkpoint.files.values())
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files)


def remove(checkpoint: Path | RemoteCheckpoint) -> None:
    """Remove a checkpoint from its folder or store."""
    location = str(checkpoint).rpartition("/")[0]
    checkpoints_at(location, timeout=READ_TIMEOUT).remove(checkpoint)  # pyright: ignore[reportArgumentType]
