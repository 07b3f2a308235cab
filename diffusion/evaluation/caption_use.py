"""Does a model use its captions? Validation loss with the true captions and with those of other samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion.datasets.batch import BatchKey
from diffusion.models.latent_diffusion import Batch, LatentDiffusion


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
        batches: held-out data as the loader yields it, on any device.
        seeds: evaluation seeds.

    Returns:
        The losses.
    """
    device = next(model.unet.parameters()).device
    whole = _concatenate(list(batches))
    num_samples = len(whole[BatchKey.SAMPLE])
    other = dict(whole)
    other[BatchKey.TOKEN_IDS] = whole[BatchKey.TOKEN_IDS].roll(num_samples // 2, dims=0)
    training_seed, was_training = model.seed, model.unet.training
    model.unet.eval()
    try:
        losses = []
        for data in (whole, other):
            losses.append([])
            for seed in seeds:
                model.seed = seed
                losses[-1].append(_loss(model, data, device))
    finally:
        model.seed = training_seed
        model.unet.train(was_training)
    return CaptionUse(true=losses[0], shuffled=losses[1])


def _concatenate(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def _loss(model: LatentDiffusion, data: Batch, device: torch.device, batch_size: int = 64) -> float:
    total = torch.zeros((), dtype=torch.float64)
    num_samples = len(data[BatchKey.SAMPLE])
    for start in range(0, num_samples, batch_size):
        batch: dict[str, Tensor] = {key: value[start : start + batch_size].to(device) for key, value in data.items()}
        outputs = model.eval_forward(batch)
        error = (outputs.prediction.float() - outputs.target).square().mean(dim=(1, 2, 3))
        total += error.double().sum().cpu()
    return (total / num_samples).item()
