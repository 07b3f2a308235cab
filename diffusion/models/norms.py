"""GroupNorm and LayerNorm in the precision of the surrounding autocast, instead of fp32.

Autocast runs normalisations in fp32 and so moves twice the bytes. The statistics are accumulated in fp32 by the kernels
either way. The class of existing modules is changed in place: parameters, their `requires_grad`, names and hooks stay
(Composer's algorithm of the same name creates new modules, and thereby un-freezes frozen ones).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Precision of the autocast that is active for the device of x, or None."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """GroupNorm whose input, weight, bias and output have the autocast dtype; plain GroupNorm without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]; same shape."""
        dtype = autocast_dtype(x)
        if dtype is None:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return F.group_norm(x.to(dtype), self.num_groups, weight, bias, self.eps)


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm whose input, weight, bias and output have the autocast dtype; plain LayerNorm without autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., *normalized_shape]; same shape."""
        dtype = autocast_dtype(x)
        if dtype is None:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = _cast(self.weight, dtype), _cast(self.bias, dtype)
            return F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)


def use_low_precision_norms(module: nn.Module) -> int:
    """Change each GroupNorm and LayerNorm below a module to its low-precision form, in place.

    Returns:
        How many were changed.
    """
    num_changed = 0
    for child in module.modules():
        if type(child) is nn.GroupNorm:
            child.__class__ = LowPrecisionGroupNorm
            num_changed += 1
        elif type(child) is nn.LayerNorm:
            child.__class__ = LowPrecisionLayerNorm
            num_changed += 1
    return num_changed
