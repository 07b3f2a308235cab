"""Images and the latents that the network works on: those of a VAE of diffusers, or the pixels themselves.

Everything that differs between VAEs in training and sampling is here; their normalisation is `LatentScaling`, and
patches are cut by the network (its `patch_size`).

Shape letters: B batch, C channels, H W height and width of the latent.
"""

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from torch import Tensor, nn

from diffusion.models.precision import upcast

TrainedVAE = AutoencoderKL | AutoencoderKLFlux2 | AutoencoderDC

VAE = TrainedVAE | nn.Identity
"""A VAE; the identity where the network works on pixels."""

Folded = TypeVar("Folded", AutoencoderKL, AutoencoderKLFlux2)

Moments = tuple[Tensor, Tensor | None]
"""Mean and log-variance of latents, [B, C, H, W] each; None where the VAE has no posterior."""


@dataclass(frozen=True)
class LatentScaling:
    """Normalisation of latents, per channel or by one scalar: (latent - mean) / std."""

    mean: tuple[float, ...]
    """C numbers, or one for all channels."""

    std: tuple[float, ...]
    """C numbers, or one for all channels."""

    @classmethod
    def of_factor(cls, factor: float) -> "LatentScaling":
        """Multiplication by a factor."""
        return cls((0.0,), (1.0 / factor,))

    def normalise(self, latents: Tensor) -> Tensor:
        """Latents of the VAE [B, C, H, W] -> latents of the network."""
        mean, std = self._constants(latents)
        return (latents - mean if any(self.mean) else latents) / std

    def denormalise(self, latents: Tensor) -> Tensor:
        """Latents of the network [B, C, H, W] -> latents of the VAE."""
        mean, std = self._constants(latents)
        return latents * std + mean

    def _constants(self, latents: Tensor) -> list[Tensor]:
        return [_constant(values, latents.dtype, latents.device) for values in (self.mean, self.std)]


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Constant [1, C, 1, 1], cached on the device: a copy in each step would wait for the device."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


class LatentSpace:
    """Latents of an AutoencoderKL, which are drawn from a posterior."""

    has_posterior = True

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    @property
    def factor(self) -> int:
        """Pixels per latent position along one side."""
        return 2 ** (len(self._vae.config["block_out_channels"]) - 1)

    @property
    def channels(self) -> int:
        """C."""
        return self._vae.config["latent_channels"]

    @property
    def scaling(self) -> LatentScaling:
        """Normalisation, from the configuration.

        In diffusers the latent of the network is (latent - latents_mean) * scaling_factor / latents_std, where mean and
        std are 0 and 1 by default.
        """
        config = self._vae.config
        factor = float(config["scaling_factor"])
        mean = config.get("latents_mean") or (config.get("shift_factor") or 0.0,)
        std = config.get("latents_std") or (1.0,)
        return LatentScaling(tuple(float(m) for m in mean), tuple(float(s) / factor for s in std))

    def encode(self, images: Tensor) -> Moments:
        """Encode images uint8 [B, 3, height, width], in the precision of the VAE."""
        with upcast(self._vae) as vae:
            return self.moments(images.to(vae.dtype) / 127.5 - 1.0)

    def moments(self, pixels: Tensor) -> Moments:
        """Encode images [B, 3, height, width] in [-1, 1]."""
        posterior = self._vae.encode(pixels).latent_dist
        return posterior.mean, posterior.logvar

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Let `scaling` normalise latents whose channels have this mean and standard deviation, [C] each."""
        statistics = {"latents_mean": mean.tolist(), "latents_std": std.tolist()}
        self._vae.register_to_config(**statistics, scaling_factor=1.0, shift_factor=None)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, H, W] to images: float32 [B, 3, height, width] in [0, 1]."""
        with upcast(self._vae) as vae:
            decoded = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return _to_unit(decoded)


