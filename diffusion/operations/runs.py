"""Runs as their folders show them: find, describe and stop them, and prune what they no longer need."""

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.find import is_complete
from diffusion.checkpointing.layout import list_checkpoints, remove_checkpoint, superseded
from diffusion.checkpointing.resume import FINISHED, PREEMPTED
from diffusion.config.checks import num_batches
from diffusion.config.fields import parse_time
from diffusion.config.loading import load
from diffusion.config.schema import Config
from diffusion.datasets.cache import move_unused_cache
from diffusion.datasets.loader import validation_streams
from diffusion.datasets.streams import StreamLocation, locate_streams
from diffusion.errors import ConfigurationError, MachineError
from diffusion.files import lock
from diffusion.operations.costs import BUDGET, StartCosts, read_costs
from diffusion.operations.heartbeats import HeartbeatRecord, Phase, heartbeat_folder, read_heartbeats
from diffusion.operations.processes import is_alive, terminate
from diffusion.operations.supervisor import SUPERVISED
from diffusion.storage import is_url

REMOVED = ".removed"
"""Suffix of a cache during its removal, so that no job finds half of it."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """Status and costs of a run."""

    folder: Path
    status: str
    step: int
    """Completed steps."""

    starts: tuple[StartCosts, ...]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Find run folders among some folders and up to two levels below them.

    Raises:
        ConfigurationError: a folder does not exist.
    """
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is no folder: give run folders, or folders that contain them")
        found |= {path.parent for pattern in ("", "*/", "*/*/") for path in folder.glob(f"{pattern}config.yaml")}
    return sorted(found)


def read_config(run: Path) -> Config:
    """Read the resolved configuration of a run.

    Raises:
        ConfigurationError: it is no run folder, or was written by a version with other keys.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigurationError(f"{run} is not a run folder: it has no config.yaml")
    return load(Config, run / "config.yaml")


def read_overview(run: Path, config: Config) -> Overview:
    """Read status and costs of a run."""
    starts = tuple(read_costs(run))
    step = starts[-1].reached if starts else 0
    return Overview(folder=run, status=_status(run, config), step=step, starts=starts)


def _status(run: Path, config: Config) -> str:
    if is_running(run, config):
        return "running"
    markers = {FINISHED: "finished", BUDGET: "budget spent", PREEMPTED: "pre-empted"}
    return next((text for name, text in markers.items() if (run / name).is_file()), "interrupted")


def is_running(run: Path, config: Config) -> bool:
    """Return whether a run is running on this machine or, by its heartbeats, on another one."""
    if supervisor_of(run) is not None:
        return True
    return any(_may_be_alive(heartbeat, config) for heartbeat in _heartbeats(run, config))


def _heartbeats(run: Path, config: Config) -> list[HeartbeatRecord]:
    return read_heartbeats(heartbeat_folder(config, run))


def _may_be_alive(heartbeat: HeartbeatRecord, config: Config) -> bool:
    """Return whether a rank is alive; on another machine, whether its silence is below the longest timeout."""
    if heartbeat.host == socket.gethostname():
        return is_alive(heartbeat)
    silence = time.time() - heartbeat.time
    return heartbeat.phase is not Phase.ended and silence < config.operations.supervision.pause_timeout


@dataclass(frozen=True, kw_only=True)
class SupervisorRecord:
    """Content of a supervisor's lock file."""

    pid: int
    host: str
    time: float
    """Time of its start in seconds since 1970."""

    folder: str
    """Working directory."""

    arguments: tuple[str, ...]
    """Arguments of `scripts/supervise.py`."""


def read_supervisor(run: Path) -> SupervisorRecord | None:
    """Read the record of the last supervisor of a run; None if it had none."""
    try:
        fields = json.loads((run / SUPERVISED).read_text(encoding="utf-8"))
        return SupervisorRecord(**{**fields, "arguments": tuple(fields["arguments"])})
    except (OSError, ValueError, KeyError, TypeError):
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
    ranks = [heartbeat.pid for heartbeat in _heartbeats(run, config) if is_alive(heartbeat)]
    pids = [supervisor.pid] if supervisor is not None and is_alive(supervisor) else ranks
    if not pids:
        hosts = sorted({heartbeat.host for heartbeat in _heartbeats(run, config) if _may_be_alive(heartbeat, config)})
        remedy = f": give the command on {hosts[0]}" if hosts else ""
        raise MachineError(f"{run} is not running on this machine{remedy}")
    terminate(pids)
    return pids


