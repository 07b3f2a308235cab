"""Weights, batches and gradients for tests of models on latents."""

from collections.abc import Iterable

import torch
from torch import Tensor

from diffusion.datasets.batch import BatchKey
from diffusion.models import LatentDiffusion


def perturb(parameters: Iterable[Tensor], scale: float, seed: int = 0) -> None:
    """Add noise, since some weights are zero at first: modulations of transformers, and much of the ingredients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)


def latent_batch(num: int, width: int = 8, spread: int = 1, step: int | None = None) -> dict[str, Tensor]:
    """Random latents and token IDs; the numbers of the samples are `spread` apart."""
    generator = torch.Generator().manual_seed(1)
    return {
        BatchKey.LATENT_MEAN: torch.randn(num, 4, 8, width, generator=generator),
        BatchKey.LATENT_LOGVAR: torch.full((num, 4, 8, width), -4.0),
        BatchKey.TOKEN_IDS: torch.randint(1, 2000, (num, 24), generator=generator),
        BatchKey.SAMPLE: torch.arange(num) * spread,
        **({} if step is None else {BatchKey.STEP: torch.full((num,), step)}),
    }


def caption_batch(model: LatentDiffusion, *captions: str) -> dict[str, Tensor]:
    """Batch of one sample with several captions."""
    one, num = latent_batch(1), len(captions)
    ids = torch.from_numpy(model.tokenize(captions)).long()
    return {key: value.expand(num, *value.shape[1:]) for key, value in one.items()} | {BatchKey.TOKEN_IDS: ids}


def gradients(model: LatentDiffusion, parts: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Gradients of the loss, summed over the samples of all parts."""
    for part in parts:
        loss = model.loss(model.forward(part), part)
        terms = [*loss.values()] if isinstance(loss, dict) else [loss]
        (torch.stack(terms).sum() * len(part[BatchKey.SAMPLE])).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
