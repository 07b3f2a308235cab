"""GroupNorm with what stands around it, in few passes over memory: the addition before it and the SiLU after it.

Shape letters: B batch, C channels, G groups, H W height and width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.models.norms import LowPrecisionGroupNorm, autocast_dtype


class FusedGroupNorm(LowPrecisionGroupNorm):
    """GroupNorm of a sum, and the SiLU after it if `silu` is set: for Inductor in `group_norm`'s form, else by torch.

    Existing modules take on this class (`fuse`): parameters, names and hooks stay.

    Attributes:
        silu: whether the SiLU is part of it.
        is_fused: whether a compiled graph has `group_norm` instead of torch's operator.
        is_low_precision: compute in the dtype of the autocast, as `LowPrecisionGroupNorm` does, and not in fp32.
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
    """GroupNorm of x + shift, in a form that Inductor fuses into as few passes as there can be.

    The moments are those of channels, which lie side by side in channels-last order, merged into those of groups (Chan
    et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979, equation 2.1). What
    remains is one multiplication and one addition for each value. Their gradients, and with them that of `shift`, are
    two sums over the positions.

    Args:
        x: floating point [B, C, H, W].
        weight: [C].
        bias: [C].
        num_groups: G, divides C.
        eps: added to the variance.
        shift: [B, C], or nothing.

    Returns:
        float32 [B, C, H, W], in the order of x.
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
    """Let a GroupNorm become a fused one, in place."""
    is_low_precision = isinstance(norm, LowPrecisionGroupNorm)
    norm.__class__ = FusedGroupNorm
    assert isinstance(norm, FusedGroupNorm)
    norm.silu, norm.is_fused, norm.is_low_precision = silu, is_fused, is_low_precision
