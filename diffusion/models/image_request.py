"""What images are asked for: the arguments of `LatentDiffusion.generate`, checked before anything is computed.

Shape letters: B images, C channels, H W height and width of the latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion.datasets.transforms import Placement
from diffusion.models.arguments import finite_number, image_size, whole_number, whole_pair
from diffusion.models.conditioning import expand_prompts
from diffusion.models.sampling import image_seeds, initial_latents


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What is to be known of the model that is to make them."""

    resolution: int
    """Default height and width, in pixels."""

    vae_factor: int
    """Pixels per latent position along one side."""

    num_channels: int
    """C."""

    num_timesteps: int
    """Of the noise schedule, and the most steps of sampling."""


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """B images that are to be made."""

    prompts: list[str]
    """Of each image."""

    negatives: list[str]
    """Of each image."""

    placement: Placement
    """Of all: what an SDXL is told of sizes and crops."""

    latent_shape: tuple[int, int, int]
    """C, H, W."""

    num_inference_steps: int
    guidance_scale: float
    batch_size: int

    seeds: list[int]
    """Of each image; without meaning where `latents` are given."""

    latents: Tensor | None
    """Initial noise float32 [B, C, H, W]; None is the seeds'."""

    def initial_latents(self, device: torch.device) -> Tensor:
        """Noise that sampling starts from: float32 [B, C, H, W]."""
        if self.latents is None:
            return initial_latents(self.seeds, self.latent_shape, device)
        return self.latents.to(device, torch.float32)


def read_request(
    sizes: ModelSizes,
    prompts: str | Sequence[str],
    negative_prompts: str | Sequence[str] | None,
    *,
    height: int | None,
    width: int | None,
    original_size: tuple[int, int] | None,
    crop: tuple[int, int],
    num_inference_steps: int,
    guidance_scale: float,
    seed: int | Sequence[int] | None,
    num_images_per_prompt: int,
    batch_size: int,
    latents: Tensor | None,
) -> ImageRequest:
    """Check the arguments of `LatentDiffusion.generate`, which are described there, for a model of some sizes.

    Raises:
        ValueError: one is wrong, or two do not fit one another; names it.
    """
    num_images_per_prompt = whole_number("num_images_per_prompt", num_images_per_prompt, least=1)
    prompts, negatives = expand_prompts(prompts, negative_prompts, num_images_per_prompt)
    size = image_size(height, width, default=sizes.resolution, factor=sizes.vae_factor)
    original = size if original_size is None else whole_pair("original_size", original_size, least=1)
    shape = (sizes.num_channels, size[0] // sizes.vae_factor, size[1] // sizes.vae_factor)
    if latents is not None:
        found = tuple(latents.shape) if isinstance(latents, Tensor) else type(latents).__name__
        if found != (expected := (len(prompts), *shape)):
            raise ValueError(
                f"latents {found}: {len(prompts)} images of {size[0]} x {size[1]} px take a tensor {expected}"
            )
    return ImageRequest(
        prompts=prompts,
        negatives=negatives,
        placement=Placement(*original, *whole_pair("crop", crop, least=0), *size),
        latent_shape=shape,
        num_inference_steps=whole_number("num_inference_steps", num_inference_steps, least=1, most=sizes.num_timesteps),
        guidance_scale=finite_number("guidance_scale", guidance_scale),
        batch_size=whole_number("batch_size", batch_size, least=1),
        seeds=image_seeds(seed, len(prompts)),
        latents=latents,
    )
