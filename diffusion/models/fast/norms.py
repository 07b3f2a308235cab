"""GroupNorm that is followed by a SiLU, or not, as one module."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.kernels.group_norm import group_norm
from diffusion.models.norms import LowPrecisionGroupNorm, autocast_dtype


class FusedGroupNorm(LowPrecisionGroupNorm):
    """GroupNorm and, if `silu` is set, the SiLU after it: by our own kernel on a GPU, by torch elsewhere.

    Existing modules take on this class (`fuse`): parameters, names and hooks stay.

    Attributes:
        silu: whether the SiLU is part of it.
        has_kernel: whether our own kernel is used for tensors on a GPU.
        is_low_precision: compute in the dtype of the autocast, as `LowPrecisionGroupNorm` does, and not in fp32.
    """

    silu: bool
    has_kernel: bool
    is_low_precision: bool

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and activate x [B, C, H, W]; same shape, channels last where the kernel is used."""
        if self.has_kernel and x.is_cuda:
            dtype = autocast_dtype(x)
            dtype = x.dtype if dtype is None else dtype if self.is_low_precision else torch.float32
            return group_norm(x.to(dtype), self.weight, self.bias, self.num_groups, self.eps, self.silu)
        normalised = super().forward(x) if self.is_low_precision else nn.GroupNorm.forward(self, x)
        return F.silu(normalised) if self.silu else normalised


def fuse(norm: nn.GroupNorm, *, silu: bool, has_kernel: bool) -> None:
    """Let a GroupNorm become a fused one, in place."""
    is_low_precision = isinstance(norm, LowPrecisionGroupNorm)
    norm.__class__ = FusedGroupNorm
    assert isinstance(norm, FusedGroupNorm)
    norm.silu, norm.has_kernel, norm.is_low_precision = silu, has_kernel, is_low_precision
