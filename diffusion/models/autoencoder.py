"""Training of the VAE: absolute and squared error, perceptual distance, KL divergence of the posterior, discriminator.

The perceptual distance is torchmetrics' LPIPS (Zhang et al. 2018) on VGG16, whose weights are read from a file instead
of being downloaded.

Equivariance of latents under scaling and rotation (EQ-VAE; Kouzelis et al. 2025, arXiv 2502.09509, section 3.3): in a
share of the steps the reconstruction loss compares D(tau(z)) with tau(x) instead of D(z) with x, where tau shrinks and
turns latents z and images x alike.

Shape letters: B batch, C channels, H W height and width of the latent, P patches.
"""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from torch import Tensor, nn
from torch.func import functional_call
from torchmetrics.functional.image.lpips import _LPIPS

from diffusion.config.model import EquivarianceConfig
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError, first_line
from diffusion.models.latents import TrainedVAE, latent_space
from diffusion.models.pretrained import freeze
from diffusion.randomness import Purpose, uniform

VGG_FILE = "vgg16-397923af.pth"


class PatchDiscriminator(nn.Sequential):
    """Classifies overlapping patches of 70 x 70 pixels (PatchGAN; Isola et al. 2017, section 3.2.2).

    It has GroupNorm instead of BatchNorm, so that the logits of an image do not depend on its microbatch.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for before, after, stride in ((64, 128, 2), (128, 256, 2), (256, 512, 1)):
            convolution = nn.Conv2d(before, after, 4, stride=stride, padding=1, bias=False)
            layers += [convolution, nn.GroupNorm(16, after), nn.LeakyReLU(0.2)]
        super().__init__(*layers, nn.Conv2d(512, 1, 4, padding=1))
        for module in self:
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.02)


class AdversarialLosses(NamedTuple):
    """Losses of both sides, float32 [] each."""

    generator: Tensor
    """Loss of the VAE; its gradients reach the decoded images only."""

    discriminator: Tensor
    """Loss of the discriminator; its gradients reach the discriminator only."""


def adversarial_losses(discriminator: nn.Module, pixels: Tensor, decoded: Tensor) -> AdversarialLosses:
    """Hinge losses (Lim and Ye 2017) of images float32 [B, 3, height, width], with one backward pass for both sides."""
    fixed = {name: parameter.detach() for name, parameter in discriminator.named_parameters()}
    generator = -functional_call(discriminator, fixed, decoded).float().mean()
    real, fake = discriminator(torch.cat([pixels, decoded.detach()])).float().chunk(2)
    return AdversarialLosses(generator, (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2)


def zero_losses(discriminator: nn.Module) -> AdversarialLosses:
    """Zero losses before the start. All parameters get zero gradients, because DDP waits for each."""
    nothing = 0.0 * torch.stack([parameter.sum() for parameter in discriminator.parameters()]).sum()
    return AdversarialLosses(nothing.detach(), nothing)


def build_perceptual(*, is_meta: bool = False) -> _LPIPS:
    """LPIPS with random weights of VGG16; on the meta device none are read."""
    return _LPIPS(net="vgg", pnet_rand=True, pretrained=not is_meta)


def load_perceptual(path: str | None) -> nn.Module:
    """Build frozen LPIPS: two batches of images, float32 [B, 3, height, width] in [-1, 1] -> [B, 1, 1, 1].

    The file at `path` (`autoencoder.vgg_weights`) holds torchvision's weights of VGG16.

    Raises:
        ConfigurationError: the file is missing, or does not hold these weights.
    """
    file = Path(path).expanduser() if path else None
    if file is None or not file.is_file():
        raise ConfigurationError(
            f"autoencoder.vgg_weights={path}: the perceptual loss needs torchvision's {VGG_FILE} (from "
            "download.pytorch.org/models). Put it on this machine and give its path, or set "
            "autoencoder.perceptual_weight=0."
        )
    lpips = build_perceptual()
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
        # torchmetrics calls layer 5 of torchvision's `features` `slice2.5`.
        lpips.net.load_state_dict(
            {name: weights[f"features.{name.split('.', 1)[1]}"] for name in lpips.net.state_dict()}
        )
    except (RuntimeError, OSError, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = first_line(error)
        raise ConfigurationError(
            f"autoencoder.vgg_weights={path} does not hold the weights of {VGG_FILE}: {reason}"
        ) from error
    return freeze(lpips)


class Reconstruction(NamedTuple):
    """Result of a forward pass."""

    pixels: Tensor
    """float32 [B, 3, fH, fW] in [-1, 1] for latents [B, C, H, W], input of the encoder; transformed in a step for
    equivariance."""

    decoded: Tensor
    """float32 [B, 3, fH, fW], output of the decoder."""

    kl: Tensor
    """float32 [B], KL divergence of the posterior from the standard normal, summed over the latent."""

    adversarial: AdversarialLosses | None = None
    """Losses of both sides; None without a discriminator and in validation."""

    equivariance: Tensor | None = None
    """float32 [B], PSNR in dB of decoded transformed latents against transformed images; only in validation."""


def to_pixels(images: Tensor) -> Tensor:
    """uint8 [B, 3, height, width] -> float32 in [-1, 1]."""
    return images.float() / 127.5 - 1.0


def initialise_logvar(vae: TrainedVAE, logvar: float) -> None:
    """Initialise the posterior of a new VAE, if it has one, with nearly constant log-variance, in place."""
    if isinstance(vae, AutoencoderDC):
        return
    num_channels = vae.config["latent_channels"]
    last: Any = vae.quant_conv or vae.encoder.conv_out
    with torch.no_grad():
        last.weight[num_channels:].mul_(0.1)
        last.bias[num_channels:].fill_(logvar)


def psnr(decoded: Tensor, pixels: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, [B], of images in [-1, 1]; decoded images are clamped."""
    error = (decoded.clamp(-1, 1) - pixels).square().mean(dim=(1, 2, 3))
    return 10.0 * torch.log10(4.0 / error.clamp(min=1e-12))


