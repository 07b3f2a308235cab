"""Export of a trained model: a diffusers folder, one safetensors file, or LoRA's matrices alone.

No GPU is needed. The output appears under its name when it is complete.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor

from diffusion.config.schema import Config, Task
from diffusion.config.secrets import to_public_yaml
from diffusion.errors import ConfigurationError, MachineError
from diffusion.files import atomic_path
from diffusion.loading import Trained, read_trained
from diffusion.model_card import Licences, write_card
from diffusion.models.architectures import ARCHITECTURES, build_unet
from diffusion.models.lora import has_lora, write_lora
from diffusion.models.pretrained import load_frozen_parts, write_pipeline
from diffusion.models.sampling import build_noise_scheduler, inference_scheduler


def export(
    place: str,
    out: Path,
    *,
    weights: str = "raw",
    lora_only: bool = False,
    licences: Licences | None = None,
    prepared: Path | None = None,
) -> None:
    """Export the model that a run has trained.

    Args:
        place: a checkpoint, a run folder, its `checkpoints` folder (for the newest complete one), or a file of averaged
            weights.
        out: a new folder; or, with the ending `.safetensors`, one file with the U-Net and its metadata.
        weights: "raw" for the training weights, "ema" for their average, or the label of one of several averages.
        lora_only: LoRA's matrices alone; otherwise they are merged into the U-Net.
        licences: for the model card.
        prepared: prepared data whose sources are listed in the card.

    Raises:
        ConfigurationError: there is no such checkpoint, or `out` exists.
        DataError: an input is damaged.
        MachineError: `out` cannot be written.
    """
    if out.exists():
        raise ConfigurationError(f"{out} exists: remove it, or choose another path")
    trained = read_trained(place, weights=weights)
    config = trained.config
    if config.task is not Task.diffusion:
        raise ConfigurationError(f"{place} is a run of {config.task.value}, whose result is exported already: RUN/vae")
    if lora_only and not has_lora(trained.weights):
        raise ConfigurationError(f"{place} was trained without model.lora: export it as a whole")
    licences = licences or Licences()
    with _whole_or_nothing(out) as partial:
        if out.suffix == ".safetensors":
            tensors = {name: tensor.contiguous() for name, tensor in trained.unet.items()}
            save_file(tensors, partial, _metadata(trained, weights, licences))
            return
        partial.mkdir(parents=True)
        card = write_card(
            config, path=trained.place, weights=weights, is_lora=lora_only, licences=licences, prepared=prepared
        )
        (partial / "README.md").write_text(card, encoding="utf-8")
        if lora_only:
            assert config.model.lora is not None
            write_lora(partial, trained.weights, config.model.lora)
            return
        write_pipeline(
            partial,
            unet=_build_unet(config, trained.unet),
            frozen=load_frozen_parts(config.model),
            scheduler=inference_scheduler(build_noise_scheduler(config.objective)),
        )


def _build_unet(config: Config, weights: dict[str, Tensor]) -> UNet2DConditionModel:
    """Build the U-Net with its weights, and with the size of its training images as default."""
    with torch.device("meta"):
        unet = build_unet(config.model)
    unet.load_state_dict(weights, assign=True)
    unet.register_to_config(sample_size=config.data.resolution // ARCHITECTURES[config.model.architecture].vae_factor)
    return unet


def _metadata(trained: Trained, weights: str, licences: Licences) -> dict[str, str]:
    config = trained.config
    return {
        "format": "pt",
        "title": config.run_name,
        "checkpoint": trained.place.name,
        "weights": weights,
        "architecture": config.model.architecture.value,
        "prediction_type": config.objective.prediction_type.value,
        "resolution": str(config.data.resolution),
        "license": licences.model,
        "data_license": licences.data,
        "config": to_public_yaml(config),
    }


@contextlib.contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    """Yield a path beside `out` that is renamed to it at the end of the block."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(out) as partial:
            yield partial
    except OSError as error:
        raise MachineError(f"{out} cannot be written: {error.strerror or error}. Choose another folder") from error
