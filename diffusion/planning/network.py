"""Counts of a configured network: parameters, operations and activations, each worked out once, without memory."""

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture, AutoencoderConfig, Compilation, LoraConfig, ModelConfig
from diffusion.config.schema import Config, Task
from diffusion.config.training import Precision
from diffusion.models.architectures import ARCHITECTURES, build_unet, build_vae, count_parameters
from diffusion.models.autoencoder import PatchDiscriminator, build_perceptual
from diffusion.models.fast.compilation import find_blocks
from diffusion.models.flops import count_unet_flops
from diffusion.models.lora import add_lora


class ParameterCounts(NamedTuple):
    """Parameters of a run."""

    trained: int
    """With gradients, optimizer state and averages; those of a VAE's discriminator among them."""

    fixed: int
    """That LoRA's matrices are put beside: sharded, gathered and stored with them."""

    frozen: int
    """Of networks that are only used, whole on each rank: VAE and text encoder; LPIPS for a VAE."""


def parameter_counts(config: Config) -> ParameterCounts:
    """Count the parameters of what is configured.

    Raises:
        MachineError: LoRA is configured, and peft is not installed.
        ConfigurationError: LoRA is to be put beside a layer that is not in the U-Net.
    """
    if config.task is Task.autoencoder:
        return _autoencoder_counts(config.model.architecture, config.autoencoder)
    return _unet_counts(_key(config.model))


def training_flops(config: Config, size: ImageSize) -> int | None:
    """Operations of the U-Net for one image of a size in pixels, forward and backward; None where not known."""
    if config.task is not Task.diffusion:
        return None
    spec = ARCHITECTURES[config.model.architecture]
    height, width = (side // spec.vae_factor for side in size)
    return _training_flops(_key(config.model), height, width, spec.max_tokens)


def activation_bytes(config: Config, size: ImageSize) -> int | None:
    """Bytes that the U-Net keeps for the backward pass of one image; None where that is not known."""
    if config.task is not Task.diffusion or config.trainer.activation_checkpointing:
        return None
    spec = ARCHITECTURES[config.model.architecture]
    height, width = (side // spec.vae_factor for side in size)
    is_fp32 = config.trainer.precision is Precision.fp32
    return _activation_bytes(_key(config.model), is_fp32, height, width, spec.max_tokens)


def largest_unit(config: Config) -> int:
    """Trained parameters of the largest part of the network whose gradients FSDP2 reduces at once."""
    if config.task is not Task.diffusion or config.performance.compilation is Compilation.unet:
        return parameter_counts(config).trained
    return _largest_unit(_key(config.model))


def meta_unet(config: ModelConfig) -> UNet2DConditionModel:
    """Build the U-Net as it is trained, with LoRA's matrices where they are configured, on the meta device."""
    with torch.device("meta"):
        unet = build_unet(config)
        if config.lora is not None:
            add_lora(unet, config.lora, seed=0)
    return unet


def _key(model: ModelConfig) -> str:
    """What the U-Net is built from."""
    lora = asdict(model.lora) if model.lora is not None else None
    return json.dumps([model.architecture.value, model.unet, lora], sort_keys=True)


def _model(key: str) -> ModelConfig:
    architecture, unet, lora = json.loads(key)
    adapter = LoraConfig(**lora) if lora is not None else None
    return ModelConfig(architecture=Architecture(architecture), unet=unet, lora=adapter)


def _autoencoder_counts(architecture: Architecture, config: AutoencoderConfig) -> ParameterCounts:
    with torch.device("meta"):
        trained = _num_trained(build_vae(ARCHITECTURES[architecture], config.vae).parameters())
        if config.adversarial_weight > 0:
            trained += _num_trained(PatchDiscriminator().parameters())
        frozen = sum(p.numel() for p in build_perceptual().parameters()) if config.perceptual_weight > 0 else 0
    return ParameterCounts(trained, 0, frozen)


@functools.cache
def _unet_counts(key: str) -> ParameterCounts:
    model = _model(key)
    unet, counts = meta_unet(model), count_parameters(model)
    trained = _num_trained(unet.parameters())
    fixed = sum(p.numel() for p in unet.parameters()) - trained
    return ParameterCounts(trained, fixed, counts["vae"] + counts["text_encoder"])


@functools.cache
def _largest_unit(key: str) -> int:
    """Of the blocks and of what is left outside of them."""
    network = meta_unet(_model(key))
    sizes = [_num_trained(block.parameters()) for block in find_blocks(network)]
    return max(*sizes, _num_trained(network.parameters()) - sum(sizes))


def _num_trained(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


@functools.cache
def _training_flops(key: str, height: int, width: int, num_tokens: int) -> int | None:
    model = _model(key)
    unet = meta_unet(model)
    flops = count_unet_flops(unet.config, height=height, width=width, num_tokens=num_tokens)
    if flops is None or model.lora is None:
        return flops.training if flops is not None else None
    inputs, added = unet_inputs(unet.config, height, width, num_tokens, torch.float32)
    with FlopCounterMode(display=False) as counter:
        unet(*inputs, added_cond_kwargs=added, return_dict=False)[0].sum().backward()
    return counter.get_total_flops()


@functools.cache
def _activation_bytes(key: str, is_fp32: bool, height: int, width: int, num_tokens: int) -> int:
    dtype = torch.float32 if is_fp32 else torch.bfloat16
    return count_activation_bytes(
        meta_unet(_model(key)), height=height, width=width, num_tokens=num_tokens, dtype=dtype
    )


def count_activation_bytes(
    unet: Any, *, height: int, width: int, num_tokens: int, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Count what autograd keeps of one image: each storage once, weights not; nothing is recomputed.

    Attention counts as by a flash kernel, which keeps its inputs and output and no scores.

    Args:
        unet: on the meta device; is cast and gets another attention processor.
        height: of the latent.
        width: of the latent.
        num_tokens: of the caption.
        dtype: of the activations.
    """
    nn.Module.to(unet, dtype)
    unet.set_attn_processor(FlashAttentionShapes())
    weights = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    inputs, added = unet_inputs(unet.config, height, width, num_tokens, dtype)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        prediction = unet(*inputs, added_cond_kwargs=added, return_dict=False)[0]
    assert prediction.is_meta
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def unet_inputs(unet: Any, height: int, width: int, num_tokens: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Latents, timesteps and text of one image on the meta device; in SDXL pooled text and sizes as well.

    Args:
        unet: its configuration.
        height: of the latent.
        width: of the latent.
        num_tokens: of the caption.
        dtype: of latents and text.
    """
    with torch.device("meta"):
        latents = torch.empty(1, unet["in_channels"], height, width, dtype=dtype)
        text = torch.empty(1, num_tokens, unet["cross_attention_dim"], dtype=dtype)
        inputs = latents, torch.empty(1, dtype=torch.int64), text
        if unet["addition_embed_type"] != "text_time":
            return inputs, None
        pooled = unet["projection_class_embeddings_input_dim"] - 6 * unet["addition_time_embed_dim"]
        return inputs, {"text_embeds": torch.empty(1, pooled, dtype=dtype), "time_ids": torch.empty(1, 6, dtype=dtype)}


class _Kept(torch.autograd.Function):
    """Keeps what flash attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # pyright: ignore
        result = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FlashAttentionShapes:
    """An attention processor of diffusers that works out shapes only."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Attend: [B, positions, C], the same shape."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        attended: Any = _Kept.apply(attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        return attn.to_out[1](attn.to_out[0](attended))
