"""Configuration of how fast the U-Net is trained; none of it changes what is computed beyond rounding."""

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
    """What `torch.compile` takes as one graph."""

    auto = "auto"
    none = "none"
    blocks = "blocks"
    unet = "unet"


@dataclass(kw_only=True)
class PerformanceConfig:
    """Speed of the U-Net; see docs/performance.md."""

    channels_last: bool = True
    """Keep activations in channels-last order (NHWC) from end to end, as convolutions on tensor cores want them."""

    fused_norms: bool = True
    """With channels_last and compilation: GroupNorm in a form that the compiler fuses with the convolution's bias, the
    timestep's embedding and the SiLU."""

    fused_projections: bool = True
    """One matrix product for queries, keys and values of self-attention, and for keys and values of cross-attention."""

    attention: AttentionBackend = AttentionBackend.auto
    """Kernel of the attention; one that cannot take the data is an error. cudnn is for self-attention only, and leaves
    cross-attention to torch. auto is cudnn on Hopper and Blackwell (compute capability 9.0 and 10.0) in half precision
    without trainer.deterministic, elsewhere torch chooses."""

    compilation: Compilation = Compilation.auto
    """Compile the U-Net while it trains: block by block (blocks), or as a whole (unet), which fuses more, but with fsdp
    makes it one unit, whose communication does not overlap with arithmetic. auto: blocks on a GPU, none on a CPU."""

    cuda_graphs: bool = False
    """Launch each compiled part as one CUDA graph, for small shares, where the host is slower than the GPU. Needs
    compilation, trainer.parallelism ddp (FSDP gathers weights to other addresses), one microbatch per step (the next
    one would overwrite the gradients), one size of images, and no trainer.activation_checkpointing."""

    accumulate_locally: bool = True
    """With fsdp and without trainer.reshard_after_forward: where a rank has several microbatches, gather and round the
    weights and average the gradients once per step instead of for each; takes 4 bytes per weight on each rank."""

    cudnn_benchmark: bool = True
    """Let cuDNN try its algorithms for each shape and take the fastest; never with trainer.deterministic."""
