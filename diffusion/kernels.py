"""Random numbers of samples by one Triton kernel, instead of 130 launches and more of torch operations.

The definition is in `diffusion.randomness`. It runs on a GPU or in Triton's interpreter.

Shape letters: B batch, N numbers per sample.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

_COUNTERS = 256
"""Counters per program, with four words each."""

_TO_ANGLE = tl.constexpr(2.0 * math.pi * 2.0**-32)


@triton.jit
def _box_muller(first, second):
    """Two standard normal numbers from two words."""
    radius = tl.sqrt_rn(-2.0 * tl.log((first.to(tl.float32) + 0.5) * 2.0**-32))
    angle = second.to(tl.float32) * _TO_ANGLE
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit(do_not_specialize=["key"])
def _draw_kernel(out, step, sample, key, num, counters: tl.constexpr):
    """Numbers [B, N]: standard normal if `out` is float32, else 32-bit words."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * counters + tl.arange(0, counters)
    step = tl.load(step + row).to(tl.uint32)
    address = tl.load(sample + row)
    a, b, c, d = tl.philox(key, position, step, address.to(tl.uint32), (address >> 32).to(tl.uint32))
    if out.dtype.element_ty == tl.float32:
        a, b = _box_muller(a, b)
        c, d = _box_muller(c, d)
    column = tl.program_id(1) * counters * 4 + tl.arange(0, 4 * counters)
    numbers = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(out.dtype.element_ty)
    tl.store(out + row * num + column, numbers, mask=column < num)


@torch.library.custom_op("diffusion::draw", mutates_args=())
def draw(key: int, step: Tensor, sample: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    """Draw random numbers.

    Args:
        key: seed + purpose * 2^32, with a purpose above 0: 64 bits for all, so that one kernel is compiled.
        step: int64 [B], optimizer step or epoch.
        sample: int64 [B], addresses of the samples.
        num: N.
        dtype: int64 for 32-bit words, float32 for standard normal numbers.

    Returns:
        [B, N] of the dtype.
    """
    out = sample.new_empty(sample.shape[0], num, dtype=dtype)
    grid = (sample.shape[0], triton.cdiv(num, 4 * _COUNTERS))
    _draw_kernel[grid](out, step.contiguous(), sample.contiguous(), key, num, counters=_COUNTERS)
    return out


@draw.register_fake
def _(key: int, step: Tensor, sample: Tensor, num: int, dtype: torch.dtype) -> Tensor:
    return sample.new_empty(sample.shape[0], num, dtype=dtype)
