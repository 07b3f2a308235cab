"""Finding checkpoints and reading weights from them, outside of training too.

A checkpoint is either a folder `ep0-ba100` of shards with an index `.metadata` (FSDP2), or a file `ep0-ba100.pt` (DDP).
The index is written last, and a zip archive ends with its directory, so that a half-written checkpoint is told from a
whole one. Whole means that the files are all there and long enough, which is seen without reading them.
"""

import json
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from diffusion.checkpointing.checksums import check_checksums
from diffusion.checkpointing.object_store import ObjectStore
from diffusion.checkpointing.remote import RemoteCheckpoints, remove_copy
from diffusion.checkpointing.retention import superseded_steps
from diffusion.checkpointing.safe_loading import (
    INDEX,
    SafeReader,
    UnsafeCheckpointError,
    check_entries,
    check_file,
    find_short_file,
    load_safely,
    load_sharded,
    read_entries,
)
from diffusion.checkpointing.writing import PARTIAL_FILE
from diffusion.config.stores import is_store
from diffusion.errors import ConfigurationError, DataError

log = logging.getLogger(__name__)

_NAME = re.compile(r"ep(\d+)-ba(\d+)(\.pt)?")


def is_half_written(path: Path) -> bool:
    """Whether the writing of a checkpoint did not reach its end."""
    return not (path / INDEX).is_file() if path.is_dir() else not zipfile.is_zipfile(path)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, without reading its tensors; None if it is whole.

    Raises:
        UnsafeCheckpointError: its index would run code.
    """
    if is_half_written(path):
        return "it was not written to its end"
    try:
        if path.is_dir():
            return find_short_file(path, read_entries(path))
        with zipfile.ZipFile(path) as archive:
            return None if any(name.endswith("/data.pkl") for name in archive.namelist()) else "it holds no state"
    except UnsafeCheckpointError:
        raise
    except (DataError, zipfile.BadZipFile, OSError) as error:
        return str(error)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint is whole."""
    return find_damage(path) is None


def check_checkpoint(path: Path, *, thoroughly: bool = True) -> None:
    """Refuse a checkpoint that is damaged or would run code, before anything else reads it.

    Args:
        path: file or folder.
        thoroughly: read all of it and compare with its checksums.

    Raises:
        UnsafeCheckpointError: it would run code.
        DataError: it is damaged.
    """
    if damage := find_damage(path):
        raise DataError(f"checkpoint {path} is damaged: {damage}")
    if path.is_dir():
        check_entries(path)
        if thoroughly:
            check_bits(path)
    else:
        check_file(path)


def check_bits(path: Path) -> None:
    """Read a sharded checkpoint entirely and compare it with its checksums.

    Raises:
        UnsafeCheckpointError: its index would run code.
        DataError: it is not what was written.
    """
    check_checksums(path, {INDEX, *(entry.file for entry in read_entries(path))})


def batch_of(path: Path) -> int:
    """The number of steps after which a checkpoint was written, -1 if the name is not a checkpoint's."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(2)) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run's `checkpoints` folder, whole or not, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if batch_of(path) >= 0), key=lambda path: (batch_of(path), path))


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run's `checkpoints` folder, oldest first."""
    return [path for path in list_checkpoints(folder) if is_complete(path)]


def find_newest(folder: Path, check: Callable[[Path], None] | None = None) -> Path | None:
    """The newest checkpoint of a folder that is whole; those that are passed over are told.

    Args:
        folder: a run's `checkpoints` folder.
        check: raises a `DataError` for a checkpoint that is not to be taken either.

    Raises:
        UnsafeCheckpointError: a checkpoint would run code.
    """
    for path in reversed(list_checkpoints(folder)):
        damage = find_damage(path)
        if damage is None and check is not None:
            try:
                check(path)
            except UnsafeCheckpointError:
                raise
            except DataError as error:
                damage = str(error)
        if damage is None:
            return path
        log.warning("checkpoint %s is passed over, and the one before is taken: %s", path, damage)
    return None


def resolve_checkpoint(place: str) -> Path:
    """The checkpoint at a path: itself, or the newest complete one of a run or of its `checkpoints` folder.

    One in an object store is downloaded to `$XDG_CACHE_HOME/diffusion` (by default `~/.cache/diffusion`), once.

    Args:
        place: path, or `s3://bucket/prefix` of a run's checkpoints or of one of them.

    Raises:
        ConfigurationError: there is none.
        UnsafeCheckpointError: it would run code.
        MachineError: the store cannot be read.
    """
    if is_store(place):
        return _resolve_remote(place)
    path = Path(place).expanduser()
    if elsewhere := _checkpoint_folder(path):
        return resolve_checkpoint(elsewhere)
    if path.is_file() or (path / INDEX).is_file():
        if damage := find_damage(path):
            raise ConfigurationError(f"checkpoint {path} is not whole ({damage}): take another one")
        return path
    for folder in (path, path / "checkpoints"):
        if found := find_newest(folder):
            return found
    what = "holds no complete checkpoint" if path.exists() else "does not exist"
    raise ConfigurationError(f"{path} {what}: give a checkpoint, a run's folder, or its `checkpoints` folder")


READ_PATIENCE = 120.0
"""Seconds for which a store that does not answer is tried again when a checkpoint is only read."""


