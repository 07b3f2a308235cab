"""Configuration of the model: architecture, objective, initial weights, and speed of the network."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from diffusion.config.fields import MAX_SEED, bounded, location, time
from diffusion.config.ingredients import Ingredients

NUM_TIMESTEPS = 1000
"""Timesteps of the noise schedule of all architectures."""


class Architecture(str, Enum):
    """Architectures of this project (`diffusion.models.architectures`)."""

    stable_diffusion_2 = "stable_diffusion_2"
    stable_diffusion_xl = "stable_diffusion_xl"
    transformer_s = "transformer_s"
    transformer_m = "transformer_m"
    transformer_l = "transformer_l"
    pixel_transformer_m = "pixel_transformer_m"
    pixel_transformer_l = "pixel_transformer_l"
    tiny = "tiny"
    tiny_xl = "tiny_xl"
    tiny_transformer = "tiny_transformer"
    tiny_pixel_transformer = "tiny_pixel_transformer"

    @property
    def is_tiny(self) -> bool:
        """Return whether it is one of the families for tests, whose VAE and text encoder may be random."""
        return self.value.startswith("tiny")

    @property
    def is_transformer(self) -> bool:
        """Return whether the network is a transformer; otherwise it is a U-Net."""
        return "transformer" in self.value

    @property
    def is_pixel(self) -> bool:
        """Return whether the network works on pixels, without a VAE."""
        return "pixel" in self.value

    @property
    def is_extended(self) -> bool:
        """Return whether it has SDXL's two text encoders."""
        return self in (Architecture.stable_diffusion_xl, Architecture.tiny_xl)


class PredictionType(str, Enum):
    """Prediction target of the network."""

    epsilon = "epsilon"
    v_prediction = "v_prediction"
    sample = "sample"
    flow = "flow"


class Sampler(str, Enum):
    """Solver of the sampling equation."""

    ddim = "ddim"
    euler = "euler"
    heun = "heun"


class Posterior(str, Enum):
    """Value taken from the VAE's posterior."""

    sample = "sample"
    mean = "mean"


class Weights(str, Enum):
    """Weights in a checkpoint."""

    raw = "raw"
    ema = "ema"


@dataclass(kw_only=True)
class TextEncoderConfig:
    """Encoder of captions: CLIP's as published, CLIP's in chunks for longer captions, or a language model's."""

    chunks: int = bounded(1, min=1)
    """Chunks of CLIP's length (77 tokens, 75 of them a caption's). Each is encoded by itself, with a start and an end
    of its own, and their encodings are concatenated. Words beyond the last chunk are cut off."""

    path: str | None = location(None)
    """Local folder of a language model (T5, T5Gemma, Qwen3 ...: layout of transformers, safetensors, tokenizer) whose
    last hidden states replace CLIP's. The network's width of the text follows it. Null: CLIP."""

    max_tokens: int = bounded(256, min=1)
    """Tokens of a caption for a language model; without effect for CLIP."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if self.path is not None and self.chunks > 1:
            yield (
                f"{key}.chunks is {self.chunks} with {key}.path, and a language model reads long captions as they are. "
                f"Remove {key}.chunks, and set {key}.max_tokens."
            )


@dataclass(kw_only=True)
class ArchitectureConfig:
    """Architecture and pretrained weights."""

    architecture: Architecture = Architecture.stable_diffusion_2
    """Family of network, VAE, text encoder, tokenizer and noise schedule."""

    pretrained: str | None = location(None)
    """Folder in the diffusers layout, or hub name, of the VAE and the text encoder. Null: random weights from
    `frozen_seed`, for the tiny families only, unless `vae` and `text_encoder.path` are set."""

    vae: str | None = location(None)
    """Folder (diffusers layout) of a VAE that replaces that of `pretrained`, such as one trained here. Null for
    architectures on pixels, which have none."""

    local_files_only: bool = False
    """Never download from the hub; fail if the weights are not on this machine."""

    frozen_seed: int = bounded(0, min=0, max=MAX_SEED)
    """Seed of randomly initialised frozen parts (`pretrained: null`)."""

    low_precision_norms: bool = True
    """GroupNorm and LayerNorm of the network in the autocast precision instead of fp32."""

    network: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of diffusers' UNet2DConditionModel or PRXTransformer2DModel that replace those of the
    architecture. `{in_channels: 16}` for a VAE of 16 channels: a U-Net's `out_channels` follow."""

    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    """Encoder of captions."""

    @property
    def missing_parts(self) -> list[str]:
        """Frozen parts without weights; none of a tiny family, which has random ones."""
        if self.architecture.is_tiny or self.pretrained:
            return []
        parts = {"VAE": self.vae or self.architecture.is_pixel, "text encoder": self.text_encoder.path}
        return [part for part, path in parts.items() if not path]

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        text = self.text_encoder
        if self.architecture.is_pixel and self.vae is not None:
            yield (
                f"{key}.vae is set with {key}.architecture {self.architecture.value}, which works on pixels. Set "
                f"{key}.vae=null, or choose another architecture."
            )
        if self.architecture.is_extended and (text.path is not None or text.chunks > 1):
            yield (
                f"{key}.text_encoder is set with {key}.architecture {self.architecture.value}, which takes the vectors "
                f"of its own two encoders. Remove {key}.text_encoder, or choose another architecture."
            )


