"""Generation of images by a latent diffusion model: prompts, scores, noise, sampling, and decoding.

Shape letters: B batch, C channels, H W height and width of the latent, S scores.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion.config.model import Sampler
from diffusion.datasets.transforms import Placement
from diffusion.models.conditioning import Conditioning
from diffusion.models.ingredients import Call
from diffusion.models.sampling import (
    expand_prompts,
    image_seeds,
    image_size,
    inference_scheduler,
    initial_latents,
    sample_latents,
    to_pil,
    whole_number,
)

if TYPE_CHECKING:
    from diffusion.models.latent_diffusion import LatentDiffusion


@torch.no_grad()
def generate(
    model: "LatentDiffusion",
    prompts: str | Sequence[str],
    negative_prompts: str | Sequence[str] | None = None,
    *,
    scores: Mapping[str, float] | None = None,
    height: int | None = None,
    width: int | None = None,
    original_size: tuple[int, int] | None = None,
    crop: tuple[int, int] = (0, 0),
    num_inference_steps: int = 50,
    sampler: Sampler | str | None = None,
    guidance_scale: float = 3.0,
    seed: int | Sequence[int] | None = None,
    num_images_per_prompt: int = 1,
    batch_size: int = 16,
    latents: Tensor | None = None,
    output: str = "pil",
    progress: bool = True,
) -> list[Image.Image] | Tensor:
    """Generate images.

    Args:
        model: the model, whose method this is.
        prompts: one, or P of them.
        negative_prompts: one for all or one per prompt; None is the empty caption, as in training.
        scores: scores to ask for, by name; the others are "none". Those of negative prompts are the same.
        height: in pixels, a multiple of the VAE's factor; the training resolution by default.
        width: as height.
        original_size: height and width that SDXL is given as the size of the original; the image's by default.
        crop: rows and columns that SDXL is given as cropped at the top and left.
        num_inference_steps: at most the timesteps of the noise schedule. A step of Heun takes two evaluations, its
            last step one.
        sampler: "ddim"; with rectified flow "euler" or "heun"; the first that fits by default.
        guidance_scale: classifier-free guidance; 1 is none.
        seed: image i gets seed + i; or one seed per image; None draws them at random.
        num_images_per_prompt: number of adjacent images of a prompt.
        batch_size: images at a time.
        latents: initial noise float32 [B, C, H, W] of all images, instead of seeds.
        output: "pil" for PIL images, "tensor" for float32 [B, 3, height, width] in [0, 1].
        progress: show a bar.

    Returns:
        P * num_images_per_prompt images.

    Raises:
        ValueError: an argument is invalid, or contradicts another one.
    """
    if output not in ("pil", "tensor"):
        raise ValueError(f"output {output!r}: choose 'pil' or 'tensor'")
    num_images_per_prompt = whole_number("num_images_per_prompt", num_images_per_prompt, minimum=1)
    texts, negatives = expand_prompts(prompts, negative_prompts, num_images_per_prompt)
    size = image_size(height, width, default=model.resolution, factor=model.side_factor)
    for name, pair in (("original_size", original_size or size), ("crop", crop)):
        if np.shape(pair) != (2,):
            raise ValueError(f"{name} {pair!r}: give two numbers")
    placement = Placement(*(original_size or size), *crop, *size)
    num_timesteps = model.noise_process.num_timesteps
    num_inference_steps = whole_number("num_inference_steps", num_inference_steps, minimum=1, maximum=num_timesteps)
    batch_size = whole_number("batch_size", batch_size, minimum=1)
    if not (isinstance(guidance_scale, Real) and math.isfinite(guidance_scale)):
        raise ValueError(f"guidance_scale {guidance_scale!r}: give a number")
    seeds = image_seeds(seed, len(texts))
    noise = _initial_noise(model, latents, seeds, size)
    asked = requested_scores(model, scores)

    def encode(texts: Sequence[str]) -> Conditioning:
        token_ids = torch.from_numpy(model.tokenize(texts)).long().to(model.network.device)
        conditioning = model.caller.condition(model.conditioner.encode_prompts(token_ids, placement), Call())
        scores = None if asked is None else asked.expand(len(texts), -1)
        return conditioning.to(model.network.dtype)._replace(scores=scores)

    scheduler = inference_scheduler(model.noise_scheduler, sampler)
    was_training = model.network.training
    model.network.eval()
    try:
        images = [torch.empty(0, 3, *size, device="cpu")]
        for start in range(0, len(texts), batch_size):
            batch = slice(start, start + batch_size)
            sampled = sample_latents(
                model.caller,
                scheduler,
                noise[batch],
                encode(texts[batch]),
                encode(negatives[batch]),
                num_inference_steps=num_inference_steps,
                guidance_scale=guidance_scale,
                progress=progress,
            )
            images.append(model.decode(sampled).cpu())
    finally:
        model.network.train(was_training)
    result = torch.cat(images)
    return to_pil(result) if output == "pil" else result


def _initial_noise(
    model: "LatentDiffusion", latents: Tensor | None, seeds: Sequence[int], size: tuple[int, int]
) -> Tensor:
    """Initial noise of images of a size in pixels, given or from their seeds: float32 [B, C, H, W]."""
    device = next(model.network.parameters()).device
    shape = (model.network.config["in_channels"], size[0] // model.vae_factor, size[1] // model.vae_factor)
    if latents is None:
        return initial_latents(seeds, shape, device)
    if (found := tuple(latents.shape)) != (expected := (len(seeds), *shape)):
        raise ValueError(f"latents {found}: {len(seeds)} images of {size[0]} x {size[1]} px take {expected}")
    return latents.to(device, torch.float32)


def requested_scores(model: "LatentDiffusion", scores: Mapping[str, float] | None) -> Tensor | None:
    """Scores float32 [S] to ask for, NaN for "none"; None without conditioning on them.

    Raises:
        ValueError: the model was not trained with one of the scores.
    """
    for ingredient in model.ingredients:
        if (requested := ingredient.requested_scores(scores or {})) is not None:
            return requested.to(model.network.device)
    if scores:
        raise ValueError(f"scores {', '.join(scores)}: the model was trained without model.score_conditioning")
    return None
