"""Floating-point operations of the network, from its configuration alone.

The numbers equal those of torch's FlopCounterMode on the meta device, which takes 1 second (Stable Diffusion 2) to 3
seconds (SDXL) for each image size; buckets have dozens of sizes.

A multiply-add counts as two. Convolutions, linear layers and the two products of attention are counted, nothing else.
The backward pass costs twice the forward pass, less the gradients of inputs that need none: noised latents, text and
timesteps.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from diffusion.datasets.batch import BatchKey, Entry

if TYPE_CHECKING:
    from diffusion.models.ingredients.base import Ingredient

MID_BLOCK = "UNetMidBlock2DCrossAttn"
CROSS_BLOCKS = {"CrossAttnDownBlock2D", "CrossAttnUpBlock2D", MID_BLOCK}
BLOCKS = CROSS_BLOCKS | {"DownBlock2D", "UpBlock2D"}

COUNTED = {
    "addition_embed_type": (None, "text_time"),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "downsample_padding": (1,),
    "encoder_hid_dim": (None,),
    "only_cross_attention": (False,),
    "resnet_time_scale_shift": ("default",),
    "reverse_transformer_layers_per_block": (None,),
    "time_embedding_type": ("positional",),
}
"""Values of keys of a U-Net with which its operations are counted."""


def batch_flops(
    network: Mapping[str, Any],
    batch: Mapping[str, Entry],
    *,
    vae_factor: int,
    has_fixed_weights: bool = False,
    ingredients: Sequence["Ingredient"] = (),
) -> float:
    """Operations of network and ingredients, forward and backward, for a batch, or for groups of several shapes.

    Returns:
        The sum; NaN for networks that are not counted.
    """
    is_latent = BatchKey.LATENT_MEAN in batch
    entry = batch[BatchKey.LATENT_MEAN if is_latent else BatchKey.IMAGE]
    factor, num_tokens = 1 if is_latent else vae_factor, batch[BatchKey.TOKEN_IDS].shape[-1]  # pyright: ignore
    counts = Counter[tuple[int, int]]()
    for group in entry if isinstance(entry, list) else [entry]:
        counts[group.shape[-2] // factor, group.shape[-1] // factor] += len(group)
    total = 0.0
    for (height, width), count in counts.items():
        flops = count_flops(network, height=height, width=width, num_tokens=num_tokens, ingredients=ingredients)
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
    """The same with frozen weights; the small matrices beside them are not counted."""


def count_flops(
    network: Mapping[str, Any],
    *,
    height: int,
    width: int,
    num_tokens: int,
    ingredients: Sequence["Ingredient"] = (),
) -> Flops | None:
    """Count the operations of a network, and of ingredients before it, for one image.

    Args:
        network: configuration of a UNet2DConditionModel or PRXTransformer2DModel, with all defaults.
        height: height of the latent.
        width: width of the latent.
        num_tokens: tokens of the caption.
        ingredients: what is trained beside the network, or changes its blocks.

    Returns:
        The operations; None for unknown block types, and for keys with values that are not in `COUNTED`.
    """
    before = [found for one in ingredients if (found := one.operations(num_tokens)) is not None]
    is_text_trained = bool(before)
    if "patch_size" in network:
        counter = _TransformerFlops(network, height, width, num_tokens, is_text_trained, ingredients)
        whole = _TransformerFlops(network, height, width, num_tokens, is_text_trained) if ingredients else counter
    elif {*network["down_block_types"], *network["up_block_types"], network["mid_block_type"]} <= BLOCKS and all(
        network[key] in values for key, values in COUNTED.items()
    ):
        whole = counter = _UNetFlops(network, height, width, num_tokens, is_text_trained)
    else:
        return None
    forward = sum(one.forward for one in before)
    training = counter.training + sum(one.training for one in before)
    return Flops(whole.forward + forward, training, counter.adapting + forward)


class OperationCounter:
    """Sums of operations, in the order of the forward pass."""

    def __init__(self, num_tokens: int = 0, is_text_trained: bool = False) -> None:
        self._num_tokens, self._is_text_trained = num_tokens, is_text_trained
        self.forward = self.training = self.adapting = 0

    def _add(self, forward: int, *, has_input_gradient: bool = True, has_weights: bool = True) -> None:
        training = forward * (3 if has_input_gradient else 2)
        self.forward += forward
        self.training += training
        self.adapting += training - forward if has_weights else training

    def linear(self, rows: int, before: int, after: int, has_input_gradient: bool = True) -> None:
        """Count a linear layer of `rows` rows."""
        self._add(2 * rows * before * after, has_input_gradient=has_input_gradient)

    def _text_linear(self, before: int, after: int) -> None:
        """A layer of the encoded text, which needs gradients only if what makes it is trained."""
        flops = 2 * self._num_tokens * before * after
        self.forward += flops
        self.training += flops * (3 if self._is_text_trained else 2)
        self.adapting += flops

    def attention(self, queries: int, keys: int, width: int) -> None:
        """Scores and weighted sum of all heads, with the sum of their widths."""
        self._add(4 * queries * keys * width, has_weights=False)


class _TransformerFlops(OperationCounter):
    def __init__(
        self,
        network: Mapping[str, Any],
        height: int,
        width: int,
        num_tokens: int,
        is_text_trained: bool,
        ingredients: Sequence["Ingredient"] = (),
    ) -> None:
        super().__init__(num_tokens, is_text_trained)
        hidden, patch = network["hidden_size"], network["patch_size"]
        positions, values = height * width // patch**2, network["in_channels"] * patch**2
        inner = int(hidden * network["mlp_ratio"])
        self._text_linear(network["context_in_dim"], hidden)
        if (bottleneck := network["bottleneck_size"]) is None:
            self.linear(positions, values, hidden, has_input_gradient=False)
        else:
            self.linear(positions, values, bottleneck, has_input_gradient=False)
            self.linear(positions, bottleneck, hidden)
        for _ in range(2 if network["resolution_embeds"] else 1):  # Embeddings of the timestep, and of the size.
            self.linear(1, 256, hidden, has_input_gradient=False)
            self.linear(1, hidden, hidden)
        depth = network["depth"]
        for number in range(depth):
            kept = min([positions, *(one.num_kept(positions, number, depth) for one in ingredients)])
            self.linear(1, hidden, 6 * hidden)
            self.linear(kept, hidden, 4 * hidden)
            self.linear(num_tokens, hidden, 2 * hidden)
            self.attention(kept, kept + num_tokens, hidden)
            self.linear(kept, hidden, 3 * inner)
        self.linear(1, hidden, 2 * hidden)
        self.linear(positions, hidden, values)


class _UNetFlops(OperationCounter):
    def __init__(
        self, unet: Mapping[str, Any], height: int, width: int, num_tokens: int, is_text_trained: bool
    ) -> None:
        super().__init__(num_tokens, is_text_trained)
        self._unet = unet
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
        self.linear(area, 9 * before, after, has_input_gradient)

    def _embeddings(self, channels: int) -> None:
        """Embeddings of the timestep and, in SDXL, of sizes and pooled text: one position each."""
        self.linear(1, channels, self._time_width, has_input_gradient=False)
        self.linear(1, self._time_width, self._time_width)
        if self._unet["addition_embed_type"] == "text_time":
            added = self._unet["projection_class_embeddings_input_dim"]
            self.linear(1, added, self._time_width, has_input_gradient=False)
            self.linear(1, self._time_width, self._time_width)

    def _layer(self, i: int, kind: str, size: tuple[int, int], before: int, after: int) -> None:
        """A ResNet and, in blocks with cross-attention, a transformer."""
        self._resnet(math.prod(size), before, after)
        if kind in CROSS_BLOCKS:
            self._transformer(i, math.prod(size), after)

    def _resnet(self, area: int, before: int, after: int) -> None:
        self._conv(area, before, after)
        self.linear(1, self._time_width, after)
        self._conv(area, after, after)
        if before != after:
            self.linear(area, before, after)

    def _transformer(self, i: int, area: int, width: int) -> None:
        num = len(self._unet["block_out_channels"])
        text_width = _per_block(self._unet["cross_attention_dim"], num)[i]
        self.linear(area, width, width)
        for _ in range(_per_block(self._unet["transformer_layers_per_block"], num)[i]):
            self.linear(area, width, 4 * width)  # Self-attention: queries, keys, values, output.
            self.attention(area, area, width)
            self.linear(area, width, 2 * width)  # Cross-attention: queries, output.
            self._text_linear(text_width, 2 * width)
            self.attention(area, self._num_tokens, width)
            self.linear(area, width, 12 * width)  # A gated layer of width 4 c, and back.
        self.linear(area, width, width)


def _per_block(value: Any, num: int) -> Any:
    return [value] * num if isinstance(value, int) else value
