"""The diffusers layout: a folder that `StableDiffusionPipeline.from_pretrained` loads, safetensors only.

model_index.json, README.md, scheduler/, tokenizer/, text_encoder/, vae/, unet/        and for SDXL
tokenizer_2/, text_encoder_2/
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from huggingface_hub import snapshot_download
from torch import nn
from transformers import CLIPTokenizer, PreTrainedModel

from diffusion.errors import ConfigurationError, DataError
from diffusion.models.conditioning import DualTextEncoder
from diffusion.models.frozen import FrozenParts, folder_of
from diffusion.models.identity import released_state_dict
from diffusion.models.latent_scaling import LatentScaling
from diffusion.models.stored_weights import StoredWeights, cut_by_size, open_safetensors, write_safetensors

PIPELINE_INDEX = "model_index.json"
UNET_SHARD_BYTES = 5 * 10**9
"""Of a file of the U-Net's weights."""

SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
SCHEDULE_DEFAULTS = {
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
    "num_train_timesteps": 1000,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "trained_betas": None,
}
"""What diffusers' schedulers take where `SCHEDULER_CONFIG` says nothing."""

_WEIGHTS = "diffusion_pytorch_model"
_NOT_THE_NETWORK = ("sample_size", "_")
"""How keys of a U-Net's configuration begin that do not change what it computes."""


def is_pipeline(place: str | Path) -> bool:
    """Whether a place is a folder in the diffusers layout."""
    return (Path(place).expanduser() / PIPELINE_INDEX).is_file()


# Reading


def open_pipeline_unet(folder: Path, unet: UNet2DConditionModel | None = None) -> StoredWeights:
    """Open the weights of a folder's U-Net.

    Args:
        folder: in the diffusers layout.
        unet: the network that they are for.

    Raises:
        ConfigurationError: there is no U-Net in safetensors, or its configuration is not that of `unet`.
        DataError: it is damaged.
    """
    part = folder / "unet"
    files = sorted(part.glob(f"{_WEIGHTS}*.safetensors"))
    # Beside the weights there may be others of another precision: diffusion_pytorch_model.fp16.safetensors.
    files = [file for file in files if file.name.removesuffix(".safetensors").count(".") == 0]
    if not files or not (part / "config.json").is_file():
        raise ConfigurationError(f"{part} holds no config.json and {_WEIGHTS}.safetensors: give a pipeline's folder")
    if unet is not None:
        _check_config(part / "config.json", unet)
    return open_safetensors(files, part)


def unet_folder(place: str, *, local_files_only: bool) -> Path:
    """The folder with a U-Net and what it was trained as: one on this machine, or of the hub, which is fetched.

    Args:
        place: a folder in the diffusers layout, or a hub name.
        local_files_only: never ask the hub: what was fetched before is taken.

    Raises:
        ConfigurationError: it is not there.
    """
    if (folder := folder_of(place)) is not None:
        return folder
    wanted = ["unet/config.json", f"unet/{_WEIGHTS}.safetensors", f"unet/{_WEIGHTS}-*.safetensors", SCHEDULER_CONFIG]
    try:
        return Path(snapshot_download(place, allow_patterns=wanted, local_files_only=local_files_only))
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigurationError(
            f"{place}/unet could not be loaded: {reason} Give a folder in the diffusers layout with safetensors, or a "
            "hub name that this machine can reach"
        ) from error


def read_noise_schedule(folder: Path) -> dict[str, Any] | None:
    """The noise schedule and prediction type that a folder's U-Net was trained with, in diffusers' names.

    Args:
        folder: in the diffusers layout.

    Returns:
        All that is in `SCHEDULE_DEFAULTS`; None if the folder does not say.

    Raises:
        DataError: it cannot be read.
    """
    path = folder / SCHEDULER_CONFIG
    if not path.is_file():
        return None
    stored = _read_config(path)
    return {key: stored.get(key, default) for key, default in SCHEDULE_DEFAULTS.items()}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _check_config(path: Path, unet: UNet2DConditionModel) -> None:
    """Refuse a U-Net that computes something else with the same weights."""
    stored = _read_config(path)
    with torch.device("meta"):
        there: Any = UNet2DConditionModel(**{k: v for k, v in stored.items() if not k.startswith("_")}).config
    differing = [
        f"{key} is {there[key]} there and {value} here"
        for key, value in unet.config.items()
        if not key.startswith(_NOT_THE_NETWORK) and _plain(there[key]) != _plain(value)
    ]
    if differing:
        raise ConfigurationError(
            f"{path}: {'; '.join(differing)}. Set model.architecture and model.unet to what the weights were trained as"
        )


def _plain(value: Any) -> Any:
    if value is None:  # As released configurations have it where something is off.
        return False
    return list(value) if isinstance(value, tuple) else value


# Writing


