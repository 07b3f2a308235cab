"""The layout of the original Stable Diffusion code (LDM): a whole model in one file, for ComfyUI, A1111 and sd-scripts.

U-Net, VAE and text encoders have the weights that they have in diffusers, under the names of CompVis' `ldm`,
Stability's `sgm` and OpenCLIP.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusion.errors import ConfigurationError
from diffusion.models.conditioning import DualTextEncoder
from diffusion.models.networks import Network
from diffusion.models.pretrained import open_safetensors, released_state_dict

_UNET, _VAE = "model.diffusion_model.", "first_stage_model."
_TEXT, _TEXT_1, _TEXT_2 = "cond_stage_model.", "conditioner.embedders.0.", "conditioner.embedders.1."
_CLIP, _OPEN_CLIP = "transformer.", "model."
"""OpenAI's models keep the names of transformers, OpenCLIP's have their own."""

_UNET_PARTS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.attentions.0": "middle_block.1",
}
_UNET_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_VAE_RESNET = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"conv_shortcut": "nin_shortcut"}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP_PARTS = {
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm": "ln_final",
    "text_projection.weight": "text_projection",
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}
_Q, _K, _V = (f".self_attn.{one}_proj." for one in "qkv")


# Names


def unet_names(unet: UNet2DConditionModel) -> dict[str, str]:
    """Names of a U-Net's weights: in diffusers, and in this layout without the prefix.

    Raises:
        ConfigurationError: the layout has no name for a weight.
    """
    return _names(unet, dict(_unet_parts(unet)))


def _unet_parts(unet: Any) -> Iterator[tuple[str, str]]:
    """The original counts each resnet with its attention as a block; so does it with each downsampler."""
    yield from _UNET_PARTS.items()
    yield from _below("mid_block.resnets.0", "middle_block.0", _UNET_RESNET)
    yield from _below("mid_block.resnets.1", "middle_block.2", _UNET_RESNET)
    number = 1  # Block 0 is the first convolution.
    for i, block in enumerate(unet.down_blocks):
        for j in range(len(block.resnets)):
            yield from _below(f"down_blocks.{i}.resnets.{j}", f"input_blocks.{number}.0", _UNET_RESNET)
            yield f"down_blocks.{i}.attentions.{j}", f"input_blocks.{number}.1"
            number += 1
        if block.downsamplers is not None:
            yield f"down_blocks.{i}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1
    number = 0
    for i, block in enumerate(unet.up_blocks):
        for j in range(len(block.resnets)):
            yield from _below(f"up_blocks.{i}.resnets.{j}", f"output_blocks.{number}.0", _UNET_RESNET)
            yield f"up_blocks.{i}.attentions.{j}", f"output_blocks.{number}.1"
            number += 1
        after = 2 if hasattr(block, "attentions") else 1
        yield f"up_blocks.{i}.upsamplers.0.conv", f"output_blocks.{number - 1}.{after}.conv"


def _vae_parts(vae: Any) -> Iterator[tuple[str, str]]:
    """The original counts the decoder's blocks from the image side."""
    yield from ((name, name) for name in ("quant_conv", "post_quant_conv"))
    for side in ("encoder", "decoder"):
        yield from ((f"{side}.{name}", f"{side}.{name}") for name in ("conv_in", "conv_out"))
        yield f"{side}.conv_norm_out", f"{side}.norm_out"
        yield from _below(f"{side}.mid_block.attentions.0", f"{side}.mid.attn_1", _VAE_ATTENTION)
        for j in range(2):
            yield from _below(f"{side}.mid_block.resnets.{j}", f"{side}.mid.block_{j + 1}", _VAE_RESNET)
    for i, block in enumerate(vae.encoder.down_blocks):
        for j in range(len(block.resnets)):
            yield from _below(f"encoder.down_blocks.{i}.resnets.{j}", f"encoder.down.{i}.block.{j}", _VAE_RESNET)
        yield f"encoder.down_blocks.{i}.downsamplers.0.conv", f"encoder.down.{i}.downsample.conv"
    for i, block in enumerate(vae.decoder.up_blocks):
        up = f"decoder.up.{len(vae.decoder.up_blocks) - 1 - i}"
        for j in range(len(block.resnets)):
            yield from _below(f"decoder.up_blocks.{i}.resnets.{j}", f"{up}.block.{j}", _VAE_RESNET)
        yield f"decoder.up_blocks.{i}.upsamplers.0.conv", f"{up}.upsample.conv"


