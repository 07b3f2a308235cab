"""Names and files of checkpoints, and which of them stay.

A checkpoint after epoch 0 and 100 steps is a folder `ep0-ba100` (FSDP2) or a file `ep0-ba100.pt` (DDP). The folder
holds a file of each rank (`__0_0.distcp`), their checksums and an index, which is written last. The file is a zip
archive, which ends with its table of contents. So an incomplete checkpoint is recognised without being read.
"""

import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from diffusion.files import file_mode

Checkpoint = TypeVar("Checkpoint")
"""A path, or a checkpoint in a store."""

CHECKPOINT_INDEX = ".metadata"
CHECKSUMS, CHECKSUM_KIND = "checksums.json", "xxh64"

_NAME = re.compile(r"ep(\d+)-ba(\d+)(\.pt)?")


def batch_of(checkpoint: Any) -> int:
    """The number of steps in the name of a path or remote checkpoint, -1 if the name is not a checkpoint's."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match.group(2)) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """List all checkpoints of a run's `checkpoints` folder, complete or not, oldest first."""
    try:
        paths = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((path for path in paths if batch_of(path) >= 0), key=lambda path: (batch_of(path), path))


def is_half_written(path: Path) -> bool:
    """Return whether the writing of a checkpoint was interrupted. One that is a file gets its name when it is whole."""
    return path.is_dir() and not file_mode(path / CHECKPOINT_INDEX)


# Removal


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, its index first: after an interruption the rest counts as half-written."""
    if path.is_dir():
        (path / CHECKPOINT_INDEX).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_copy(path: Path) -> None:
    """Remove a copy of a checkpoint, as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# Retention


def superseded(
    checkpoints: Sequence[Checkpoint], *, newest: int, every: float | None, is_whole: Callable[[Checkpoint], bool]
) -> list[Checkpoint]:
    """Select the checkpoints that may be removed.

    Args:
        checkpoints: all of a run, oldest first.
        newest: number of the newest whole ones that stay; nothing is removed before there are as many.
        every: the first checkpoint at or after each multiple of this number of steps stays as well.
        is_whole: whether a checkpoint is complete.
    """
    remaining, position = newest, len(checkpoints)
    while remaining and position:
        position -= 1
        remaining -= is_whole(checkpoints[position])
    if remaining:
        return []
    steps = [batch_of(one) for one in checkpoints]
    return [checkpoints[i] for i in _superseded_positions(steps, num_replaceable=position, every=every)]


def kept_steps(steps: Sequence[float], *, newest: int, every: float | None) -> list[float]:
    """Select of the steps after which checkpoints are written those that stay at the end, as in `superseded`."""
    removed = _superseded_positions(steps, num_replaceable=max(len(steps) - newest, 0), every=every)
    return [step for position, step in enumerate(steps) if position not in removed]


def _superseded_positions(steps: Sequence[float], *, num_replaceable: int, every: float | None) -> list[int]:
    """Positions of the oldest `num_replaceable` steps, without the first at or after each multiple of `every`."""
    removed, previous = [], 0.0
    for position, step in enumerate(steps[:num_replaceable]):
        if every is None or math.floor(step / every) == math.floor(previous / every):
            removed.append(position)
        previous = step
    return removed
