"""From a checkpoint to a model that generates, without the Trainer."""

import logging
from pathlib import Path

import yaml

from diffusion.checkpoints import read_record, read_unet, resolve_checkpoint
from diffusion.config.loading import from_dict
from diffusion.config.model import Weights
from diffusion.config.schema import Config
from diffusion.models.build import build_model, load_unet
from diffusion.models.latent_diffusion import LatentDiffusion

log = logging.getLogger(__name__)


def load_config_of(checkpoint: Path) -> Config:
    """The configuration that a checkpoint was trained with.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
        ConfigurationError: it was written by a version with other keys.
    """
    return from_dict(Config, yaml.safe_load(read_record(checkpoint)["config"]), str(checkpoint))


def load_model(place: str | Path, *, weights: str = "raw") -> LatentDiffusion:
    """Build the model that a checkpoint was trained as, with its weights.

    The checkpoint holds the configuration; VAE and text encoder come from where that says.

    Args:
        place: a checkpoint, a run folder, or its `checkpoints` folder (the newest complete one is taken).
        weights: "raw" for the training weights, "ema" for their average.

    Returns:
        The model, on the CPU, in eval mode.

    Raises:
        ConfigurationError: there is no checkpoint, or it does not fit.
        DataError: it is damaged, or holds no average.
    """
    checkpoint = resolve_checkpoint(str(place))
    config = load_config_of(checkpoint)
    log.info("loading %s weights of %s", weights, checkpoint)
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    load_unet(model, read_unet(checkpoint, Weights(weights)), str(checkpoint))
    return model.eval()