def _below(ours: str, theirs: str, parts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    return ((f"{ours}.{one}", f"{theirs}.{other}") for one, other in parts.items())


def _names(module: nn.Module, parts: Mapping[str, str], names: Iterable[str] | None = None) -> dict[str, str]:
    """Rename the part that a name begins with: the longest that is known."""
    renamed = {}
    for name in module.state_dict() if names is None else names:
        pieces = name.split(".")
        starts = (".".join(pieces[:count]) for count in range(len(pieces), 0, -1))
        if (start := next((start for start in starts if start in parts), None)) is None:
            raise ConfigurationError(
                f"the LDM layout has no name for {name} of {type(module).__name__}: export in the diffusers layout"
            )
        renamed[name] = parts[start] + name.removeprefix(start)
    return renamed


# Writing


def single_file(
    unet: UNet2DConditionModel, vae: AutoencoderKL, text_encoder: CLIPTextModel | DualTextEncoder
) -> dict[str, Tensor]:
    """Weights of a whole model, by the names of this layout.

    Raises:
        ConfigurationError: the layout has no name for a weight.
    """
    state = unet.state_dict()
    weights = {_UNET + theirs: state[ours] for ours, theirs in unet_names(unet).items()}
    state = vae.state_dict()
    for ours, theirs in _names(vae, dict(_vae_parts(vae))).items():
        # Linear layers of attention are 1x1 convolutions in the original.
        weights[_VAE + theirs] = state[ours][:, :, None, None] if state[ours].ndim == 2 else state[ours]
    if isinstance(text_encoder, DualTextEncoder):
        first = released_state_dict(text_encoder.text_encoder)
        weights |= {_TEXT_1 + _CLIP + name: tensor for name, tensor in first.items()}
        weights |= _open_clip_weights(text_encoder.text_encoder_2, _TEXT_2 + _OPEN_CLIP)
    elif text_encoder.config.hidden_act == "quick_gelu":  # OpenAI's CLIP, as in Stable Diffusion 1.
        state = released_state_dict(text_encoder)
        weights |= {_TEXT + _CLIP + name: tensor for name, tensor in state.items()}
    else:
        weights |= _open_clip_weights(text_encoder, _TEXT + _OPEN_CLIP)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def _open_clip_weights(encoder: CLIPTextModel | CLIPTextModelWithProjection, prefix: str) -> dict[str, Tensor]:
    """OpenCLIP's names, with queries, keys and values in one matrix, and the projection transposed."""
    state, parts = released_state_dict(encoder), dict(_OPEN_CLIP_PARTS)
    for i in range(encoder.config.num_hidden_layers):
        parts |= _below(f"text_model.encoder.layers.{i}", f"transformer.resblocks.{i}", _OPEN_CLIP_LAYER)
    plain = [name for name in state if not any(one in name for one in (_Q, _K, _V))]
    weights = {prefix + theirs: state[ours] for ours, theirs in _names(encoder, parts, plain).items()}
    for name in [name for name in state if _Q in name]:
        layer, _, kind = name.removeprefix("text_model.encoder.layers.").partition(_Q)
        joined = torch.cat([state[name.replace(_Q, one)] for one in (_Q, _K, _V)])
        weights[f"{prefix}transformer.resblocks.{layer}.attn.in_proj_{kind}"] = joined
    if (name := f"{prefix}text_projection") in weights:
        weights[name] = weights[name].T
    return weights


# Reading


def read_single_file(path: Path, network: Network) -> dict[str, Tensor]:
    """Read the U-Net of a file in this layout; configurations cannot be compared, because the file has none.

    Returns:
        The weights by their names in the model, such as `unet.conv_in.weight`.

    Raises:
        ConfigurationError: it is not in this layout, or a pickle, or the model has a transformer.
        DataError: it is missing or damaged.
    """
    if not isinstance(network, UNet2DConditionModel):
        raise ConfigurationError(f"{path} is for a U-Net, and this model has a transformer: give a pipeline's folder")
    ours = {theirs: name for name, theirs in unet_names(network).items()}
    with open_safetensors(path) as file:
        names = [name.removeprefix(_UNET) for name in file.keys() if name.startswith(_UNET)]  # noqa: SIM118
        weights = {f"unet.{ours.get(name, name)}": file.get_tensor(_UNET + name) for name in names}
    if not weights:
        raise ConfigurationError(f"{path} holds no {_UNET}*: give a whole model in the original layout")
    return weights
