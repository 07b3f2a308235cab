"""Construction of models: from the configuration for training, from options for notebooks."""

import inspect
import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from diffusion.config.model import (
    Architecture,
    FlowConfig,
    ModelConfig,
    ObjectiveConfig,
    Posterior,
    PredictionType,
)
from diffusion.errors import ConfigurationError
from diffusion.models.architectures import (
    ARCHITECTURES,
    ArchitectureSpec,
    build_network,
    side_factor,
    vae_factor,
    with_seed,
)
from diffusion.models.conditioning import text_width
from diffusion.models.ingredients import find_ingredients
from diffusion.models.ingredients.text_adapter import FOLDER as TEXT_ADAPTER
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.latents import VAE, latent_space
from diffusion.models.ldm_layout import read_single_file
from diffusion.models.networks import Network, component_name, text_width_of
from diffusion.models.pretrained import (
    SCHEDULER_CONFIG,
    is_single_file,
    load_frozen_parts,
    network_folder,
    read_noise_schedule,
    read_pipeline_network,
    stored_resolution,
)
from diffusion.models.sampling import build_noise_scheduler, schedule_differences, whole_number
from diffusion.randomness import NUM_SEEDS

log = logging.getLogger(__name__)


def build_model(
    config: ModelConfig, objective: ObjectiveConfig, *, resolution: int, seed: int, for_training: bool = True
) -> LatentDiffusion:
    """Build a model: a random network from the seed, frozen parts as configured.

    Raises:
        ConfigurationError: frozen weights are missing, or do not fit the network.
    """
    parts = build_parts(config, objective, resolution=resolution, seed=seed, for_training=for_training)
    return LatentDiffusion(**parts)


def build_parts(
    config: ModelConfig, objective: ObjectiveConfig, *, resolution: int, seed: int, for_training: bool = True
) -> dict[str, Any]:
    """Build the arguments of a `LatentDiffusion`, with the ingredients that only training needs or without.

    Raises:
        ConfigurationError: frozen weights are missing, or do not fit the network.
    """
    network = with_seed(seed, lambda: build_network(config))
    frozen = load_frozen_parts(config)
    width = config.adapted_text_width or text_width(frozen.text_encoder)
    if text_width_of(network) != width:
        raise ConfigurationError(
            f"model.pretrained={config.pretrained}: its text encoder is {width} wide, the network of "
            f"{config.architecture.value} expects {text_width_of(network)}"
        )
    _check_latents(config, objective, frozen.vae, network)
    ingredients = [one for one in find_ingredients(config) if for_training or not one.serves_training_only]
    for ingredient in ingredients:
        with_seed(seed, partial(ingredient.build, network, frozen.text_encoder))
    with torch.device("cpu"):  # Its tables are read by the host, also where the weights are on another device.
        noise_scheduler = build_noise_scheduler(objective)
    return {
        "network": network,
        "ingredients": ingredients,
        "frozen": frozen,
        "noise_scheduler": noise_scheduler,
        "objective": objective,
        "resolution": resolution,
        "seed": seed,
        "low_precision_norms": config.low_precision_norms,
    }


def _check_latents(config: ModelConfig, objective: ObjectiveConfig, vae: VAE, network: Network) -> None:
    """Reject a network that does not fit the latents of a VAE."""
    space, start = latent_space(vae), f"model.vae={config.vae or config.pretrained}"
    if config.architecture.is_pixel:
        start = f"model.architecture={config.architecture.value}"
        if objective.prediction_type is not PredictionType.flow or config.vae is not None:
            raise ConfigurationError(f"{start} works on pixels. Set objective.prediction_type=flow and model.vae=null")
    if network.config["in_channels"] != space.channels:
        raise ConfigurationError(
            f"{start}: its latents have {space.channels} channels, the network expects "
            f"{network.config['in_channels']}. Set model.network.in_channels={space.channels} to train such a network"
        )
    if (out_channels := network.config.get("out_channels", space.channels)) != space.channels:
        raise ConfigurationError(f"model.network.out_channels is {out_channels}, not {space.channels}. Remove it")
    if component_name(network) == "unet" and not isinstance(vae, AutoencoderKL):
        raise ConfigurationError(
            f"{start} is an {type(vae).__name__}, which no pipeline of a U-Net decodes. Set "
            "model.architecture=transformer_m, or give an AutoencoderKL"
        )
    if objective.posterior is Posterior.sample and not (space.has_posterior or config.architecture.is_pixel):
        raise ConfigurationError(f"{start} is deterministic and has no posterior. Set objective.posterior=mean")


