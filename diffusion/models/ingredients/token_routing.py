"""Token routing (TREAD, Krause et al. 2025, arXiv 2501.04765): in training, image tokens skip most of a transformer.

A random share of the tokens of each sample leaves the stream before one block and comes back, unchanged, behind another
one. The other tokens go through all blocks, with their own rotary positions. Sampling and validation use all tokens.

Hooks around the blocks do it, so that they hold for compiled blocks, FSDP2 and recomputed activations.

Shape letters: B batch, L image tokens, K tokens that are kept, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from diffusion.config.ingredients import TokenRoutingConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.conditioning import Conditioning
from diffusion.models.ingredients.base import Call, Caller, Ingredient
from diffusion.models.networks import Network, patch_size_of
from diffusion.randomness import Purpose, random_words

ARGUMENTS = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "attention_mask")
"""Arguments of a block in their order; recomputation gives them without names."""


def select_tokens(seed: int, step: Tensor, sample: Tensor, num_tokens: int, num_kept: int) -> Tensor:
    """Draw the tokens that are kept.

    Args:
        seed: seed of the run.
        step: int64 [B], optimizer step.
        sample: int64 [B], addresses of the samples.
        num_tokens: L.
        num_kept: K.

    Returns:
        int64 [B, K], ascending numbers of tokens: each set of K is equally likely.
    """
    order = random_words(seed, Purpose.TOKEN_ROUTING, step, sample, num_tokens).argsort(dim=1, stable=True)
    return order[:, :num_kept].sort(dim=1).values


class TokenRoutingIngredient(Ingredient):
    """Routes tokens around blocks of a transformer in training; no parameter and no name changes."""

    key = "token_routing"

    def __init__(self, config: TokenRoutingConfig) -> None:
        self._config = config

    def attach(self, network: Network, caller: Caller) -> None:
        """Register hooks at the blocks.

        Raises:
            ConfigurationError: there are no such blocks.
        """
        self._caller, self._area = caller, patch_size_of(network) ** 2
        blocks = list(network.get_submodule("blocks").children())
        blocks = [blocks[i] for i in self._config.blocks(len(blocks))]
        self._first = blocks[0]
        for block in blocks:
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
        blocks[-1].register_forward_hook(self._leave)

    def prepare(self, call: Call, noised: Tensor, conditioning: Conditioning) -> None:
        """Draw the tokens that are kept; all of them outside of training."""
        if call.is_training:
            num_tokens = noised[0, 0].numel() // self._area
            address = call.batch[BatchKey.STEP], call.batch[BatchKey.SAMPLE]
            call.kept = select_tokens(call.seed, *address, num_tokens, self._config.num_kept(num_tokens))

    def num_kept(self, num_tokens: int, block: int, depth: int) -> int:
        """Image tokens of `num_tokens` that a block of a transformer of `depth` gets in training."""
        return self._config.num_kept(num_tokens) if block in self._config.blocks(depth) else num_tokens

    def _enter(self, block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call = self._caller.call
        if call.kept is None or not block.training:
            return None
        named = {**dict(zip(ARGUMENTS[: len(arguments)], arguments, strict=True)), **named}
        if block is self._first:
            tokens: Tensor = named["hidden_states"]  # [B, L, D]
            # `gather` keeps the index for the backward pass without its D copies, `take_along_dim` with them.
            named["hidden_states"] = tokens.gather(1, call.kept[..., None].expand(-1, -1, tokens.shape[-1]))
            # [B, 1, L, ...]
            positions = torch.take_along_dim(named["image_rotary_emb"], call.kept[:, None, :, None, None, None], dim=2)
            call.skipped = tokens, positions
        assert call.skipped is not None
        named["image_rotary_emb"] = call.skipped[1]
        return (), named

    def _leave(self, block: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        """Put the kept tokens [B, K, D] back at their positions: [B, L, D]."""
        call = self._caller.call
        if call.kept is None or not block.training:
            return None
        assert call.skipped is not None
        return call.skipped[0].scatter(1, call.kept[..., None].expand_as(output), output)
