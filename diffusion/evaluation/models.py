"""What generates images: a checkpoint of this package, or a pipeline in the diffusers layout."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.layout import batch_of
from diffusion.ema.posthoc import AVERAGE_SUFFIX
from diffusion.errors import ConfigurationError
from diffusion.loading import load_model
from diffusion.models.conditioning import DualTextEncoder
from diffusion.models.identity import module_identity
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.layout import PIPELINE_INDEX, is_pipeline
from diffusion.models.sampling import inference_scheduler


class Generator(Protocol):
    """Generates images from prompts and initial latents."""

    identity: str
    """Hash of its weights."""

    resolution: int
    """Side of its images in pixels, unless another is asked for."""

    device: torch.device

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents of an image of so many pixels."""
        ...

    def generate(
        self, prompts: Sequence[str], latents: Tensor, *, negative_prompt: str, num_steps: int, guidance_scale: float
    ) -> list[Image.Image]:
        """One image for each prompt, from latents [B, C, H, W]."""
        ...


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What an evaluation is of."""

    name: str
    """For file names: `ep0-ba100-ema`."""

    place: str
    """Where it was found."""

    step: int | None
    """Optimizer step that the weights belong to, if there is one."""

    weights: str
    """Which of a checkpoint's weights; empty for a pipeline or images."""

    origin: str | None = None
    """Where it comes from, if `place` is a copy."""


class CheckpointGenerator:
    """A model of this package.

    Args:
        model: with the weights that are evaluated.
        device: where it generates.

    Attributes:
        vae_identity: hash of its VAE's weights.
    """

    def __init__(self, model: LatentDiffusion, device: torch.device) -> None:
        self.vae_identity = module_identity(model.vae)
        self.identity = _joined(module_identity(model.unet), self.vae_identity, module_identity(model.text_encoder))
        self.model, self.device, self.resolution = model.to(device).eval(), device, model.resolution

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents."""
        factor = self.model.vae_factor
        _check_size(height, width, factor)
        return self.model.unet.config["in_channels"], height // factor, width // factor

    def generate(
        self, prompts: Sequence[str], latents: Tensor, *, negative_prompt: str, num_steps: int, guidance_scale: float
    ) -> list[Image.Image]:
        """One image for each prompt."""
        factor = self.model.vae_factor
        images = self.model.generate(
            prompts,
            negative_prompt,
            height=latents.shape[2] * factor,
            width=latents.shape[3] * factor,
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            latents=latents,
            batch_size=len(prompts),
            progress=False,
        )
        assert isinstance(images, list)
        return images


class PipelineGenerator:
    """A text-to-image pipeline of diffusers, with the DDIM sampler of this package.

    Args:
        folder: in the diffusers layout.
        device: where it generates.

    Raises:
        ConfigurationError: it cannot be loaded.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler

        pipeline = _load_pipeline(folder)
        pipeline.scheduler = inference_scheduler(DDIMScheduler.from_config(pipeline.scheduler.config))
        pipeline.set_progress_bar_config(disable=True)
        text_encoder = pipeline.text_encoder
        if hasattr(pipeline, "text_encoder_2"):
            text_encoder = DualTextEncoder(text_encoder, pipeline.text_encoder_2)
            pipeline.watermark = None
        self.identity = _joined(*(module_identity(part) for part in (pipeline.unet, pipeline.vae, text_encoder)))
        self.pipeline, self.device = pipeline.to(device), device
        self.resolution = pipeline.unet.config.sample_size * pipeline.vae_scale_factor

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Channels, height and width of the latents."""
        factor = self.pipeline.vae_scale_factor
        _check_size(height, width, factor)
        return self.pipeline.unet.config.in_channels, height // factor, width // factor

    def generate(
        self, prompts: Sequence[str], latents: Tensor, *, negative_prompt: str, num_steps: int, guidance_scale: float
    ) -> list[Image.Image]:
        """One image for each prompt."""
        factor = self.pipeline.vae_scale_factor
        return self.pipeline(
            list(prompts),
            negative_prompt=[negative_prompt] * len(prompts),
            height=latents.shape[2] * factor,
            width=latents.shape[3] * factor,
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            latents=latents.to(self.pipeline.unet.dtype),
        ).images


def _load_pipeline(folder: Path) -> Any:
    """Load a pipeline of the class that its index names: Stable Diffusion or SDXL."""
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline

    kinds: dict[str, Any] = {kind.__name__: kind for kind in (StableDiffusionPipeline, StableDiffusionXLPipeline)}
    try:
        kind = kinds[json.loads((folder / PIPELINE_INDEX).read_text(encoding="utf-8"))["_class_name"]]
        return kind.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigurationError(f"model={folder} is no {' or '.join(kinds)}: {reason}") from error


def find_subjects(place: str, weights: Sequence[str]) -> list[Subject]:
    """What is to be evaluated at a place.

    Args:
        place: as `EvaluationConfig.model`.
        weights: as `EvaluationConfig.weights`; without meaning for a pipeline or a file of averaged weights.

    Raises:
        ConfigurationError: there is nothing.
    """
    path = Path(place).expanduser()
    if is_pipeline(place):
        return [Subject(name=path.resolve().name, place=str(path), step=None, weights="")]
    if path.suffix == AVERAGE_SUFFIX:
        return [Subject(name=path.stem, place=str(path), step=None, weights="")]
    return subjects_of_checkpoint(resolve_checkpoint(place), weights)


def subjects_of_checkpoint(checkpoint: Path, weights: Sequence[str]) -> list[Subject]:
    """One for each of the weights of a checkpoint."""
    stem, step = checkpoint.name.removesuffix(".pt"), batch_of(checkpoint)
    return [
        Subject(name=f"{stem}-{one}", place=str(checkpoint), step=step if step >= 0 else None, weights=one)
        for one in weights
    ]


def load_generator(subject: Subject, device: torch.device) -> Generator:
    """Load what generates.

    Raises:
        ConfigurationError: it is not there, or does not fit.
        DataError: it is damaged, or holds no such average.
    """
    if is_pipeline(subject.place):
        return PipelineGenerator(Path(subject.place), device)
    return CheckpointGenerator(load_model(subject.place, weights=subject.weights or "raw"), device)


def _check_size(height: int, width: int, factor: int) -> None:
    if height % factor or width % factor:
        raise ConfigurationError(
            f"protocol.sampling.height={height} and width={width} must be multiples of {factor} for this model"
        )


def _joined(*identities: str) -> str:
    return hashlib.sha256(" ".join(identities).encode()).hexdigest()[:16]
