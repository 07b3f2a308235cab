"""The mathematics of training: noise process, prediction targets, loss weights. Knows neither Composer nor diffusers.

Shape letters: B batch, C channels, H W height and width of the latent, T timesteps. With the cumulative product of the
noise schedule abar_t, a noised latent is x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise (Ho et al. 2020, equation 4).
Rectified flow has the rates 1 - t / T and t / T of a continuous timestep instead (Liu et al. 2022).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffusion.config.model import NUM_TIMESTEPS, FlowConfig, ObjectiveConfig, PredictionType
from diffusion.randomness import Purpose, normal, permutation, random_words

Rates = tuple[Tensor, Tensor]
"""Factors of the latents and of the noise, each float32 [B, 1, 1, 1]."""


class Quantiles(NamedTuple):
    """Quantiles (position + u) / (num_slots * 2^32) of timesteps, for u in [0, 1)."""

    position: Tensor
    """int64 [B], 0 <= position < num_slots * 2^32."""

    num_slots: int
    """1, or samples of the global batch."""


@dataclass
class NoiseProcess:
    """Forward process of DDPM for one noise schedule."""

    alphas_cumprod: Tensor
    """float64 [T]: abar_t, from nearly 1 to nearly 0 (exactly 0 with zero-terminal SNR)."""

    _tables: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.alphas_cumprod = self.alphas_cumprod.double().cpu()

    @property
    def num_timesteps(self) -> int:
        """T."""
        return len(self.alphas_cumprod)

    def signal_and_noise_rate(self, timesteps: Tensor) -> Rates:
        """sqrt(abar_t) and sqrt(1 - abar_t) of timesteps int64 [B], on their device."""
        device = timesteps.device
        if device not in self._tables:
            rates = torch.stack([self.alphas_cumprod.sqrt(), (1.0 - self.alphas_cumprod).sqrt()], dim=1)
            self._tables[device] = rates.float().to(device)
        signal, noise = self._tables[device][timesteps].view(-1, 2, 1, 1, 1).unbind(1)
        return signal, noise

    def timesteps(self, quantiles: Quantiles) -> Tensor:
        """Uniform timesteps, int64 [B], 0 <= t < T; T is at most 2^10."""
        position, num_slots = quantiles
        scaled = position * self.num_timesteps
        return (scaled if num_slots == 1 else scaled // num_slots) >> 32


@dataclass(frozen=True)
class RectifiedFlow:
    """Straight lines between latents and noise, x_t = (1 - t / T) x_0 + t / T noise (Liu et al. 2022)."""

    config: FlowConfig

    num_timesteps: int = NUM_TIMESTEPS
    """T."""

    def signal_and_noise_rate(self, timesteps: Tensor) -> Rates:
        """1 - t / T and t / T of timesteps float32 [B]."""
        noise = (timesteps / self.num_timesteps).view(-1, 1, 1, 1)
        return 1.0 - noise, noise

    def timesteps(self, quantiles: Quantiles) -> Tensor:
        """Timesteps float32 [B], 0 < t < T: logit-normal, then shifted (Esser et al. 2024, equations 19 and 23)."""
        quantile = (quantiles.position.double() + 0.5) / (quantiles.num_slots * 2.0**32)
        rate = torch.sigmoid(self.config.logit_mean + self.config.logit_std * torch.special.ndtri(quantile))
        shift = self.config.shift
        return (self.num_timesteps * shift * rate / (1.0 + (shift - 1.0) * rate)).float()


def noise_process(objective: ObjectiveConfig, noise_scheduler: Any) -> NoiseProcess | RectifiedFlow:
    """Choose the process by the prediction type; `noise_scheduler` holds abar_t of DDPM."""
    if objective.prediction_type is PredictionType.flow:
        return RectifiedFlow(objective.flow)
    return NoiseProcess(noise_scheduler.alphas_cumprod)


def add_noise(latents: Tensor, noise: Tensor, rates: Rates) -> Tensor:
    """x_t, float [B, C, H, W] for latents and noise of that shape."""
    signal_rate, noise_rate = rates
    return signal_rate * latents + noise_rate * noise


# What the network predicts

MIN_NOISE_RATE = 0.05
"""Smallest noise rate that an error of the image is divided by (Li and He 2025)."""


def velocity(noised: Tensor, image: Tensor, timesteps: Tensor) -> Tensor:
    """Velocity noise - x_0 of rectified flow at timesteps [B] or [] from the image x_0 that a network gives.

    The loss of the velocity is then that of the image, divided by the squared noise rate. Below `MIN_NOISE_RATE` the
    divisor is that rate, and the network learns the image that gives the right velocity, which is not x_0.
    """
    rate = (timesteps.float() / NUM_TIMESTEPS).clamp(min=MIN_NOISE_RATE).view(-1, 1, 1, 1)
    return (noised - image.float()) / rate


class Target(NamedTuple):
    """Target of the prediction."""

    compute: Callable[[Tensor, Tensor, Rates], Tensor]
    """(latents x_0, noise, rates) -> target, float [B, C, H, W] each."""

    error_ratio: Callable[[Tensor], Tensor | float]
    """SNR -> squared error of this target over that of the latents."""


TARGETS = {
    PredictionType.epsilon: Target(lambda latents, noise, rates: noise, lambda snr: snr),
    PredictionType.sample: Target(lambda latents, noise, rates: latents, lambda snr: 1.0),
    # v = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0 (Salimans and Ho 2022, appendix D).
    PredictionType.v_prediction: Target(
        lambda latents, noise, rates: rates[0] * noise - rates[1] * latents, lambda snr: snr + 1.0
    ),
    # x_0 = x_t - (t / T) (noise - x_0), and SNR = (T / t - 1)^2.
    PredictionType.flow: Target(lambda latents, noise, rates: noise - latents, lambda snr: (snr.sqrt() + 1.0) ** 2),
}
"""Everything that differs between prediction types in training."""


def min_snr_weight(target: Target, rates: Rates, gamma: float) -> Tensor:
    """Weight of each sample's squared error (Hang et al. 2023, section 3.4): float32 [B].

    min(SNR, gamma) weighs the error of the latents; the weight of another target is divided by the ratio of its error.
    """
    signal_rate, noise_rate = (rate.flatten() for rate in rates)
    snr = (signal_rate / noise_rate) ** 2
    return snr.clamp(max=gamma) / target.error_ratio(snr)


# Random numbers


class Purposes(NamedTuple):
    """Purposes of the random numbers of a forward pass (`diffusion.randomness`)."""

    noise: Purpose
    timestep: Purpose
    posterior: Purpose


TRAINING = Purposes(Purpose.NOISE, Purpose.TIMESTEP, Purpose.POSTERIOR)
EVALUATION = Purposes(Purpose.EVALUATION_NOISE, Purpose.EVALUATION_TIMESTEP, Purpose.EVALUATION_POSTERIOR)


def draw_noise(
    config: ObjectiveConfig, purposes: Purposes, seed: int, step: Tensor, sample: Tensor, shape: tuple[int, int, int]
) -> Tensor:
    """Draw the noise that is added to each latent: float32 [B, C, H, W] for steps and samples int64 [B].

    `offset_noise` adds a constant per channel, in training only.
    """
    noise = normal(seed, purposes.noise, step, sample, shape)
    if config.offset_noise and purposes is TRAINING:
        offset = normal(seed, Purpose.OFFSET_NOISE, step, sample, (shape[0], 1, 1))
        noise = noise + config.offset_noise * offset
    return noise


def draw_quantiles(purposes: Purposes, seed: int, step: Tensor, sample: Tensor) -> Quantiles:
    """Draw the quantile of each sample's timestep, for steps and samples int64 [B]."""
    return Quantiles(random_words(seed, purposes.timestep, step, sample, 1)[:, 0], 1)


def draw_stratified_quantiles(seed: int, step: Tensor, sample: Tensor, slot: Tensor, num_slots: int) -> Quantiles:
    """Draw quantiles of timesteps that are spread evenly over the global batch.

    The quantiles are divided into as many strata as the global batch has slots. Each slot draws from one stratum; the
    order of strata is drawn anew in each step (Kingma et al., "Variational diffusion models", 2021, use one random
    offset instead). Each timestep by itself has the same distribution; their mean over a global batch varies less.

    Args:
        seed: seed of the run.
        step: int64 [B], optimizer step, the same for all.
        sample: int64 [B], addresses of the samples.
        slot: int64 [B], positions of the samples in the global batch.
        num_slots: samples of the global batch, at most 2^20.
    """
    stratum = permutation(seed, Purpose.TIMESTEP_STRATUM, step[:1], num_slots)[slot]
    within = draw_quantiles(TRAINING, seed, step, sample).position
    return Quantiles((stratum << 32) + within, num_slots)
