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
    is_transformer = "patch_size" in network
    if not is_transformer and not (
        {*network["down_block_types"], *network["up_block_types"], network["mid_block_type"]} <= BLOCKS
        and all(network[key] in values for key, values in COUNTED.items())
    ):
        return None

    def count(ingredients: Sequence["Ingredient"]) -> OperationCounter:
        counter = OperationCounter(num_tokens, bool(before))
        if is_transformer:
            _count_transformer(counter, network, height * width, num_tokens, ingredients)
        else:
            _count_unet(counter, network, (height, width), num_tokens)
        return counter

    counter = count(ingredients)
    whole = count(()) if is_transformer and ingredients else counter
    forward = sum(one.forward for one in before)
    training = counter.training + sum(one.training for one in before)
    return Flops(whole.forward + forward, training, counter.adapting + forward)


class OperationCounter:
    """Sums of operations, in the order of the forward pass."""

    def __init__(self, num_tokens: int = 0, is_text_trained: bool = False) -> None:
        self._num_tokens, self._is_text_trained = num_tokens, is_text_trained
        self.forward = self.training = self.adapting = 0

    def _add(self, forward: int, *, training: int, adapting: int) -> None:
        """Add a product whose passes take so many times the operations of the forward pass."""
        self.forward += forward
        self.training += training * forward
        self.adapting += adapting * forward

    def linear(self, rows: int, before: int, after: int, has_input_gradient: bool = True) -> None:
        """Count a linear layer of `rows` rows."""
        self._add(2 * rows * before * after, training=2 + has_input_gradient, adapting=1 + has_input_gradient)

    def text_linear(self, before: int, after: int) -> None:
        """Count a layer of the encoded text, which needs gradients only if what makes it is trained."""
        self._add(2 * self._num_tokens * before * after, training=2 + self._is_text_trained, adapting=1)

    def attention(self, queries: int, keys: int, width: int) -> None:
        """Count scores and weighted sum of all heads, with the sum of their widths."""
        self._add(4 * queries * keys * width, training=3, adapting=3)


def _count_transformer(
    counter: OperationCounter,
    network: Mapping[str, Any],
    area: int,
    num_tokens: int,
    ingredients: Sequence["Ingredient"],
) -> None:
    linear, hidden, patch = counter.linear, network["hidden_size"], network["patch_size"]
    positions, values = area // patch**2, network["in_channels"] * patch**2
    inner = int(hidden * network["mlp_ratio"])
    counter.text_linear(network["context_in_dim"], hidden)
    if (bottleneck := network["bottleneck_size"]) is None:
        linear(positions, values, hidden, has_input_gradient=False)
    else:
        linear(positions, values, bottleneck, has_input_gradient=False)
        linear(positions, bottleneck, hidden)
    for _ in range(2 if network["resolution_embeds"] else 1):  # Embeddings of the timestep, and of the size.
        linear(1, 256, hidden, has_input_gradient=False)
        linear(1, hidden, hidden)
    depth = network["depth"]
    for number in range(depth):
        kept = min([positions, *(one.num_kept(positions, number, depth) for one in ingredients)])
        linear(1, hidden, 6 * hidden)
        linear(kept, hidden, 4 * hidden)
        linear(num_tokens, hidden, 2 * hidden)
        counter.attention(kept, kept + num_tokens, hidden)
        linear(kept, hidden, 3 * inner)
    linear(1, hidden, 2 * hidden)
    linear(positions, hidden, values)


def _count_unet(counter: OperationCounter, unet: Mapping[str, Any], size: tuple[int, int], num_tokens: int) -> None:
    linear, channels = counter.linear, unet["block_out_channels"]
    num, time_width = len(channels), unet["time_embedding_dim"] or 4 * channels[0]
    per_block = {
        key: [unet[key]] * num if isinstance(unet[key], int) else unet[key]
        for key in ("layers_per_block", "cross_attention_dim", "transformer_layers_per_block")
    }

    def conv(area: int, before: int, after: int, has_input_gradient: bool = True) -> None:
        """Count a convolution of 3 x 3; one of 1 x 1 counts as a linear layer."""
        linear(area, 9 * before, after, has_input_gradient)

    def resnet(area: int, before: int, after: int) -> None:
        conv(area, before, after)
        linear(1, time_width, after)
        conv(area, after, after)
        if before != after:
            linear(area, before, after)

    def layer(i: int, kind: str, area: int, before: int, width: int) -> None:
        """Count a ResNet and, in blocks with cross-attention, a transformer."""
        resnet(area, before, width)
        if kind not in CROSS_BLOCKS:
            return
        linear(area, width, width)
        for _ in range(per_block["transformer_layers_per_block"][i]):
            linear(area, width, 4 * width)  # Self-attention: queries, keys, values, output.
            counter.attention(area, area, width)
            linear(area, width, 2 * width)  # Cross-attention: queries, output.
            counter.text_linear(per_block["cross_attention_dim"][i], 2 * width)
            counter.attention(area, num_tokens, width)
            linear(area, width, 12 * width)  # A gated layer of width 4 c, and back.
        linear(area, width, width)

    # Embeddings of the timestep and, in SDXL, of sizes and pooled text: one position each.
    added = unet["projection_class_embeddings_input_dim"] if unet["addition_embed_type"] == "text_time" else None
    for features in filter(None, (channels[0], added)):
        linear(1, features, time_width, has_input_gradient=False)
        linear(1, time_width, time_width)
    sizes, skipped, before = [size], [channels[0]], channels[0]
    conv(math.prod(size), unet["in_channels"], before, has_input_gradient=False)
    for i, kind in enumerate(unet["down_block_types"]):
        for _ in range(per_block["layers_per_block"][i]):
            layer(i, kind, math.prod(sizes[-1]), before, channels[i])
            before = channels[i]
            skipped.append(before)
        if i < num - 1:
            sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
            conv(math.prod(sizes[-1]), before, before)
            skipped.append(before)
    layer(num - 1, MID_BLOCK, math.prod(sizes[-1]), before, before)
    resnet(math.prod(sizes[-1]), before, before)
    for i, kind in zip(reversed(range(num)), unet["up_block_types"], strict=True):
        for _ in range(per_block["layers_per_block"][i] + 1):
            layer(i, kind, math.prod(sizes[i]), before + skipped.pop(), channels[i])
            before = channels[i]
        if i:
            conv(math.prod(sizes[i - 1]), before, before)
    conv(math.prod(size), before, unet["out_channels"])
