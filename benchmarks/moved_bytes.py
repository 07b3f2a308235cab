"""Bytes that the operations of a training step read and write, counted on the meta device."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusion.config.model import Architecture, Compilation, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.models import fast
from diffusion.models.architectures import ARCHITECTURES, build_unet
from diffusion.models.fast.norms import FusedGroupNorm
from diffusion.planning.memory import FlashAttentionShapes

PRODUCTS = ("convolution", "mm")
"""Parts of the names of operations that are bound by arithmetic; attention is not counted at all."""


@dataclass
class MovedBytes:
    """Bytes for one image."""

    products: int = 0
    """Of convolutions and matrix products."""

    by_operation: Counter[str] = field(default_factory=Counter)
    """Of everything else."""

    @property
    def other(self) -> int:
        """Of everything but products."""
        return self.by_operation.total()


class _Count(TorchDispatchMode):
    """Adds up the bytes of inputs and outputs of each operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = MovedBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.name().startswith(("aten::detach", "aten::empty", "aten::_unsafe_view")):
            return result
        self.add(func.name().split("::")[1].split(".")[0], args, kwargs, result)
        return result

    def add(self, name: str, *values: Any) -> None:
        """Count the tensors among the inputs and outputs of an operation."""
        tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if any(product in name for product in PRODUCTS):
            self.moved.products += num_bytes
        else:
            self.moved.by_operation[name] += num_bytes


class _FusedNorm(torch.autograd.Function):
    """A compiled GroupNorm, of whose passes over memory the additions before it and the SiLU are parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: _Count) -> Tensor:
        ctx.save_for_backward(x)
        ctx.counter, y = counter, torch.empty_like(x)
        counter.add("group_norm", x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        result = torch.empty_like(x)
        ctx.counter.add("group_norm_backward", x, *gradients, result)
        return result, None


@functools.cache
def count_moved_bytes(architecture: Architecture, resolution: int, is_fast: bool = False) -> MovedBytes:
    """Count for forward and backward pass of the U-Net in bf16, eager, one image; the optimizer is not counted.

    Args:
        architecture: of the U-Net.
        resolution: side of the image in pixels.
        is_fast: the U-Net as `diffusion.models.fast` changes it; else as diffusers builds it.
    """
    spec = ARCHITECTURES[architecture]
    side, dtype = resolution // spec.vae_factor, torch.bfloat16
    with torch.device("meta"):
        unet: Any = build_unet(ModelConfig(architecture=architecture))
        latents = torch.empty(1, unet.config["in_channels"], side, side, dtype=dtype)
        text = torch.empty(1, spec.max_tokens, unet.config["cross_attention_dim"], dtype=dtype)
        timesteps, target = torch.empty(1, dtype=torch.int64), torch.empty(latents.shape)
    torch.nn.Module.to(unet, dtype)
    counter = _Count()
    if is_fast:
        fast.apply(unet, PerformanceConfig(compilation=Compilation.none), Device.gpu)
        for norm in unet.modules():
            if isinstance(norm, FusedGroupNorm):
                norm.forward = lambda x, shift=None: _FusedNorm.apply(x, counter)  # pyright: ignore[reportAttributeAccessIssue]
    unet.set_attn_processor(FlashAttentionShapes())
    with counter:
        prediction = unet(latents, timesteps, text, return_dict=False)[0]
        loss = F.mse_loss(prediction.float(), target)
        # Without accumulation, which on the meta device copies gradients of other strides than a GPU's.
        torch.autograd.grad(loss, list(unet.parameters()), allow_unused=True)
    return counter.moved


def measure_moved_bytes(architecture: Architecture, resolutions: Sequence[int]) -> dict[str, Any]:
    """Count at several sizes.

    Returns:
        By resolution and kind of U-Net (`stock`, `ours`) the gigabytes of everything but products per image, and the
        operations that move most; `ratio PX`, ours over stock.
    """
    result: dict[str, Any] = {"architecture": architecture.value}
    for side in resolutions:
        counted = {kind: count_moved_bytes(architecture, side, kind == "ours") for kind in ("stock", "ours")}
        result[f"ratio {side}"] = counted["ours"].other / counted["stock"].other
        for kind, moved in counted.items():
            result[f"gigabytes {side} {kind}"] = moved.other / 1e9
            result[f"operations {side} {kind}"] = dict(moved.by_operation.most_common(12))
    return result
