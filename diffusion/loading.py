"""From a checkpoint to a model that generates, without the Trainer."""

import logging
from pathlib import Path

import yaml
from torch import Tensor

from diffusion.algorithms.average_files import AVERAGE_SUFFIX, read_unet_average
from diffusion.checkpointing.reading import read_average, read_record, read_unet, resolve_checkpoint
from diffusion.config.loading import from_dict, load
from diffusion.config.model import Weights
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError
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
            Or a file of averaged weights (`RUN/averages/...` or `RUN/reconstructed/...safetensors`) in a run folder.
        weights: "raw" for the training weights, "ema" for their average, or which one of several: `decay-0.999`,
            `width-0.05`. Without meaning for a file.

    Returns:
        The model, on the CPU, in eval mode.

    Raises:
        ConfigurationError: there is no checkpoint, or it does not fit.
        DataError: it is damaged, or holds no average.
    """
    if Path(place).suffix == AVERAGE_SUFFIX:
        file = Path(place).expanduser()
        return _load(load(Config, _config_beside(file)), read_unet_average(file), file)
    checkpoint = resolve_checkpoint(str(place))
    log.info("loading %s weights of %s", weights, checkpoint)
    is_known = weights in [choice.value for choice in Weights]
    unet = read_unet(checkpoint, Weights(weights)) if is_known else read_average(checkpoint, weights)
    return _load(load_config_of(checkpoint), unet, checkpoint)


def _load(config: Config, unet: dict[str, Tensor], place: Path) -> LatentDiffusion:
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    load_unet(model, unet, str(place))
    return model.eval()


def _config_beside(file: Path) -> Path:
    """The configuration of the run in whose folder a file lies, at most one level deep."""
    found = [folder / "config.yaml" for folder in (file.parent, file.parent.parent)]
    if (path := next((path for path in found if path.is_file()), None)) is None:
        raise ConfigurationError(f"{file}: there is no config.yaml beside it or one folder above: copy the run's there")
    return path
