"""The U-Net's weights in a checkpoint: those of training, or an average; some at a time, and without running code."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.checkpointing.reading import check_bits, flatten
from diffusion.checkpointing.safe_loading import SafeReader, check_file, load_safely, load_sharded
from diffusion.config.model import Weights
from diffusion.errors import DataError
from diffusion.models.stored_weights import StoredWeights

_UNET = "unet."
_MODEL = "state.model."
_AVERAGES = "state.callbacks.LateStartEMA."
_LABELS = f"{_AVERAGES}labels"


def open_unet(checkpoint: Path, weights: str, *, is_checked: bool = False) -> StoredWeights:
    """Open the U-Net's weights of a checkpoint, in one process; all of it is compared with its checksums first.

    An average holds the weights that are trained; frozen ones come with it as they are.

    Args:
        checkpoint: file or folder.
        weights: "raw" for the training weights, "ema" for the first average, or an average's label: `decay-0.999`.
        is_checked: the checksums have been compared on this node.

    Returns:
        Weights by the U-Net's own parameter names.

    Raises:
        DataError: the checkpoint is damaged, or holds no such average.
    """
    if checkpoint.is_dir() and not is_checked:
        check_bits(checkpoint)
    stored, labels = _open_folder(checkpoint) if checkpoint.is_dir() else _open_file(checkpoint)
    module = f"{_MODEL}module." if any(name.startswith(f"{_MODEL}module.") for name in stored.shapes) else _MODEL
    raw = stored.below(module + _UNET)
    if weights == Weights.raw:
        if not raw.shapes:
            raise DataError(f"checkpoint {checkpoint} holds no U-Net")
        return raw
    if weights != Weights.ema and weights not in labels:
        there = f"holds {', '.join(labels)}" if labels else "holds no averages (they had not started)"
        raise DataError(f"checkpoint {checkpoint} {there}, but not the average {weights}: choose another one")
    is_first = weights == Weights.ema or weights == labels[0]
    average = stored.below(_AVERAGES + ("averages." if is_first else f"others.{weights}.") + _UNET)
    if not average.shapes:
        raise DataError(f"checkpoint {checkpoint} holds no average of the weights (it had not started)")
    return average.over(raw)


def read_unet(checkpoint: Path, weights: str) -> dict[str, Tensor]:
    """Read what `open_unet` opens."""
    return open_unet(checkpoint, weights).read_all()


def _open_folder(checkpoint: Path) -> tuple[StoredWeights, list[str]]:
    """The tensors of a sharded checkpoint by its keys, and the labels of the averages."""
    stored = SafeReader(checkpoint).read_metadata().state_dict_metadata
    labels: dict[str, Any] = {_LABELS: ""}
    if _LABELS in stored:
        load_sharded(labels, checkpoint)
    shapes = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")  # pyright: ignore
        for key, entry in stored.items()
        if hasattr(entry, "size")
    }

    def read(keys: Collection[str]) -> dict[str, Tensor]:
        content = {key: torch.empty_like(shapes[key], device="cpu") for key in keys}
        if content:
            load_sharded(content, checkpoint)
        return content

    return StoredWeights(source=f"checkpoint {checkpoint}", shapes=shapes, read=read), labels[_LABELS].split()


def _open_file(checkpoint: Path) -> tuple[StoredWeights, list[str]]:
    """The same of a file, which is mapped instead of being read, by the same keys."""
    check_file(checkpoint)
    content = dict(flatten(load_safely(checkpoint, f"checkpoint {checkpoint}", mmap=True)))
    tensors = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    shapes = {key: torch.empty_like(tensor, device="meta") for key, tensor in tensors.items()}

    def read(keys: Collection[str]) -> dict[str, Tensor]:
        return {key: tensors[key].clone() for key in keys}

    place = f"checkpoint {checkpoint}"
    return StoredWeights(source=place, shapes=shapes, read=read), str(content.get(_LABELS, "")).split()
