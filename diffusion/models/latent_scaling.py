"""Scaling between the latents of the VAE and those of the U-Net."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Constant [1, C, 1, 1], cached on the device: a copy in each step would wait for the device."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    return _constant(values, like.dtype, like.device)


@dataclass(frozen=True)
class LatentScaling:
    """Normalisation of latents, per channel or by one scalar: (latent - mean) / std."""

    mean: tuple[float, ...]
    """C numbers, or one for all channels."""

    std: tuple[float, ...]
    """C numbers, or one for all channels."""

    @classmethod
    def from_vae(cls, config: Any) -> "LatentScaling":
        """Read the configuration of an AutoencoderKL.

        In diffusers the latent of the U-Net is (latent - latents_mean) * scaling_factor / latents_std, where mean and
        std are 0 and 1 by default.
        """
        factor = float(config.scaling_factor)
        mean = getattr(config, "latents_mean", None) or (getattr(config, "shift_factor", None) or 0.0,)
        std = getattr(config, "latents_std", None) or (1.0,)
        return cls(tuple(float(m) for m in mean), tuple(float(s) / factor for s in std))

    def normalise(self, latents: Tensor) -> Tensor:
        """Latents of the VAE [B, C, H, W] -> latents of the U-Net."""
        centred = latents - _per_channel(self.mean, latents) if any(self.mean) else latents
        return centred / _per_channel(self.std, latents)

    def denormalise(self, latents: Tensor) -> Tensor:
        """Latents of the U-Net [B, C, H, W] -> latents of the VAE."""
        return latents * _per_channel(self.std, latents) + _per_channel(self.mean, latents)
