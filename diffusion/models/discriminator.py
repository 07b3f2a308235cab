"""The discriminator of the VAE's training, and the losses of both sides.

Shape letters: B batch, P patches.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


class PatchDiscriminator(nn.Sequential):
    """Judges overlapping patches of 70 x 70 pixels (PatchGAN; Isola et al. 2017, section 3.2.2).

    Its norms are of groups of channels, not of the batch: what it says of an image must not depend on which others are
    in the same microbatch.
    """

    def __init__(self, num_channels: int = 64) -> None:
        widths = [num_channels * factor for factor in (1, 2, 4, 8)]
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for before, after, stride in zip(widths[:-1], widths[1:], (2, 2, 1), strict=True):
            convolution = nn.Conv2d(before, after, 4, stride=stride, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(num_channels // 4, after), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(widths[-1], 1, 4, padding=1))
        for module in self:
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.02)


class AdversarialLosses(NamedTuple):
    """What the two sides minimise, float32 [] each."""

    generator: Tensor
    """Has gradients with respect to the decoded images only."""

    discriminator: Tensor
    """Has gradients with respect to the discriminator only."""


def adversarial_losses(discriminator: nn.Module, pixels: Tensor, decoded: Tensor) -> AdversarialLosses:
    """Hinge losses (Lim and Ye 2017), routed so that one backward pass serves both sides.

    Args:
        discriminator: gives logits [B, 1, P, P].
        pixels: float32 [B, 3, height, width] in [-1, 1].
        decoded: what came back, of that shape.
    """
    fixed = {name: parameter.detach() for name, parameter in discriminator.named_parameters()}
    generator = -functional_call(discriminator, fixed, decoded).float().mean()
    real, fake = discriminator(torch.cat([pixels, decoded.detach()])).float().chunk(2)
    return AdversarialLosses(generator, (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2)


def no_losses(discriminator: nn.Module) -> AdversarialLosses:
    """Zeros before the start. All parameters get a gradient of 0, because DDP waits for one from each."""
    nothing = 0.0 * torch.stack([parameter.sum() for parameter in discriminator.parameters()]).sum()
    return AdversarialLosses(nothing.detach(), nothing)
