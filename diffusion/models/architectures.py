"""Architectures as local configuration, and networks with random weights built from them. No hub is asked.

Each architecture is a set of keyword arguments for the Hugging Face classes. `stable_diffusion_2` is the configuration
of stable-diffusion-2-base (the hub repository was removed in November 2025), `stable_diffusion_xl` that of
stable-diffusion-xl-base-1.0. `tiny` and `tiny_xl` have the same structure and train on two CPU cores.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_dc import AutoencoderDC
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from omegaconf import MISSING
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from diffusion.config.model import NUM_TIMESTEPS, Architecture, ModelConfig, PredictionType
from diffusion.config.schema import Config, Task
from diffusion.errors import ConfigurationError, raise_all, similar_names
from diffusion.files import read_json
from diffusion.models.conditioning import DualTextEncoder, TextEncoder
from diffusion.models.latents import VAE, VAE_CLASSES, TrainedVAE, latent_space
from diffusion.models.networks import NETWORKS, TEXT_WIDTHS, Network, take_whole_timesteps
from diffusion.models.text_encoders import LanguageModel, hidden_width, read_language_model

Built = TypeVar("Built")


NOISE_SCHEDULE = {
    "num_train_timesteps": NUM_TIMESTEPS,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
}
"""DDPMScheduler of all architectures, without the prediction type."""

FLOW_PREDICTION = "flow_prediction"
"""Prediction type of rectified flow in the configuration of a sampler of diffusers."""

CLIP_VOCABULARY = 49_408

_COUNTS = (
    *("in_channels", "out_channels", "latent_channels", "block_out_channels", "decoder_block_out_channels"),
    *("patch_size", "bottleneck_size", "hidden_size", "context_in_dim", "cross_attention_dim", "depth"),
    *("layers_per_block", "num_heads", "attention_head_dim", "norm_num_groups", "conv_in_kernel", "conv_out_kernel"),
)
"""Arguments of networks and VAEs that are a whole number of at least 1, or where a class takes it a list of them."""


@dataclass(frozen=True, kw_only=True)
class ArchitectureSpec:
    """Keyword arguments of the parts of a latent diffusion model."""

    network: dict[str, Any]
    """UNet2DConditionModel, or PRXTransformer2DModel."""

    vae: dict[str, Any] | None
    """AutoencoderKL; None: the network works on pixels."""

    text_encoder: dict[str, Any]
    """CLIPTextConfig."""

    text_encoder_2: dict[str, Any] | None = None
    """CLIPTextConfig of SDXL's second text encoder, which has a projection."""

    component: str = "unet"
    """Kind of network: key of `NETWORKS`."""

    sample_size: int = 64
    """Usual side of the latents."""

    prediction_type: PredictionType = PredictionType.epsilon
    """Usual prediction target."""

    @property
    def vae_factor(self) -> int:
        """Pixels per latent position along one side."""
        return 1 if self.vae is None else 2 ** (len(self.vae["block_out_channels"]) - 1)

    @property
    def resolution(self) -> int:
        """Usual side of images, in pixels."""
        return self.sample_size * self.vae_factor

    @property
    def text_width(self) -> int:
        """Width of the text encoding (D)."""
        second = self.text_encoder_2 or {"hidden_size": 0}
        return self.text_encoder["hidden_size"] + second["hidden_size"]

    @property
    def max_tokens(self) -> int:
        """Tokens of a chunk of a caption."""
        return self.text_encoder["max_position_embeddings"]