@dataclass(kw_only=True)
class ModelConfig(Ingredients, ArchitectureConfig):
    """Architecture, pretrained weights and ingredients."""

    scale: int | None = bounded(None, min=1)
    """Size to which other keys of a YAML refer, such as `hidden_size: ${times:32,${model.scale}}` for the network, and
    likewise batch and length of the run (`yamls/tiny/scale.yaml`). By itself it changes nothing."""


@dataclass(kw_only=True)
class FlowConfig:
    """Rectified flow (Liu et al. 2022): density of the timesteps (Esser et al. 2024, section 3.1)."""

    logit_mean: float = 0.0
    """Mean of the logit of the noise rate; positive: more noise."""

    logit_std: float = bounded(1.0, above=0)
    """Standard deviation of the logit of the noise rate."""

    shift: float = bounded(1.0, above=0)
    """Factor of the ratio of noise to signal, in training and sampling: larger images need more noise (sqrt of the
    ratio of their areas, Esser et al. 2024, section 5.3.2)."""


@dataclass(kw_only=True)
class ObjectiveConfig:
    """The training objective."""

    prediction_type: PredictionType = PredictionType.epsilon
    """Target of the network (v_prediction: Salimans and Ho 2022, section 2.4; flow: noise less latents, which an
    architecture on pixels computes from the image that its network gives)."""

    flow: FlowConfig = field(default_factory=FlowConfig)
    """Without effect for other prediction types."""

    zero_terminal_snr: bool = False
    """Rescale the noise schedule to zero signal at the last step (Lin et al. 2023); not with epsilon."""

    offset_noise: float = bounded(0.0, min=0)
    """Standard deviation of additional noise that is constant over each channel; 0: none."""

    min_snr_gamma: float | None = bounded(None, above=0)
    """Clip the weight of each timestep at this signal-to-noise ratio (Hang et al. 2023); null: none, 5 is usual. With
    `zero_terminal_snr` the last step has no weight."""

    stratified_timesteps: bool = False
    """Spread the timesteps of a global batch evenly instead of independent draws."""

    caption_dropout: float = bounded(0.1, min=0, max=1)
    """Probability that a caption is replaced by the empty caption during training."""

    posterior: Posterior = Posterior.sample
    """Sample of the VAE's posterior, or its mean; without effect for pixels."""

    def problems(self, key: str) -> Iterator[str]:
        """Describe wrong relations."""
        if self.zero_terminal_snr and self.prediction_type is PredictionType.flow:
            yield (
                f"{key}.zero_terminal_snr is true with {key}.prediction_type flow, whose last step is always pure "
                f"noise. Remove {key}.zero_terminal_snr."
            )
        if self.zero_terminal_snr and self.prediction_type is PredictionType.epsilon:
            yield (
                f"{key}.zero_terminal_snr is true with {key}.prediction_type epsilon: the last step is pure noise, "
                f"from which epsilon gives no image (Lin et al. 2023). Set {key}.prediction_type=v_prediction."
            )


@dataclass(kw_only=True)
class EquivarianceConfig:
    """Latents that turn and shrink with their images (EQ-VAE; Kouzelis et al. 2025, section 3.3)."""

    probability: float = bounded(0.5, min=0, max=1)
    """Share of the steps in which the latent is transformed, decoded, and compared with the transformed image. 0: the
    equivariance is only measured in validation."""

    min_scale: float = bounded(0.25, above=0, max=1)
    """Both are shrunk by a random factor between this and 1; 1: not shrunk."""

    rotations: bool = True
    """Both are turned by 90, 180 or 270 degrees."""


