"""Equivariance of latents under scaling and rotation (EQ-VAE; Kouzelis et al. 2025, arXiv 2502.09509, section 3.3).

In a share of the steps the reconstruction loss of a VAE compares D(tau(z)) with tau(x) instead of D(z) with x, where
tau shrinks and turns latents z and images x alike.

Shape letters: B batch, C channels, H W height and width of the latent.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diffusion.config.model import EquivarianceConfig
from diffusion.randomness import Purpose, uniform


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
