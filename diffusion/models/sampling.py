"""From noise to images: DDIM with classifier-free guidance.

Shape letters: B images, C channels, H W height and width of the latent.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from diffusion.models.arguments import whole_number
from diffusion.models.conditioning import Conditioning
from diffusion.randomness import MAX_SEED, Purpose, normal

Denoiser = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(latents [B, C, H, W], timestep [], what it is told of B images) -> prediction [B, C, H, W]."""


def inference_scheduler(noise_scheduler: Any) -> DDIMScheduler:
    """DDIM (Song et al. 2021) over the noise schedule that was trained with.

    With zero-terminal SNR the last training step must be the first sampling step (Lin et al. 2023, section 3.3), so the
    steps trail; otherwise they lead with an offset of 1, as published with Stable Diffusion 2.
    """
    zero_terminal = bool(noise_scheduler.config.rescale_betas_zero_snr)
    return DDIMScheduler.from_config(  # pyright: ignore[reportReturnType]
        noise_scheduler.config,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=0 if zero_terminal else 1,
        timestep_spacing="trailing" if zero_terminal else "leading",
    )


def image_seeds(seed: int | Sequence[int] | None, num_images: int) -> list[int]:
    """One seed per image: consecutive from a number, as given, or random.

    Raises:
        ValueError: the number of seeds is not the number of images, or one is not a whole number in 0 .. 2^32 - 1.
    """
    if seed is None:
        return [secrets.randbelow(MAX_SEED) for _ in range(num_images)]
    given: Any = seed.tolist() if isinstance(seed, Tensor | np.ndarray) else seed
    if not isinstance(given, Sequence) or isinstance(given, str):
        first = whole_number("seed", given, least=0, most=MAX_SEED - 1)
        return [(first + i) % MAX_SEED for i in range(num_images)]
    if len(given) != num_images:
        raise ValueError(f"{len(given)} seeds for {num_images} images: give one per image, one number, or none")
    return [whole_number("seed", one, least=0, most=MAX_SEED - 1) for one in given]


def initial_latents(seeds: Sequence[int], shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """Noise that sampling starts from; that of an image depends on its seed alone.

    It is drawn on the CPU: on a GPU random numbers are compiled, which takes a C compiler.

    Returns:
        float32 [B, C, H, W], on the device.
    """
    zero = torch.zeros(1, dtype=torch.int64)
    noise = (normal(seed, Purpose.INITIAL_LATENTS, zero, zero, shape) for seed in seeds)
    return torch.cat([torch.empty(0, *shape), *noise]).to(device)


@torch.no_grad()
def sample_latents(
    denoiser: Denoiser,
    scheduler: DDIMScheduler,
    latents: Tensor,
    told: Conditioning,
    unconditional: Conditioning,
    *,
    num_inference_steps: int,
    guidance_scale: float,
    progress: bool = False,
) -> Tensor:
    """Run DDIM with classifier-free guidance (Ho and Salimans 2022, equation 6, with guidance scale 1 + w).

    Args:
        denoiser: the network.
        scheduler: DDIM; its steps are set here.
        latents: float32 [B, C, H, W], pure noise.
        told: of the prompts.
        unconditional: of the empty caption or of negative prompts.
        num_inference_steps: number of steps, at most those of the noise schedule.
        guidance_scale: 1 is none.
        progress: show a bar.

    Returns:
        float32 [B, C, H, W].
    """
    scheduler.set_timesteps(num_inference_steps, device=latents.device)
    # With all steps of the schedule those that lead with an offset would begin beyond it.
    last = scheduler.config["num_train_timesteps"] - 1
    timesteps = scheduler.timesteps - (scheduler.timesteps[0] - last).clamp(min=0)
    guided = guidance_scale != 1.0
    context = unconditional.then(told) if guided else told
    latents = latents * scheduler.init_noise_sigma
    for timestep in tqdm(timesteps, desc="sampling", disable=not progress, leave=False):
        model_input = torch.cat([latents, latents]) if guided else latents
        prediction = denoiser(model_input, timestep, context).float()
        if guided:
            away, towards = prediction.chunk(2)
            prediction = away + guidance_scale * (towards - away)
        latents = scheduler.step(prediction, timestep, latents, return_dict=False)[0]  # pyright: ignore
    return latents


def to_pil(images: Tensor) -> list[Image.Image]:
    """Images [B, 3, height, width] in [0, 1] -> PIL."""
    arrays = (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in arrays]


def image_grid(images: Sequence[Image.Image], num_columns: int, pad: int = 2) -> Image.Image:
    """Arrange images of one size in rows on white, with so many pixels between them."""
    width, height = images[0].size
    num_rows = -(-len(images) // num_columns)
    size = (num_columns * (width + pad) + pad, num_rows * (height + pad) + pad)
    grid = Image.new("RGB", size, "white")
    for i, image in enumerate(images):
        grid.paste(image, (pad + i % num_columns * (width + pad), pad + i // num_columns * (height + pad)))
    return grid
