"""From configuration to model: what a notebook imports and what training calls."""

from typing import TypedDict

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from torch import Tensor
from typing_extensions import Unpack

from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.errors import ConfigurationError
from diffusion.models.architectures import ARCHITECTURES
from diffusion.models.conditioning import text_width
from diffusion.models.construction import construct
from diffusion.models.frozen import build_text_encoder, build_vae, load_frozen_parts, load_pretrained, with_seed
from diffusion.models.latent_diffusion import LatentDiffusion


def build_unet(config: ModelConfig) -> UNet2DConditionModel:
    """Build the U-Net with random weights from torch's generator.

    Raises:
        ConfigurationError: `model.unet` holds an unknown argument, or one that does not fit.
    """
    return construct(UNet2DConditionModel, ARCHITECTURES[config.architecture].unet, config.unet, "model.unet")


def build_noise_scheduler(architecture: Architecture, objective: ObjectiveConfig) -> DDPMScheduler:
    """Build the noise scheduler that training and sampling share.

    Raises:
        ConfigurationError: zero-terminal SNR with epsilon prediction: at the last step the noise is the input, and its
            prediction says nothing about the image.
    """
    if objective.zero_terminal_snr and objective.prediction_type == PredictionType.epsilon:
        raise ConfigurationError(
            "objective.zero_terminal_snr needs objective.prediction_type=v_prediction (or sample): with epsilon the "
            "last step cannot be learned"
        )
    return DDPMScheduler(
        **ARCHITECTURES[architecture].noise_schedule,
        prediction_type=objective.prediction_type.value,
        rescale_betas_zero_snr=objective.zero_terminal_snr,
    )


def build_model(config: ModelConfig, objective: ObjectiveConfig, *, resolution: int, seed: int) -> LatentDiffusion:
    """Build the model that is trained: random U-Net from the seed, frozen parts as configured.

    Raises:
        ConfigurationError: the frozen weights are not there, or the combination is impossible.
    """
    unet = with_seed(seed, lambda: build_unet(config))
    frozen = load_frozen_parts(config)
    width = text_width(frozen.text_encoder)
    if unet.config["cross_attention_dim"] != width:
        raise ConfigurationError(
            f"model.pretrained={config.pretrained}: its text encoder is {width} wide, the U-Net of "
            f"{config.architecture.value} expects {unet.config['cross_attention_dim']}"
        )
    channels = frozen.vae.config["latent_channels"]
    if unet.config["in_channels"] != channels:
        raise ConfigurationError(
            f"model.vae={config.vae or config.pretrained}: its latents have {channels} channels, the U-Net expects "
            f"{unet.config['in_channels']}"
        )
    return LatentDiffusion(
        unet=unet,
        frozen=frozen,
        noise_scheduler=build_noise_scheduler(config.architecture, objective),
        objective=objective,
        resolution=resolution,
        seed=seed,
        low_precision_norms=config.low_precision_norms,
    )


def load_unet(model: LatentDiffusion, weights: dict[str, Tensor], where: str) -> None:
    """Load weights into a model's U-Net.

    Raises:
        ConfigurationError: names or shapes are not those of the U-Net; says which.
    """
    expected = model.unet.state_dict()
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    shapes = [name for name in expected.keys() & weights.keys() if expected[name].shape != weights[name].shape]
    if missing or unexpected or shapes:
        example = next(iter(sorted(shapes)), None)
        detail = f", such as {example}: {tuple(weights[example].shape)} there" if example else ""
        raise ConfigurationError(
            f"{where} does not fit the U-Net of this configuration: {len(missing)} weights missing, {len(unexpected)} "
            f"unknown, {len(shapes)} of another shape{detail}. Use the `model` section that it was trained with"
        )
    model.unet.load_state_dict(weights)


class ModelOptions(TypedDict, total=False):
    """Options of the functions below."""

    unet: str | None
    """Diffusers-layout folder or hub name of the U-Net's weights; None (default): random weights from the seed."""

    vae: str | None
    """Folder of a VAE in place of that of `pretrained`."""

    resolution: int
    """Default size of generated images, in pixels; by default the one that the family is made for."""

    prediction_type: str
    """"epsilon", "v_prediction" or "sample"."""

    zero_terminal_snr: bool
    """Rescale the noise schedule (Lin et al. 2023); not with epsilon. False by default."""

    local_files_only: bool
    """Never ask the hub. False by default."""

    seed: int
    """Of random weights and of training's random numbers; 17 by default."""


def stable_diffusion_2(pretrained: str | None = None, **options: Unpack[ModelOptions]) -> LatentDiffusion:
    """Stable Diffusion 2: 865,910,724 parameters in the U-Net, 83,653,863 in the VAE, 340,387,840 in the text encoder.

    Args:
        pretrained: diffusers-layout folder or hub name of the VAE's and text encoder's weights; None: random weights.
        options: see `ModelOptions`; 512 px and epsilon by default.

    Returns:
        The model, on the CPU, in eval mode.

    Raises:
        ConfigurationError: weights are not there or do not fit.
    """
    return _assemble(Architecture.stable_diffusion_2, pretrained, **{"resolution": 512, **options})


def stable_diffusion_xl(pretrained: str | None = None, **options: Unpack[ModelOptions]) -> LatentDiffusion:
    """SDXL: 2,567,463,684 parameters in the U-Net, 83,653,863 in the VAE, 817,720,320 in the two text encoders.

    Arguments as for `stable_diffusion_2`; 1024 px and epsilon by default.
    """
    return _assemble(Architecture.stable_diffusion_xl, pretrained, **{"resolution": 1024, **options})


def tiny(pretrained: str | None = None, **options: Unpack[ModelOptions]) -> LatentDiffusion:
    """A model like `stable_diffusion_2` that trains on two CPU cores; 32 px and v-prediction by default."""
    return _assemble(Architecture.tiny, pretrained, **{"prediction_type": "v_prediction", **options})


def tiny_xl(pretrained: str | None = None, **options: Unpack[ModelOptions]) -> LatentDiffusion:
    """A model like `stable_diffusion_xl` that trains on two CPU cores; 32 px and v-prediction by default."""
    return _assemble(Architecture.tiny_xl, pretrained, **{"prediction_type": "v_prediction", **options})


def _assemble(
    architecture: Architecture,
    pretrained: str | None,
    *,
    unet: str | None = None,
    vae: str | None = None,
    resolution: int = 32,
    prediction_type: str = "epsilon",
    zero_terminal_snr: bool = False,
    local_files_only: bool = False,
    seed: int = 17,
) -> LatentDiffusion:
    config = ModelConfig(architecture=architecture, pretrained=pretrained, vae=vae, local_files_only=local_files_only)
    objective = ObjectiveConfig(prediction_type=PredictionType(prediction_type), zero_terminal_snr=zero_terminal_snr)
    model = build_model(config, objective, resolution=resolution, seed=seed)
    if unet:
        loaded = load_pretrained(UNet2DConditionModel, unet, "unet", local_files_only, use_safetensors=True)
        load_unet(model, loaded.state_dict(), f"{unet}/unet")
    return model.eval()


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters of `unet`, `vae` and `text_encoder`, counted without allocating any."""
    spec = ARCHITECTURES[config.architecture]
    with torch.device("meta"):
        parts = {"unet": build_unet(config), "vae": build_vae(spec), "text_encoder": build_text_encoder(spec)}
    return {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in parts.items()}
