"""Trained layers between the frozen text encoder and the network.

They continue a CLIP text encoder: same layers, causal attention, and the encoder's final norm behind them. So an export
holds a CLIP text encoder of more layers, which every pipeline of diffusers loads.

Shape letters: B batch, L tokens, D width of the text encoding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPTextModel
from transformers.activations import ACT2FN


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (x.transpose(1, 2) for x in heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation = nn.Linear(width, inner), nn.Linear(inner, width), ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.self_attn = _Attention(width, config.num_attention_heads)
        self.mlp = _MLP(width, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class TextAdapter(nn.Module):
    """Layers of a transformer behind the last layer of a CLIP text encoder, before its final norm.

    At first they are the identity.

    Args:
        text_encoder: the frozen encoder, whose configuration and final norm are copied.
        num_layers: number of layers.
    """

    def __init__(self, text_encoder: CLIPTextModel, num_layers: int) -> None:
        super().__init__()
        layers = [_Layer(text_encoder.config) for _ in range(num_layers)]
        for layer in layers:
            for last in (layer.self_attn.out_proj, layer.mlp.fc2):
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)
        self.layers = nn.ModuleList(layers)
        norm = final_norm(text_encoder)
        self.final_layer_norm = nn.LayerNorm(norm.weight.shape, norm.eps)
        self.final_layer_norm.load_state_dict(norm.state_dict())

    def forward(self, hidden: Tensor) -> Tensor:
        """Continue the hidden states of the last layer, before the final norm: [B, L, D] each."""
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_layer_norm(hidden)


def final_norm(text_encoder: CLIPTextModel) -> nn.LayerNorm:
    """Final norm of a CLIP text encoder."""
    return _inside(text_encoder).final_layer_norm


def _inside(text_encoder: CLIPTextModel) -> Any:
    """The transformer of a CLIP text encoder; transformers 5 has no `text_model` around it."""
    return getattr(text_encoder, "text_model", text_encoder)


@torch.no_grad()
def with_adapter(text_encoder: CLIPTextModel, adapter: TextAdapter) -> CLIPTextModel:
    """CLIP text encoder that holds the adapter as its last layers."""
    num_frozen, config = text_encoder.config.num_hidden_layers, text_encoder.config.to_dict()
    config["num_hidden_layers"] = num_frozen + len(adapter.layers)
    merged = CLIPTextModel(type(text_encoder.config)(**config))
    inside = _inside(merged)
    merged.load_state_dict(text_encoder.state_dict(), strict=False)
    for layer, trained in zip(inside.encoder.layers[num_frozen:], adapter.layers, strict=True):
        layer.load_state_dict(trained.state_dict())
    inside.final_layer_norm.load_state_dict(adapter.final_layer_norm.state_dict())
    return merged.eval().requires_grad_(False)
