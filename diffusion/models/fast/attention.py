"""Attention with fewer matrix products and a configurable kernel.

Queries, keys and values keep three parameters, with the names and shapes of checkpoints, averages, optimizer and
adapters. They are concatenated in each forward pass: one copy of these weights, but the activations are read once
instead of three times.
"""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.transformers.transformer_prx import PRXAttention, PRXAttnProcessor2_0
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion.config.model import AttentionBackend

_BACKENDS = {
    AttentionBackend.flash: SDPBackend.FLASH_ATTENTION,
    AttentionBackend.cudnn: SDPBackend.CUDNN_ATTENTION,
    AttentionBackend.efficient: SDPBackend.EFFICIENT_ATTENTION,
    AttentionBackend.math: SDPBackend.MATH,
}


class AttentionProcessor(AttnProcessor2_0):
    """Attention of a transformer block; calls with masks or further arguments use diffusers' implementation.

    Args:
        backend: kernel of the attention.
        is_fused: compute all projections of one input by one matrix product.
    """

    def __init__(self, backend: AttentionBackend, *, is_fused: bool) -> None:
        super().__init__()
        self.backend = _BACKENDS.get(backend)
        self.is_fused = is_fused

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attend from [B, N, C] to itself, or to [B, L, D]; returns [B, N, C]."""
        if attention_mask is not None or args or kwargs:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, temb, *args, **kwargs)
        is_cross = encoder_hidden_states is not None
        if is_cross:
            query = attn.to_q(hidden_states)
            key, value = self._project(encoder_hidden_states, attn.to_k, attn.to_v)
        else:
            query, key, value = self._project(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (query, key, value))
        attended = self._attend(query, key, value, is_cross).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](attended))  # pyright: ignore[reportOptionalSubscript]

    def _project(self, x: Tensor, *layers: Any) -> tuple[Tensor, ...]:
        """Outputs of the layers for x."""
        if not self.is_fused or any(type(layer) is not nn.Linear or layer.bias is not None for layer in layers):
            return tuple(layer(x) for layer in layers)
        return F.linear(x, torch.cat([layer.weight for layer in layers])).chunk(len(layers), dim=-1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, is_cross: bool) -> Tensor:
        if self.backend is None or (is_cross and self.backend is SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value)
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(query, key, value)


class JointAttentionProcessor(PRXAttnProcessor2_0):
    """Attention of a transformer's blocks to image and text, whose padding is masked.

    One is set in all blocks: they share a compiled graph, which one processor for each block would not allow.

    Args:
        backend: kernel of the attention.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = _BACKENDS.get(backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attend from the image [B, N, C] to itself and to the text [B, L, C]; returns [B, N, C]."""
        if self.backend is None:
            return super().__call__(*args, **kwargs)
        with sdpa_kernel(self.backend):
            return super().__call__(*args, **kwargs)


def _is_plain(attention: Attention) -> bool:
    return (
        type(attention.processor) is AttnProcessor2_0
        and attention.spatial_norm is None
        and attention.group_norm is None
        and attention.norm_q is None
        and attention.norm_k is None
        and not attention.norm_cross
        and not attention.residual_connection
        and attention.rescale_output_factor == 1.0
    )


def set_attention(module: nn.Module, backend: AttentionBackend, *, is_fused: bool) -> None:
    """Set these processors in the plain attention layers below a module.

    The layers of a transformer have fused projections of their own, and torch chooses their kernel for `auto`.
    """
    processor = AttentionProcessor(backend, is_fused=is_fused)
    joint = JointAttentionProcessor(backend)
    for layer in module.modules():
        if isinstance(layer, Attention) and _is_plain(layer):
            layer.processor = processor  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(layer, PRXAttention):
            layer.processor = joint  # pyright: ignore[reportAttributeAccessIssue]
