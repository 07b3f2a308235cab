"""Runs as their folders show them: where each stands, which of them are at work, and how one is stopped."""

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.resume import FINISHED, PREEMPTED
from diffusion.config.loading import load
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.files import lock
from diffusion.operations import jobs
from diffusion.operations.beats import Beat, Phase, beats_folder, read_beats
from diffusion.operations.costs import BUDGET, StartCosts, read_costs
from diffusion.operations.stacks import is_alive
from diffusion.operations.supervision import SUPERVISED


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A run in one line."""

    folder: Path
    status: str
    step: int
    """Steps done."""

    starts: tuple[StartCosts, ...]


def find_runs(places: Sequence[Path]) -> list[Path]:
    """Run folders: places that are one, and those at most two levels below places that are not.

    Raises:
        ConfigurationError: a place does not exist.
    """
    found: set[Path] = set()
    for place in places:
        if not place.is_dir():
            raise ConfigurationError(f"{place} is no folder: give run folders, or folders that hold them")
        found |= {path.parent for pattern in ("", "*/", "*/*/") for path in place.glob(f"{pattern}config.yaml")}
    return sorted(found)


def read_config(run: Path) -> Config:
    """The resolved configuration of a run.

    Raises:
        ConfigurationError: it is no run folder, or was written by a version with other keys.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigurationError(f"{run} is not a run folder: it has no config.yaml")
    return load(Config, run / "config.yaml")


def read_overview(run: Path, config: Config) -> Overview:
    """How a run stands."""
    starts = tuple(read_costs(run))
    step = starts[-1].reached if starts else 0
    return Overview(folder=run, status=_status(run, config), step=step, starts=starts)


def _status(run: Path, config: Config) -> str:
    if is_live(run, config):
        return "running"
    markers = {FINISHED: "finished", BUDGET: "budget spent", PREEMPTED: "pre-empted"}
    return next((text for name, text in markers.items() if (run / name).is_file()), "interrupted")


def is_live(run: Path, config: Config) -> bool:
    """Whether a run is at work, on this machine or, as far as its folder shows, on another one."""
    return supervisor_of(run) is not None or any(_may_be_alive(beat, config) for beat in _beats(run, config))


def _beats(run: Path, config: Config) -> list[Beat]:
    return read_beats(beats_folder(config, run))


def _may_be_alive(beat: Beat, config: Config) -> bool:
    """Of another machine, unless it has ended by itself or has been silent for longer than anything takes."""
    if beat.host == socket.gethostname():
        return is_alive(beat)
    return beat.phase is not Phase.ended and time.time() - beat.time < config.operations.supervision.pause_timeout


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What a supervisor has written down."""

    pid: int
    host: str
    time: float
    """When it began, in seconds since 1970."""

    folder: str
    """Where it was started."""

    arguments: tuple[str, ...]
    """Of `scripts/supervise.py`."""


def read_supervision(run: Path) -> Supervision | None:
    """The last supervisor of a run; None if it had none."""
    try:
        fields = json.loads((run / SUPERVISED).read_text(encoding="utf-8"))
        return Supervision(**{**fields, "arguments": tuple(fields["arguments"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def supervisor_of(run: Path) -> Supervision | None:
    """The supervisor that holds a run's lock now, or whose job does though it was killed; None if nobody does."""
    if not (run / SUPERVISED).exists():
        return None
    try:
        with lock(run / SUPERVISED, shared=True, timeout=0):
            return None
    except TimeoutError:
        return read_supervision(run)


def stop(run: Path, config: Config) -> list[int]:
    """Ask a run to save and end: its supervisor, or its ranks on this machine, which tell the others.

    Returns:
        The processes that were asked.

    Raises:
        MachineError: the run is not at work on this machine, or supervised on another one.
    """
    supervisor = supervisor_of(run)
    if supervisor is not None and supervisor.host != socket.gethostname():  # It would start again what its ranks end.
        raise MachineError(f"{run} is supervised on {supervisor.host}: give the command there")
    ranks = [beat.pid for beat in _beats(run, config) if is_alive(beat)]
    asked = [supervisor.pid] if supervisor is not None and is_alive(supervisor) else ranks
    if not asked:
        hosts = sorted({beat.host for beat in _beats(run, config) if _may_be_alive(beat, config)})
        where = f": give the command on {hosts[0]}" if hosts else ""
        raise MachineError(f"{run} is not at work on this machine{where}")
    jobs.tell(asked)
    return asked
