"""From a checkpoint or a diffusers folder to weights, and to a model that generates, without the Trainer."""

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
    """Weights of a run that lie somewhere, and what they were trained as."""

    place: Path
    """Checkpoint, or file of averaged weights."""

    config: Config

    weights: StoredWeights
    """The U-Net's as they are stored, with the matrices of LoRA if it was trained with any."""

    @property
    def unet(self) -> StoredWeights:
        """The U-Net's, with LoRA merged into them."""
        return merged(self.weights, self.config.model.lora) if has_lora(self.weights) else self.weights


def load_config_of(checkpoint: Path) -> Config:
    """The configuration that a checkpoint was trained with.

    Raises:
        DataError: the checkpoint is damaged, or was not written by this package.
        ConfigurationError: it was written by a version with other keys.
    """
    return from_dict(Config, yaml.safe_load(read_record(checkpoint)["config"]), str(checkpoint))


def open_trained(place: str | Path, *, weights: str = "raw") -> Trained:
    """Open the weights that a run has stored, without reading them yet.

    Args:
        place: a checkpoint, a run folder, or its `checkpoints` folder (the newest complete one is taken).
            Or a file of averaged weights (`RUN/averages/...` or `RUN/reconstructed/...safetensors`) in a run folder.
        weights: "raw" for the training weights, "ema" for their average, or which one of several: `decay-0.999`,
            `width-0.05`. Without meaning for a file.

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
            # An average is of what was trained; the rest never changes.
            average = average.over(open_unet(resolve_checkpoint(str(config_file.parent)), "raw"))
        return Trained(place=file, config=config, weights=average)
    checkpoint = resolve_checkpoint(str(place))
    return Trained(place=checkpoint, config=load_config_of(checkpoint), weights=open_unet(checkpoint, weights))


def load_model(place: str | Path, *, weights: str = "raw") -> LatentDiffusion:
    """Build the model that a checkpoint was trained as, with its weights, and LoRA merged into them.

    The checkpoint holds the configuration; VAE and text encoder come from where that says.

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
    """Open the weights of a U-Net that a run is to start from.

    Args:
        config: where they are; the checksums of a checkpoint have been compared on this node.
        unet: what they are for.

    Raises:
        ConfigurationError: there are none, or they are those of another network.
        DataError: they are damaged.
    """
    if is_pipeline(config.checkpoint):
        return open_pipeline_unet(Path(config.checkpoint).expanduser(), unet)
    checkpoint = resolve_checkpoint(config.checkpoint)
    stored = open_unet(checkpoint, config.weights, is_checked=True)
    return merged(stored, load_config_of(checkpoint).model.lora) if has_lora(stored) else stored


def _config_beside(file: Path) -> Path:
    """The configuration of the run in whose folder a file lies, at most one level deep."""
    found = [folder / "config.yaml" for folder in (file.parent, file.parent.parent)]
    if (path := next((path for path in found if path.is_file()), None)) is None:
        raise ConfigurationError(f"{file}: there is no config.yaml beside it or one folder above: copy the run's there")
    return path
