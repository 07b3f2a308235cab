"""Models of this package, written as pipelines of diffusers."""

from pathlib import Path

from diffusion.models import FrozenParts, LatentDiffusion
from diffusion.models.pretrained import write_pipeline
from diffusion.models.sampling import exported_scheduler


def write_model(model: LatentDiffusion, folder: Path, *, resolution: int | None = None) -> Path:
    """Write a model to a folder, which is created if it does not exist."""
    folder.mkdir(exist_ok=True)
    frozen = FrozenParts(
        vae=model.vae,
        text_encoder=model.text_encoder,
        tokenizer=model.tokenizer,
        latent_scaling=model.latent_scaling,
    )
    scheduler = exported_scheduler(model.noise_scheduler)
    write_pipeline(folder, network=model.network, frozen=frozen, scheduler=scheduler, resolution=resolution)
    return folder
