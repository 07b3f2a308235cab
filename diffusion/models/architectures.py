"""Architectures as local configuration: no hub is asked for what a model looks like.

Each is a set of keyword arguments for the Hugging Face classes. `stable_diffusion_2` is the configuration of
stable-diffusion-2-base (the hub repository was withdrawn in November 2025); `tiny` trains on two CPU cores.
"""

from dataclasses import dataclass
from typing import Any

from diffusion.config.model import Architecture


@dataclass(frozen=True, kw_only=True)
class ArchitectureSpec:
    """Keyword arguments from which the parts of a latent diffusion model are built."""

    unet: dict[str, Any]
    """UNet2DConditionModel."""

    vae: dict[str, Any]
    """AutoencoderKL."""

    text_encoder: dict[str, Any]
    """CLIPTextConfig."""

    noise_schedule: dict[str, Any]
    """DDPMScheduler, without the prediction type."""

    max_tokens: int
    """Length of a caption in tokens (L)."""

    @property
    def vae_factor(self) -> int:
        """Pixels per latent position along one side."""
        return 2 ** (len(self.vae["block_out_channels"]) - 1)


NOISE_SCHEDULE = {
    "num_train_timesteps": 1000,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
}

STABLE_DIFFUSION_2 = ArchitectureSpec(
    unet={
        "sample_size": 64,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (320, 640, 1280, 1280),
        "layers_per_block": 2,
        "attention_head_dim": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
    },
    vae={
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "latent_channels": 4,
        "sample_size": 512,
        "scaling_factor": 0.18215,
    },
    text_encoder={
        "vocab_size": 49408,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 23,
        "num_attention_heads": 16,
        "max_position_embeddings": 77,
        "hidden_act": "gelu",
        "projection_dim": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    noise_schedule=NOISE_SCHEDULE,
    max_tokens=77,
)

TINY = ArchitectureSpec(
    unet={
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (64, 128),
        "layers_per_block": 1,
        "attention_head_dim": (2, 4),
        "cross_attention_dim": 64,
        "norm_num_groups": 8,
        "use_linear_projection": True,
    },
    vae={
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "block_out_channels": (16, 32, 64),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 2,
        "mid_block_add_attention": False,
        "sample_size": 32,
        "scaling_factor": 1.0,
    },
    text_encoder={
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 0,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "hidden_act": "gelu",
        "projection_dim": 64,
        "bos_token_id": 2046,
        "eos_token_id": 2047,
        "pad_token_id": 0,
    },
    noise_schedule=NOISE_SCHEDULE,
    max_tokens=24,
)

ARCHITECTURES = {Architecture.stable_diffusion_2: STABLE_DIFFUSION_2, Architecture.tiny: TINY}
