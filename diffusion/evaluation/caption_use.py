"""Does a model use its captions? Validation loss with the true captions and with those of other samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from diffusion.datasets.batch import BatchKey, num_samples
from diffusion.models.latent_diffusion import Batch, LatentDiffusion

CAPTION_KEYS = frozenset({BatchKey.TOKEN_IDS, BatchKey.TEXT_EMBEDDING, BatchKey.POOLED_TEXT_EMBEDDING})
"""Entries of a batch that are made from its captions."""


@dataclass(frozen=True, kw_only=True)
class CaptionUse:
    """Mean squared errors at fixed noise and timesteps, one per evaluation seed."""

    true: list[float]
    """With each sample's own caption."""

    shuffled: list[float]
    """With the caption of another sample."""

    @property
    def gain(self) -> float:
        """How much lower the loss is with the true captions, averaged over the seeds."""
        return _mean(self.shuffled) - _mean(self.true)

    @property
    def spread(self) -> float:
        """Largest minus smallest gain over the seeds."""
        gains = [s - t for t, s in zip(self.true, self.shuffled, strict=True)]
        return max(gains) - min(gains)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@torch.no_grad()
def measure_caption_use(model: LatentDiffusion, batches: Iterable[Batch], seeds: Sequence[int]) -> CaptionUse:
    """Measure validation loss with true captions and with those of the sample half the set away.

    Noise and timesteps of a sample are the same for both; they differ from seed to seed.

    Args:
        model: with the weights that are to be measured.
        batches: held-out data as the loader yields it, on any device, each of one size.
        seeds: evaluation seeds.

    Returns:
        The losses.
    """
    own = list(batches)
    training_seed, was_training = model.seed, model.unet.training
    model.unet.eval()
    try:
        losses = []
        for of_captions in (own, with_other_captions(own)):
            losses.append([])
            for seed in seeds:
                model.seed = seed
                losses[-1].append(_loss(model, of_captions))
    finally:
        model.seed = training_seed
        model.unet.train(was_training)
    return CaptionUse(true=losses[0], shuffled=losses[1])


def with_other_captions(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches, each sample with the caption of the one half the set away."""
    sizes = [num_samples(batch) for batch in batches]
    others: list[Batch] = [dict(batch) for batch in batches]
    for key in CAPTION_KEYS & batches[0].keys():
        moved = torch.cat([batch[key] for batch in batches]).roll(sum(sizes) // 2, dims=0)
        for batch, part in zip(others, moved.split(sizes), strict=True):
            batch[key] = part
    return others


def _loss(model: LatentDiffusion, batches: Sequence[Batch]) -> float:
    device = next(model.unet.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        outputs = model.eval_forward({key: value.to(device) for key, value in batch.items()})
        error = (outputs.prediction.float() - outputs.target).square().mean(dim=(1, 2, 3))
        total += error.double().sum().cpu()
    return (total / sum(map(num_samples, batches))).item()
