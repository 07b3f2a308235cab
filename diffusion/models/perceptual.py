"""Perceptual distance of images: LPIPS (Zhang et al. 2018) on the features of torchvision's VGG16, from a file.

torchmetrics brings the distance and its learned weights; VGG16's, which it would download, are read from a file.
"""

import pickle
from pathlib import Path

import torch
from torch import nn
from torchmetrics.functional.image.lpips import _LPIPS

from diffusion.errors import ConfigurationError
from diffusion.models.frozen import freeze

VGG_FILE = "vgg16-397923af.pth"


def build_perceptual() -> _LPIPS:
    """LPIPS with random weights of VGG16."""
    return _LPIPS(net="vgg", pnet_rand=True)


def load_perceptual(path: str | None, key: str) -> nn.Module:
    """Build LPIPS, frozen: from two batches of images, float32 [B, 3, height, width] in [-1, 1], to [B, 1, 1, 1].

    Args:
        path: torchvision's weights of VGG16, a state dict with `features.0.weight` and so on.
        key: where the path was configured, for messages.

    Raises:
        ConfigurationError: the file is not there, or does not hold these weights.
    """
    file = Path(path).expanduser() if path else None
    if file is None or not file.is_file():
        raise ConfigurationError(
            f"{key}={path}: the perceptual loss needs torchvision's {VGG_FILE} (from download.pytorch.org/models). Put "
            "it on this machine and give its path, or set autoencoder.perceptual_weight=0."
        )
    lpips = build_perceptual()
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
        # torchmetrics calls layer 5 of torchvision's `features` `slice2.5`.
        lpips.net.load_state_dict(
            {name: weights[f"features.{name.split('.', 1)[1]}"] for name in lpips.net.state_dict()}
        )
    except (RuntimeError, OSError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"{key}={path} does not hold the weights of {VGG_FILE}: {reason}") from error
    return freeze(lpips)
