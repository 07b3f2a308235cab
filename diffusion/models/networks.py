"""The trained network: a U-Net or a transformer of diffusers, behind one interface.

The transformer is PRX's: one stream of image tokens with rotary positions, so that it has no size of its own, and
captions as further keys and values.
"""

import math
import re
from typing import Any

import torch
from diffusers.models.transformers.transformer_prx import PRXTransformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from diffusion.config.model import NUM_TIMESTEPS
from diffusion.models.conditioning import Conditioning

Network = UNet2DConditionModel | PRXTransformer2DModel

NETWORKS: dict[str, type[Network]] = {"unet": UNet2DConditionModel, "transformer": PRXTransformer2DModel}
"""Classes by the names that the networks have in models, checkpoints and pipelines of diffusers."""


def component_name(network: nn.Module) -> str:
    """`unet` or `transformer`."""
    return next(name for name, kind in NETWORKS.items() if isinstance(network, kind))


TEXT_WIDTHS = {"unet": "cross_attention_dim", "transformer": "context_in_dim"}
"""Keyword argument of the width of the text encoding."""


def text_width_of(network: Network) -> int:
    """Width of the text encoding that a network takes."""
    return network.config[TEXT_WIDTHS[component_name(network)]]


def patch_size_of(network: Network) -> int:
    """Latent positions per token along one side; 1 in a U-Net."""
    return network.config.get("patch_size", 1)


def predict(network: Network, noised: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
    """Prediction for noised latents [B, C, H, W] at timesteps [B] or [], with the same shape as the latents.

    The network is given whole timesteps: autocast and FSDP would round others to 8 bits.
    """
    timesteps = timesteps.round().long() if timesteps.is_floating_point() else timesteps
    if isinstance(network, UNet2DConditionModel):
        added: Any = None
        if conditioning.pooled is not None:  # SDXL.
            added = {"text_embeds": conditioning.pooled, "time_ids": conditioning.placement}
        return network(noised, timesteps, conditioning.text, added_cond_kwargs=added, return_dict=False)[0]
    timesteps = timesteps.expand(len(noised))
    return network(noised, timesteps, conditioning.text, attention_mask=conditioning.mask, return_dict=False)[0]


def wide_matrices(network: nn.Module) -> list[nn.Parameter]:
    """Matrices of a transformer whose inputs are as wide as its hidden states.

    The inputs of the others, images, captions and time features, have widths of their own.
    """
    others = re.compile(r"(img_in|txt_in)\.|.*\bin_layer\.")
    return [weight for name, weight in network.named_parameters() if weight.ndim > 1 and not others.match(name)]


@torch.no_grad()
def scale_output(network: nn.Module, ratio: float) -> None:
    """Divide a transformer's random output layer by the root of `ratio`, its width over that of the learning rate."""
    network.get_submodule("final_layer.linear").get_parameter("weight").div_(math.sqrt(ratio))


def take_whole_timesteps(network: Network) -> None:
    """Let a transformer take timesteps in int64 instead of noise rates; a U-Net does."""
    if isinstance(network, PRXTransformer2DModel):
        network.register_forward_pre_hook(_scale_timesteps, with_kwargs=True)


def _scale_timesteps(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if len(arguments) > 1 and not arguments[1].is_floating_point():
        rates = arguments[1].to(torch.float32) / NUM_TIMESTEPS
        arguments = (arguments[0], rates, *arguments[2:])
    return arguments, named


def cast_positions(network: Network, dtype: torch.dtype) -> None:
    """Compute the rotary positions of a transformer in a dtype that FSDP2 would cast them to.

    FSDP2 of torch 2.11 casts the inputs of a block in the forward pass, and not in its recomputation.
    """
    if isinstance(network, PRXTransformer2DModel):
        network.pe_embedder.register_forward_hook(lambda module, positions, table: table.to(dtype))
