"""Faster networks: the same parameters, names and results up to rounding."""

from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import nn

from diffusion.config.model import AttentionBackend, Compilation, PerformanceConfig
from diffusion.config.training import Device
from diffusion.errors import ConfigurationError
from diffusion.models.fast.attention import set_attention
from diffusion.models.fast.channels_last import keep_channels_last
from diffusion.models.fast.compilation import compile_modules, find_units, mark_steps, outer_norms, split_geglu


def resolve_compilation(compilation: Compilation, device: Device) -> Compilation:
    """Resolve `auto` for a device."""
    if compilation is not Compilation.auto:
        return compilation
    return Compilation.blocks if device is Device.gpu else Compilation.none


def apply(network: nn.Module, config: PerformanceConfig, device: Device) -> None:
    """Change a network in place, before it is sharded or has adapters: classes of modules only, no parameter.

    Raises:
        ConfigurationError: the device does not support CUDA graphs or the kernel of the attention.
    """
    if device is Device.cpu and config.cuda_graphs:
        raise ConfigurationError("performance.cuda_graphs is for GPUs, and this run is on a CPU: set it to false")
    if device is Device.cpu and config.attention in (AttentionBackend.cudnn, AttentionBackend.efficient):
        raise ConfigurationError(
            f"performance.attention={config.attention.value} is for GPUs, and this run is on a CPU: set it to auto"
        )
    if config.channels_last and isinstance(network, UNet2DConditionModel):
        keep_channels_last(network, is_fused=config.fused_norms)
    set_attention(network, config.attention, is_fused=config.fused_projections)
    if config.split_geglu:
        split_geglu(network)
    if config.cuda_graphs:
        mark_steps(network)
    compilation = resolve_compilation(config.compilation, device)
    if compilation is Compilation.unet:
        compile_modules([network], cuda_graphs=config.cuda_graphs)
        return
    units = find_units(network, compilation)
    network.fsdp_wrap_fn = set(units).__contains__  # pyright: ignore[reportArgumentType]
    if compilation is not Compilation.none:
        compile_modules([*units, *outer_norms(network, units)], cuda_graphs=config.cuda_graphs)
