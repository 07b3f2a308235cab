"""Bytes of activations that the U-Net keeps for the backward pass, counted without memory on the meta device."""

from typing import Any

import torch
from torch import Tensor, nn


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
