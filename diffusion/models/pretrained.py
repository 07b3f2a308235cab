"""Pretrained weights: loaded from a folder in the diffusers layout or from the hub, written as such a folder, hashed.

The layout is what `DiffusionPipeline.from_pretrained` loads, with safetensors only: model_index.json, README.md,
scheduler/, tokenizer/, text_encoder/, vae/, unet/ or transformer/, and for SDXL tokenizer_2/ and text_encoder_2/.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, PreTrainedModel

from diffusion.config.model import ModelConfig, PredictionType
from diffusion.errors import ConfigurationError, DataError, error_context, first_line
from diffusion.files import read_json
from diffusion.models.architectures import (
    ARCHITECTURES,
    build_random_vae,
    build_text_encoder,
    with_seed,
)
from diffusion.models.conditioning import DualTextEncoder, TextEncoder
from diffusion.models.latents import VAE, VAE_CLASSES, LatentScaling, TrainedVAE, fold_scaling, latent_space
from diffusion.models.model_folders import PIPELINE_INDEX, load_pretrained, local_folder
from diffusion.models.networks import Network, component_name
from diffusion.models.sampling import flow_shift
from diffusion.models.text_encoders import LanguageModel, read_language_model
from diffusion.models.tokenizers import load_tokenizer, tokenize

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
SCHEDULER_KEY = "scheduler"
"""Key of the same in the header of one file."""

SCHEDULE_KEYS = (
    *("prediction_type", "rescale_betas_zero_snr", "trained_betas"),
    *("num_train_timesteps", "beta_schedule", "beta_start", "beta_end"),
)
"""Keys of a scheduler's configuration that the noise schedule of DDPM depends on."""

PRX_SCALING_FACTOR = 0.18215
"""Scaling factor of PRXPipeline for a VAE whose configuration has none."""

_WEIGHTS = "diffusion_pytorch_model"
_NOT_THE_NETWORK = ("sample_size", "scaling_factor", "shift_factor", "latents_", "force_upcast", "_")
"""Prefixes of keys of a network's configuration that do not change its results."""


# VAE, text encoder and tokenizer


@dataclass(frozen=True, kw_only=True)
class FrozenParts:
    """The parts that are not trained. Modules are in eval mode and need no gradients."""

    vae: VAE
    text_encoder: TextEncoder
    tokenizer: Any
    """CLIPTokenizer, or a language model's."""

    latent_scaling: LatentScaling

    num_chunks: int = 1
    """Chunks of a caption that the text encoder is given one by one (`model.text_encoder.chunks`)."""

    def tokenize(self, captions: str | Sequence[str]) -> NDArray[np.int32]:
        """Encode K captions (or one): int32 [K, L]."""
        return tokenize(self.tokenizer, captions, self.num_chunks)

    def identities(self) -> dict[str, str]:
        """Hashes of all that the results of a trained network depend on besides its own weights, by part."""
        scaling = json.dumps(asdict(self.latent_scaling), sort_keys=True)
        return {
            "vae": module_identity(self.vae),
            "latent_scaling": hashlib.sha256(scaling.encode()).hexdigest()[:16],
            "text_encoder": module_identity(self.text_encoder),
            "tokenizer": tokenizer_identity(self.tokenizer, self.num_chunks),
        }


def freeze(module: nn.Module) -> nn.Module:
    """Put a module into eval mode without gradients, in place."""
    return module.eval().requires_grad_(False)


def load_frozen_parts(config: ModelConfig) -> FrozenParts:
    """Load the frozen parts, or initialise them at random without `pretrained`.

    Raises:
        ConfigurationError: weights are missing.
    """
    spec, source, is_local = ARCHITECTURES[config.architecture], config.pretrained, config.local_files_only
    tokenizer = load_tokenizer(config)
    with error_context("model.pretrained"):
        if config.text_encoder.path is not None:
            text_encoder = load_language_model(config.text_encoder.path, tokenizer.pad_token_id)
        elif source:
            text_encoder = load_pretrained(CLIPTextModel, source, "text_encoder", local_files_only=is_local)
            if spec.text_encoder_2 is not None:
                kind = CLIPTextModelWithProjection
                second = load_pretrained(kind, source, "text_encoder_2", local_files_only=is_local)
                text_encoder = DualTextEncoder(text_encoder, second)
        else:
            text_encoder = with_seed(config.frozen_seed, lambda: build_text_encoder(spec))
    if config.architecture.is_pixel:
        vae = build_random_vae(config)
    elif config.vae:
        with error_context("model.vae"):
            remedy = "Give the folder of a VAE with safetensors (vae/ of a run or pipeline), or a hub name"
            options = {"others": VAE_CLASSES, "local_files_only": is_local, "remedy": remedy}
            vae = load_pretrained(AutoencoderKL, config.vae, **options)
    elif source:
        with error_context("model.pretrained"):
            vae = load_pretrained(AutoencoderKL, source, "vae", others=VAE_CLASSES, local_files_only=is_local)
    else:
        vae = with_seed(config.frozen_seed + 1, lambda: build_random_vae(config))
    freeze(vae)
    freeze(text_encoder)
    return FrozenParts(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        latent_scaling=latent_space(vae).scaling,
        num_chunks=config.text_encoder.chunks,
    )


