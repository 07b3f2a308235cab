"""Conditioning of the network: encoded captions, dropped captions and, in SDXL, image sizes and crops.

Shape letters: B batch, L tokens, D width of the text encoding, P width of the pooled text.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusion.datasets.batch import BatchKey
from diffusion.datasets.transforms import Placement
from diffusion.models.fast.norms import autocast_dtype
from diffusion.models.text_encoders import LanguageModel

NUM_ROUNDED = 8
"""Parts of a batch to whose multiples the number of encoded chunks is rounded up."""


class TextEncoding(NamedTuple):
    """Output of a text encoder."""

    hidden: Tensor
    """[B, L, D], text, for the network's attention."""

    pooled: Tensor
    """[B, P], one vector per caption; used by SDXL only."""


class DualTextEncoder(nn.Module):
    """SDXL's two text encoders as one (Podell et al. 2023, section 2.1).

    Both read the same ids of CLIP's vocabulary. The first was trained with captions padded with the end token, the
    second with "!" (id 0) as in the data. The padding is replaced for the first.

    Args:
        first: CLIP ViT-L.
        second: OpenCLIP ViT-bigG.
    """

    def __init__(self, first: CLIPTextModel, second: CLIPTextModelWithProjection) -> None:
        super().__init__()
        self.text_encoder = first
        self.text_encoder_2 = second

    def forward(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encode captions int64 [B, L].

        Returns:
            The penultimate hidden states of both, concatenated [B, L, D], and the projection of the second [B, P].
        """
        end = self.text_encoder.config.vocab_size - 1
        has_ended = (token_ids == end).cumsum(dim=1) > 0
        first = self.text_encoder(token_ids.masked_fill(has_ended, end), output_hidden_states=True)
        second = self.text_encoder_2(token_ids, output_hidden_states=True)
        return torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1), second.text_embeds


TextEncoder = CLIPTextModel | DualTextEncoder | LanguageModel


def text_width(text_encoder: TextEncoder) -> int:
    """Width D of a text encoder's output."""
    if isinstance(text_encoder, DualTextEncoder):
        return text_encoder.text_encoder.config.hidden_size + text_encoder.text_encoder_2.config.hidden_size
    return text_encoder.width if isinstance(text_encoder, LanguageModel) else text_encoder.config.hidden_size


class Conditioning(NamedTuple):
    """Inputs of the network besides noised latents and timesteps."""

    text: Tensor
    """[B, L, D]."""

    pooled: Tensor | None = None
    """[B, P]; None unless the U-Net is SDXL's."""

    placement: Tensor | None = None
    """int64 [B, 6], see `Placement`. Autocast and FSDP would round floating-point sizes: bfloat16 has no 1025."""

    mask: Tensor | None = None
    """bool [B, L], whether a token is no padding. A U-Net attends to the padding, too: None for it, except with a
    language model, whose adapter needs it."""

    scores: Tensor | None = None
    """float32 [B, S], NaN where missing; None unless the model is conditioned on scores."""

    def to(self, dtype: torch.dtype) -> "Conditioning":
        """Cast the encoded text."""
        pooled = None if self.pooled is None else self.pooled.to(dtype)
        return self._replace(text=self.text.to(dtype), pooled=pooled)

    def concatenate(self, other: "Conditioning") -> "Conditioning":
        """Append another batch."""
        joined = [
            None if one is None or two is None else torch.cat([one, two]) for one, two in zip(self, other, strict=True)
        ]
        return Conditioning(*joined)  # pyright: ignore[reportArgumentType]


def encode_tokens(
    text_encoder: nn.Module, token_ids: Tensor, num_chunks: int = 1, *, before_norm: bool = False
) -> TextEncoding:
    """Encode captions, each chunk by itself.

    Args:
        text_encoder: maps token ids to hidden states and pooled text.
        token_ids: int64 [B, L].
        num_chunks: chunks of a caption, which divide L.
        before_norm: return the hidden states of a CLIPTextModel before its final norm.

    Returns:
        The hidden states of the chunks in their order, and the pooled text of the first.
    """
    chunks = token_ids.reshape(len(token_ids) * num_chunks, -1)
    if before_norm:
        encoded: Any = text_encoder(chunks, output_hidden_states=True)
        # An encoder without layers records no hidden states.
        states = encoded.hidden_states or [text_encoder.get_submodule("embeddings")(chunks)]
        hidden, pooled = states[-1], encoded.pooler_output
    else:
        hidden, pooled = text_encoder(chunks)[:2]
    return TextEncoding(hidden.reshape(*token_ids.shape, hidden.shape[-1]), pooled[::num_chunks])


def lowered_layers(text_encoder: TextEncoder, dtype: torch.dtype) -> list[nn.Linear] | None:
    """Layers whose weights `Conditioner.lower_precision` casts; None where it does nothing."""
    if dtype == torch.float16 and isinstance(text_encoder, LanguageModel):
        return None
    return [module for module in text_encoder.modules() if isinstance(module, nn.Linear)]


class Conditioner:
    """Makes the conditioning of a batch or of prompts, and drops captions.

    Args:
        text_encoder: maps token ids int64 [B, L] to hidden states [B, L, D] and pooled text [B, P].
        empty_token_ids: int64 [L], the empty caption.
        num_chunks: chunks of a caption that are encoded by themselves.
        is_extended: whether the network takes pooled text, sizes and crops (SDXL).
        is_masked: whether the network takes a mask of the padding.
        is_adapted: whether an adapter follows, which takes hidden states before the final norm.
    """

    def __init__(
        self,
        text_encoder: TextEncoder,
        empty_token_ids: Tensor,
        *,
        num_chunks: int,
        is_extended: bool,
        is_masked: bool,
        is_adapted: bool,
    ) -> None:
        self._text_encoder = text_encoder
        self._empty_token_ids = {empty_token_ids.device: empty_token_ids}
        self._empty_text: dict[tuple[torch.device, torch.dtype | None, bool], TextEncoding] = {}
        self._dtype: torch.dtype | None = None
        self._num_chunks = num_chunks
        self._is_extended, self._is_masked, self._is_adapted = is_extended, is_masked, is_adapted

    def lower_precision(self, dtype: torch.dtype) -> None:
        """Encode under autocast of this dtype from now on, with weights cast once instead of in each call.

        The results equal those of autocast with float32 weights to the bit. Norms and embeddings stay in float32, and a
        language model entirely where the dtype is float16.
        """
        layers = lowered_layers(self._text_encoder, dtype)
        if layers is None:
            return
        self._dtype = dtype
        for layer in layers:
            layer.to(dtype)

    @torch.no_grad()
    def encode_text(self, token_ids: Tensor) -> TextEncoding:
        """Encode captions: int64 [B, L]."""
        return self._encode(token_ids, self._num_chunks)

    def _encode(self, token_ids: Tensor, num_chunks: int) -> TextEncoding:
        with nullcontext() if self._dtype is None else torch.autocast(token_ids.device.type, self._dtype):
            return encode_tokens(self._text_encoder, token_ids, num_chunks, before_norm=self._is_adapted)

    def _is_used(self, token_ids: Tensor) -> Tensor:
        """Chunks of captions int64 [B, L] that differ from those of the empty caption: bool [B, chunks]."""
        differs = token_ids != self._empty_ids(token_ids.device)
        return differs.unflatten(1, (self._num_chunks, -1)).any(dim=2)

    def count_chunks(self, token_ids: Tensor) -> tuple[int, ...]:
        """Count the used chunks of each caption int64 [B, L], which the host holds."""
        return tuple(self._is_used(token_ids).sum(dim=1).tolist())

    def _encode_used(self, token_ids: Tensor, num_used: int) -> Tensor:
        """Encode the used chunks of captions int64 [B, L], at most `num_used`: hidden states [B, L, D].

        The others are the empty caption's, whose encoding is known. The number of chunks that are encoded is rounded up
        to eighths of the batch, so that it takes few values. The host does not wait for the device.
        """
        num_captions = len(token_ids)
        step = max(1, num_captions // NUM_ROUNDED)
        num_encoded = max(1, -(-num_used // step)) * step
        chunks = token_ids.reshape(num_captions * self._num_chunks, -1)
        encoded = self._is_used(token_ids).flatten().argsort(descending=True, stable=True)[:num_encoded]
        hidden = self._encoded_empty(token_ids).hidden.repeat(num_captions, 1, 1)
        hidden.view(*chunks.shape, -1).index_copy_(0, encoded, self._encode(chunks[encoded], 1).hidden)
        return hidden

    def drop(self, token_ids: Tensor, is_dropped: Tensor) -> Tensor:
        """Replace captions int64 [B, L] by the empty one where `is_dropped` bool [B]."""
        return torch.where(is_dropped[:, None], self._empty_ids(token_ids.device), token_ids)

    def _empty_ids(self, device: torch.device) -> Tensor:
        """Empty caption int64 [L], cached on the device: a copy in each step would wait for the device."""
        if device not in self._empty_token_ids:
            self._empty_token_ids[device] = next(iter(self._empty_token_ids.values())).to(device)
        return self._empty_token_ids[device]

    def _encoded_empty(self, like: Tensor, *, is_half: bool = False) -> TextEncoding:
        """Encoding of the empty caption, [1, L, D] and [1, P], or float16 like stored encodings; cached."""
        key = like.device, self._dtype or autocast_dtype(like), is_half
        if key not in self._empty_text:
            empty = self.encode_text(self._empty_ids(like.device)[None])
            self._empty_text[key] = TextEncoding(empty.hidden.half(), empty.pooled.half()) if is_half else empty
        return self._empty_text[key]

    @torch.no_grad()
    def encode_batch(self, batch: Mapping[str, Any], token_ids: Tensor) -> Conditioning:
        """Conditioning of a batch whose token ids, after captions were dropped, are int64 [B, L].

        Raises:
            ValueError: the batch lacks sizes and crops for SDXL.
        """
        if BatchKey.TEXT_EMBEDDING in batch:
            text = self._stored_text(batch, token_ids)
        elif BatchKey.NUM_CHUNKS in batch:
            hidden = self._encode_used(token_ids, sum(batch[BatchKey.NUM_CHUNKS]))
            return Conditioning(hidden, mask=self._mask(token_ids))
        else:
            text = self.encode_text(token_ids)
        if not self._is_extended:
            return Conditioning(text.hidden, mask=self._mask(token_ids))
        if BatchKey.PLACEMENT not in batch:
            raise ValueError("the data has no sizes and crops, which SDXL needs: encode it again")
        return Conditioning(text.hidden, text.pooled, batch[BatchKey.PLACEMENT])

    def encode_prompts(self, token_ids: Tensor, placement: Placement) -> Conditioning:
        """Conditioning of prompts int64 [B, L]."""
        text = self.encode_text(token_ids)
        if not self._is_extended:
            return Conditioning(text.hidden, mask=self._mask(token_ids))
        numbers = torch.tensor(placement, dtype=torch.int64, device=token_ids.device)
        return Conditioning(text.hidden, text.pooled, numbers.expand(len(token_ids), -1))

    def _mask(self, token_ids: Tensor) -> Tensor | None:
        """Mask [B, L] without padding: up to the first end of each chunk; later chunks may be empty."""
        if isinstance(self._text_encoder, LanguageModel):
            return self._text_encoder.mask(token_ids)
        if not self._is_masked:
            return None
        chunks = token_ids.unflatten(1, (self._num_chunks, -1))
        end = self._empty_ids(token_ids.device)[1]  # Of the start, the end and the padding.
        is_end = chunks == end
        is_used = is_end.cumsum(dim=2) - is_end.long() == 0
        is_used[:, 1:] &= ~is_end[:, 1:, 1:2]
        return is_used.flatten(1)

    def _stored_text(self, batch: Mapping[str, Any], token_ids: Tensor) -> TextEncoding:
        """Stored encoding of captions, replaced by that of the empty caption where captions were dropped."""
        is_empty = (token_ids == self._empty_ids(token_ids.device)).all(dim=1)
        empty = self._encoded_empty(token_ids, is_half=True)
        hidden, pooled = batch[BatchKey.TEXT_EMBEDDING], batch[BatchKey.POOLED_TEXT_EMBEDDING]
        return TextEncoding(
            torch.where(is_empty[:, None, None], empty.hidden, hidden),
            torch.where(is_empty[:, None], empty.pooled, pooled) if self._is_extended else pooled,
        )