# Pruning


@dataclass(frozen=True, kw_only=True)
class Removable:
    """A file or folder that no run needs."""

    path: Path
    why: str
    num_bytes: int
    remove: Callable[[], None]


def find_removable(run: Path, config: Config, num_kept: int | None) -> Iterator[Removable]:
    """Find what a run no longer needs: old checkpoints, and its caches if it has finished. Nothing of a running run.

    Args:
        run: the run folder.
        config: its configuration.
        num_kept: newest whole checkpoints that stay beside those of `trainer.keep_every`; None is
            `trainer.keep_checkpoints`.
    """
    if is_running(run, config):
        return
    yield from _checkpoints(run, config, config.trainer.keep_checkpoints if num_kept is None else num_kept)
    if (run / FINISHED).is_file():
        yield from _caches(run, config)


def _checkpoints(run: Path, config: Config, num_kept: int) -> Iterator[Removable]:
    settings = config.trainer
    if num_kept < 1 or (settings.checkpoint_folder is not None and is_url(settings.checkpoint_folder)):
        return
    every = None
    if settings.keep_every is not None:
        interval = parse_time(settings.keep_every, "trainer.keep_every")
        every = interval.in_batches(num_batches=num_batches(config), global_batch_size=config.data.global_batch_size)
    folder = run / "checkpoints"
    if settings.checkpoint_folder is not None:
        folder = _absolute(run, Path(settings.checkpoint_folder).expanduser())
    present = list_checkpoints(folder) if folder is not None else []
    for path in superseded(present, newest=num_kept, every=every, is_whole=is_complete):
        why = f"checkpoint older than {num_kept} whole ones"
        yield Removable(path=path, why=why, num_bytes=_size(path), remove=lambda path=path: remove_checkpoint(path))


def _caches(run: Path, config: Config) -> Iterator[Removable]:
    data, validation = config.data, config.validation
    locations = locate_streams(data.remote, data.local, data.streams)
    if validation is not None:
        locations += locate_streams(validation.remote, validation.local, validation_streams(validation, data))
    for cache in filter(None, (_cache(run, location) for location in locations)):
        partial, why = _renamed(cache), "cache of a finished run"
        if partial.is_dir():
            size = _size(partial)
            yield Removable(path=partial, why=why, num_bytes=size, remove=lambda path=partial: shutil.rmtree(path))
        if cache.is_dir():
            yield Removable(path=cache, why=why, num_bytes=_size(cache), remove=lambda path=cache: _remove_cache(path))


def _cache(run: Path, location: StreamLocation) -> Path | None:
    """Return the folder that a run has filled from a remote; None if it may be the original."""
    cache = _absolute(run, location.local)
    if location.remote is None or (not is_url(location.remote) and _absolute(run, location.remote) in (None, cache)):
        return None
    return cache


def _absolute(run: Path, path: Path | str) -> Path | None:
    """Resolve a path of a run's configuration; None for a relative one if the working directory is unknown."""
    supervisor = read_supervisor(run)
    path = Path(supervisor.folder, path) if supervisor is not None else Path(path)
    return path.resolve() if path.is_absolute() else None


def _remove_cache(cache: Path) -> None:
    partial = _renamed(cache)
    if not move_unused_cache(cache, partial):
        raise MachineError(f"{cache} is in use by a running job, and stays")
    shutil.rmtree(partial)


def _renamed(cache: Path) -> Path:
    return cache.with_name(cache.name + REMOVED)


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def remove_all(removables: Sequence[Removable]) -> list[str]:
    """Remove files and folders; return the failures with their reasons."""
    failures = []
    for removable in removables:
        try:
            removable.remove()
        except (OSError, MachineError) as error:
            failures.append(f"{removable.path}: {error}")
    return failures
