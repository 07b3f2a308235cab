"""Token routing (TREAD, Krause et al. 2025, arXiv 2501.04765): in training, image tokens skip most of a transformer.

A random share of the tokens of each sample leaves the stream before one block and comes back, unchanged, behind another
one. The other tokens go through all blocks, with their own rotary positions. Sampling and validation use all tokens.

Hooks around the blocks do it, so that they hold for compiled blocks, FSDP2 and recomputed activations. The selection
stays after a forward pass, because recomputation runs the hooks again.

Shape letters: B batch, L image tokens, K tokens that are kept, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from diffusion.config.model import TokenRoutingConfig
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


class TokenRouter:
    """Routes tokens around blocks of a transformer in training mode.

    Args:
        network: transformer whose `blocks` get hooks; no parameter and no name changes.
        config: share of the tokens, and blocks.

    Attributes:
        kept: int64 [B, K], tokens that are kept in the next forward pass in training mode; None: all.
    """

    def __init__(self, network: nn.Module, config: TokenRoutingConfig) -> None:
        self.kept: Tensor | None = None
        self._config = config
        blocks = list(network.get_submodule("blocks").children())
        blocks = [blocks[i] for i in config.blocks(len(blocks))]
        self._first = blocks[0]
        for block in blocks:
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
        blocks[-1].register_forward_hook(self._leave)

    def select(self, seed: int, step: Tensor, sample: Tensor, num_tokens: int, *, is_training: bool = True) -> None:
        """Draw the tokens that are kept in the next forward pass (`select_tokens`); all of them outside of training."""
        num_kept = self._config.num_kept(num_tokens)
        self.kept = select_tokens(seed, step, sample, num_tokens, num_kept) if is_training else None

    def _enter(self, block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.kept is None or not block.training:
            return None
        named = {**dict(zip(ARGUMENTS[: len(arguments)], arguments, strict=True)), **named}
        if block is self._first:
            self._tokens: Tensor = named["hidden_states"]  # [B, L, D]
            # `gather` keeps the index for the backward pass without its D copies, `take_along_dim` with them.
            named["hidden_states"] = self._tokens.gather(1, self.kept[..., None].expand(-1, -1, self._tokens.shape[-1]))
            # [B, 1, L, ...]
            self._positions = torch.take_along_dim(
                named["image_rotary_emb"], self.kept[:, None, :, None, None, None], dim=2
            )
        named["image_rotary_emb"] = self._positions
        return (), named

    def _leave(self, block: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        """Put the kept tokens [B, K, D] back at their positions: [B, L, D]."""
        if self.kept is None or not block.training:
            return None
        return self._tokens.scatter(1, self.kept[..., None].expand_as(output), output)
