"""Configuration of what is trained: architecture, objective, and the weights it starts from."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

NUM_TIMESTEPS = 1000
"""Of the noise schedule, in all architectures."""


class Architecture(str, Enum):
    """Architectures that live in this project as local configuration (`diffusion.models.architectures`)."""

    stable_diffusion_2 = "stable_diffusion_2"
    stable_diffusion_xl = "stable_diffusion_xl"
    tiny = "tiny"
    tiny_xl = "tiny_xl"


class PredictionType(str, Enum):
    """What the U-Net predicts."""

    epsilon = "epsilon"
    v_prediction = "v_prediction"
    sample = "sample"


class Posterior(str, Enum):
    """What is taken from the VAE's posterior."""

    sample = "sample"
    mean = "mean"


class Weights(str, Enum):
    """Which of the weights in a checkpoint."""

    raw = "raw"
    ema = "ema"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank fine-tuning (Hu et al. 2021): beside weights of the U-Net thin matrices are trained, the weights not."""

    rank: int = 16
    """Width of the matrices."""

    alpha: float = 16.0
    """What the matrices add is multiplied by alpha / rank."""

    targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    """Layers of the U-Net that they are put beside, by the ends of their names; by default those of attention."""


@dataclass(kw_only=True)
class ModelConfig:
    """The model: architecture and where pretrained weights come from."""

    architecture: Architecture = Architecture.stable_diffusion_2
    """Family of U-Net, VAE, text encoder, tokenizer and noise schedule."""

    pretrained: str | None = None
    """Diffusers-layout folder or hub name from which VAE and text encoder are loaded. Null: random weights from
    `frozen_seed`, which makes sense for the tiny family and for tests only."""

    vae: str | None = None
    """Folder (diffusers layout) of a VAE that replaces the one of `pretrained`, such as one trained here."""

    local_files_only: bool = False
    """Never ask the hub; fail when the weights are not on this machine."""

    frozen_seed: int = 0
    """Seed of randomly initialised frozen parts (`pretrained: null`)."""

    low_precision_norms: bool = True
    """GroupNorm and LayerNorm of the U-Net in the autocast precision instead of fp32."""

    unet: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of diffusers' UNet2DConditionModel that replace those of the architecture."""

    lora: LoraConfig | None = None
    """Train LoRA's matrices on top of `init_from` instead of all weights; null: train all."""


@dataclass(kw_only=True)
class ObjectiveConfig:
    """The training objective."""

    prediction_type: PredictionType = PredictionType.epsilon
    """Target of the U-Net (v_prediction: Salimans and Ho 2022, section 2.4)."""

    zero_terminal_snr: bool = False
    """Rescale the noise schedule so that the last step is pure noise (Lin et al. 2023); not with epsilon."""

    offset_noise: float = 0.0
    """Standard deviation of noise that is constant over each channel, added to the noise; 0 is none."""

    min_snr_gamma: float | None = None
    """Clip the weight of each timestep at this signal-to-noise ratio (Hang et al. 2023); null is none, 5 is usual."""

    stratified_timesteps: bool = False
    """Spread the timesteps of a global batch evenly instead of drawing each by itself."""

    caption_dropout: float = 0.1
    """Probability with which a caption is replaced by the empty caption while training."""

    posterior: Posterior = Posterior.sample
    """Draw from the VAE's posterior, or take its mean."""


@dataclass(kw_only=True)
class AutoencoderConfig:
    """Training of the VAE itself (`task: autoencoder`)."""

    l1_weight: float = 1.0
    """Weight of the mean absolute error of the pixels, which lie in [-1, 1]."""

    l2_weight: float = 0.0
    """Weight of their mean squared error; some of it keeps a small VAE from giving up on rare colours."""

    kl_weight: float = 1e-6
    """Weight of the KL divergence of the posterior from the standard normal, summed over an image's latent and divided
    by the number of its pixel values."""

    perceptual_weight: float = 0.0
    """Weight of the perceptual distance LPIPS, which needs `vgg_weights`; 0 is none."""

    vgg_weights: str | None = None
    """File with torchvision's weights of VGG16, `vgg16-397923af.pth`."""

    adversarial_weight: float = 0.0
    """Weight with which the decoder is to deceive a discriminator of patches, which is trained beside it; 0 is none."""

    adversarial_start: str = "0ba"
    """When the discriminator begins to be trained and to count, as a time; late, when the decoder is good otherwise."""

    discriminator_lr: float | None = None
    """Learning rate of the discriminator, with the same schedule; null is `optimizer.lr`."""

    initial_logvar: float = -5.0
    """Log-variance of the posterior before the first step: small, so that noise does not drown the first latents."""

    vae: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of diffusers' AutoencoderKL that replace those of the architecture."""


@dataclass(kw_only=True)
class InitFromConfig:
    """Weights that a phase starts from, with a new optimizer and from step 0."""

    checkpoint: str = MISSING
    """Checkpoint (file or folder), or a run's `checkpoints` folder, whose newest complete checkpoint is taken; or a
    folder in the diffusers layout, whose U-Net is taken."""

    weights: Weights = Weights.raw
    """The training weights or their exponential moving average; without meaning for a diffusers folder."""
