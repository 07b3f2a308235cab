"""Folders with pretrained models for plug-ins: checked before they are loaded, never fetched, never run as code."""

from pathlib import Path

import torch

from diffusion.errors import ConfigurationError, DataError, MachineError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_model_folder(folder: str | Path, key: str, what: str, *more: str) -> Path:
    """Check that a folder holds a model in the layout of transformers, with safetensors.

    Args:
        folder: The folder.
        key: The argument that names it, for messages.
        what: What should be in it, for messages.
        more: Names of further files that are needed.

    Returns:
        The folder.

    Raises:
        DataError: A file is missing; the message says which one to put where.
    """
    folder = Path(folder)
    needed = ["config.json", *more]
    missing = [name for name in needed if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise DataError(
            f"{key}: {folder} has no {' and no '.join(missing)}; put {what} there as `save_pretrained` writes it "
            "(weights as safetensors; nothing is downloaded)"
        )
    return folder


def choose_device(device: str | None) -> torch.device:
    """Return the device of a name; None is a GPU where there is one.

    Raises:
        ConfigurationError: It is not the name of a device.
        MachineError: This machine has no GPU, or not that one.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device: {device!r} is not a device; write cpu, cuda or cuda:1") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"device: {device}: there are {torch.cuda.device_count()} GPUs here; take cpu, or leave it out"
        )
    return chosen


def choose_dtype(precision: str) -> torch.dtype:
    """Return the type of the weights.

    Raises:
        ConfigurationError: There is no such precision.
    """
    if precision not in DTYPES:
        raise ConfigurationError(f"precision: {precision!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[precision]
