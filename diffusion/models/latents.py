"""Images and the latents that the network works on: those of a VAE of diffusers, or the pixels themselves.

Everything that differs between VAEs in training and sampling is here; their normalisation is `LatentScaling`, and
patches are cut by the network (its `patch_size`).

Shape letters: B batch, C channels, H W height and width of the latent.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from diffusion.models.precision import upcast

VAE = AutoencoderKL | nn.Identity
"""A VAE; the identity where the network works on pixels."""

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
        """Latents of the U-Net [B, C, H, W] -> latents of the VAE."""
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
            return self._moments(vae.encode(images.to(vae.dtype) / 127.5 - 1.0))

    @staticmethod
    def _moments(encoded: Any) -> Moments:
        return encoded.latent_dist.mean, encoded.latent_dist.logvar

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, H, W] to images: float32 [B, 3, height, width] in [0, 1]."""
        with upcast(self._vae) as vae:
            decoded = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return _to_unit(decoded)


class PixelSpace(LatentSpace):
    """Images in [-1, 1] in place of latents."""

    has_posterior = False
    factor, channels, scaling = 1, 3, LatentScaling.of_factor(1.0)

    def encode(self, images: Tensor) -> Moments:
        """Scale images uint8 [B, 3, height, width] to [-1, 1]."""
        return images.float() / 127.5 - 1.0, None

    def decode(self, latents: Tensor) -> Tensor:
        """Scale images to [0, 1]."""
        return _to_unit(latents)


def latent_space(vae: VAE) -> LatentSpace:
    """Choose the space by the class of a VAE."""
    return PixelSpace(vae) if isinstance(vae, nn.Identity) else LatentSpace(vae)


def _to_unit(images: Tensor) -> Tensor:
    return (images.float() / 2 + 0.5).clamp(0, 1)
