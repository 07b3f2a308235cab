"""Trained layers between the frozen text encoder and the network.

They continue a CLIP text encoder: same layers, causal attention, and the encoder's final norm behind them. So an export
holds a CLIP text encoder of more layers, which every pipeline of diffusers loads. With CLIP in chunks they run over the
whole sequence, so that they bind words of different chunks; no CLIP text encoder does, and an export takes
`models.prompt_encoder`. The same holds behind a language model, which has layers of its own: any width, attention in
both directions.

Shape letters: B batch, L tokens, D width of the text encoding.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CLIPTextModel
from transformers.activations import ACT2FN

from diffusion.config.ingredients import TextAdapterConfig
from diffusion.models.conditioning import Conditioning
from diffusion.models.fast.norms import autocast_dtype
from diffusion.models.flops import OperationCounter
from diffusion.models.ingredients.base import Call, Ingredient
from diffusion.models.networks import Network
from diffusion.models.pretrained import FrozenParts
from diffusion.models.text_encoders import LanguageModel

FOLDER, WEIGHTS = "text_adapter", "model.safetensors"
"""Folder and file of an exported model with the adapter that its own text encoder does not hold."""


class _Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attention to the tokens of a mask [B, 1, 1, L]; None: to the tokens before."""
        heads = (layer(x).unflatten(-1, (self.num_heads, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (x.transpose(1, 2) for x in heads)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation = nn.Linear(width, inner), nn.Linear(inner, width), ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(x)))


class _Layer(nn.Module):
    def __init__(self, width: int, *, num_heads: int, inner: int, activation: str, eps: float) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.self_attn = _Attention(width, num_heads)
        self.mlp = _MLP(width, inner, activation)
        for last in (self.self_attn.out_proj, self.mlp.fc2):  # The identity at first.
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
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
        config = text_encoder.config
        shape = {"num_heads": config.num_attention_heads, "inner": config.intermediate_size}
        options = {**shape, "activation": config.hidden_act, "eps": config.layer_norm_eps}
        self.layers = nn.ModuleList(_Layer(config.hidden_size, **options) for _ in range(num_layers))
        norm = text_encoder.final_layer_norm
        self.final_layer_norm = nn.LayerNorm(norm.weight.shape, norm.eps)
        self.final_layer_norm.load_state_dict(norm.state_dict())

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Continue the hidden states of the last layer, before the final norm: [B, L, D] each.

        The mask is not used: no word attends to the padding behind it.
        """
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_layer_norm(hidden)


class LanguageAdapter(nn.Module):
    """A norm, a linear layer and layers of a transformer behind a language model.

    At first its output is the normalised linear layer's.

    Args:
        text_width: width of the language model's hidden states.
        width: D of the output; heads are 64 wide where that divides it.
        num_layers: number of layers.
    """

    def __init__(self, text_width: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.norm, self.projection = nn.LayerNorm(text_width), nn.Linear(text_width, width)
        num_heads = 1 if width % 64 else width // 64
        options: dict[str, Any] = {"num_heads": num_heads, "inner": 4 * width, "activation": "gelu", "eps": 1e-5}
        self.layers = nn.ModuleList(_Layer(width, **options) for _ in range(num_layers))
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Map hidden states [B, L, W] to [B, L, D], zeros at the padding, which bool [B, L] excludes."""
        x = self.projection(self.norm(hidden))
        for layer in self.layers:
            x = layer(x, mask[:, None, None])
        return self.final_layer_norm(x) * mask[..., None]


Adapter = TextAdapter | LanguageAdapter


def build_text_adapter(config: TextAdapterConfig, text_encoder: nn.Module) -> Adapter:
    """Build the adapter of a text encoder, which is not SDXL's two."""
    if isinstance(text_encoder, LanguageModel):
        return LanguageAdapter(text_encoder.width, config.width or text_encoder.width, config.layers)
    assert isinstance(text_encoder, CLIPTextModel)
    return TextAdapter(text_encoder, config.layers)


@torch.no_grad()
def with_adapter(text_encoder: CLIPTextModel, adapter: TextAdapter) -> CLIPTextModel:
    """CLIP text encoder that holds the adapter as its last layers."""
    num_frozen, config = text_encoder.config.num_hidden_layers, text_encoder.config.to_dict()
    config["num_hidden_layers"] = num_frozen + len(adapter.layers)
    merged = CLIPTextModel(type(text_encoder.config)(**config))
    merged.load_state_dict(text_encoder.state_dict(), strict=False)
    for layer, trained in zip(merged.encoder.layers[num_frozen:], adapter.layers, strict=True):
        layer.load_state_dict(trained.state_dict())
    merged.final_layer_norm.load_state_dict(adapter.final_layer_norm.state_dict())
    return merged.eval().requires_grad_(False)


class TextAdapterIngredient(Ingredient):
    """Continues the text encoding by trained layers."""

    key = part = "text_adapter"
    name_in_exports = "a text adapter"
    module: Adapter

    def __init__(self, config: TextAdapterConfig) -> None:
        self._config = config

    def build(self, network: Network, text_encoder: nn.Module, *, is_meta: bool = False) -> None:
        """Build the adapter."""
        self.module = build_text_adapter(self._config, text_encoder)
        self.continues_text_encoder = isinstance(self.module, TextAdapter)

    def condition(self, conditioning: Conditioning, call: Call) -> Conditioning:
        """Continue the text encoding."""
        if autocast_dtype(conditioning.text) is None:
            conditioning = conditioning.to(next(self.module.parameters()).dtype)
        return conditioning._replace(text=self.module(conditioning.text, conditioning.mask))

    def operations(self, num_tokens: int) -> OperationCounter:
        """Count the linear layers and the attention."""
        counter, layers = OperationCounter(), list[Any](self.module.layers)
        if isinstance(self.module, LanguageAdapter):
            counter.linear(num_tokens, self.module.projection.in_features, self.module.projection.out_features)
        for layer in layers:
            width, inner = layer.mlp.fc1.in_features, layer.mlp.fc1.out_features
            counter.linear(num_tokens, width, 4 * width)
            counter.attention(num_tokens, num_tokens, width)
            counter.linear(num_tokens, width, 2 * inner)
        return counter

    def write(self, folder: Path, frozen: FrozenParts, weights: Mapping[str, Tensor]) -> FrozenParts:
        """Make the layers those of the CLIP text encoder; where that is not possible, write them beside it."""
        if (folder / FOLDER).is_dir():
            save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / FOLDER / WEIGHTS)
            return frozen
        adapter = build_text_adapter(self._config, frozen.text_encoder)
        adapter.load_state_dict(weights)
        assert isinstance(adapter, TextAdapter) and isinstance(frozen.text_encoder, CLIPTextModel)
        return replace(frozen, text_encoder=with_adapter(frozen.text_encoder, adapter))
