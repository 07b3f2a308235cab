"""Floating-point operations of the U-Net, from its configuration alone.

The numbers equal those of torch's FlopCounterMode on the meta device, which takes 1 second (Stable Diffusion 2) to 3
seconds (SDXL) for each image size; buckets have dozens of sizes.

A multiply-add counts as two. Convolutions, linear layers and the two products of attention are counted, nothing else.
The backward pass costs twice the forward pass, less the gradients of inputs that need none: noised latents, text and
timesteps.

Letters: h w height and width of the latent at a stage, c channels, l tokens, d text width.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from diffusion.datasets.batch import BatchKey, Entry

MID_BLOCK = "UNetMidBlock2DCrossAttn"
CROSS_BLOCKS = {"CrossAttnDownBlock2D", "CrossAttnUpBlock2D", MID_BLOCK}
BLOCKS = CROSS_BLOCKS | {"DownBlock2D", "UpBlock2D"}


class Kind(str, Enum):
    """Kind of a layer."""

    convolution = "convolution"
    linear = "linear"
    attention = "attention"


@dataclass(frozen=True)
class Flops:
    """Operations of one layer."""

    kind: Kind
    forward: int
    needs_input_gradient: bool = True

    @property
    def backward(self) -> int:
        """Operations of the gradients of weights (or of the second factor) and, if needed, of the input."""
        return self.forward * (2 if self.needs_input_gradient else 1)


@dataclass(frozen=True)
class UNetFlops:
    """Operations for one image."""

    layers: tuple[Flops, ...]

    @property
    def forward(self) -> int:
        """Operations of the forward pass."""
        return sum(layer.forward for layer in self.layers)

    @property
    def training(self) -> int:
        """Operations of forward and backward pass, without recomputation."""
        return sum(layer.forward + layer.backward for layer in self.layers)

    @property
    def adapting(self) -> int:
        """Operations of training with frozen weights, as under LoRA, whose small matrices are not counted."""
        fixed = sum(layer.forward for layer in self.layers if layer.kind is not Kind.attention)
        return self.training - fixed


def count_unet_flops(unet: Mapping[str, Any], *, height: int, width: int, num_tokens: int) -> UNetFlops | None:
    """Count the operations of a diffusers UNet2DConditionModel for one image.

    Args:
        unet: configuration of the U-Net (`unet.config`, with all defaults).
        height: height of the latent.
        width: width of the latent.
        num_tokens: tokens of the caption.

    Returns:
        The operations; None for unknown block types.
    """
    types = {*unet["down_block_types"], *unet["up_block_types"], unet["mid_block_type"]}
    if not types <= BLOCKS:
        return None
    return UNetFlops(tuple(_Counter(unet, num_tokens).layers(height, width)))


def batch_flops(
    unet: Mapping[str, Any], batch: Mapping[str, Entry], *, vae_factor: int, has_fixed_weights: bool = False
) -> float:
    """Operations of the U-Net, forward and backward, for the samples of a batch, which may be groups of several shapes.

    Args:
        unet: configuration of the U-Net.
        batch: the entries of `BatchKey`; only shapes are read.
        vae_factor: pixels per latent position along one side.
        has_fixed_weights: the U-Net's weights are frozen (LoRA).

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
        flops = count_unet_flops(unet, height=height, width=width, num_tokens=num_tokens)
        if flops is None:
            return math.nan
        total += count * (flops.adapting if has_fixed_weights else flops.training)
    return total


