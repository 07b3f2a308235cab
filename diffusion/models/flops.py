"""Floating-point operations of the network, from its configuration alone.

The numbers equal those of torch's FlopCounterMode on the meta device, which takes 1 second (Stable Diffusion 2) to 3
seconds (SDXL) for each image size; buckets have dozens of sizes.

A multiply-add counts as two. Convolutions, linear layers and the two products of attention are counted, nothing else.
The backward pass costs twice the forward pass, less the gradients of inputs that need none: noised latents, text and
timesteps.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from diffusion.config.model import TokenRoutingConfig
from diffusion.datasets.batch import BatchKey, Entry

MID_BLOCK = "UNetMidBlock2DCrossAttn"
CROSS_BLOCKS = {"CrossAttnDownBlock2D", "CrossAttnUpBlock2D", MID_BLOCK}
BLOCKS = CROSS_BLOCKS | {"DownBlock2D", "UpBlock2D"}


def batch_flops(
    network: Mapping[str, Any],
    batch: Mapping[str, Entry],
    *,
    vae_factor: int,
    routing: TokenRoutingConfig | None = None,
    has_fixed_weights: bool = False,
) -> float:
    """Operations of the network, forward and backward, for a batch, which may be groups of several shapes.

    Returns:
        The sum; NaN for unknown block types.
    """
    is_latent = BatchKey.LATENT_MEAN in batch
    entry = batch[BatchKey.LATENT_MEAN if is_latent else BatchKey.IMAGE]
    factor, num_tokens = 1 if is_latent else vae_factor, batch[BatchKey.TOKEN_IDS].shape[-1]  # pyright: ignore
    counts = Counter[tuple[int, int]]()
    for group in entry if isinstance(entry, list) else [entry]:
        counts[group.shape[-2] // factor, group.shape[-1] // factor] += len(group)
    total = 0.0
    for (height, width), count in counts.items():
        flops = count_flops(network, height=height, width=width, num_tokens=num_tokens, routing=routing)
        if flops is None:
            return math.nan
        total += count * (flops.adapting if has_fixed_weights else flops.training)
    return total


class Flops(NamedTuple):
    """Operations for one image."""

    forward: int
    """With all tokens."""
    training: int
    """Forward and backward pass, without recomputation."""
    adapting: int
    """The same with frozen weights, as under LoRA, whose small matrices are not counted."""


def count_flops(
    network: Mapping[str, Any],
    *,
    height: int,
    width: int,
    num_tokens: int,
    routing: TokenRoutingConfig | None = None,
) -> Flops | None:
    """Count the operations of a network for one image.

    Args:
        network: configuration of a UNet2DConditionModel or PRXTransformer2DModel, with all defaults.
        height: height of the latent.
        width: width of the latent.
        num_tokens: tokens of the caption.
        routing: image tokens that skip blocks in training.

    Returns:
        The operations; None for unknown block types.
    """
    if "patch_size" in network:
        whole = _TransformerFlops(network, height, width, num_tokens)
        counter = _TransformerFlops(network, height, width, num_tokens, routing)
        return Flops(whole.forward, counter.training, counter.adapting)
    if {*network["down_block_types"], *network["up_block_types"], network["mid_block_type"]} <= BLOCKS:
        counter = _UNetFlops(network, height, width, num_tokens)
        return Flops(counter.forward, counter.training, counter.adapting)
    return None


class _Counter:
    """Sums of operations, in the order of the forward pass."""

    def __init__(self) -> None:
        self.forward = self.training = self.adapting = 0

    def _add(self, forward: int, *, has_input_gradient: bool = True, has_weights: bool = True) -> None:
        training = forward * (3 if has_input_gradient else 2)
        self.forward += forward
        self.training += training
        self.adapting += training - forward if has_weights else training

    def _linear(self, rows: int, before: int, after: int, has_input_gradient: bool = True) -> None:
        self._add(2 * rows * before * after, has_input_gradient=has_input_gradient)

    def _attention(self, queries: int, keys: int, width: int) -> None:
        """Scores and weighted sum of all heads, with the sum of their widths."""
        self._add(4 * queries * keys * width, has_weights=False)


class _TransformerFlops(_Counter):
    def __init__(
        self,
        network: Mapping[str, Any],
        height: int,
        width: int,
        num_tokens: int,
        routing: TokenRoutingConfig | None = None,
    ) -> None:
        super().__init__()
        hidden, patch = network["hidden_size"], network["patch_size"]
        positions, values = height * width // patch**2, network["in_channels"] * patch**2
        inner = int(hidden * network["mlp_ratio"])
        self._linear(num_tokens, network["context_in_dim"], hidden, has_input_gradient=False)
        self._linear(positions, values, hidden, has_input_gradient=False)
        self._linear(1, 256, hidden, has_input_gradient=False)
        self._linear(1, hidden, hidden)
        depth = network["depth"]
        routed = range(0) if routing is None else routing.blocks(depth)
        for number in range(depth):
            kept = positions if routing is None or number not in routed else routing.num_kept(positions)
            self._linear(1, hidden, 6 * hidden)
            self._linear(kept, hidden, 4 * hidden)
            self._linear(num_tokens, hidden, 2 * hidden)
            self._attention(kept, kept + num_tokens, hidden)
            self._linear(kept, hidden, 3 * inner)
        self._linear(1, hidden, 2 * hidden)
        self._linear(positions, hidden, values)


class _UNetFlops(_Counter):
    def __init__(self, unet: Mapping[str, Any], height: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self._unet, self._num_tokens = unet, num_tokens
        channels = unet["block_out_channels"]
        self._time_width = unet["time_embedding_dim"] or 4 * channels[0]
        num_layers = _per_block(unet["layers_per_block"], len(channels))
        last = len(channels) - 1

        self._embeddings(channels[0])
        self._conv(height * width, unet["in_channels"], channels[0], has_input_gradient=False)
        sizes, skipped, before = [(height, width)], [channels[0]], channels[0]
        for i, kind in enumerate(unet["down_block_types"]):
            for _ in range(num_layers[i]):
                self._layer(i, kind, sizes[-1], before, channels[i])
                before = channels[i]
                skipped.append(before)
            if i < last:
                sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
                self._conv(math.prod(sizes[-1]), before, before)
                skipped.append(before)
        self._layer(last, MID_BLOCK, sizes[-1], before, before)
        self._resnet(math.prod(sizes[-1]), before, before)
        for i, kind in zip(range(last, -1, -1), unet["up_block_types"], strict=True):
            for _ in range(num_layers[i] + 1):
                self._layer(i, kind, sizes[i], before + skipped.pop(), channels[i])
                before = channels[i]
            if i:
                self._conv(math.prod(sizes[i - 1]), before, before)
        self._conv(height * width, before, unet["out_channels"])

    def _conv(self, area: int, before: int, after: int, has_input_gradient: bool = True) -> None:
        """A convolution of 3 x 3; one of 1 x 1 counts as a linear layer."""
        self._linear(area, 9 * before, after, has_input_gradient)

    def _embeddings(self, channels: int) -> None:
        """Embeddings of the timestep and, in SDXL, of sizes and pooled text: one position each."""
        self._linear(1, channels, self._time_width, has_input_gradient=False)
        self._linear(1, self._time_width, self._time_width)
        if self._unet["addition_embed_type"] == "text_time":
            added = self._unet["projection_class_embeddings_input_dim"]
            self._linear(1, added, self._time_width, has_input_gradient=False)
            self._linear(1, self._time_width, self._time_width)

    def _layer(self, i: int, kind: str, size: tuple[int, int], before: int, after: int) -> None:
        """A ResNet and, in blocks with cross-attention, a transformer."""
        self._resnet(math.prod(size), before, after)
        if kind in CROSS_BLOCKS:
            self._transformer(i, math.prod(size), after)

    def _resnet(self, area: int, before: int, after: int) -> None:
        self._conv(area, before, after)
        self._linear(1, self._time_width, after)
        self._conv(area, after, after)
        if before != after:
            self._linear(area, before, after)

    def _transformer(self, i: int, area: int, width: int) -> None:
        num = len(self._unet["block_out_channels"])
        text_width = _per_block(self._unet["cross_attention_dim"], num)[i]
        self._linear(area, width, width)
        for _ in range(_per_block(self._unet["transformer_layers_per_block"], num)[i]):
            self._linear(area, width, 4 * width)  # Self-attention: queries, keys, values, output.
            self._attention(area, area, width)
            self._linear(area, width, 2 * width)  # Cross-attention: queries, output.
            self._linear(self._num_tokens, text_width, 2 * width, has_input_gradient=False)
            self._attention(area, self._num_tokens, width)
            self._linear(area, width, 12 * width)  # A gated layer of width 4 c, and back.
        self._linear(area, width, width)


def _per_block(value: Any, num: int) -> Any:
    return [value] * num if isinstance(value, int) else value
