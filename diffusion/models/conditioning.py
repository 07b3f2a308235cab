"""What the U-Net is told besides the noised latents and the timestep: captions and, in SDXL, sizes and crops.

Shape letters: B batch, L tokens, D width of the text encoding, P width of the pooled text.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusion.datasets.batch import BatchKey
from diffusion.datasets.transforms import Placement
from diffusion.models.norms import autocast_dtype


class TextEncoding(NamedTuple):
    """What a text encoder makes of captions."""

    hidden: Tensor
    """[B, L, D], which the U-Net attends to."""

    pooled: Tensor
    """[B, P], one vector for the whole caption; only SDXL's U-Net is given it."""


class DualTextEncoder(nn.Module):
    """SDXL's two text encoders as one (Podell et al. 2023, section 2.1).

    Both read the same ids of CLIP's vocabulary. The first was trained with captions padded by the token that ends a
    caption, the second with "!" (id 0), as the data has them: for the first, the padding is replaced.

    Args:
        first: CLIP ViT-L.
        second: OpenCLIP ViT-bigG.
    """

    def __init__(self, first: CLIPTextModel, second: CLIPTextModelWithProjection) -> None:
        super().__init__()
        self.text_encoder = first
        self.text_encoder_2 = second

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encode captions.

        Args:
            token_ids: int64 [B, L].

        Returns:
            The last hidden states but one of both, side by side [B, L, D], and the second's projection [B, P].
        """
        end = self.text_encoder.config.vocab_size - 1
        has_ended = (token_ids == end).cumsum(dim=1) > 0
        first = self.text_encoder(token_ids.masked_fill(has_ended, end), output_hidden_states=True)
        second = self.text_encoder_2(token_ids, output_hidden_states=True)
        return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds


TextEncoder = CLIPTextModel | DualTextEncoder


def text_width(text_encoder: TextEncoder) -> int:
    """D of a text encoder."""
    if isinstance(text_encoder, DualTextEncoder):
        return text_encoder.text_encoder.config.hidden_size + text_encoder.text_encoder_2.config.hidden_size
    return text_encoder.config.hidden_size


class Conditioning(NamedTuple):
    """What the U-Net is told."""

    text: Tensor
    """[B, L, D]."""

    pooled: Tensor | None = None
    """[B, P]; None where the U-Net takes no more than text."""

    placement: Tensor | None = None
    """int64 [B, 6], see `Placement`. Whole numbers, which autocast and FSDP leave as they are: bfloat16 has no 1025."""

    def added(self) -> dict[str, Any]:
        """Keyword arguments of the U-Net besides the text."""
        if self.pooled is None:
            return {}
        return {"added_cond_kwargs": {"text_embeds": self.pooled, "time_ids": self.placement}}

    def to(self, dtype: torch.dtype) -> "Conditioning":
        """Cast what is text."""
        return Conditioning(self.text.to(dtype), None if self.pooled is None else self.pooled.to(dtype), self.placement)

    def then(self, other: "Conditioning") -> "Conditioning":
        """Append a batch."""
        joined = [
            None if one is None or two is None else torch.cat([one, two]) for one, two in zip(self, other, strict=True)
        ]
        return Conditioning(*joined)  # pyright: ignore[reportArgumentType]


class Conditioner:
    """From a batch or prompts to what the U-Net is told.

    Args:
        text_encoder: token ids int64 [B, L] -> hidden states [B, L, D], pooled text [B, P], and perhaps more.
        empty_token_ids: int64 [L], the empty caption.
        is_extended: whether the U-Net takes pooled text, sizes and crops, too (SDXL).
    """

    def __init__(self, text_encoder: TextEncoder, empty_token_ids: Tensor, *, is_extended: bool) -> None:
        self._text_encoder = text_encoder
        self._empty_token_ids = {empty_token_ids.device: empty_token_ids}
        self._empty_text: dict[tuple[torch.device, torch.dtype | None], TextEncoding] = {}
        self._dtype: torch.dtype | None = None
        self._is_extended = is_extended

    def lower_precision(self, dtype: torch.dtype) -> None:
        """Encode in an autocast of this dtype from now on, with the weights cast once instead of in each call.

        The encoding has the bits of one in an autocast with float32 weights. Norms and embeddings stay in float32.
        """
        self._dtype = dtype
        for module in self._text_encoder.modules():
            if isinstance(module, nn.Linear):
                module.to(dtype)

    @torch.no_grad()
    def encode_text(self, token_ids: Tensor) -> TextEncoding:
        """Encode captions: int64 [B, L]."""
        with nullcontext() if self._dtype is None else torch.autocast(token_ids.device.type, self._dtype):
            hidden, pooled = self._text_encoder(token_ids)[:2]
        return TextEncoding(hidden, pooled)

    def drop(self, token_ids: Tensor, is_dropped: Tensor) -> Tensor:
        """Replace captions by the empty one: int64 [B, L] where bool [B]."""
        return torch.where(is_dropped[:, None], self._empty_ids(token_ids.device), token_ids)

    def _empty_ids(self, device: torch.device) -> Tensor:
        """The empty caption int64 [L], copied to a device once: a copy in each step would wait for the device."""
        if device not in self._empty_token_ids:
            self._empty_token_ids[device] = next(iter(self._empty_token_ids.values())).to(device)
        return self._empty_token_ids[device]

    def _encoded_empty(self, like: Tensor) -> TextEncoding:
        """The encoding of the empty caption, float16 as the stored ones [1, L, D] and [1, P]; encoded once."""
        key = like.device, self._dtype or autocast_dtype(like)
        if key not in self._empty_text:
            empty = self.encode_text(self._empty_ids(like.device)[None])
            self._empty_text[key] = TextEncoding(empty.hidden.half(), empty.pooled.half())
        return self._empty_text[key]

    @torch.no_grad()
    def of_batch(self, batch: dict[str, Tensor], token_ids: Tensor) -> Conditioning:
        """What the U-Net is told of a batch.

        Args:
            batch: the entries of `BatchKey`.
            token_ids: int64 [B, L], in which captions may have been dropped.

        Raises:
            ValueError: the batch lacks what the model is told.
        """
        text = self._stored_text(batch, token_ids) if BatchKey.TEXT_EMBEDDING in batch else self.encode_text(token_ids)
        if not self._is_extended:
            return Conditioning(text.hidden)
        if BatchKey.PLACEMENT not in batch:
            raise ValueError("the data holds no sizes and crops, which this model is told: encode it again")
        return Conditioning(text.hidden, text.pooled, batch[BatchKey.PLACEMENT])

    def of_prompts(self, token_ids: Tensor, placement: Placement) -> Conditioning:
        """What the U-Net is told of prompts int64 [B, L]."""
        text = self.encode_text(token_ids)
        if not self._is_extended:
            return Conditioning(text.hidden)
        numbers = torch.tensor(placement, dtype=torch.int64, device=token_ids.device)
        return Conditioning(text.hidden, text.pooled, numbers.expand(len(token_ids), -1))

    def _stored_text(self, batch: dict[str, Tensor], token_ids: Tensor) -> TextEncoding:
        """The stored encoding of captions; of those that were dropped, that of the empty caption."""
        is_empty = (token_ids == self._empty_ids(token_ids.device)).all(dim=1)
        empty = self._encoded_empty(token_ids)
        hidden, pooled = batch[BatchKey.TEXT_EMBEDDING], batch[BatchKey.POOLED_TEXT_EMBEDDING]
        return TextEncoding(
            torch.where(is_empty[:, None, None], empty.hidden, hidden),
            torch.where(is_empty[:, None], empty.pooled, pooled) if self._is_extended else pooled,
        )


def expand_prompts(
    prompts: str | Sequence[str], negative_prompts: str | Sequence[str] | None, num_images_per_prompt: int
) -> tuple[list[str], list[str]]:
    """Prompts and negative prompts of each image.

    Args:
        prompts: one, or P of them.
        negative_prompts: one for all or one per prompt; none is the empty caption.
        num_images_per_prompt: images for each prompt, next to one another.

    Raises:
        ValueError: one is no text, or there are neither one nor P negative prompts.
    """
    prompts = _texts("prompts", prompts)
    negatives = _texts("negative_prompts", "" if negative_prompts is None else negative_prompts)
    if len(negatives) not in (1, len(prompts)):
        raise ValueError(f"{len(negatives)} negative prompts for {len(prompts)} prompts: give one, or one each")
    negatives = negatives * len(prompts) if len(negatives) == 1 else negatives
    repeat = range(num_images_per_prompt)
    return [prompt for prompt in prompts for _ in repeat], [negative for negative in negatives for _ in repeat]


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    """One text or several as a list."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} {given!r}: give one text or a list of texts")
    texts = list(given)
    wrong = [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise ValueError(f"{name}: {wrong[0]!r} is no text; that of the empty caption is ''")
    return texts
