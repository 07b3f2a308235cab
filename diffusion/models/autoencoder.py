"""Training of the VAE: pixels' mean absolute error and the posterior's KL divergence.

Shape letters: B batch, C channels, H W height and width of the latent.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor
from torchmetrics import Metric

from diffusion.config.model import AutoencoderConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.metrics import HeldOutMean, held_out_means
from diffusion.randomness import Purpose, normal

Batch = dict[str, Tensor]


class Reconstruction(NamedTuple):
    """What a forward pass returns."""

    pixels: Tensor
    """float32 [B, 3, 8H, 8W] in [-1, 1], what was encoded."""

    decoded: Tensor
    """float32 of that shape."""

    kl: Tensor
    """float32 [B], KL divergence of the posterior from the standard normal, summed over the latent."""


def to_pixels(images: Tensor) -> Tensor:
    """uint8 [B, 3, height, width] -> float32 in [-1, 1]."""
    return images.float() / 127.5 - 1.0


class AutoencoderTraining(ComposerModel):
    """Trains an AutoencoderKL (Kingma and Welling 2014; Rombach et al. 2022, section 3.1).

    Args:
        vae: what is trained.
        config: the weights of the terms of the loss.
        seed: seed of the draws from the posterior.
    """

    vae: AutoencoderKL

    def __init__(self, vae: AutoencoderKL, config: AutoencoderConfig, seed: int) -> None:
        super().__init__()
        self.vae = vae
        self.config = config
        self.seed = seed

    def _reconstruct(self, batch: Batch, draw: bool) -> Reconstruction:
        pixels = to_pixels(batch[BatchKey.IMAGE])
        posterior = self.vae.encode(pixels).latent_dist  # pyright: ignore[reportAttributeAccessIssue]
        latents = posterior.mean
        if draw:
            step = batch.get(BatchKey.STEP, torch.zeros_like(batch[BatchKey.SAMPLE]))
            shape = tuple(latents.shape[1:])
            noise = normal(self.seed, Purpose.POSTERIOR, step, batch[BatchKey.SAMPLE], shape)
            latents = latents + posterior.std * noise
        decoded = self.vae.decode(latents, return_dict=False)[0]
        return Reconstruction(pixels, decoded.float(), posterior.kl().float())

    def forward(self, batch: Batch) -> Reconstruction:
        """Encode, draw from the posterior, decode."""
        return self._reconstruct(batch, draw=True)

    def loss(self, outputs: Reconstruction, batch: Batch) -> Tensor:
        """L1 + KL per pixel value, averaged over the microbatch: float32 []."""
        num_values = outputs.pixels[0].numel()
        l1 = (outputs.decoded - outputs.pixels).abs().mean()
        return self.config.l1_weight * l1 + self.config.kl_weight * outputs.kl.mean() / num_values

    def eval_forward(self, batch: Batch, outputs: Reconstruction | None = None) -> Reconstruction:
        """Reconstruct from the posterior's mean."""
        return outputs if outputs is not None else self._reconstruct(batch, draw=False)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Peak signal-to-noise ratio of each picture, averaged, in dB."""
        return {} if is_train else held_out_means("psnr")

    def update_metric(self, batch: Any, outputs: Reconstruction, metric: Metric) -> None:
        """Add the pictures of an evaluation batch."""
        assert isinstance(metric, HeldOutMean)
        metric.add(psnr(outputs.decoded, outputs.pixels), batch)


def initialise_logvar(vae: AutoencoderKL, logvar: float) -> None:
    """Make the posterior of a new VAE start with about the same log-variance everywhere, in place."""
    num_channels = vae.config["latent_channels"]
    with torch.no_grad():
        vae.quant_conv.weight[num_channels:].mul_(0.1)  # pyright: ignore[reportOptionalMemberAccess]
        vae.quant_conv.bias[num_channels:].fill_(logvar)  # pyright: ignore


def psnr(decoded: Tensor, pixels: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, [B], of pictures in [-1, 1]; the decoded ones are clamped."""
    error = (decoded.clamp(-1, 1) - pixels).square().mean(dim=(1, 2, 3))
    return 10.0 * torch.log10(4.0 / error.clamp(min=1e-12))


@torch.no_grad()
def latent_statistics(
    vae: AutoencoderKL, batches: Iterable[Tensor], device: torch.device
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of the posterior's mean, over all ranks' pictures.

    Args:
        vae: the encoder.
        batches: this rank's pictures, uint8 [B, 3, height, width].
        device: where the VAE is.

    Returns:
        C means and C standard deviations, accumulated in float64.
    """
    num_channels = vae.config["latent_channels"]
    sums = torch.zeros(3, num_channels, dtype=torch.float64)
    for images in batches:
        mean = vae.encode(to_pixels(images.to(device))).latent_dist.mean.double().cpu()  # pyright: ignore
        per_channel = mean.transpose(0, 1).flatten(1)
        sums += torch.stack(
            [torch.full((num_channels,), per_channel.shape[1]), per_channel.sum(1), per_channel.square().sum(1)]
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
        sums = sums.cpu()
    count, total, squares = sums
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=1e-12).sqrt()
    return mean.tolist(), std.tolist()


def save_autoencoder(vae: AutoencoderKL, mean: list[float], std: list[float], folder: Path) -> None:
    """Write a VAE with its latent statistics, in the diffusers layout with safetensors."""
    vae.register_to_config(latents_mean=mean, latents_std=std, scaling_factor=1.0)
    vae.save_pretrained(folder, safe_serialization=True)
