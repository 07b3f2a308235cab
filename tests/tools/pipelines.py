"""Pipelines of diffusers beside models of this package: written, read, and compared by their images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from diffusion.models import LatentDiffusion
from diffusion.models.pretrained import write_pipeline
from diffusion.models.sampling import exported_scheduler, initial_latents

PROMPTS = ["a red circle", "a blue star"]
_LATENTS = initial_latents([1, 2], (4, 8, 8), torch.device("cpu"))
_SAMPLING: dict[str, Any] = {"latents": _LATENTS, "num_inference_steps": 3, "guidance_scale": 3.0}


def write_model(model: LatentDiffusion, folder: Path, *, resolution: int | None = None) -> Path:
    """Write a model to a folder, which is created if it does not exist."""
    folder.mkdir(exist_ok=True)
    frozen = replace(model.frozen, latent_scaling=model.latent_scaling)
    scheduler = exported_scheduler(model.noise_scheduler)
    write_pipeline(folder, network=model.network, frozen=frozen, scheduler=scheduler, resolution=resolution)
    return folder


def read_pipeline(folder: Path) -> Any:
    """Read a pipeline of diffusers, which computes without a progress bar."""
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def images_of_model(model: LatentDiffusion, prompts: Any = PROMPTS, *more: Any, **options: Any) -> Tensor:
    """Images of `generate`, which are not uniform."""
    images = model.generate(prompts, *more, output="tensor", progress=False, **(_SAMPLING | options))
    assert isinstance(images, Tensor)
    assert images.std() > 0.01, "there is something to see"
    return images


def images_of_pipeline(pipeline: Any, prompts: Any = PROMPTS, *more: Any, **options: Any) -> Tensor:
    """Images of a pipeline of diffusers."""
    is_prx = "transformer" in pipeline.components
    own = {"use_resolution_binning": False, "skip_text_cleaning": True} if is_prx else {}
    return pipeline(prompts, *more, output_type="pt", **(_SAMPLING | own | options)).images
