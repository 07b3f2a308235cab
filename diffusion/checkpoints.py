"""Finding checkpoints and reading weights from them, outside of training too.

A checkpoint is either a folder `ep0-ba100` of shards with an index `.metadata` (FSDP2), or a file `ep0-ba100.pt` (DDP).
Both are written by Composer; the index is written last, and a zip archive ends with its directory, so that a
half-written checkpoint is told from a whole one.
"""

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from diffusion.config.model import Weights
from diffusion.errors import ConfigurationError, DataError
from diffusion.sharding import SafeLoadPlanner, check_metadata, load_safely

_NAME = re.compile(r"ep(\d+)-ba(\d+)(\.pt)?$")
_UNET = "unet."


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return (path / ".metadata").is_file() if path.is_dir() else zipfile.is_zipfile(path)


def batch_of(path: Path) -> int:
    """The number of steps after which a checkpoint was written, -1 if the name is not a checkpoint's."""
    match = _NAME.search(path.name)
    return int(match.group(2)) if match else -1


def find_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run's `checkpoints` folder, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.search(path.name) and is_complete(path)]
    return sorted(found, key=batch_of)


def resolve_checkpoint(place: str) -> Path:
    """The checkpoint at a path: itself, or the newest complete one of a run or of its `checkpoints` folder.

    Raises:
        ConfigurationError: there is none.
    """
    path = Path(place).expanduser()
    if path.is_file() or (path / ".metadata").is_file():
        if not is_complete(path):
            raise ConfigurationError(f"checkpoint {path} is not whole: take another one")
        return path
    for folder in (path, path / "checkpoints"):
        if found := find_checkpoints(folder):
            return found[-1]
    what = "holds no complete checkpoint" if path.exists() else "does not exist"
    raise ConfigurationError(f"{path} {what}: give a checkpoint, a run's folder, or its `checkpoints` folder")


def read_unet(checkpoint: Path, weights: Weights) -> dict[str, Tensor]:
    """Read the U-Net's weights from a checkpoint, in one process and without running code from it.

    Args:
        checkpoint: file or folder.
        weights: the training weights, or their average.

    Returns:
        fp32 tensors by the U-Net's own parameter names.

    Raises:
        DataError: the checkpoint is damaged, or holds no average.
    """
    if checkpoint.is_dir():
        tensors = _read_sharded(
            checkpoint, "state.callbacks.LateStartEMA.averages." if weights == Weights.ema else "state.model."
        )
    else:
        tensors = _read_file(checkpoint, weights)
    unet = {name.removeprefix(_UNET): tensor for name, tensor in tensors.items() if name.startswith(_UNET)}
    if not unet:
        missing = "average of the weights (it had not started)" if weights == Weights.ema else "U-Net"
        raise DataError(f"checkpoint {checkpoint} holds no {missing}")
    return unet


def read_record(checkpoint: Path) -> dict[str, Any]:
    """Read what a run has stored about itself in a checkpoint: `config` (YAML), `model`.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
    """
    key = "state.callbacks.RunRecord."
    if checkpoint.is_dir():
        check_metadata(checkpoint)
        reader = FileSystemReader(checkpoint)
        content: dict[str, Any] = {
            name: None for name in reader.read_metadata().state_dict_metadata if name.startswith(key)
        }
        if content:
            load(content, storage_reader=reader, planner=_planner(), no_dist=True)
        record = {name.removeprefix(key): value for name, value in content.items()}
    else:
        record = _read_state(checkpoint).get("callbacks", {}).get("RunRecord", {})
    if "config" not in record:
        raise DataError(
            f"checkpoint {checkpoint} does not say what it was trained as: it was not written by this package"
        )
    return record


def _planner() -> SafeLoadPlanner:
    """For dictionaries that are filled in place under the keys of the checkpoint."""
    return SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def _read_sharded(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    check_metadata(checkpoint)
    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    wanted = {key: entry for key, entry in stored.items() if key.startswith(prefix)}
    tensors: dict[str, Tensor] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        for key, entry in wanted.items()
        if hasattr(entry, "size")
    }
    load(tensors, storage_reader=reader, planner=_planner(), no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def _read_state(checkpoint: Path) -> dict[str, Any]:
    try:
        return load_safely(checkpoint)["state"]
    except (RuntimeError, KeyError) as error:
        raise DataError(f"checkpoint {checkpoint} cannot be read: {error}") from error


def _read_file(checkpoint: Path, weights: Weights) -> dict[str, Tensor]:
    state = _read_state(checkpoint)
    if weights == Weights.ema:
        return state.get("callbacks", {}).get("LateStartEMA", {}).get("averages", {})
    return {name.removeprefix("module."): tensor for name, tensor in state["model"].items()}
