"""VGG16 with random weights, in the file that the perceptual loss reads."""

from pathlib import Path

import torch
from torch import nn
from torchvision.models import vgg16

from diffusion.models.architectures import with_seed


def write_vgg(path: Path) -> nn.Sequential:
    """Save the weights as torchvision's file has them, without the classifier; return the layers."""
    features = with_seed(0, lambda: vgg16(weights=None, init_weights=False).features)
    assert isinstance(features, nn.Sequential)
    torch.save({f"features.{name}": tensor for name, tensor in features.state_dict().items()}, path)
    return features