@dataclass(kw_only=True)
class AutoencoderConfig:
    """Training of the VAE itself (`task: autoencoder`)."""

    l1_weight: float = bounded(1.0, min=0)
    """Weight of the mean absolute error of the pixels in [-1, 1]."""

    l2_weight: float = bounded(0.0, min=0)
    """Weight of their mean squared error; it helps a small VAE with rare colours."""

    kl_weight: float = bounded(1e-6, min=0)
    """Weight of the KL divergence of the posterior from the standard normal, summed over an image's latent and divided
    by the number of its pixel values."""

    perceptual_weight: float = bounded(0.0, min=0)
    """Weight of the perceptual distance LPIPS, which needs `vgg_weights`; 0: none."""

    vgg_weights: str | None = location(None)
    """File with torchvision's weights of VGG16, `vgg16-397923af.pth`."""

    adversarial_weight: float = bounded(0.0, min=0)
    """Weight of the adversarial loss against a patch discriminator that is trained with the VAE; 0: none."""

    adversarial_start: str = time("0ba", units="ba sp dur")
    """Start of the discriminator's training and of the adversarial loss; late, when the decoder is good otherwise. A
    resumption that would stop a training that has begun is refused."""

    discriminator_lr: float | None = bounded(None, above=0)
    """Learning rate of the discriminator, with the same schedule; null: `optimizer.lr`."""

    equivariance: EquivarianceConfig | None = None
    """Regularise the latents towards equivariance; null: do not."""

    initial_logvar: float = bounded(-5.0, min=-30, max=20)
    """Initial log-variance of the posterior: small, so that noise does not hide the first latents."""

    vae: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of diffusers' AutoencoderKL that replace those of the architecture; `_class_name` may name
    AutoencoderKLFlux2 or AutoencoderDC instead, which is deterministic: no KL, and an own architecture."""


@dataclass(kw_only=True)
class InitFromConfig:
    """Initial weights of a phase, which starts at step 0 with a new optimizer."""

    checkpoint: str = location(MISSING)
    """Checkpoint (file or folder); or the `checkpoints` folder of a run, for its newest complete checkpoint; or a
    folder in the diffusers layout, or a `.safetensors` file in the original layout of Stable Diffusion, for its
    network. With `task: autoencoder`: folder of a VAE, or that holds `vae/`."""

    weights: Weights = Weights.raw
    """Training weights or their first average; without effect for a diffusers folder or a file."""

    new_objective: bool = False
    """Train weights of another prediction type or noise schedule; false: such weights are an error."""


class AttentionBackend(str, Enum):
    """Kernels of `torch.nn.functional.scaled_dot_product_attention`."""

    auto = "auto"
    flash = "flash"
    cudnn = "cudnn"
    efficient = "efficient"
    math = "math"


class Compilation(str, Enum):
    """Parts that `torch.compile` compiles as one graph."""

    auto = "auto"
    none = "none"
    blocks = "blocks"
    stages = "stages"
    unet = "unet"


@dataclass(kw_only=True)
class PerformanceConfig:
    """Speed of the network; see docs/performance.md."""

    channels_last: bool = True
    """Keep all activations in channels-last order (NHWC), the native order of convolutions on tensor cores."""

    fused_norms: bool = True
    """With channels_last and compilation: use a GroupNorm that the compiler fuses with the convolution's bias, the
    timestep embedding and the SiLU."""

    fused_projections: bool = True
    """Use one matrix product for queries, keys and values (self-attention), or keys and values (cross-attention)."""

    split_geglu: bool = True
    """With compilation: use two matrix products for a GEGLU, whose backward pass then needs half the arithmetic beside
    them."""

    attention: AttentionBackend = AttentionBackend.auto
    """Attention kernel; one that does not support the data is an error. cudnn: self-attention only, torch chooses for
    cross-attention. auto: torch chooses, on Hopper and Blackwell cuDNN where it supports the data."""

    compilation: Compilation = Compilation.auto
    """Compile the network for training: block by block (blocks); the down, mid and up blocks of a U-Net (stages), with
    fewer calls by the host; or as a whole (unet), which fuses more, but with fsdp makes it one unit without overlap of
    communication and arithmetic. auto: blocks on a GPU, none on a CPU."""

    compile_text_encoder: bool = False
    """Compile the layers of the frozen text encoder for training, where captions are encoded in each step."""

    parallel_compilation: bool = False
    """With compilation of blocks: before the first step, compile the distinct blocks for all sizes of images in one
    process per core, into Inductor's cache on disk (TORCHINDUCTOR_CACHE_DIR)."""

    cuda_graphs: bool = False
    """Launch each compiled part as one CUDA graph, for small batches per GPU, at which the host is the limit. Needs
    compilation, trainer.parallelism ddp (FSDP gathers weights to changing addresses), one microbatch per step (the next
    one would overwrite the gradients), one size of images, and no trainer.activation_checkpointing."""

    accumulate_locally: bool = True
    """With fsdp, without trainer.reshard_after_forward, with trainer.reduce_precision fp32 (in which microbatches are
    added up), and with several microbatches per rank: gather and round the weights and average the gradients once per
    step instead of once per microbatch; takes 4 bytes per weight on each rank."""

    log_late: bool = False
    """Read the loss and the gradient norm of a step when the next one is queued, so that a GPU always has work. Logged
    numbers keep their steps. The guard checks a loss one step later, or before a checkpoint is saved."""

    cudnn_benchmark: bool = True
    """Let cuDNN benchmark its algorithms for each shape; never with trainer.deterministic."""
