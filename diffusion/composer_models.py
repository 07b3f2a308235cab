"""The models that Composer's Trainer trains: latent diffusion, and the VAE.

Shape letters: B batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from diffusion.config.model import AutoencoderConfig
from diffusion.datasets.batch import BatchKey
from diffusion.models.autoencoder import (
    VALIDATED,
    PatchDiscriminator,
    Reconstruction,
    Transformation,
    adversarial_losses,
    draw_transformation,
    load_perceptual,
    psnr,
    to_pixels,
    transform,
    zero_losses,
)
from diffusion.models.latent_diffusion import LatentDiffusion, Prediction, squared_error
from diffusion.models.latents import TrainedVAE, latent_space
from diffusion.models.metrics import ValidationMean, validation_means
from diffusion.models.pretrained import module_identity
from diffusion.randomness import Purpose, normal

Batch = dict[str, Tensor]


class LatentDiffusionTraining(LatentDiffusion, ComposerModel):
    """Trains a `LatentDiffusion`, with the metrics of validation.

    Attributes:
        validation_streams: names of the validation streams by number, each with a metric; empty names are skipped.
        validation_bins: ranges of timesteps, each with a validation metric.
    """

    validation_streams: Sequence[str] = ()
    validation_bins: Sequence[range] = ()
    errors: Tensor
    """Errors of the samples in the last loss, float32 [B]."""

    def sample_errors(self, outputs: Prediction) -> Tensor:
        """Compute the errors of the samples, and keep them for callbacks, which need not compute them again."""
        errors = super().sample_errors(outputs)
        self.errors = errors.detach()
        return errors

    def set_validation_data(self, streams: Sequence[str], samples: Tensor) -> None:
        """Configure the metrics by stream and by timestep, without ranges that no sample of [N] draws."""
        self.validation_streams, self.validation_bins = list(streams), self.occupied_timestep_bins(samples)

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Validation loss over all data, by stream and by timestep: the unweighted mean squared error."""
        return {} if is_train else validation_means("loss", self.validation_streams, self.validation_bins)

    def update_metric(self, batch: Any, outputs: Prediction, metric: Metric) -> None:
        """Add the error of each sample of an evaluation batch."""
        assert isinstance(metric, ValidationMean)
        metric.update(squared_error(outputs), batch, outputs.draws.timesteps)


class EquivarianceMean(ValidationMean):
    """Mean of `Reconstruction.equivariance`."""


class AutoencoderTraining(ComposerModel):
    """Trains a VAE (Kingma and Welling 2014; Rombach et al. 2022, section 3.1); without a posterior there is no KL.

    The weight of the discriminator is fixed, not adapted to the norms of gradients (Esser et al. 2021, equation 7):
    gradients of a microbatch would make the run depend on its size. Training with it begins at step
    `adversarial_start`. The seed is that of the draws from the posterior.

    Raises:
        ConfigurationError: the weights of the perceptual loss are missing.
    """

    vae: TrainedVAE
    discriminator: PatchDiscriminator | None

    def __init__(self, vae: TrainedVAE, config: AutoencoderConfig, seed: int, adversarial_start: float = 0) -> None:
        super().__init__()
        self.vae = vae
        self.config = config
        self.seed = seed
        self.adversarial_start = adversarial_start
        self.discriminator = PatchDiscriminator() if config.adversarial_weight > 0 else None
        # In a dictionary instead of the module tree: neither trained nor saved.
        self._frozen: dict[str, nn.Module] = {}
        if config.perceptual_weight > 0:
            self._frozen["perceptual"] = load_perceptual(config.vgg_weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AutoencoderTraining":
        """Move or cast the frozen part with the rest (`to`, `cuda`, `half`)."""
        super()._apply(fn, recurse)
        for module in self._frozen.values():
            module._apply(fn)
        return self

    def identities(self) -> dict[str, str]:
        """Hash of the frozen part by its name, if there is one."""
        return {name: module_identity(module) for name, module in self._frozen.items()}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: VAE, and discriminator with its own learning rate and no weight decay."""
        groups: list[dict[str, Any]] = [{"params": list(self.vae.parameters())}]
        if self.discriminator is not None:
            own_lr = {} if self.config.discriminator_lr is None else {"lr": self.config.discriminator_lr}
            groups.append({"params": list(self.discriminator.parameters()), "weight_decay": 0.0, **own_lr})
        return groups

    def _reconstruct(self, batch: Batch, *, draw: bool, transformation: Transformation | None = None) -> Reconstruction:
        pixels = to_pixels(batch[BatchKey.IMAGE])
        mean, logvar = latent_space(self.vae).moments(pixels)
        latents, kl = mean, torch.zeros(len(pixels), device=pixels.device)
        if logvar is not None:
            kl = 0.5 * (mean.pow(2) + logvar.exp() - 1.0 - logvar).sum(dim=(1, 2, 3))
        if draw and logvar is not None:
            step = batch.get(BatchKey.STEP, torch.zeros_like(batch[BatchKey.SAMPLE]))
            shape = tuple(latents.shape[1:])
            noise = normal(self.seed, Purpose.POSTERIOR, step, batch[BatchKey.SAMPLE], shape)
            latents = latents + torch.exp(0.5 * logvar) * noise
        if transformation is not None:
            pixels = transform(pixels, transformation, cell=pixels.shape[-1] // latents.shape[-1])
            latents = transform(latents, transformation)
        decoded = self.vae.decode(latents, return_dict=False)[0]  # pyright: ignore[reportArgumentType]
        return Reconstruction(pixels, decoded.float(), kl.float())

    def forward(self, batch: Batch) -> Reconstruction:
        """Encode, sample the posterior, decode and discriminate; DDP needs the discriminator in `forward`."""
        transformation = None
        if self.config.equivariance is not None:
            transformation = draw_transformation(self.config.equivariance, self.seed, int(batch[BatchKey.STEP][0]))
        result = self._reconstruct(batch, draw=True, transformation=transformation)
        if self.discriminator is None:
            return result
        if batch[BatchKey.STEP][0] < self.adversarial_start:
            return result._replace(adversarial=zero_losses(self.discriminator))
        return result._replace(adversarial=adversarial_losses(self.discriminator, result.pixels, result.decoded))

    def loss(self, outputs: Reconstruction, batch: Batch) -> dict[str, Tensor]:
        """Weighted terms of the loss, averaged over the microbatch, float32 [] each; Composer adds them."""
        error, num_values = outputs.decoded - outputs.pixels, batch[BatchKey.IMAGE][0].numel()
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
        if outputs is not None:
            return outputs
        result = self._reconstruct(batch, draw=False)
        if self.config.equivariance is None:
            return result
        transformed = self._reconstruct(batch, draw=False, transformation=VALIDATED)
        return result._replace(equivariance=psnr(transformed.decoded, transformed.pixels))

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Means of the images' peak signal-to-noise ratios, in dB."""
        if is_train:
            return {}
        own = {} if self.config.equivariance is None else {"equivariance_psnr": EquivarianceMean()}
        return {**validation_means("psnr"), **own}

    def update_metric(self, batch: Any, outputs: Reconstruction, metric: Metric) -> None:
        """Add the images of an evaluation batch."""
        assert isinstance(metric, ValidationMean)
        if isinstance(metric, EquivarianceMean):
            assert outputs.equivariance is not None
            metric.update(outputs.equivariance, batch)
        else:
            metric.update(psnr(outputs.decoded, outputs.pixels), batch)
