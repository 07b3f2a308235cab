"""GroupNorm with an optional SiLU as one operator that `torch.compile` keeps whole.

It keeps its input, and neither what the norm gives nor what the SiLU takes; statistics are fp32 whatever the input is;
the result is channels last, which CUDA's own GroupNorm is not. Triton computes it, on a GPU or in Triton's interpreter.

Shape letters: B batch, C channels, G groups, H W height and width.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("diffusion::group_norm", mutates_args=())
def _group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from diffusion.kernels import group_norm_triton

    return group_norm_triton.forward(_channels_last(x), weight, bias, num_groups, eps, silu)


@torch.library.custom_op("diffusion::group_norm_backward", mutates_args=())
def _group_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from diffusion.kernels import group_norm_triton

    gradient, x = _channels_last(gradient), _channels_last(x)
    return group_norm_triton.backward(gradient, x, weight, bias, mean, rstd, num_groups, silu)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@_group_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, silu: bool) -> tuple[Tensor, ...]:
    statistics = x.new_empty(x.shape[0], num_groups, dtype=torch.float32)
    return _like(x), statistics, torch.empty_like(statistics)


@_group_norm_backward.register_fake
def _(gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _like(x), torch.empty_like(weight), torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.num_groups, _, ctx.silu = inputs
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _differentiate(ctx: Any, gradient: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _group_norm_backward(gradient, *ctx.saved_tensors, ctx.num_groups, ctx.silu)
    return *gradients, None, None, None


_group_norm.register_autograd(_differentiate, setup_context=_save)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, silu: bool) -> Tensor:
    """Normalise each group of channels, scale, shift, and apply the SiLU if asked for.

    Args:
        x: fp32, bf16 or fp16 [B, C, H, W], on a GPU; converted to channels last if it is not.
        weight: [C], of any of these dtypes.
        bias: [C].
        num_groups: divides C.
        eps: added to the variance.
        silu: x * sigmoid(x) of the result.

    Returns:
        [B, C, H, W] in the dtype of x, channels last.
    """
    return _group_norm(x, weight, bias, num_groups, eps, silu)[0]