def load_weights(model: LatentDiffusion, weights: dict[str, Tensor], source: str) -> None:
    """Load weights, which messages call `source`, into a model; a part that they lack beside the network stays.

    Raises:
        ConfigurationError: names or shapes differ from those of the model.
    """
    expected = model.state_dict()
    for ingredient in model.ingredients:
        prefix = f"{ingredient.part}."
        initial = {name: value for name, value in expected.items() if name.startswith(prefix)}
        if initial and not any(name.startswith(prefix) for name in weights):
            log.warning("%s has no weights of %s, which keeps its initial ones", source, ingredient.part)
            weights = weights | initial
    missing, unexpected = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    shapes = [name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape]
    if missing or unexpected or shapes:
        example = next(iter(sorted(shapes)), None)
        detail = f", such as {example}: {tuple(weights[example].shape)} stored" if example else ""
        raise ConfigurationError(
            f"{source} does not fit the model of this configuration: {len(missing)} weights missing, {len(unexpected)} "
            f"unknown, {len(shapes)} of another shape{detail}. Use the `model` section of its training run"
        )
    model.load_state_dict(weights)


def load_family(
    architecture: Architecture,
    pretrained: str | Path | None = None,
    *,
    network: str | Path | None = None,
    vae: str | Path | None = None,
    resolution: int | None = None,
    prediction_type: str | None = None,
    zero_terminal_snr: bool | None = None,
    local_files_only: bool = False,
    seed: int = 17,
) -> LatentDiffusion:
    """Build a model for a notebook.

    Args:
        architecture: given already in `stable_diffusion_2`, `tiny` ...
        pretrained: diffusers-layout folder or hub name of the VAE's and text encoder's weights; None: random weights.
        network: the same of the weights of U-Net or transformer, or a file in the original layout of Stable Diffusion;
            None: random weights from the seed.
        vae: folder of a VAE that replaces the VAE of `pretrained`.
        resolution: default size of generated images, in pixels; by default as stored in the folder of `network`, else
            that of the family.
        prediction_type: "epsilon", "v_prediction", "sample" or "flow"; by default as stored in the folder of `network`,
            else that of the family.
        zero_terminal_snr: rescale the noise schedule (Lin et al. 2023); not with epsilon. By default as stored in the
            folder of `network`, else False.
        local_files_only: read the local cache instead of the hub.
        seed: seed of random weights and of the random numbers of training.

    Returns:
        The model in eval mode, on the CPU or on the device of a surrounding `with torch.device(...)`.

    Raises:
        ConfigurationError: weights are missing or do not fit, or an option is invalid.
        DataError: the weights are damaged.
    """
    spec = ARCHITECTURES[architecture]
    try:
        resolution = None if resolution is None else whole_number("resolution", resolution, minimum=1)
        seed = whole_number("seed", seed, minimum=0, maximum=NUM_SEEDS - 1)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    config = ModelConfig(
        architecture=architecture,
        pretrained=None if pretrained is None else str(pretrained),
        vae=None if vae is None else str(vae),
        local_files_only=local_files_only,
    )
    if resolution is not None and resolution % (factor := side_factor(config)):
        raise ConfigurationError(f"resolution {resolution}: give a multiple of {factor}")
    folder = None
    if network is not None and is_single_file(network):
        folder = Path(network).expanduser()
    elif network is not None:
        folder = network_folder(str(network), spec.component, local_files_only=local_files_only)
        if (folder / TEXT_ADAPTER).is_dir():
            raise ConfigurationError(
                f"{folder} holds {TEXT_ADAPTER}/, which no family has. Load the run that it was exported from"
            )
    requested = {"prediction_type": prediction_type, "rescale_betas_zero_snr": zero_terminal_snr}
    requested = {key: value for key, value in requested.items() if value is not None}
    if resolution is None:
        stored = None if folder is None else stored_resolution(folder, spec.component, vae_factor(config))
        resolution = stored or spec.resolution
    model = build_model(config, _objective(spec, folder, requested), resolution=resolution, seed=seed)
    if folder is not None:
        read = read_single_file if is_single_file(folder) else read_pipeline_network
        load_weights(model, read(folder, model.network), f"{folder}/{model.component}")
    elif pretrained or vae:
        log.warning(
            "the network has random weights, the other parts those of %s: give network=FOLDER", pretrained or vae
        )
    return model.eval()


