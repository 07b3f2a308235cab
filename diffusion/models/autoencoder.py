"""Training of the VAE: absolute and squared error, perceptual distance, KL divergence of the posterior, discriminator.

Shape letters: B batch, C channels, H W height and width of the latent.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from composer.models import ComposerModel
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn
from torchmetrics import Metric

from diffusion.config.model import AutoencoderConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.discriminator import AdversarialLosses, PatchDiscriminator, adversarial_losses, no_losses
from diffusion.models.metrics import HeldOutMean, held_out_means
from diffusion.models.perceptual import load_perceptual
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

    adversarial: AdversarialLosses | None = None
    """What the discriminator makes of it, in training with one."""


def to_pixels(images: Tensor) -> Tensor:
    """uint8 [B, 3, height, width] -> float32 in [-1, 1]."""
    return images.float() / 127.5 - 1.0


class AutoencoderTraining(ComposerModel):
    """Trains an AutoencoderKL (Kingma and Welling 2014; Rombach et al. 2022, section 3.1).

    The weight of the discriminator is fixed, not adapted to the size of gradients (Esser et al. 2021, equation 7):
    those of a microbatch would make the run depend on how a batch is cut.

    Args:
        vae: what is trained.
        config: the weights of the terms of the loss.
        seed: seed of the draws from the posterior.
        adversarial_start: the step from which the discriminator takes part, where there is one.

    Raises:
        ConfigurationError: the weights of the perceptual loss are not there.
    """

    vae: AutoencoderKL
    discriminator: PatchDiscriminator | None

    def __init__(self, vae: AutoencoderKL, config: AutoencoderConfig, seed: int, adversarial_start: float = 0) -> None:
        super().__init__()
        self.vae = vae
        self.config = config
        self.seed = seed
        self.adversarial_start = adversarial_start
        self.discriminator = PatchDiscriminator() if config.adversarial_weight > 0 else None
        # Held in a dictionary, so that it is neither trained nor saved.
        self._frozen: dict[str, nn.Module] = {}
        if config.perceptual_weight > 0:
            self._frozen["perceptual"] = load_perceptual(config.vgg_weights, "autoencoder.vgg_weights")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AutoencoderTraining":
        """Move or cast the frozen part with the rest (`to`, `cuda`, `half`)."""
        super()._apply(fn, recurse)
        for module in self._frozen.values():
            module._apply(fn)
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        """For the optimizer: the VAE, and the discriminator with its own learning rate and without weight decay."""
        groups: list[dict[str, Any]] = [{"params": list(self.vae.parameters())}]
        if self.discriminator is not None:
            own_lr = {} if self.config.discriminator_lr is None else {"lr": self.config.discriminator_lr}
            groups.append({"params": list(self.discriminator.parameters()), "weight_decay": 0.0, **own_lr})
        return groups

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
        """Encode, draw from the posterior, decode, and judge: the discriminator is called here, where DDP sees it."""
        result = self._reconstruct(batch, draw=True)
        if self.discriminator is None:
            return result
        if batch[BatchKey.STEP][0] < self.adversarial_start:
            return result._replace(adversarial=no_losses(self.discriminator))
        return result._replace(adversarial=adversarial_losses(self.discriminator, result.pixels, result.decoded))

    def loss(self, outputs: Reconstruction, batch: Batch) -> dict[str, Tensor]:
        """The weighted terms, averaged over the microbatch, float32 [] each; their sum is minimised."""
        error, num_values = outputs.decoded - outputs.pixels, outputs.pixels[0].numel()
        terms = {
            "l1": self.config.l1_weight * error.abs().mean(),
            "kl": self.config.kl_weight * outputs.kl.mean() / num_values,
        }
        if self.config.l2_weight > 0:
            terms["l2"] = self.config.l2_weight * error.square().mean()
        if "perceptual" in self._frozen:
            distance = self._frozen["perceptual"](outputs.decoded, outputs.pixels).float().mean()
            terms["perceptual"] = self.config.perceptual_weight * distance
        if outputs.adversarial is not None:
            terms["adversarial"] = self.config.adversarial_weight * outputs.adversarial.generator
            terms["discriminator"] = outputs.adversarial.discriminator
        return terms

    def eval_forward(self, batch: Batch, outputs: Reconstruction | None = None) -> Reconstruction:
        """Reconstruct from the posterior's mean."""
        return outputs if outputs is not None else self._reconstruct(batch, draw=False)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Peak signal-to-noise ratio of each image, averaged, in dB."""
        return {} if is_train else held_out_means("psnr")

    def update_metric(self, batch: Any, outputs: Reconstruction, metric: Metric) -> None:
        """Add the images of an evaluation batch."""
        assert isinstance(metric, HeldOutMean)
        metric.add(psnr(outputs.decoded, outputs.pixels), batch)


def initialise_logvar(vae: AutoencoderKL, logvar: float) -> None:
    """Make the posterior of a new VAE start with about the same log-variance everywhere, in place."""
    num_channels = vae.config["latent_channels"]
    with torch.no_grad():
        vae.quant_conv.weight[num_channels:].mul_(0.1)  # pyright: ignore[reportOptionalMemberAccess]
        vae.quant_conv.bias[num_channels:].fill_(logvar)  # pyright: ignore


def psnr(decoded: Tensor, pixels: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, [B], of images in [-1, 1]; the decoded ones are clamped."""
    error = (decoded.clamp(-1, 1) - pixels).square().mean(dim=(1, 2, 3))
    return 10.0 * torch.log10(4.0 / error.clamp(min=1e-12))


@torch.no_grad()
def latent_statistics(
    vae: AutoencoderKL, batches: Iterable[Tensor], device: torch.device
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of the posterior's mean, over all ranks' images.

    Args:
        vae: the encoder.
        batches: this rank's images, uint8 [B, 3, height, width].
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