class Transformation(NamedTuple):
    """Scaling and rotation, tau in the paper."""

    scale: float
    """Factor of height and width, up to 1."""

    quarter_turns: int
    """Counterclockwise rotations by 90 degrees."""


VALIDATED = Transformation(scale=0.5, quarter_turns=1)
"""The transformation of validation."""


def draw_transformation(config: EquivarianceConfig, seed: int, step: int) -> Transformation | None:
    """Draw the transformation of a step, one for the global batch; None for a step without."""
    address = torch.tensor([step]), torch.tensor([0])
    chance, scale, turns = uniform(seed, Purpose.EQUIVARIANCE, *address, 3)[0].tolist()
    if chance >= config.probability:
        return None
    return Transformation(
        scale=config.min_scale + (1 - config.min_scale) * scale,
        quarter_turns=1 + int(3 * turns) if config.rotations else 0,
    )


def transform(values: Tensor, transformation: Transformation, cell: int = 1) -> Tensor:
    """Shrink by bilinear interpolation, then rotate.

    Args:
        values: [B, C, cell * H, cell * W]: latents, or images with `cell` pixels per latent position along one side.
        transformation: what to do; the scale is rounded to whole latent positions.
        cell: the VAE's factor for images, 1 for latents.

    Returns:
        The same with other H and W.
    """
    height, width = (cell * max(1, round(transformation.scale * side / cell)) for side in values.shape[-2:])
    if (height, width) != values.shape[-2:]:
        values = F.interpolate(values, size=(height, width), mode="bilinear", align_corners=False)
    return torch.rot90(values, transformation.quarter_turns, dims=(-2, -1))


@torch.no_grad()
def latent_statistics(vae: TrainedVAE, batches: Iterable[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation, float64 [C], of the posterior's mean over all ranks' images.

    `batches` are images of this rank, uint8 [B, 3, height, width].
    """
    space = latent_space(vae)

    def measure() -> Tensor:
        sums = torch.zeros(3, space.channels, dtype=torch.float64)
        for images in batches:
            mean, _ = space.moments(to_pixels(images.to(device)))
            per_channel = mean.double().cpu().transpose(0, 1).flatten(1)
            count = torch.full((space.channels,), per_channel.shape[1])
            sums += torch.stack([count, per_channel.sum(1), per_channel.square().sum(1)])
        return sums

    sums = agree(measure, takes_long=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
        sums = sums.cpu()
    count, total, squares = sums
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=1e-12).sqrt()
