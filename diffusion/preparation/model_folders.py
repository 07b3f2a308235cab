"""Folders of pretrained models for plug-ins: checked before they are loaded, never downloaded, never run as code."""

import os
from pathlib import Path

import torch

from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation.plugins import NO_GPU

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_model_folder(folder: str | Path, key: str, what: str, *more: str) -> Path:
    """Check that a folder holds a model in the layout of transformers, with safetensors.

    Args:
        folder: the folder.
        key: argument of the plug-in, for messages.
        what: what should be in it, for messages.
        more: names of further files that are needed.

    Returns:
        The folder.

    Raises:
        DataError: a file is missing.
    """
    folder = Path(folder)
    missing = [name for name in ("config.json", *more) if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("model.safetensors")
    if missing:
        raise DataError(
            f"{key}: {folder} has no {' and no '.join(missing)}; put {what} there as `save_pretrained` writes it "
            "(weights as safetensors; nothing is downloaded)"
        )
    return folder


def choose_device(device: str | None) -> torch.device:
    """Return the device of a name; None is the GPU that the worker was given, else the CPU.

    Raises:
        ConfigurationError: it is not the name of a device.
        MachineError: the worker has no GPU, or not that one, or one that PyTorch cannot use.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    has_gpu = torch.cuda.is_available() if visible is None else visible not in NO_GPU
    try:
        chosen = torch.device(device or ("cuda" if has_gpu else "cpu"))
    except RuntimeError as error:
        raise ConfigurationError(f"device: {device!r} is not a device; write cpu, cuda or cuda:1") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise MachineError(
            f"device: {chosen}: PyTorch finds {torch.cuda.device_count()} GPUs in this worker; correct the driver or "
            "num_gpus, or give `device: cpu`"
        )
    return chosen


def choose_dtype(precision: str) -> torch.dtype:
    """Return the type of the weights.

    Raises:
        ConfigurationError: there is no such precision.
    """
    if precision not in DTYPES:
        raise ConfigurationError(f"precision: {precision!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[precision]
