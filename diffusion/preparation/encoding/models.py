"""The frozen networks that encode, and their forward passes on a device.

Shape letters: B batch, C channels, H W height and width of the latent, K captions, L tokens, D text width.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diffusion.config.data import ImageSize
from diffusion.datasets.dataset import Tokenize
from diffusion.errors import ConfigurationError
from diffusion.models.conditioning import TextEncoding, encode_tokens
from diffusion.models.latents import VAE, Moments, latent_space
from diffusion.models.pretrained import FrozenParts, module_identity, tokenizer_identity


@dataclass(frozen=True, kw_only=True)
class EncodingModels:
    """VAE and text encoders, with the identities that the manifest holds."""

    vae: VAE
    vae_identity: str
    tokenize: Tokenize
    """K captions -> int32 [K, L]."""
    tokenizer_identity: str
    empty_ids: list[int]
    """Ids [L] of the empty caption."""
    text_encoder: nn.Module | None = None
    """Token ids int64 [B, L] -> hidden states [B, L, D], pooled text [B, P]; None stores no embeddings."""
    text_encoder_identity: str | None = None
    num_chunks: int = 1
    """Chunks of a caption that the text encoder is given one by one."""

    @classmethod
    def of(cls, parts: FrozenParts, *, text_embeddings: bool = False) -> "EncodingModels":
        """Take the frozen parts of a model; `text_embeddings` stores its text encoder's output, too."""
        text_encoder = parts.text_encoder if text_embeddings else None
        return cls(
            vae=parts.vae,
            vae_identity=module_identity(parts.vae),
            tokenize=parts.tokenize,
            tokenizer_identity=tokenizer_identity(parts.tokenizer, parts.num_chunks),
            empty_ids=parts.tokenize([""])[0].tolist(),
            text_encoder=text_encoder,
            text_encoder_identity=None if text_encoder is None else module_identity(text_encoder),
            num_chunks=parts.num_chunks,
        )

    def latent_shape(self, size: ImageSize) -> tuple[int, int, int]:
        """Return C, H, W of the latent of an image.

        Raises:
            ConfigurationError: The size is not a multiple of the VAE's factor.
        """
        space = latent_space(self.vae)
        factor = space.factor
        if min(size) <= 0 or size.height % factor or size.width % factor:
            shown = size.height if size.height == size.width else size
            raise ConfigurationError(f"--resolution {shown} is not a multiple of {factor}, the VAE's factor")
        return space.channels, size.height // factor, size.width // factor


Load = Callable[[], EncodingModels]
"""Loads the networks in another process."""


class Encoded(NamedTuple):
    """Result of a batch, on its way to the host."""

    moments: dict[ImageSize, Moments]
    """For each size of the images mean and log-variance, float16 [B, C, H, W] each."""

    embeddings: TextEncoding | None
    """Hidden states float16 [K, L, D] and pooled text float16 [K, P] of the captions of all samples; None if none are
    stored."""

    copied: torch.cuda.Event | None
    """Recorded when everything is on the host; None where it is from the start."""

    def wait(self) -> None:
        """Wait until the tensors can be read."""
        if self.copied is not None:
            self.copied.synchronize()


class Encoder:
    """Networks on their device.

    A forward pass is started without waiting for it, and its results are copied to pinned memory after it: whoever
    reads them calls `Encoded.wait`.
    """

    def __init__(self, models: EncodingModels, device: str, precision: str) -> None:
        self.device = torch.device(device)
        vae: Any = models.vae
        self._latent_space = latent_space(vae.to(self.device).eval().requires_grad_(False))
        self._text_encoder = models.text_encoder and models.text_encoder.to(self.device).eval().requires_grad_(False)
        self._num_chunks, self._precision = models.num_chunks, precision

    @torch.inference_mode()
    def start(self, images: Mapping[ImageSize, Tensor], token_ids: Tensor) -> Encoded:
        """Encode a batch.

        Args:
            images: For each size uint8 [B, 3, height, width].
            token_ids: int32 [K, L] of the captions of all samples.
        """
        embeddings: TextEncoding | None = None
        copied: Any = None
        with _one_thread(self.device):
            moments = {size: self._moments(pixels) for size, pixels in images.items()}
            if self._text_encoder is not None:
                embeddings = self._embed(self._text_encoder, token_ids)
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
        return Encoded(moments, embeddings, copied)

    def _moments(self, images: Tensor) -> Moments:
        with self._autocast():
            mean, logvar = self._latent_space.encode(images.to(self.device, non_blocking=True))
        return self._to_host(mean), None if logvar is None else self._to_host(logvar)

    def _embed(self, text_encoder: nn.Module, token_ids: Tensor) -> TextEncoding:
        with self._autocast():
            token_ids = token_ids.long().to(self.device, non_blocking=True)
            hidden, pooled = encode_tokens(text_encoder, token_ids, self._num_chunks)
        return TextEncoding(self._to_host(hidden), self._to_host(pooled))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._precision == "bf16")

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Start to copy a tensor to pinned memory, as float16."""
        tensor = tensor.half()
        if self.device.type != "cuda":
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Compute with one thread on a CPU, whatever the process has: sums, and so the bytes, depend on their number."""
    num_threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