def load_language_model(folder: str, pad_token_id: int) -> LanguageModel:
    """Load a language model as a text encoder, in float32.

    Its attention is the one with a mask for all shapes: others look at the mask, and the host waits for the device.

    Raises:
        ConfigurationError: there is none in safetensors.
    """
    kind, config = read_language_model(folder)
    model = load_pretrained(kind, folder, local_files_only=True, config=config, attn_implementation="eager")
    return LanguageModel(model, pad_token_id)


# The network of a folder


def is_pipeline(path: str | Path) -> bool:
    """Return whether a path is a folder in the diffusers layout."""
    return (Path(path).expanduser() / PIPELINE_INDEX).is_file()


def is_single_file(path: str | Path) -> bool:
    """Return whether a path is one file with the weights of a model."""
    return Path(path).suffix in (".safetensors", ".ckpt")


def read_pipeline_network(folder: Path, network: Network) -> dict[str, Tensor]:
    """Read the network of a folder, whose stored configuration is compared with that of `network`.

    Returns:
        The weights by their names in the model, such as `unet.conv_in.weight`.

    Raises:
        ConfigurationError: there is no such network in safetensors, or its configuration differs.
        DataError: a file is damaged.
    """
    component = component_name(network)
    part, config = folder / component, folder / component / "config.json"
    index = folder / PIPELINE_INDEX
    if index.is_file() and (scale := read_json(index).get("noise_scale", 1.0)) != 1.0:
        raise ConfigurationError(
            f"{index}: noise_scale is {scale}, and networks are trained here with noise of scale 1"
        )
    # Weights of another precision may lie beside them: diffusion_pytorch_model.fp16.safetensors.
    files = [file for file in sorted(part.glob(f"{_WEIGHTS}*.safetensors")) if file.name.count(".") == 1]
    if not files or not config.is_file():
        raise ConfigurationError(f"{part} holds no config.json and {_WEIGHTS}.safetensors: give a pipeline's folder")
    values = {k: v for k, v in read_json(config).items() if not k.startswith("_")}
    try:
        with torch.device("meta"):
            there: Any = type(network)(**values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{config} is not that of a {type(network).__name__}: {error}") from error
    check_config(there, network, str(config), "model.network")
    return {f"{component}.{name}": tensor for file in files for name, tensor in read_safetensors(file).items()}


def read_vae(source: str, vae: TrainedVAE) -> dict[str, Tensor]:
    """Read a VAE, whose stored configuration is compared with that of `vae`.

    Args:
        source: folder of the VAE, or one that holds `vae/`: a run's or a pipeline's.
        vae: the VAE that the weights are for.

    Raises:
        ConfigurationError: there is no such VAE in safetensors, or its configuration differs.
    """
    subfolder = "vae" if (Path(source).expanduser() / "vae").is_dir() else None
    # Not the file itself: diffusers renames the attention of older VAEs.
    stored = load_pretrained(AutoencoderKL, source, subfolder, others=VAE_CLASSES, local_files_only=True)
    if type(stored) is not type(vae):
        there, here = type(stored).__name__, type(vae).__name__
        raise ConfigurationError(f"{source} holds an {there}, not an {here}: set autoencoder.vae._class_name={there}")
    check_config(stored, vae, source, "autoencoder.vae")
    return stored.state_dict()


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a file of weights.

    Raises:
        DataError: it is missing or damaged.
    """
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a file of weights.

    Raises:
        ConfigurationError: it is a pickle.
        DataError: it is missing or damaged.
    """
    if path.suffix == ".ckpt":
        raise ConfigurationError(f"{path} is a pickle, which may run code: convert it to safetensors")
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a file of weights, or damaged: {error}") from error


def network_folder(source: str, component: str, *, local_files_only: bool) -> Path:
    """Folder with a network and its noise schedule, downloaded from the hub if `source` is a hub name.

    Raises:
        ConfigurationError: the network is missing.
    """
    if (folder := local_folder(source)) is not None:
        return folder
    files = ("config.json", f"{_WEIGHTS}.safetensors", f"{_WEIGHTS}-*.safetensors")
    wanted = [*(f"{component}/{file}" for file in files), SCHEDULER_CONFIG, PIPELINE_INDEX]
    try:
        return Path(snapshot_download(source, allow_patterns=wanted, local_files_only=local_files_only))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise ConfigurationError(
            f"{source}/{component} could not be loaded: {reason} Give a folder in the diffusers layout with "
            "safetensors, or a hub name that this machine can reach"
        ) from error


def read_noise_schedule(source: Path) -> dict[str, Any] | None:
    """Noise schedule and prediction type of a folder's or file's network, in diffusers' names; None if it has none.

    Of rectified flow: prediction type and shift. Of the files in the LDM layout, those exported here have a schedule.

    Raises:
        DataError: the file cannot be read.
    """
    if is_single_file(source):
        with open_safetensors(source) as file:
            stored = json.loads((file.metadata() or {}).get(SCHEDULER_KEY, "null"))
    else:
        path = source / SCHEDULER_CONFIG
        stored = read_json(path) if path.is_file() else None
    if stored is None:
        return None
    arguments = signature(DDIMScheduler).parameters
    if (shift := flow_shift(stored)) is not None:
        return {"prediction_type": PredictionType.flow.value, "shift": shift}
    return {key: stored.get(key, arguments[key].default) for key in SCHEDULE_KEYS}


def stored_resolution(source: Path, component: str, vae_factor: int) -> int | None:
    """Default size in pixels of the images of a folder's or file's network; None if it has none.

    Raises:
        DataError: the file cannot be read.
    """
    if is_single_file(source):
        with open_safetensors(source) as file:
            stored = (file.metadata() or {}).get("resolution", "")
        return int(stored) if stored.isdecimal() else None
    is_unet = component == "unet"
    path = source / component / "config.json" if is_unet else source / PIPELINE_INDEX
    stored = read_json(path).get("sample_size" if is_unet else "default_sample_size") if path.is_file() else None
    return stored * (vae_factor if is_unet else 1) if isinstance(stored, int) else None


def check_config(there: Any, here: Any, source: str, key: str) -> None:
    """Raise a ConfigurationError if another module of a class has a configuration that changes its results."""
    differing = [
        f"{name} is {there.config[name]} there and {value} here"
        for name, value in here.config.items()
        if not name.startswith(_NOT_THE_NETWORK) and _plain(there.config[name]) != _plain(value)
    ]
    if differing:
        raise ConfigurationError(
            f"{source}: {'; '.join(differing)}. Set model.architecture and {key}, or choose the family, as the weights "
            "were trained"
        )


def _plain(value: Any) -> Any:
    if value is None:  # Released configurations have None for False.
        return False
    return list(value) if isinstance(value, tuple) else value


# Writing


def write_pipeline(
    folder: Path,
    *,
    network: Network,
    frozen: FrozenParts,
    scheduler: Any,
    resolution: int | None = None,
    scaling_factor: float = 1.0,
) -> None:
    """Write all parts of a pipeline to an empty folder, which the caller renames when it is complete.

    Args:
        folder: to be written.
        network: the trained part.
        frozen: the other parts.
        scheduler: the sampler.
        resolution: default size of a transformer's images.
        scaling_factor: scaling factor of the written VAE if latents are normalised per channel (`fold_scaling`).

    Raises:
        OSError: a file cannot be written.
    """
    vae = frozen.vae
    if isinstance(vae, AutoencoderKLFlux2):
        vae = fold_scaling(vae, frozen.latent_scaling, PRX_SCALING_FACTOR)
    elif isinstance(vae, AutoencoderKL):
        is_factor = frozen.latent_scaling == LatentScaling.of_factor(vae.config["scaling_factor"])
        vae = vae if is_factor else fold_scaling(vae, frozen.latent_scaling, scaling_factor)
        if component_name(network) == "transformer" and vae.config["shift_factor"] is None:
            vae = copy.deepcopy(vae)
            vae.register_to_config(shift_factor=0.0)  # The pipeline adds it.
    pipeline = build_pipeline(network=network, vae=vae, frozen=frozen, scheduler=scheduler)
    if component_name(network) == "transformer" and resolution is not None:
        pipeline.register_to_config(default_sample_size=resolution)
    pipeline.save_config(folder)
    for name, part in pipeline.components.items():
        if isinstance(part, PreTrainedModel):
            part.save_pretrained(folder / name, state_dict=released_state_dict(part))
        elif part is not None:
            part.save_pretrained(folder / name)  # split_special_tokens would change the ids of "!", the pad token.
        if isinstance(part, CLIPTokenizer) and not (folder / name / "vocab.json").is_file():
            backend: Any = part.backend_tokenizer
            backend.model.save(str(folder / name))  # transformers 5 writes tokenizer.json only, which 4 does not read.


def build_pipeline(*, network: Network, vae: VAE, frozen: FrozenParts, scheduler: Any) -> Any:
    """Assemble a pipeline: of PRX with a transformer, of SDXL with two text encoders."""
    from diffusers.pipelines.prx.pipeline_prx import PRXPipeline
    from diffusers.pipelines.prx.pipeline_prx_pixel import PRXPixelPipeline
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline

    parts: dict[str, Any] = {"vae": vae, component_name(network): network, "scheduler": scheduler}
    text_encoder: Any = frozen.text_encoder
    if isinstance(text_encoder, LanguageModel):
        text_encoder = text_encoder.text_encoder
    if isinstance(network, PRXTransformer2DModel) and isinstance(vae, nn.Identity):
        return PRXPixelPipeline(
            transformer=network,
            scheduler=scheduler,
            tokenizer=frozen.tokenizer,
            text_encoder=text_encoder,
            prompt_max_tokens=frozen.tokenizer.model_max_length,
            noise_scale=1.0,
        )
    if isinstance(network, PRXTransformer2DModel):
        return PRXPipeline(**parts, tokenizer=frozen.tokenizer, text_encoder=text_encoder)
    if not isinstance(frozen.text_encoder, DualTextEncoder):
        return StableDiffusionPipeline(
            **parts,
            tokenizer=frozen.tokenizer,
            text_encoder=text_encoder,
            safety_checker=None,  # pyright: ignore[reportArgumentType]
            feature_extractor=None,  # pyright: ignore[reportArgumentType]
            requires_safety_checker=False,
        )
    first = copy.deepcopy(frozen.tokenizer)
    first.pad_token = first.eos_token  # That of the first text encoder pads with the end token.
    return StableDiffusionXLPipeline(
        **parts,
        tokenizer=first,
        tokenizer_2=frozen.tokenizer,
        text_encoder=frozen.text_encoder.text_encoder,
        text_encoder_2=frozen.text_encoder.text_encoder_2,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )


# Hashes


def released_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """State dict with the names of released weights: transformers 5 drops `text_model.` in `CLIPTextModel`."""
    paths = [path for path, part in module.named_modules() if isinstance(part, CLIPTextModel)]
    # The text encoder of a larger CLIP model is itself called text_model.
    shortened = [f"{path}." if path else "" for path in paths if path.split(".")[-1] != "text_model"]
    state = module.state_dict()
    for start in shortened:
        names = [name for name in state if name.startswith(start) and not name.startswith(f"{start}text_model.")]
        state |= {f"{start}text_model.{name.removeprefix(start)}": state.pop(name) for name in names}
    return state


def module_identity(module: nn.Module | Mapping[str, Tensor]) -> str:
    """Hash of the weights of a module: SHA-256 over released names, shapes, dtypes and bytes, 16 hexadecimal digits.

    The hash is the same with each version of the libraries. Weights in another precision have another hash. Weights
    without their module have released names.
    """
    digest = hashlib.sha256()
    state = released_state_dict(module) if isinstance(module, nn.Module) else module
    for name, tensor in sorted(state.items()):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {tuple(data.shape)} {data.dtype}".encode())
        digest.update(data.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def weights_identity(*parts: nn.Module | Mapping[str, Tensor]) -> str:
    """Hash of network, VAE, text encoder and others that images are generated with, 16 hexadecimal digits."""
    return hashlib.sha256(" ".join(map(module_identity, parts)).encode()).hexdigest()[:16]


def tokenizer_identity(tokenizer: Any, num_chunks: int = 1) -> str:
    """Hash of a tokenizer's vocabulary, special tokens and length of all chunks, 16 hexadecimal digits."""
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "length": tokenizer.model_max_length * num_chunks,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def check_identities(stored: Mapping[str, str], found: Mapping[str, str], where: str, remedy: str) -> None:
    """Reject other frozen parts than those of a training.

    Args:
        stored: identities of the parts in training; empty for checkpoints of older versions.
        found: identities of the parts at the configured paths now.
        where: the checkpoint, for the message.
        remedy: advice for the message.

    Raises:
        ConfigurationError: a part that is in both differs.
    """
    differing = [
        f"{part.replace('_', ' ')} ({stored[part]} in training, {identity} now)"
        for part, identity in found.items()
        if stored.get(part, identity) != identity
    ]
    if differing:
        raise ConfigurationError(f"{where} was trained with other frozen parts: {', '.join(differing)}. {remedy}")
