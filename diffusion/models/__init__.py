"""Models: the public names for notebooks. The import needs no GPU, network or distributed start-up."""

from diffusion.models.architectures import count_parameters
from diffusion.models.build import (
    build_model,
    pixel_transformer_l,
    pixel_transformer_m,
    stable_diffusion_2,
    stable_diffusion_xl,
    tiny,
    tiny_pixel_transformer,
    tiny_transformer,
    tiny_xl,
    transformer_l,
    transformer_m,
    transformer_s,
)
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import FrozenParts, load_frozen_parts

__all__ = [
    "FrozenParts",
    "LatentDiffusion",
    "build_model",
    "count_parameters",
    "load_frozen_parts",
    "pixel_transformer_l",
    "pixel_transformer_m",
    "stable_diffusion_2",
    "stable_diffusion_xl",
    "tiny",
    "tiny_pixel_transformer",
    "tiny_transformer",
    "tiny_xl",
    "transformer_l",
    "transformer_m",
    "transformer_s",
]
