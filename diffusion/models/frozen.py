"""The frozen parts of a latent diffusion model: VAE, text encoder and tokenizer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from huggingface_hub import constants
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from diffusion.config.model import ModelConfig
from diffusion.errors import ConfigurationError, error_context
from diffusion.models.architectures import ARCHITECTURES, ArchitectureSpec
from diffusion.models.conditioning import DualTextEncoder, TextEncoder
from diffusion.models.construction import construct
from diffusion.models.latent_scaling import LatentScaling
from diffusion.models.tokenizers import build_tokenizer

Built = TypeVar("Built")

HUB_PATIENCE = 10.0
"""Seconds within which the hub must take a connection, and then answer."""


@dataclass(frozen=True, kw_only=True)
class FrozenParts:
    """What is not trained. Modules are in eval mode and without gradients."""

    vae: AutoencoderKL
    text_encoder: TextEncoder
    tokenizer: CLIPTokenizer
    latent_scaling: LatentScaling


def freeze(module: nn.Module) -> nn.Module:
    """Put a module into eval mode and switch its gradients off, in place."""
    return module.eval().requires_grad_(False)


@contextmanager
def upcast(vae: AutoencoderKL) -> Iterator[AutoencoderKL]:
    """Keep a VAE in float32 where it is in float16, in which its configuration says that it overflows, as SDXL's."""
    is_cast = vae.dtype == torch.float16 and bool(vae.config["force_upcast"])
    if is_cast:
        vae.float()
    try:
        yield vae
    finally:
        if is_cast:
            vae.half()


def with_seed(seed: int, build: Callable[[], Built]) -> Built:
    """Build something random from a seed, without touching the generator of the process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def build_text_encoder(spec: ArchitectureSpec) -> TextEncoder:
    """Build the text encoder, or SDXL's two, with random weights."""
    first = CLIPTextModel(CLIPTextConfig(**spec.text_encoder))
    if spec.text_encoder_2 is None:
        return first
    return DualTextEncoder(first, CLIPTextModelWithProjection(CLIPTextConfig(**spec.text_encoder_2)))


def load_text_encoder(spec: ArchitectureSpec, place: str, **options: Any) -> TextEncoder:
    """Load the text encoder, or SDXL's two, from a folder in the diffusers layout, or from the hub.

    Raises:
        ConfigurationError: it is not there.
    """
    first = load_pretrained(CLIPTextModel, place, "text_encoder", **options)
    if spec.text_encoder_2 is None:
        return first
    return DualTextEncoder(first, load_pretrained(CLIPTextModelWithProjection, place, "text_encoder_2", **options))


def build_vae(spec: ArchitectureSpec, changes: dict[str, Any] | None = None) -> AutoencoderKL:
    """Build a VAE with random weights; `changes` (`autoencoder.vae`) replace keyword arguments of the architecture.

    Raises:
        ConfigurationError: a change is an unknown argument, or does not fit.
    """
    return construct(AutoencoderKL, spec.vae, changes or {}, "autoencoder.vae")


def folder_of(place: str) -> Path | None:
    """The folder that a place is; None if it is a hub name.

    Raises:
        ConfigurationError: there is no such folder.
    """
    folder = Path(place).expanduser()
    if folder.is_dir():
        return folder
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        raise ConfigurationError(f"there is no folder {place}: give a folder in the diffusers layout, or a hub name")
    return None


def silence_of_hub() -> str | None:
    """Why the hub cannot be asked; None where it answers.

    It is tried once: huggingface_hub would go on for more than a minute for each file.
    """
    if constants.HF_HUB_OFFLINE:
        return None  # Its own messages say so.
    try:
        requests.head(constants.ENDPOINT, timeout=HUB_PATIENCE)
    except requests.RequestException as error:
        return f"{constants.ENDPOINT} does not answer ({type(error).__name__})."
    return None


def load_pretrained(
    kind: type[Built], place: str, subfolder: str | None, local_files_only: bool, **options: Any
) -> Built:
    """Load one part from a folder in the diffusers layout, or from the hub or what this machine has of it.

    Only safetensors are read: other formats can run code.

    Raises:
        ConfigurationError: it is not there, not in this layout, or lacks weights.
    """
    where = f"{place}/{subfolder}" if subfolder else place
    folder = folder_of(place)
    silence = None if folder is not None or local_files_only else silence_of_hub()
    if issubclass(kind, nn.Module):
        options["output_loading_info"] = True
    try:
        loaded: Any = kind.from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
            place if folder is None else str(folder),
            **({"subfolder": subfolder} if subfolder else {}),
            local_files_only=local_files_only or silence is not None,
            low_cpu_mem_usage=False,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(filter(None, [silence, str(error).strip().split("\n")[0]]))
        raise ConfigurationError(
            f"{kind.__name__} could not be loaded from {where}: {reason} Give a folder in the diffusers layout with "
            f"safetensors (vae/, text_encoder/, with SDXL text_encoder_2/), or a hub name that this machine can reach."
        ) from error
    if not issubclass(kind, nn.Module):
        return loaded
    module, info = loaded
    if info["missing_keys"]:  # The libraries draw them at random and warn only.
        raise ConfigurationError(
            f"{where} lacks {len(info['missing_keys'])} weights of {kind.__name__}, {min(info['missing_keys'])} among "
            f"them: if a newer version of transformers wrote it, export it with `scripts/export.py` or load it there"
        )
    return module


def load_frozen_parts(config: ModelConfig) -> FrozenParts:
    """Load, or (without `pretrained`) randomly initialise, what is not trained.

    Raises:
        ConfigurationError: the weights are not where the configuration says.
    """
    spec = ARCHITECTURES[config.architecture]
    if config.pretrained:
        options = {"local_files_only": config.local_files_only, "use_safetensors": True}
        with error_context("model.pretrained"):
            text_encoder = load_text_encoder(spec, config.pretrained, **options)
    else:
        options = {"local_files_only": True, "use_safetensors": True}
        text_encoder = with_seed(config.frozen_seed, lambda: build_text_encoder(spec))
    if config.vae:
        with error_context("model.vae"):
            vae = load_pretrained(AutoencoderKL, config.vae, None, **options)
    elif config.pretrained:
        with error_context("model.pretrained"):
            vae = load_pretrained(AutoencoderKL, config.pretrained, "vae", **options)
    else:
        vae = with_seed(config.frozen_seed + 1, lambda: build_vae(spec))
    freeze(vae)
    freeze(text_encoder)
    return FrozenParts(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=build_tokenizer(config.architecture),
        latent_scaling=LatentScaling.of_vae(vae.config),
    )
