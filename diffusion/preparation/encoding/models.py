"""The frozen networks that encode, and their forward passes on a device.

Shape letters: B batch, C channels, H W height and width of the latent, K captions, L tokens, D text width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diffusion.config.data import ImageSize
from diffusion.datasets.dataset import Tokenize
from diffusion.errors import ConfigurationError
from diffusion.models.conditioning import TextEncoding
from diffusion.models.pretrained import FrozenParts, module_identity, tokenizer_identity
from diffusion.models.tokenizers import tokenize
from diffusion.preparation.encoding.images import ImageBatch

Frozen = TypeVar("Frozen", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class EncodingModels:
    """What encodes, with the identities that the manifest holds.

    Attributes:
        vae: diffusers' AutoencoderKL.
        vae_identity: Its `module_identity`.
        tokenize: K captions -> int32 [K, L].
        tokenizer_identity: Identity of the tokenizer.
        empty_ids: Ids [L] of the empty caption.
        text_encoder: Token ids int64 [B, L] -> hidden states [B, L, D], pooled text [B, P]; None stores no embeddings.
        text_encoder_identity: Its `module_identity`.
    """

    vae: nn.Module
    vae_identity: str
    tokenize: Tokenize
    tokenizer_identity: str
    empty_ids: list[int]
    text_encoder: nn.Module | None = None
    text_encoder_identity: str | None = None

    @classmethod
    def of(cls, parts: FrozenParts, *, text_embeddings: bool = False) -> "EncodingModels":
        """Take the frozen parts of a model; `text_embeddings` stores its text encoder's output, too."""
        text_encoder = parts.text_encoder if text_embeddings else None
        return cls(
            vae=parts.vae,
            vae_identity=module_identity(parts.vae),
            tokenize=partial(tokenize, parts.tokenizer),
            tokenizer_identity=tokenizer_identity(parts.tokenizer),
            empty_ids=tokenize(parts.tokenizer, [""])[0].tolist(),
            text_encoder=text_encoder,
            text_encoder_identity=None if text_encoder is None else module_identity(text_encoder),
        )

    def latent_shape(self, size: ImageSize) -> tuple[int, int, int]:
        """Return C, H, W of the latent of an image.

        Raises:
            ConfigurationError: The size is not a multiple of the VAE's factor.
        """
        config: Any = self.vae.config
        factor = 2 ** (len(config.block_out_channels) - 1)
        if min(size) <= 0 or size.height % factor or size.width % factor:
            shown = size.height if size.height == size.width else size
            raise ConfigurationError(f"--resolution {shown} is not a multiple of {factor}, the VAE's factor")
        return config.latent_channels, size.height // factor, size.width // factor


@dataclass(frozen=True)
class Encoded:
    """What came of a batch, on its way to the host.

    Attributes:
        batch: The batch.
        moments: For each size of its images mean and log-variance, float16 [B, C, H, W] each.
        embeddings: Of the captions of all samples, hidden states float16 [K, L, D] and pooled text float16 [K, P];
            None where there are none.
        copied: Recorded when everything is on the host; None where it is from the start.
    """

    batch: ImageBatch
    moments: dict[ImageSize, tuple[Tensor, Tensor]]
    embeddings: TextEncoding | None
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait until the tensors can be read."""
        if self.copied is not None:
            self.copied.synchronize()


class Encoder:
    """Networks on their device.

    A forward pass is begun without waiting for it, and its results are copied to pinned memory behind it: the one wait
    per batch is `Encoded.wait`, when the next batch is under way.

    Args:
        models: The networks; they are moved to the device.
        device: Torch device.
        precision: `fp32`, or `bf16` for autocast.
    """

    def __init__(self, models: EncodingModels, device: str, precision: str) -> None:
        self.device = torch.device(device)
        self._vae: Any = _ready(models.vae, self.device)
        self._text_encoder = models.text_encoder and _ready(models.text_encoder, self.device)
        self._precision = precision

    @torch.inference_mode()
    def start(self, batch: ImageBatch) -> Encoded:
        """Encode a batch."""
        embeddings = None
        with _one_thread(self.device):
            moments = {size: self._moments(images) for size, images in batch.images.items()}
            if self._text_encoder is not None:
                embeddings = self._embed(self._text_encoder, torch.cat(batch.token_ids))
                embeddings = TextEncoding(*map(self._to_host, embeddings))
        copied: Any = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.device))
        return Encoded(batch, moments, embeddings, copied)

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Encode uint8 [B, 3, height, width] to mean and log-variance."""
        pixels = images.to(self.device, non_blocking=True).float() / 127.5 - 1.0
        with self._autocast():
            posterior = self._vae.encode(pixels).latent_dist
        return self._to_host(posterior.mean.half()), self._to_host(posterior.logvar.half())

    def _embed(self, text_encoder: nn.Module, token_ids: Tensor) -> TextEncoding:
        with self._autocast():
            hidden, pooled = text_encoder(token_ids.long().to(self.device, non_blocking=True))[:2]
        return TextEncoding(hidden.half(), pooled.half())

    def _autocast(self):
        bf16 = self._precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext()

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor to pinned memory."""
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


def _ready(module: Frozen, device: torch.device) -> Frozen:
    return module.to(device).eval().requires_grad_(False)


Load = Callable[[], EncodingModels]
"""Builds the networks in another process."""
