"""Norms of the U-Net: in the precision of autocast, and fused with the addition before and the SiLU after them.

Autocast runs norms in fp32 and so moves twice the bytes, although the kernels accumulate the statistics in fp32 either
way. The class of existing modules is changed in place, so that parameters, `requires_grad`, names and hooks stay
(Composer's algorithm of the same name creates new modules and so un-freezes frozen ones).

Shape letters: B batch, C channels, G groups, H W height and width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Dtype of the active autocast for the device of x, or None; there is none for the meta device."""
    device_type = x.device.type
    is_active = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_active else None


class _LowPrecision:
    """Norm whose input, weight, bias and output have the autocast dtype; the plain norm without autocast."""

    weight: Any  # A tensor, or None.
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x; same shape."""
        dtype = autocast_dtype(x)
        if dtype is None:
            return super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        weight = None if self.weight is None else self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return self._normalise(x.to(dtype), weight, bias)

    def _normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class LowPrecisionGroupNorm(_LowPrecision, nn.GroupNorm):
    """GroupNorm in the autocast dtype, of [B, C, ...]."""

    def _normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(_LowPrecision, nn.LayerNorm):
    """LayerNorm in the autocast dtype, of [..., *normalized_shape]."""

    def _normalise(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def use_low_precision_norms(module: nn.Module) -> None:
    """Change each GroupNorm and LayerNorm below a module to its low-precision form, in place."""
    for child in module.modules():
        if type(child) is nn.GroupNorm:
            child.__class__ = LowPrecisionGroupNorm
        elif type(child) is nn.LayerNorm:
            child.__class__ = LowPrecisionLayerNorm


class FusedGroupNorm(LowPrecisionGroupNorm):
    """GroupNorm of a sum with an optional SiLU: `group_norm` in compiled graphs, torch's operator otherwise.

    `fuse` changes existing modules to this class.

    Attributes:
        silu: apply SiLU.
        is_fused: use `group_norm` in compiled graphs.
        is_low_precision: compute in the dtype of autocast, like `LowPrecisionGroupNorm`, instead of fp32.
    """

    silu: bool
    is_fused: bool
    is_low_precision: bool

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Normalise and activate x + shift, [B, C, H, W] and [B, C]; same shape, channels last."""
        if self.is_fused and torch.compiler.is_compiling():
            dtype = autocast_dtype(x)
            dtype = x.dtype if dtype is None else dtype if self.is_low_precision else torch.float32
            normalised = group_norm(x, self.weight, self.bias, self.num_groups, self.eps, shift)
            return (F.silu(normalised) if self.silu else normalised).to(dtype)
        if shift is not None:
            x = x + shift[:, :, None, None].to(x.dtype)
        normalised = super().forward(x) if self.is_low_precision else nn.GroupNorm.forward(self, x)
        activated = F.silu(normalised) if self.silu else normalised
        return activated.contiguous(memory_format=torch.channels_last)  # CUDA's GroupNorm returns NCHW.


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, shift: Tensor | None) -> Tensor:
    """GroupNorm of x + shift, in a form that Inductor fuses into the fewest passes over memory.

    The moments of channels, which are adjacent in channels-last order, are merged into those of groups (Chan et al.,
    "Updating formulae and a pairwise algorithm for computing sample variances", 1979, equation 2.1). One multiplication
    and one addition per value remain. Their gradients and that of `shift` are two sums over the positions.

    Args:
        x: floating point [B, C, H, W].
        weight: [C].
        bias: [C].
        num_groups: G, divides C.
        eps: added to the variance.
        shift: [B, C], or None.

    Returns:
        float32 [B, C, H, W], in the memory format of x.
    """
    groups = (num_groups, -1)
    x = x.float()
    within, mean = (moment.unflatten(1, groups) for moment in torch.var_mean(x, dim=(2, 3), correction=0))
    added = torch.zeros_like(mean) if shift is None else shift.unflatten(1, groups)
    between, centre = torch.var_mean(mean + added, dim=2, correction=0, keepdim=True)
    rstd = torch.rsqrt(within.mean(2, keepdim=True) + between + eps)
    scale = rstd * weight.unflatten(0, groups)
    offset = bias.unflatten(0, groups) + (added - centre) * scale
    return x * scale.flatten(1)[:, :, None, None] + offset.flatten(1)[:, :, None, None]


def fuse(norm: nn.GroupNorm, *, silu: bool, is_fused: bool) -> None:
    """Change a GroupNorm to a fused one, in place."""
    is_low_precision = isinstance(norm, LowPrecisionGroupNorm)
    norm.__class__ = FusedGroupNorm
    assert isinstance(norm, FusedGroupNorm)
    norm.silu, norm.is_fused, norm.is_low_precision = silu, is_fused, is_low_precision
