"""Configuration of the speed of the U-Net. Results change by rounding only."""

from dataclasses import dataclass
from enum import Enum


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
    unet = "unet"


@dataclass(kw_only=True)
class PerformanceConfig:
    """Speed of the U-Net; see docs/performance.md."""

    channels_last: bool = True
    """Keep all activations in channels-last order (NHWC), the native order of convolutions on tensor cores."""

    fused_norms: bool = True
    """With channels_last and compilation: use a GroupNorm that the compiler fuses with the convolution's bias, the
    timestep embedding and the SiLU."""

    fused_projections: bool = True
    """Use one matrix product for queries, keys and values (self-attention), or keys and values (cross-attention)."""

    attention: AttentionBackend = AttentionBackend.auto
    """Attention kernel; one that does not support the data is an error. cudnn: self-attention only, torch chooses for
    cross-attention. auto: cudnn on Hopper and Blackwell (compute capability 9.0 and 10.0) in half precision without
    trainer.deterministic; elsewhere torch chooses."""

    compilation: Compilation = Compilation.auto
    """Compile the U-Net for training: block by block (blocks), or as a whole (unet), which fuses more, but with fsdp
    makes it one unit without overlap of communication and arithmetic. auto: blocks on a GPU, none on a CPU."""

    cuda_graphs: bool = False
    """Launch each compiled part as one CUDA graph, for small batches per GPU, at which the host is the limit. Needs
    compilation, trainer.parallelism ddp (FSDP gathers weights to changing addresses), one microbatch per step (the next
    one would overwrite the gradients), one size of images, and no trainer.activation_checkpointing."""

    accumulate_locally: bool = True
    """With fsdp, without trainer.reshard_after_forward, and with several microbatches per rank: gather and round the
    weights and average the gradients once per step instead of once per microbatch; takes 4 bytes per weight on each
    rank."""

    cudnn_benchmark: bool = True
    """Let cuDNN benchmark its algorithms for each shape; never with trainer.deterministic."""
