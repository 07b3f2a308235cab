"""Weights and models from checkpoints and diffusers folders, without the Trainer."""

import logging
from dataclasses import dataclass
from pathlib import Path

import yaml
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.read import open_unet, read_record
from diffusion.config.loading import from_dict, load
from diffusion.config.model import InitFromConfig
from diffusion.config.schema import Config
from diffusion.ema.posthoc import AVERAGE_SUFFIX
from diffusion.errors import ConfigurationError, DataError
from diffusion.models.build import build_model, load_unet
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.lora import has_lora, merged
from diffusion.models.pretrained import is_pipeline, open_pipeline_unet
from diffusion.models.stored_weights import StoredWeights, open_safetensors

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Stored weights of a run, with its configuration."""

    place: Path
    """Checkpoint, or file of averaged weights."""

    config: Config

    weights: StoredWeights
    """Weights of the U-Net as stored, with LoRA's matrices if it was trained with LoRA."""

    @property
    def unet(self) -> StoredWeights:
        """Weights of the U-Net with LoRA merged."""
        return merged(self.weights, self.config.model.lora) if has_lora(self.weights) else self.weights


def load_config_of(checkpoint: Path) -> Config:
    """Read the configuration of a checkpoint.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
        ConfigurationError: it was written by a version with other keys.
    """
    return from_dict(Config, yaml.safe_load(read_record(checkpoint)["config"]), str(checkpoint))


def open_trained(place: str | Path, *, weights: str = "raw") -> Trained:
    """Open the stored weights of a run, without reading them yet.

    Args:
        place: a checkpoint, a run folder, or its `checkpoints` folder (for the newest complete one). Or a file of
            averaged weights in a run folder (`RUN/averages/...` or `RUN/reconstructed/...safetensors`).
        weights: "raw" for the training weights, "ema" for their average, or the label of one of several averages:
            `decay-0.999`, `width-0.05`. Ignored for a file.

    Raises:
        ConfigurationError: there is no checkpoint.
        DataError: it is damaged, or holds no average.
    """
    if Path(place).suffix == AVERAGE_SUFFIX:
        file = Path(place).expanduser()
        config_file = _config_beside(file)
        config = load(Config, config_file)
        average = open_safetensors([file], file).below("unet.")
        if not average.shapes:
            raise DataError(f"{file} holds no U-Net")
        if config.model.lora is not None:
            # The average has LoRA's matrices only; the other weights never change.
            average = average.over(open_unet(resolve_checkpoint(str(config_file.parent)), "raw"))
        return Trained(place=file, config=config, weights=average)
    checkpoint = resolve_checkpoint(str(place))
    return Trained(place=checkpoint, config=load_config_of(checkpoint), weights=open_unet(checkpoint, weights))


def load_model(place: str | Path, *, weights: str = "raw") -> LatentDiffusion:
    """Build the model of a checkpoint, with its weights and LoRA merged into them.

    VAE and text encoder come from the paths in the configuration of the checkpoint.

    Args:
        place: as for `open_trained`.
        weights: likewise.

    Returns:
        The model, on the CPU, in eval mode.

    Raises:
        ConfigurationError: there is no checkpoint, or it does not fit.
        DataError: it is damaged, or holds no average.
    """
    trained = open_trained(place, weights=weights)
    log.info("loading %s weights of %s", weights, trained.place)
    config = trained.config
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    load_unet(model, trained.unet.read_all(), str(trained.place))
    return model.eval()


def open_initial(config: InitFromConfig, unet: UNet2DConditionModel) -> StoredWeights:
    """Open the initial weights of a U-Net.

    Args:
        config: their path; the checksums of a checkpoint were verified on this node.
        unet: the network that they are for.

    Raises:
        ConfigurationError: there are none, or they are of another network.
        DataError: they are damaged.
    """
    if is_pipeline(config.checkpoint):
        return open_pipeline_unet(Path(config.checkpoint).expanduser(), unet)
    checkpoint = resolve_checkpoint(config.checkpoint)
    stored = open_unet(checkpoint, config.weights, is_checked=True)
    return merged(stored, load_config_of(checkpoint).model.lora) if has_lora(stored) else stored


def _config_beside(file: Path) -> Path:
    """Find the configuration beside a file, or one folder above."""
    found = [folder / "config.yaml" for folder in (file.parent, file.parent.parent)]
    if (path := next((path for path in found if path.is_file()), None)) is None:
        raise ConfigurationError(f"{file}: there is no config.yaml beside it or one folder above: copy the run's there")
    return path