def _family(architecture: Architecture, description: str) -> "partial[LatentDiffusion]":
    loader = partial(load_family, architecture)
    loader.__doc__ = f"{description}\n\n{inspect.getdoc(load_family)}"  # For `help` in a notebook.
    return loader


stable_diffusion_2 = _family(
    Architecture.stable_diffusion_2,
    "Stable Diffusion 2: 865,910,724 parameters in the U-Net, 83,653,863 in the VAE, 340,387,840 in the text encoder.",
)

stable_diffusion_xl = _family(
    Architecture.stable_diffusion_xl,
    "SDXL: 2,567,463,684 parameters in the U-Net, 83,653,863 in the VAE, 817,720,320 in the two text encoders.",
)

tiny = _family(
    Architecture.tiny,
    "Small model with the structure of `stable_diffusion_2`, for two CPU cores; v-prediction by default.",
)

transformer_s = _family(
    Architecture.transformer_s,
    "Transformer over Stable Diffusion 2's latents: 76,440,592 parameters; rectified flow.",
)

transformer_m = _family(
    Architecture.transformer_m,
    "Transformer over Stable Diffusion 2's latents: 287,686,928 parameters; rectified flow.",
)

pixel_transformer_m = _family(
    Architecture.pixel_transformer_m,
    "Transformer over patches of 16 x 16 pixels, without a VAE: 288,670,848 parameters; rectified flow.",
)

pixel_transformer_l = _family(
    Architecture.pixel_transformer_l,
    "Transformer over patches of 16 x 16 pixels, without a VAE: 1,170,201,088 parameters; rectified flow.",
)

transformer_l = _family(
    Architecture.transformer_l,
    "Transformer over Stable Diffusion 2's latents: 1,168,225,808 parameters; rectified flow.",
)

tiny_transformer = _family(
    Architecture.tiny_transformer, "Small transformer with VAE and text encoder of `tiny`; rectified flow by default."
)

tiny_pixel_transformer = _family(
    Architecture.tiny_pixel_transformer,
    "Small transformer over pixels with the text encoder of `tiny`; rectified flow by default.",
)

tiny_xl = _family(
    Architecture.tiny_xl,
    "Small model with the structure of `stable_diffusion_xl`, for two CPU cores; v-prediction by default.",
)


def _objective(spec: ArchitectureSpec, folder: Path | None, requested: dict[str, Any]) -> ObjectiveConfig:
    """Prediction type and noise schedule of a network: from the options, the folder of its weights, or the defaults.

    Raises:
        ConfigurationError: the prediction type is unknown, or the folder contradicts the options.
    """
    stored = read_noise_schedule(folder) if folder is not None else {}
    if stored is None and "prediction_type" not in requested:
        log.warning(
            "%s has no %s: the prediction type of its network is assumed to be %s",
            folder,
            SCHEDULER_CONFIG,
            spec.prediction_type.value,
        )
    stored = stored or {}
    found = {"prediction_type": spec.prediction_type.value, "rescale_betas_zero_snr": False, **stored, **requested}
    choices = [one.value for one in PredictionType]
    if found["prediction_type"] not in choices:
        raise ConfigurationError(f"prediction_type {found['prediction_type']!r}: choose one of {', '.join(choices)}")
    if differing := schedule_differences(stored, **requested):
        raise ConfigurationError(
            f"{folder}/{SCHEDULER_CONFIG}: {'; '.join(differing)}. Use the family of its network without "
            "prediction_type and zero_terminal_snr"
        )
    return ObjectiveConfig(
        prediction_type=PredictionType(found["prediction_type"]),
        zero_terminal_snr=found["rescale_betas_zero_snr"],
        flow=FlowConfig(shift=found.get("shift", 1.0)),
    )