def _clip(width: int, *, num_layers: int, num_heads: int, projection: int, activation: str = "gelu") -> dict[str, Any]:
    return {
        "vocab_size": CLIP_VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": 77,
        "hidden_act": activation,
        "projection_dim": projection,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


STABLE_DIFFUSION_2 = ArchitectureSpec(
    network={
        "sample_size": 64,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "attention_head_dim": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
    },
    vae={
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
        "sample_size": 512,
        "scaling_factor": 0.18215,
    },
    text_encoder=_clip(1024, num_layers=23, num_heads=16, projection=512),
)

STABLE_DIFFUSION_XL = ArchitectureSpec(
    sample_size=128,
    network={
        "sample_size": 128,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (320, 640, 1280),
        "layers_per_block": 2,
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    vae={**(STABLE_DIFFUSION_2.vae or {}), "sample_size": 1024, "scaling_factor": 0.13025},
    text_encoder=_clip(768, num_layers=12, num_heads=12, projection=768, activation="quick_gelu"),
    text_encoder_2=_clip(1280, num_layers=32, num_heads=20, projection=1280),
)

TINY = ArchitectureSpec(
    sample_size=8,
    network={
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (64, 128),
        "layers_per_block": 1,
        "attention_head_dim": (2, 4),
        "cross_attention_dim": 64,
        "norm_num_groups": 8,
        "use_linear_projection": True,
    },
    vae={
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (16, 32, 64),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "mid_block_add_attention": False,
        "sample_size": 32,
        "scaling_factor": 1.0,
    },
    text_encoder={
        **_clip(64, num_layers=0, num_heads=4, projection=64),
        "vocab_size": 2048,
        "intermediate_size": 64,
        "max_position_embeddings": 24,
        "bos_token_id": 2046,
        "eos_token_id": 2047,
        "pad_token_id": 0,
    },
    prediction_type=PredictionType.v_prediction,
)

TINY_XL = ArchitectureSpec(
    sample_size=8,
    network={
        **TINY.network,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 32 + 6 * 8,
    },
    vae=TINY.vae,
    text_encoder={**TINY.text_encoder, "hidden_size": 24, "num_hidden_layers": 2},
    text_encoder_2={**TINY.text_encoder, "hidden_size": 40, "num_hidden_layers": 2, "projection_dim": 32},
    prediction_type=PredictionType.v_prediction,
)


def _transformer(base: ArchitectureSpec, width: int, depth: int, *, head: int = 64) -> ArchitectureSpec:
    """A transformer over the latents of another architecture, with its text encoder; heads are `head` wide."""
    network = {
        "in_channels": 4,
        "patch_size": 2,
        "context_in_dim": base.text_width,
        "hidden_size": width,
        "mlp_ratio": 3.5,
        "num_heads": width // head,
        "depth": depth,
        "axes_dim": (head // 2, head // 2),
    }
    return replace(base, component="transformer", network=network, prediction_type=PredictionType.flow)


def _on_pixels(spec: ArchitectureSpec, *, resolution: int, patch_size: int, bottleneck: int) -> ArchitectureSpec:
    """The same transformer over patches of pixels, which a bottleneck narrows (Li and He 2025)."""
    patches = {"in_channels": 3, "patch_size": patch_size, "bottleneck_size": bottleneck}
    return replace(spec, vae=None, sample_size=resolution, network=spec.network | patches)


_TRANSFORMER_M, _TRANSFORMER_L = (_transformer(STABLE_DIFFUSION_2, *size) for size in ((1024, 12), (1792, 16)))
_TINY_TRANSFORMER = _transformer(TINY, 128, 6, head=32)

ARCHITECTURES = {
    Architecture.transformer_s: _transformer(STABLE_DIFFUSION_2, 576, 10),
    Architecture.transformer_m: _TRANSFORMER_M,
    Architecture.transformer_l: _TRANSFORMER_L,
    Architecture.tiny_transformer: _TINY_TRANSFORMER,
    Architecture.pixel_transformer_m: _on_pixels(_TRANSFORMER_M, resolution=256, patch_size=16, bottleneck=128),
    Architecture.pixel_transformer_l: _on_pixels(_TRANSFORMER_L, resolution=256, patch_size=16, bottleneck=256),
    Architecture.tiny_pixel_transformer: _on_pixels(_TINY_TRANSFORMER, resolution=32, patch_size=4, bottleneck=16),
    Architecture.stable_diffusion_2: STABLE_DIFFUSION_2,
    Architecture.stable_diffusion_xl: STABLE_DIFFUSION_XL,
    Architecture.tiny: TINY,
    Architecture.tiny_xl: TINY_XL,
}


def num_text_tokens(config: ModelConfig) -> int:
    """Tokens of a caption (L)."""
    text = config.text_encoder
    return text.max_tokens if text.path is not None else ARCHITECTURES[config.architecture].max_tokens * text.chunks


def text_shape(config: ModelConfig) -> tuple[int, int]:
    """Tokens of a caption (L) and width of their encoding for the network (D).

    Raises:
        ConfigurationError: the folder of a language model holds none.
    """
    return num_text_tokens(config), config.adapted_text_width or encoder_width(config)


def encoder_width(config: ModelConfig) -> int:
    """Width of the text encoder's hidden states, before an adapter; errors as of `text_shape`."""
    path = config.text_encoder.path
    return ARCHITECTURES[config.architecture].text_width if path is None else hidden_width(read_language_model(path)[1])


# Networks with random weights


def with_seed(seed: int, build: Callable[[], Built]) -> Built:
    """Build something random from a seed, without changing the generator of the process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def latent_channels(config: ModelConfig) -> int:
    """Channels of the latents (C) that the network takes."""
    return config.network.get("in_channels", ARCHITECTURES[config.architecture].network["in_channels"])


def _vae_source(config: ModelConfig) -> str | None:
    """Folder or hub name of the VAE, which may be `???`; None without any."""
    if config.architecture.is_pixel:
        return None
    return config.vae or (config.pretrained and f"{config.pretrained}/vae")


def _stored_vae(config: ModelConfig) -> VAE | None:
    """Build the VAE of a local folder by its configuration; None without such a folder."""
    vae = _vae_source(config)
    path = Path(vae or "", "config.json").expanduser()
    if not vae or not path.is_file():
        return None
    stored = read_json(path)
    kind = VAE_CLASSES.get(stored.get("_class_name", "")) if isinstance(stored, dict) else None
    try:
        return kind and kind.from_config(stored)  # pyright: ignore[reportReturnType]
    except (TypeError, ValueError):
        return None  # `load_frozen_parts` says what is wrong.


def vae_factor(config: ModelConfig) -> int:
    """Pixels per latent position along one side: of a VAE in a local folder, or of the architecture."""
    with torch.device("meta"):
        stored = _stored_vae(config)
    return ARCHITECTURES[config.architecture].vae_factor if stored is None else latent_space(stored).factor


def unread_vae(config: ModelConfig) -> str | None:
    """Folder or hub name of a VAE that is no local folder, so that its factor and size are the architecture's."""
    source = _vae_source(config)
    with torch.device("meta"):
        return source if source and not source.startswith(MISSING) and _stored_vae(config) is None else None


def side_factor(config: ModelConfig) -> int:
    """Both sides of an image in pixels are multiples of it: the VAE's factor, and the network's patches."""
    spec = ARCHITECTURES[config.architecture]
    _check_arguments(NETWORKS[spec.component], config.network, "model.network")
    return vae_factor(config) * (spec.network | config.network).get("patch_size", 1)


def image_side_factor(config: Config) -> int:
    """Both sides of a training image in pixels are multiples of it: without a network, of the trained VAE's factor."""
    if config.task is not Task.autoencoder or config.model.architecture.is_pixel:
        return side_factor(config.model)
    with torch.device("meta"):
        vae = build_vae(ARCHITECTURES[config.model.architecture], config.autoencoder.vae)
    return latent_space(vae).factor


def build_network(config: ModelConfig) -> Network:
    """Build the network with random weights from torch's generator.

    Raises:
        ConfigurationError: `model.network` holds an unknown argument or an invalid value.
    """
    spec = ARCHITECTURES[config.architecture]
    arguments: dict[str, Any] = {"out_channels": latent_channels(config)} if spec.component == "unet" else {}
    if config.text_encoder.path is not None:
        arguments[TEXT_WIDTHS[spec.component]] = text_shape(config)[1]
    network = _build(NETWORKS[spec.component], spec.network | arguments, config.network, "model.network")
    take_whole_timesteps(network)
    return network


def build_vae(spec: ArchitectureSpec, changes: Mapping[str, Any] | None = None) -> TrainedVAE:
    """Build a VAE with random weights.

    Args:
        spec: its keyword arguments, as far as the class has them; an AutoencoderDC takes none.
        changes: `autoencoder.vae`; replaces them, and names another class than AutoencoderKL by `_class_name`.

    Raises:
        ConfigurationError: `changes` holds an unknown class or argument, or an invalid value.
    """
    assert spec.vae is not None, "a network on pixels has no VAE"
    changes = dict(changes or {})
    name = changes.pop("_class_name", AutoencoderKL.__name__)
    kind = VAE_CLASSES.get(str(name))
    if kind is None:
        known = ", ".join(VAE_CLASSES)
        raise ConfigurationError(f"autoencoder.vae._class_name is {name!r}: set it to one of {known}, or leave it out")
    parameters = {} if kind is AutoencoderDC else inspect.signature(kind).parameters
    arguments = {key: value for key, value in spec.vae.items() if key in parameters}
    return _build(kind, arguments, changes, "autoencoder.vae")


def build_random_vae(config: ModelConfig) -> VAE:
    """Build the VAE with random weights, as in its local folder, or with as many channels as the network takes.

    It is the identity for pixels.
    """
    if config.architecture.is_pixel:
        return nn.Identity()
    channels = {"latent_channels": latent_channels(config)}
    return _stored_vae(config) or build_vae(ARCHITECTURES[config.architecture], channels)


def build_text_encoder(spec: ArchitectureSpec) -> TextEncoder:
    """Build the text encoder, or SDXL's two, with random weights."""
    first = CLIPTextModel(CLIPTextConfig(**spec.text_encoder))
    if spec.text_encoder_2 is None:
        return first
    return DualTextEncoder(first, CLIPTextModelWithProjection(CLIPTextConfig(**spec.text_encoder_2)))


def build_frozen_text_encoder(config: ModelConfig) -> TextEncoder:
    """Build the text encoder with random weights, a language model by the configuration in its folder."""
    if config.text_encoder.path is None:
        return build_text_encoder(ARCHITECTURES[config.architecture])
    kind, language = read_language_model(config.text_encoder.path)
    return LanguageModel(kind(language), pad_token_id=0)


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Count the parameters of `network`, `vae` and `text_encoder` on the meta device."""
    with torch.device("meta"):
        vae = build_random_vae(config)
        text_encoder = build_frozen_text_encoder(config)
        parts = {"network": build_network(config), "vae": vae, "text_encoder": text_encoder}
    return {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in parts.items()}


def _build(kind: type[Built], arguments: Mapping[str, Any], changes: Mapping[str, Any], key: str) -> Built:
    """Build a network from the architecture's keyword arguments and the `changes` of a key of the configuration."""
    _check_arguments(kind, changes, key)
    try:
        return kind(**{**arguments, **changes})
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if not changes:
            raise
        raise ConfigurationError(
            f"{key} is {dict(changes)}, which does not fit the other arguments of the architecture's "
            f"{kind.__name__}: {str(error).rstrip('.')}. Change or remove these keys."
        ) from error


def _check_arguments(kind: type, changes: Mapping[str, Any], key: str) -> None:
    """Raise a ConfigurationError for the unknown keys of `changes`, and for counts that no network can have."""
    parameters = inspect.signature(kind).parameters
    problems = []
    for name, value in changes.items():
        if name not in parameters:
            similar = similar_names(name, parameters)
            remedy = f": did you mean {key}.{similar[0]}?" if similar else f". Its keys are {', '.join(parameters)}."
            problems.append(f"Unknown key {key}.{name} (no argument of {kind.__name__}){remedy}")
        elif name in _COUNTS and not (value is None and parameters[name].default is None):
            counts = value if isinstance(value, list | tuple) and parameters[name].annotation is not int else [value]
            if any(type(count) is not int or count < 1 for count in counts):
                problems.append(f"{key}.{name} is {value!r}, but must be whole and at least 1.")
    raise_all(ConfigurationError, problems)