class _Counter:
    """Lists the layers of a U-Net in the order of its forward pass."""

    def __init__(self, unet: Mapping[str, Any], num_tokens: int) -> None:
        self.unet, self.num_tokens = unet, num_tokens
        self.channels: Sequence[int] = unet["block_out_channels"]
        num = len(self.channels)
        self.num_layers = _per_block(unet["layers_per_block"], num)
        self.depths = _per_block(unet["transformer_layers_per_block"], num)
        self.text_width = _per_block(unet["cross_attention_dim"], num)
        self.time_width = unet["time_embedding_dim"] or 4 * self.channels[0]

    def layers(self, height: int, width: int) -> Iterator[Flops]:
        """Layers for a latent of this size."""
        unet, last = self.unet, len(self.channels) - 1
        yield from self._embeddings()
        yield _conv(height * width, unet["in_channels"], self.channels[0], needs_input_gradient=False)
        sizes, skipped, before = [(height, width)], [self.channels[0]], self.channels[0]
        for i, (kind, channels) in enumerate(zip(unet["down_block_types"], self.channels, strict=True)):
            for _ in range(self.num_layers[i]):
                yield from self._layer(i, kind, sizes[-1], before, channels)
                before = channels
                skipped.append(channels)
            if i < last:
                sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
                yield _conv(_area(sizes[-1]), channels, channels)
                skipped.append(channels)
        yield from self._layer(last, MID_BLOCK, sizes[-1], before, before)
        yield from self._resnet(_area(sizes[-1]), before, before)
        for i, kind in zip(range(last, -1, -1), unet["up_block_types"], strict=True):
            for _ in range(self.num_layers[i] + 1):
                yield from self._layer(i, kind, sizes[i], before + skipped.pop(), self.channels[i])
                before = self.channels[i]
            if i:
                yield _conv(_area(sizes[i - 1]), before, before)
        yield _conv(height * width, before, unet["out_channels"])

    def _embeddings(self) -> Iterator[Flops]:
        """Embeddings of the timestep and, in SDXL, of sizes and pooled text: one position each."""
        yield _linear(1, self.channels[0], self.time_width, needs_input_gradient=False)
        yield _linear(1, self.time_width, self.time_width)
        if self.unet["addition_embed_type"] == "text_time":
            added = self.unet["projection_class_embeddings_input_dim"]
            yield _linear(1, added, self.time_width, needs_input_gradient=False)
            yield _linear(1, self.time_width, self.time_width)

    def _layer(self, i: int, kind: str, size: tuple[int, int], before: int, after: int) -> Iterator[Flops]:
        """A ResNet and, in blocks with cross-attention, a transformer."""
        yield from self._resnet(_area(size), before, after)
        if kind in CROSS_BLOCKS:
            yield from self._transformer(_area(size), after, self.depths[i], self.text_width[i])

    def _resnet(self, area: int, before: int, after: int) -> Iterator[Flops]:
        yield _conv(area, before, after)
        yield _linear(1, self.time_width, after)
        yield _conv(area, after, after)
        if before != after:
            yield _conv(area, before, after, kernel=1)

    def _transformer(self, area: int, c: int, depth: int, d: int) -> Iterator[Flops]:
        project = _linear if self.unet["use_linear_projection"] else _pointwise
        yield project(area, c, c)
        for _ in range(depth):
            yield _linear(area, c, 4 * c)  # Self-attention: queries, keys, values, output.
            yield _attention(area, area, c)
            yield _linear(area, c, 2 * c)  # Cross-attention: queries, output.
            yield _linear(self.num_tokens, d, 2 * c, needs_input_gradient=False)
            yield _attention(area, self.num_tokens, c)
            yield _linear(area, c, 12 * c)  # A gated layer of width 4 c, and back.
        yield project(area, c, c)


def _per_block(value: Any, num: int) -> Sequence[Any]:
    return [value] * num if isinstance(value, int) else value


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _conv(area: int, before: int, after: int, kernel: int = 3, needs_input_gradient: bool = True) -> Flops:
    return Flops(Kind.convolution, 2 * area * before * after * kernel**2, needs_input_gradient)


def _pointwise(area: int, before: int, after: int) -> Flops:
    return _conv(area, before, after, kernel=1)


def _linear(rows: int, before: int, after: int, needs_input_gradient: bool = True) -> Flops:
    return Flops(Kind.linear, 2 * rows * before * after, needs_input_gradient)


def _attention(queries: int, keys: int, c: int) -> Flops:
    """Scores and weighted sum of all heads, with c as the sum of their widths."""
    return Flops(Kind.attention, 4 * queries * keys * c)