def fold_scaling(vae: AutoencoderKL, scaling: LatentScaling) -> AutoencoderKL:
    """Move a normalisation of latents into the VAE's 1x1 convolutions.

    StableDiffusionPipeline knows a scalar factor only and would ignore means and standard deviations per channel. The
    result's latents are those of the U-Net, its factor 1.

    Returns:
        A copy.
    """
    vae = copy.deepcopy(vae)
    num_channels = vae.config["latent_channels"]
    mean, std = (torch.tensor(values).expand(num_channels) for values in (scaling.mean, scaling.std))
    quant_conv = vae.quant_conv or _identity(2 * num_channels)
    post_quant_conv = vae.post_quant_conv or _identity(num_channels)
    with torch.no_grad():
        # Moments: mean and log-variance. (m - mean) / std, and logvar - 2 log(std).
        assert quant_conv.bias is not None and post_quant_conv.bias is not None
        quant_conv.weight[:num_channels] /= std.view(-1, 1, 1, 1)
        quant_conv.bias[:num_channels] = (quant_conv.bias[:num_channels] - mean) / std
        quant_conv.bias[num_channels:] -= 2.0 * std.log()
        post_quant_conv.bias += post_quant_conv.weight[:, :, 0, 0] @ mean
        post_quant_conv.weight *= std.view(1, -1, 1, 1)
    vae.quant_conv, vae.post_quant_conv = quant_conv, post_quant_conv
    vae.register_to_config(
        scaling_factor=1.0,
        shift_factor=None,
        latents_mean=None,
        latents_std=None,
        use_quant_conv=True,
        use_post_quant_conv=True,
    )
    return vae


def _identity(num_channels: int) -> nn.Conv2d:
    """A 1x1 convolution that changes nothing."""
    convolution = nn.Conv2d(num_channels, num_channels, 1)
    with torch.no_grad():
        convolution.weight.copy_(torch.eye(num_channels)[:, :, None, None])
        convolution.bias.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    return convolution.requires_grad_(False)


def write_pipeline(
    folder: Path, *, unet: UNet2DConditionModel, weights: StoredWeights, frozen: FrozenParts, scheduler: DDIMScheduler
) -> None:
    """Write all parts of a pipeline.

    Args:
        folder: exists and is empty; it is to lie where nobody looks for whole folders yet.
        unet: without weights (on the meta device); its configuration is written.
        weights: the U-Net's.
        frozen: the other parts.
        scheduler: which the pipeline samples with.

    Raises:
        OSError: it cannot be written.
    """
    is_factor = frozen.latent_scaling == LatentScaling((0.0,), (1.0 / frozen.vae.config["scaling_factor"],))
    vae = frozen.vae if is_factor else fold_scaling(frozen.vae, frozen.latent_scaling)
    pipeline = build_pipeline(unet=unet, vae=vae, frozen=frozen, scheduler=scheduler)
    pipeline.save_config(folder)
    for name, part in pipeline.components.items():
        if isinstance(part, PreTrainedModel):
            part.save_pretrained(folder / name, state_dict=released_state_dict(part))
        elif part is not None and part is not unet:
            part.save_pretrained(folder / name)
        if isinstance(part, CLIPTokenizer) and not (folder / name / "vocab.json").is_file():
            backend: Any = part.backend_tokenizer
            backend.model.save(str(folder / name))  # For transformers 4: 5 has written tokenizer.json alone.
    unet.save_config(folder / "unet")
    write_unet(folder / "unet", weights)


def build_pipeline(
    *, unet: UNet2DConditionModel, vae: AutoencoderKL, frozen: FrozenParts, scheduler: DDIMScheduler
) -> Any:
    """Put the parts of a pipeline together: SDXL's where there are two text encoders."""
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import StableDiffusionXLPipeline

    parts: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": scheduler}
    if not isinstance(frozen.text_encoder, DualTextEncoder):
        return StableDiffusionPipeline(
            **parts,
            tokenizer=frozen.tokenizer,
            text_encoder=frozen.text_encoder,
            safety_checker=None,  # pyright: ignore[reportArgumentType]
            feature_extractor=None,  # pyright: ignore[reportArgumentType]
            requires_safety_checker=False,
        )
    return StableDiffusionXLPipeline(
        **parts,
        tokenizer=_padded_by_end(frozen.tokenizer),
        tokenizer_2=frozen.tokenizer,
        text_encoder=frozen.text_encoder.text_encoder,
        text_encoder_2=frozen.text_encoder.text_encoder_2,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )


def _padded_by_end(tokenizer: CLIPTokenizer) -> CLIPTokenizer:
    """The tokenizer of SDXL's first text encoder, which pads by the token that ends a caption."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def write_unet(folder: Path, weights: StoredWeights, shard_bytes: int = UNET_SHARD_BYTES) -> None:
    """Write a U-Net's weights: one file, or several with an index where there are more than so many bytes.

    Raises:
        OSError: it cannot be written.
    """
    metadata = {"format": "pt"}
    groups = list(cut_by_size(weights.shapes, sorted(weights.shapes), shard_bytes))
    if len(groups) == 1:
        write_safetensors(folder / f"{_WEIGHTS}.safetensors", weights, groups[0], metadata)
        return
    places: dict[str, str] = {}
    for i, names in enumerate(groups, start=1):
        file = f"{_WEIGHTS}-{i:05d}-of-{len(groups):05d}.safetensors"
        write_safetensors(folder / file, weights, names, metadata)
        places.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": sum(s.nbytes for s in weights.shapes.values())}, "weight_map": places}
    (folder / f"{_WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
