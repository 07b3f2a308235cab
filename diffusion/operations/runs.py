"""Runs as their folders show them: find, describe and stop them, and find the checkpoints that they no longer need."""

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.find import is_complete
from diffusion.checkpointing.layout import list_checkpoints, remove_checkpoint, superseded
from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoint, RemoteCheckpoints
from diffusion.checkpointing.resume import FINISHED, PREEMPTED
from diffusion.config.checks import steps_of
from diffusion.config.loading import load
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.files import lock
from diffusion.operations.costs import BUDGET, COSTS
from diffusion.operations.heartbeats import heartbeat_folder, read_heartbeats
from diffusion.operations.lease import LEASE_FILE, active_holder
from diffusion.operations.processes import ProcessRecord, is_alive, terminate
from diffusion.operations.supervisor import SUPERVISED
from diffusion.storage import is_url


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Find run folders among some folders and up to three levels below them: `runs/sweeps/NAME/POINT`.

    Raises:
        ConfigurationError: a folder does not exist.
    """
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is no folder: give run folders, or folders that contain them")
        paths = (path for depth in ("", "*/", "*/*/", "*/*/*/") for path in folder.glob(f"{depth}config.yaml"))
        found |= {path.parent for path in paths if "wandb" not in path.relative_to(folder).parts}
    return sorted(found)


def read_config(run: Path) -> Config:
    """Read the resolved configuration of a run.

    Raises:
        ConfigurationError: it is no run folder, or was written by a version with other keys.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigurationError(f"{run} is not a run folder: it has no config.yaml")
    return load(Config, run / "config.yaml")


def read_status(run: Path) -> str:
    """Return the status of a run in words."""
    if is_running(run):
        return "running"
    markers = {FINISHED: "finished", BUDGET: "budget spent", PREEMPTED: "pre-empted"}
    otherwise = "interrupted" if (run / COSTS).is_file() else "not trained"  # A check has failed.
    return next((text for name, text in markers.items() if (run / name).is_file()), otherwise)


def is_running(run: Path) -> bool:
    """Return whether a run has a supervisor or, on any host, a start that holds its lease."""
    return supervisor_of(run) is not None or active_holder(run / LEASE_FILE) is not None


@dataclass(frozen=True, kw_only=True)
class SupervisorRecord(ProcessRecord):
    """Content of a supervisor's lock file."""

    folder: str
    """Working directory."""

    arguments: list[str]
    """Arguments of `scripts/supervise.py`."""