class Flux2Space(LatentSpace):
    """Latents of an AutoencoderKLFlux2, which is trained with a batch norm of patches of 2 x 2 latent positions."""

    @property
    def scaling(self) -> LatentScaling:
        """Mean and standard deviation of each channel over the four positions of a patch.

        FLUX.2's pipeline normalises each position by itself. But the statistics of positions differ by chance only,
        and those of a channel can be folded into a VAE that other pipelines read.
        """
        mean, var = (values.float().view(self.channels, -1) for values in _statistics(self._vae))
        std = (var.mean(1) + mean.var(1, correction=0)).sqrt()
        return LatentScaling(tuple(mean.mean(1).tolist()), tuple(std.tolist()))

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set the moments of the batch norm, of all positions of a patch the same."""
        batch_norm = self._vae.bn
        positions = batch_norm.num_features // self.channels
        batch_norm.running_mean.copy_(mean.repeat_interleave(positions))
        variance = std.square() - self._vae.config["batch_norm_eps"]
        batch_norm.running_var.copy_(variance.repeat_interleave(positions))


def _statistics(vae: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    """Mean and variance that the batch norm divides by, channels of patches [4 C] each."""
    mean, var = vae.bn.running_mean, vae.bn.running_var
    assert mean is not None and var is not None
    return mean, var + vae.config["batch_norm_eps"]


class DeepSpace(LatentSpace):
    """Latents of an AutoencoderDC, which is deterministic (Chen et al. 2024)."""

    has_posterior = False

    @property
    def factor(self) -> int:
        """Pixels per latent position along one side."""
        return 2 ** (len(self._vae.config["encoder_block_out_channels"]) - 1)

    def moments(self, pixels: Tensor) -> Moments:
        """Encode images [B, 3, height, width] in [-1, 1]."""
        return self._vae.encode(pixels).latent, None

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Set the scaling factor, the inverse of the root mean square: pipelines know no statistics of channels."""
        self._vae.register_to_config(scaling_factor=1.0 / (mean.square() + std.square()).mean().sqrt().item())


class PixelSpace(LatentSpace):
    """Images in [-1, 1] in place of latents."""

    has_posterior = False
    factor, channels, scaling = 1, 3, LatentScaling.of_factor(1.0)  # pyright: ignore[reportAssignmentType]

    def encode(self, images: Tensor) -> Moments:
        """Scale images uint8 [B, 3, height, width] to [-1, 1]."""
        return images.float() / 127.5 - 1.0, None

    def decode(self, latents: Tensor) -> Tensor:
        """Scale images to [0, 1]."""
        return _to_unit(latents)


SPACES = {
    "AutoencoderKL": LatentSpace,
    "AutoencoderKLFlux2": Flux2Space,
    "AutoencoderDC": DeepSpace,
    "Identity": PixelSpace,
}
"""Spaces by class of the VAE, as its stored configuration names it."""

VAE_CLASSES = {kind.__name__: kind for kind in (AutoencoderKL, AutoencoderKLFlux2, AutoencoderDC)}


def latent_space(vae: VAE) -> LatentSpace:
    """Choose the space by the class of a VAE."""
    return next(SPACES[kind.__name__] for kind in type(vae).__mro__ if kind.__name__ in SPACES)(vae)


def _to_unit(images: Tensor) -> Tensor:
    return (images.float() / 2 + 0.5).clamp(0, 1)


def fold_scaling(vae: Folded, scaling: LatentScaling, factor: float = 1.0) -> Folded:
    """Copy a VAE, with the normalisation of latents moved into its 1x1 convolutions.

    Pipelines of other models support a scalar factor only and would ignore means and standard deviations per channel.
    The latents of the copy times `factor`, its scaling factor, are those of the network. FLUX.2's batch norm follows:
    its own pipeline decodes the same from the copy.
    """
    vae = copy.deepcopy(vae)
    num_channels = vae.config["latent_channels"]
    mean, std = (torch.tensor(values).expand(num_channels) for values in (scaling.mean, scaling.std))
    std = std * factor
    quant_conv = vae.quant_conv or _identity(2 * num_channels)
    post_quant_conv = vae.post_quant_conv or _identity(num_channels)
    with torch.no_grad():
        # Moments: mean and log-variance. (m - mean) / std, and logvar - 2 log(std).
        assert quant_conv.bias is not None and post_quant_conv.bias is not None
        quant_conv.weight[:num_channels] /= std.view(-1, 1, 1, 1)
        quant_conv.bias[:num_channels] = (quant_conv.bias[:num_channels] - mean) / std
        quant_conv.bias[num_channels:] -= 2.0 * std.log()
        post_quant_conv.bias += post_quant_conv.weight[:, :, 0, 0] @ mean
        post_quant_conv.weight *= std.view(1, -1, 1, 1)
    vae.quant_conv, vae.post_quant_conv = quant_conv, post_quant_conv
    vae.register_to_config(use_quant_conv=True, use_post_quant_conv=True)
    if isinstance(vae, AutoencoderKLFlux2):
        means, variances = _statistics(vae)
        of_patch = means.numel() // num_channels
        mean, std = mean.repeat_interleave(of_patch), std.repeat_interleave(of_patch)
        vae.bn.running_mean = (means - mean) / std
        vae.bn.running_var = variances / std**2 - vae.config["batch_norm_eps"]
    else:
        vae.register_to_config(scaling_factor=factor, shift_factor=None, latents_mean=None, latents_std=None)
    return vae


def _identity(num_channels: int) -> nn.Conv2d:
    """Identity as a 1x1 convolution."""
    convolution = nn.Conv2d(num_channels, num_channels, 1).requires_grad_(False)
    nn.init.dirac_(convolution.weight)
    nn.init.zeros_(convolution.bias)  # pyright: ignore[reportArgumentType]
    return convolution
