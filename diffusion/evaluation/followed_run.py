"""A run that is followed: its complete checkpoints, held against removal, and whether it is finished."""

import logging
import os
import shutil
from pathlib import Path
from typing import Protocol

import yaml

from diffusion.checkpointing.reading import (
    READ_PATIENCE,
    batch_of,
    find_damage,
    is_half_written,
    list_checkpoints,
    open_remote,
)
from diffusion.checkpointing.remote import remove_copy
from diffusion.config.checks import num_batches
from diffusion.config.schema import Config
from diffusion.config.stores import is_store
from diffusion.errors import MachineError
from diffusion.files import read_json

log = logging.getLogger(__name__)

FINISHED = "finished.json"
"""What training leaves in its run folder at its end (`diffusion.checkpointing.ending`)."""


class FollowedRun(Protocol):
    """The checkpoints of a run."""

    def present(self) -> list[str]:
        """Names of the complete checkpoints, oldest first."""
        ...

    def hold(self, name: str, folder: Path) -> Path | None:
        """A copy of a checkpoint below a folder, which stays when the run removes its own; None if it is gone."""
        ...

    def finished_step(self) -> int | None:
        """The step at which the run has ended, if it says so."""
        ...


class LocalRun:
    """A run whose checkpoints are in a folder.

    Args:
        place: a run folder, or its `checkpoints` folder; it need not exist yet.
    """

    def __init__(self, place: Path) -> None:
        self.run = place.parent if place.name == "checkpoints" else place
        self.checkpoints = place if place.name == "checkpoints" else place / "checkpoints"

    def present(self) -> list[str]:
        """Those whose writing has ended."""
        return [path.name for path in list_checkpoints(self.checkpoints) if not _is_half_written(path)]

    def hold(self, name: str, folder: Path) -> Path | None:
        """Link its files, or copy them to another file system."""
        source, held = self.checkpoints / name, folder / name
        remove_copy(held)
        try:
            if source.is_dir():
                held.mkdir(parents=True)
                for file in sorted(source.iterdir()):
                    _link(file, held / file.name)
            else:
                folder.mkdir(parents=True, exist_ok=True)
                _link(source, held)
        except FileNotFoundError:
            remove_copy(held)
            return None
        if damage := find_damage(held):
            log.info("checkpoint %s: %s", source, damage)
            remove_copy(held)
            return None
        return held

    def finished_step(self) -> int | None:
        """What the run folder says."""
        return _finished_step(self.run)


class RemoteRun:
    """A run whose checkpoints are in an object store.

    Args:
        url: `s3://bucket/prefix` of its checkpoints.
        run: its folder, if that can be reached.
    """

    def __init__(self, url: str, run: Path | None = None) -> None:
        self._remote, self._run = open_remote(url, READ_PATIENCE), run

    def present(self) -> list[str]:
        """Those whose upload has ended."""
        return [found.name for found in self._remote.present() if found.is_complete]

    def hold(self, name: str, folder: Path) -> Path | None:
        """Download it."""
        found = next((one for one in self._remote.present() if one.name == name and one.is_complete), None)
        if found is None:
            return None
        try:
            held = self._remote.fetch(found, folder)
        except MachineError:
            remove_copy(folder / name)
            if name in self.present():
                raise
            return None
        if find_damage(held):
            remove_copy(held)
            return None
        return held

    def finished_step(self) -> int | None:
        """What the run folder says; the store holds checkpoints only."""
        return _finished_step(self._run) if self._run is not None else None


def follow(place: str) -> FollowedRun:
    """The run at a place.

    Args:
        place: run folder, `checkpoints` folder, or `s3://bucket/prefix`; a run folder whose run has put its
            checkpoints elsewhere leads there.
    """
    if is_store(place):
        return RemoteRun(place)
    path = Path(place).expanduser()
    config = path / "config.yaml"
    if config.is_file():
        settings = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("trainer") or {}
        if elsewhere := settings.get("checkpoint_folder"):
            return (
                RemoteRun(elsewhere, path) if is_store(elsewhere) else _ElsewhereRun(path, Path(elsewhere).expanduser())
            )
    return LocalRun(path)


class _ElsewhereRun(LocalRun):
    """A run whose checkpoints are in a folder outside of its own."""

    def __init__(self, run: Path, checkpoints: Path) -> None:
        super().__init__(run)
        self.checkpoints = checkpoints


def _finished_step(run: Path) -> int | None:
    path = run / FINISHED
    return int(read_json(path)["step"]) if path.is_file() else None


def is_last(step: int, config: Config) -> bool:
    """Whether a checkpoint is that of the run's last step, by the configuration in it."""
    return step >= num_batches(config)


def step_of(name: str) -> int:
    """The step that a checkpoint's name says."""
    return batch_of(Path(name))


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
