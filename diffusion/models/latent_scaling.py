"""Between the VAE's latents and those that the U-Net sees."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept on the device, so that no step copies it there."""
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
    def of_vae(cls, config: Any) -> "LatentScaling":
        """Read it from the configuration of an AutoencoderKL.

        In diffusers a U-Net's latent is (latent - latents_mean) * scaling_factor / latents_std, where mean and std are
        0 and 1 unless given.
        """
        factor = float(config.scaling_factor)
        mean = getattr(config, "latents_mean", None) or (getattr(config, "shift_factor", None) or 0.0,)
        std = getattr(config, "latents_std", None) or (1.0,)
        return cls(tuple(float(m) for m in mean), tuple(float(s) / factor for s in std))

    def normalise(self, latents: Tensor) -> Tensor:
        """VAE's latents [B, C, H, W] -> U-Net's."""
        centred = latents - _per_channel(self.mean, latents) if any(self.mean) else latents
        return centred / _per_channel(self.std, latents)

    def denormalise(self, latents: Tensor) -> Tensor:
        """U-Net's latents [B, C, H, W] -> VAE's."""
        return latents * _per_channel(self.std, latents) + _per_channel(self.mean, latents)
