"""Counts of a configured network: parameters, operations and activations, each worked out once."""

import functools
import json
from typing import Any

import torch

from diffusion.config.data import PictureSize
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.performance import Compilation
from diffusion.config.schema import Config, Task
from diffusion.config.training import Precision
from diffusion.models.architectures import ARCHITECTURES
from diffusion.models.build import build_unet, count_parameters
from diffusion.models.fast.compilation import is_block
from diffusion.models.flops import UNetFlops, count_unet_flops
from diffusion.planning.activations import count_activation_bytes


def parameter_counts(config: Config) -> tuple[int, int]:
    """Parameters that are trained, and those of the frozen parts beside them."""
    counts = _parameter_counts(*_key(config))
    if config.task is Task.autoencoder:
        return counts["vae"], 0
    return counts["unet"], sum(counts.values()) - counts["unet"]


def training_flops(config: Config, size: PictureSize) -> UNetFlops | None:
    """Operations of the U-Net for one image of a size in pixels; None where they are not known."""
    if config.task is not Task.diffusion:
        return None
    spec = ARCHITECTURES[config.model.architecture]
    height, width = (side // spec.vae_factor for side in size)
    return count_unet_flops(_unet_config(*_key(config)), height=height, width=width, num_tokens=spec.max_tokens)


def activation_bytes(config: Config, size: PictureSize) -> int | None:
    """Bytes that the U-Net keeps for the backward pass of one image; None where that is not known."""
    if config.task is not Task.diffusion or config.trainer.activation_checkpointing:
        return None
    return _activation_bytes(*_key(config), config.trainer.precision is Precision.fp32, size)


def largest_unit(config: Config) -> int:
    """Parameters of the largest part of what is trained that FSDP2 gathers and reduces at once."""
    if config.task is not Task.diffusion or config.performance.compilation is Compilation.unet:
        return parameter_counts(config)[0]
    return _largest_unit(*_key(config))


def _key(config: Config) -> tuple[Architecture, str]:
    return config.model.architecture, json.dumps(config.model.unet, sort_keys=True)


def _model(architecture: Architecture, unet: str) -> ModelConfig:
    return ModelConfig(architecture=architecture, unet=json.loads(unet))


@functools.cache
def _parameter_counts(architecture: Architecture, unet: str) -> dict[str, int]:
    return count_parameters(_model(architecture, unet))


@functools.cache
def _largest_unit(architecture: Architecture, unet: str) -> int:
    """Of the blocks and of what is left outside of them."""
    with torch.device("meta"):
        network = build_unet(_model(architecture, unet))
    sizes = [sum(p.numel() for p in block.parameters()) for block in network.modules() if is_block(block)]
    return max(*sizes, sum(p.numel() for p in network.parameters()) - sum(sizes))


@functools.cache
def _unet_config(architecture: Architecture, unet: str) -> Any:
    with torch.device("meta"):
        return build_unet(_model(architecture, unet)).config


@functools.cache
def _activation_bytes(architecture: Architecture, unet: str, is_fp32: bool, size: PictureSize) -> int:
    spec = ARCHITECTURES[architecture]
    height, width = (side // spec.vae_factor for side in size)
    dtype = torch.float32 if is_fp32 else torch.bfloat16
    return count_activation_bytes(
        _model(architecture, unet), height=height, width=width, num_tokens=spec.max_tokens, dtype=dtype
    )