def read_supervisor(run: Path) -> SupervisorRecord | None:
    """Read the record of the last supervisor of a run; None if it had none."""
    try:
        return SupervisorRecord(**json.loads((run / SUPERVISED).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def supervisor_of(run: Path) -> SupervisorRecord | None:
    """Return the supervisor whose lock is held, by itself or by its job if it was killed; None without one."""
    if not (run / SUPERVISED).exists():
        return None
    try:
        with lock(run / SUPERVISED, shared=True, timeout=0):
            return None
    except TimeoutError:
        return read_supervisor(run)
    except PermissionError:  # Another user's; the lease says whether it runs.
        return None


def stop(run: Path, config: Config) -> list[int]:
    """Stop a run after a save: through its supervisor, or through its ranks on this machine, which notify the others.

    Returns:
        The processes that got the signal.

    Raises:
        MachineError: the run is not running on this machine, or supervised on another one.
    """
    supervisor = supervisor_of(run)
    if supervisor is not None and supervisor.host != socket.gethostname():  # It would restart the job.
        raise MachineError(f"{run} is supervised on {supervisor.host}: give the command there")
    pids = [one.pid for one in read_heartbeats(heartbeat_folder(config, run)) if is_alive(one)]
    if supervisor is not None and is_alive(supervisor):
        pids = [supervisor.pid]
    if not pids:
        holder = active_holder(run / LEASE_FILE)
        remedy = f": give the command on {holder.host}" if holder is not None else ""
        raise MachineError(f"{run} is not running on this machine{remedy}")
    terminate(pids)
    return pids


# Checkpoints


def absolute(run: Path, location: str) -> str:
    """Resolve a location that a run names; a relative path starts where its supervisor was started, if it had one."""
    if is_url(location):
        return location.rstrip("/")
    supervisor = read_supervisor(run)
    return str(Path(supervisor.folder if supervisor is not None else "", Path(location).expanduser()).resolve())


def checkpoints_of(run: Path, config: Config) -> str:
    """The folder or URI of a run's checkpoints."""
    location = config.trainer.checkpoint_folder
    return str(run.resolve() / "checkpoints") if location is None else absolute(run, location)


def beginning_of(run: Path, config: Config) -> tuple[str, ...]:
    """Parts of the location of the checkpoint that a run begins with; none without one.

    The last parts only, if the location is relative to a folder that is unknown.
    """
    if config.init_from is None:
        return ()
    location = config.init_from.checkpoint
    if _is_guessed(run, location):
        return tuple(part for part in Path(location).parts if part != "..")
    return Path(absolute(run, location)).parts


def begins_with(beginning: tuple[str, ...], checkpoint: str) -> bool:
    """Whether the run of a beginning begins with a checkpoint, or may do so."""
    return beginning != () and Path(checkpoint).parts[-len(beginning) :] == beginning


def find_superseded(run: Path, config: Config, num_kept: int | None) -> list[Path | RemoteCheckpoint]:
    """Find the whole checkpoints that a run no longer needs, in a folder or an object store.

    Args:
        run: the run folder.
        config: its configuration.
        num_kept: newest whole checkpoints that stay beside those of `trainer.keep_every`; None is
            `trainer.keep_checkpoints`.

    Raises:
        UserError: the run is running, keeps all, or has its checkpoints in an unknown folder; or the store cannot be
            read.
    """
    settings, location = config.trainer, checkpoints_of(run, config)
    num_kept = settings.keep_checkpoints if num_kept is None else num_kept
    if is_running(run):
        raise MachineError("it is running")
    if num_kept < 1:
        raise ConfigurationError(f"trainer.keep_checkpoints is {num_kept}, which keeps all: give --keep")
    if _is_guessed(run, settings.checkpoint_folder):
        raise ConfigurationError(
            f"trainer.checkpoint_folder is {settings.checkpoint_folder}, and the folder in which the run was started "
            "is not known"
        )
    every = None
    if settings.keep_every is not None:
        every = steps_of(config, settings.keep_every, "trainer.keep_every")
    if is_url(location):
        remote = {Path(found.name): found for found in RemoteCheckpoints(location, timeout=READ_TIMEOUT).present()}
        whole = [path for path, found in remote.items() if found.is_complete]
        old = superseded(list(remote), newest=num_kept, every=every, is_whole=whole.__contains__)
        return [remote[path] for path in old if path in whole]
    old = superseded(list_checkpoints(Path(location)), newest=num_kept, every=every, is_whole=is_complete)
    return [path for path in old if is_complete(path)]


def _is_guessed(run: Path, location: str | None) -> bool:
    """Whether a location is relative to a folder that is not known."""
    is_relative = location is not None and not (is_url(location) or Path(location).expanduser().is_absolute())
    return is_relative and read_supervisor(run) is None


def num_bytes(checkpoint: Path | RemoteCheckpoint) -> int:
    """Size of a checkpoint."""
    if isinstance(checkpoint, RemoteCheckpoint):
        return sum(file.size for file in checkpoint.files.values())
    files = checkpoint.iterdir() if checkpoint.is_dir() else [checkpoint]
    return sum(file.stat().st_size for file in files)


def remove(checkpoint: Path | RemoteCheckpoint) -> None:
    """Remove a checkpoint from its folder or store."""
    if isinstance(checkpoint, RemoteCheckpoint):
        RemoteCheckpoints(checkpoint.uri.rpartition("/")[0], timeout=READ_TIMEOUT).remove(checkpoint)
    else:
        remove_checkpoint(checkpoint)