def open_remote(url: str, patience: float) -> RemoteCheckpoints:
    """The checkpoints of a run in an object store.

    Args:
        url: `s3://bucket/prefix`.
        patience: seconds for which failures that may pass are tried again.

    Raises:
        ConfigurationError: the URL is of another kind.
    """
    return RemoteCheckpoints(ObjectStore(url, patience=patience), batch_of)


def _resolve_remote(url: str) -> Path:
    parent, _, name = url.rstrip("/").rpartition("/")
    is_named = batch_of(Path(name)) >= 0
    folder = parent if is_named else url.rstrip("/")
    remote = open_remote(folder, READ_PATIENCE)
    whole = [found for found in remote.present() if found.is_complete and (not is_named or found.name == name)]
    if not whole:
        raise ConfigurationError(f"{url} holds no complete checkpoint: give s3://bucket/prefix of a run's checkpoints")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "diffusion"
    path = remote.fetch(whole[-1], cache / whole[-1].identity)
    if damage := find_damage(path):
        remove_copy(path)
        raise DataError(f"checkpoint {url} is damaged: {damage}")
    return path


def _checkpoint_folder(run: Path) -> str | None:
    """Where a run has put its checkpoints, if not into its own folder."""
    path = run / "config.yaml"
    if not path.is_file():
        return None
    settings = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("trainer") or {}
    return settings.get("checkpoint_folder")


# Retention


def superseded(
    checkpoints: list[Path], *, newest: int, every: float | None, is_whole: Callable[[Path], bool] = is_complete
) -> list[Path]:
    """Which checkpoints may be removed.

    Args:
        checkpoints: all of a run, oldest first.
        newest: so many of the newest whole ones stay; nothing is removed before there are as many.
        every: the first checkpoint at or after each multiple of so many steps stays as well.
        is_whole: tells a whole checkpoint.
    """
    remaining, position = newest, len(checkpoints)
    while remaining and position:
        position -= 1
        remaining -= is_whole(checkpoints[position])
    if remaining:
        return []
    steps = [batch_of(path) for path in checkpoints]
    return [checkpoints[i] for i in superseded_steps(steps, num_replaceable=position, every=every)]


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that, interrupted in between, it is not taken for whole."""
    if path.is_dir():
        (path / INDEX).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_half_written(folder: Path) -> None:
    """Remove what an interrupted save has left behind."""
    for path in list_checkpoints(folder):
        if is_half_written(path):
            log.warning("removing %s, which was not written to its end", path)
            remove_checkpoint(path)
    for path in folder.glob(f"ep*{PARTIAL_FILE}"):
        path.unlink(missing_ok=True)


# Reading


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Read what a run has stored about itself in a checkpoint: `config` (YAML), `model`.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
    """
    if checkpoint.is_dir():
        record = _read_sharded(checkpoint, "state.callbacks.RunRecord.")
    else:
        record = _read_state(checkpoint).get("callbacks", {}).get("RunRecord", {})
    if "config" not in record:
        raise DataError(
            f"checkpoint {checkpoint} does not say what it was trained as: it was not written by this package"
        )
    return record


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run had come."""

    num_steps: int
    """Optimizer steps that were done."""

    order: dict[str, str | int | None]
    """Fingerprint of the order of its samples (`diffusion.datasets.sample_order.GlobalOrder.fingerprint`)."""


def read_position(checkpoint: Path) -> Position:
    """Read how far a run had come when a checkpoint was written.

    Raises:
        DataError: the checkpoint is damaged, or of a run whose data was not in this package's order.
    """
    if checkpoint.is_dir():
        steps = _read_sharded(checkpoint, "state.timestamp.Timestamp.").get("batch")
        order = _read_sharded(checkpoint, "state.dataset_state.train.").get("order")
    else:
        state = _read_state(checkpoint)
        steps = state.get("timestamp", {}).get("Timestamp", {}).get("batch")
        order = (state.get("dataset_state", {}).get("train") or {}).get("order")
    if not isinstance(steps, int) or not isinstance(order, str):
        raise DataError(f"checkpoint {checkpoint} does not say in which order its samples came")
    return Position(num_steps=steps, order=json.loads(order))


def read_all(checkpoint: Path) -> dict[str, Any]:
    """Read everything in a checkpoint, in one process, by dotted keys such as `state.model.unet.conv_in.weight`.

    Raises:
        DataError: the checkpoint is damaged, or would run code.
    """
    if checkpoint.is_dir():
        return _read_sharded(checkpoint, "")
    return dict(flatten(load_safely(checkpoint, f"checkpoint {checkpoint}")))


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """What nested dictionaries and lists hold, by dotted keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, value
        return
    for name, content in items:
        yield from flatten(content, f"{key}.{name}" if key else str(name))


def _read_sharded(checkpoint: Path, prefix: str) -> dict[str, Any]:
    """Entries below a prefix, without it."""
    stored = SafeReader(checkpoint).read_metadata().state_dict_metadata
    content: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None  # pyright: ignore
        for key, entry in stored.items()
        if key.startswith(prefix)
    }
    if content:
        load_sharded(content, checkpoint)
    return {key.removeprefix(prefix): value for key, value in content.items()}


def _read_state(checkpoint: Path) -> dict[str, Any]:
    content = load_safely(checkpoint, f"checkpoint {checkpoint}", mmap=True)
    if not isinstance(content, dict) or not isinstance(content.get("state"), dict):
        raise DataError(f"checkpoint {checkpoint} holds no state of a run")
    return content["state"]
