"""Triton kernels of GroupNorm with an optional SiLU, for channels-last tensors.

A tensor [B, C, H, W] in channels-last order is a matrix [P, C] per sample, of which each program takes a tile. Sums
over a group are made of those of its tiles by a second kernel, in fp32 and in a fixed order: the same input gives the
same bits. Variances are merged from those of the tiles, not taken as a difference of large numbers (Chan et al.,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979, equation 2.1).

Shape letters: B batch, C channels, G groups, P positions (H*W), T tiles along the positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# pyright: reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

ROWS, COLUMNS, TILES = 64, 64, 16
"""Positions and channels of a tile; tiles that the second kernel reads at a time."""


@triton.jit
def _place(num_positions, num_channels, rows: tl.constexpr, columns: tl.constexpr):
    """This program's sample and channels, and the offsets and the mask of its tile."""
    sample = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * rows + tl.arange(0, rows)
    channel = tl.program_id(2) * columns + tl.arange(0, columns)
    inside = (position < num_positions)[:, None] & (channel < num_channels)[None, :]
    offsets = (sample * num_positions + position)[:, None] * num_channels + channel[None, :]
    return sample, channel, offsets, inside


@triton.jit
def _normalise(x, mean, rstd, sample, channel, offsets, inside, num_channels, num_groups):
    """The tile's values with mean 0 and variance 1, and the offsets of its channels' groups in [B, G]."""
    group = sample * num_groups + channel // (num_channels // num_groups)
    valid = channel < num_channels
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    centre = tl.load(mean + group, mask=valid, other=0.0)
    scale = tl.load(rstd + group, mask=valid, other=0.0)
    return (values - centre[None, :]) * scale[None, :], group


@triton.jit
def _affine(weight, bias, channel, num_channels):
    """The channels' weight and bias in fp32, [1, columns] each."""
    valid = channel < num_channels
    scale = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    return scale[None, :], shift[None, :]


@triton.jit
def _upstream(gradient, normal, scale, shift, offsets, inside, silu: tl.constexpr):
    """Gradient of the tile before the SiLU."""
    upstream = tl.load(gradient + offsets, mask=inside, other=0.0).to(tl.float32)
    if silu:
        before = normal * scale + shift
        sigmoid = tl.sigmoid(before)
        upstream = upstream * sigmoid * (1.0 + before * (1.0 - sigmoid))
    return upstream


@triton.jit
def _group_tiles(start, num_tiles, num_channels, num_groups, tiles: tl.constexpr, width: tl.constexpr):
    """Offsets and mask of this program's group in some tiles of [B, T, C], and the numbers of these tiles."""
    size = num_channels // num_groups
    tile, member = start + tl.arange(0, tiles), tl.arange(0, width)
    inside = (tile < num_tiles)[:, None] & (member < size)[None, :]
    row = tl.program_id(0).to(tl.int64) * num_tiles + tile
    return row[:, None] * num_channels + (tl.program_id(1) * size + member)[None, :], inside, tile


@triton.jit
def _moments_kernel(x, means, squares, num_positions, num_channels, rows: tl.constexpr, columns: tl.constexpr):
    """Mean of each channel of a tile and the sum of squared distances from it: [B, T, C] each."""
    sample, channel, offsets, inside = _place(num_positions, num_channels, rows, columns)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / tl.minimum(num_positions - tl.program_id(1) * rows, rows)
    distance = tl.where(inside, values - mean[None, :], 0.0)
    out = (sample * tl.num_programs(1) + tl.program_id(1)) * num_channels + channel
    tl.store(means + out, mean, mask=channel < num_channels)
    tl.store(squares + out, tl.sum(distance * distance, axis=0), mask=channel < num_channels)


@triton.jit
def _statistics_kernel(
    means,
    squares,
    mean,
    rstd,
    eps,
    num_positions,
    num_channels,
    num_tiles,
    num_groups,
    rows: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
):
    """Merge the moments of a group's tiles: mean and reciprocal standard deviation, [B, G] each."""
    num_values = num_positions * (num_channels // num_groups)
    total = tl.zeros([tiles, width], tl.float32)
    for start in range(0, num_tiles, tiles):
        offsets, inside, tile = _group_tiles(start, num_tiles, num_channels, num_groups, tiles, width)
        count = tl.minimum(num_positions - tile * rows, rows).to(tl.float32)[:, None]
        total += tl.load(means + offsets, mask=inside, other=0.0) * count
    centre = tl.sum(tl.sum(total, axis=1), axis=0) / num_values
    spread = tl.zeros([tiles, width], tl.float32)
    for start in range(0, num_tiles, tiles):
        offsets, inside, tile = _group_tiles(start, num_tiles, num_channels, num_groups, tiles, width)
        count = tl.minimum(num_positions - tile * rows, rows).to(tl.float32)[:, None]
        distance = tl.load(means + offsets, mask=inside, other=0.0) - centre
        spread += tl.where(
            inside, tl.load(squares + offsets, mask=inside, other=0.0) + count * distance * distance, 0.0
        )
    variance = tl.sum(tl.sum(spread, axis=1), axis=0) / num_values
    out = tl.program_id(0) * num_groups + tl.program_id(1)
    tl.store(mean + out, centre)
    tl.store(rstd + out, 1.0 / tl.sqrt(variance + eps))


@triton.jit
def _apply_kernel(
    x,
    weight,
    bias,
    mean,
    rstd,
    y,
    num_positions,
    num_channels,
    num_groups,
    silu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Normalise, scale, shift and activate a tile."""
    sample, channel, offsets, inside = _place(num_positions, num_channels, rows, columns)
    normal, _ = _normalise(x, mean, rstd, sample, channel, offsets, inside, num_channels, num_groups)
    scale, shift = _affine(weight, bias, channel, num_channels)
    out = normal * scale + shift
    if silu:
        out = out * tl.sigmoid(out)
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_sums_kernel(
    gradient,
    x,
    weight,
    bias,
    mean,
    rstd,
    sums,
    products,
    num_positions,
    num_channels,
    num_groups,
    silu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Over the positions of a tile, sums of the gradient and of its product with the normalised values: [B, T, C]."""
    sample, channel, offsets, inside = _place(num_positions, num_channels, rows, columns)
    normal, _ = _normalise(x, mean, rstd, sample, channel, offsets, inside, num_channels, num_groups)
    scale, shift = _affine(weight, bias, channel, num_channels)
    upstream = _upstream(gradient, normal, scale, shift, offsets, inside, silu)
    out = (sample * tl.num_programs(1) + tl.program_id(1)) * num_channels + channel
    tl.store(sums + out, tl.sum(upstream, axis=0), mask=channel < num_channels)
    tl.store(products + out, tl.sum(upstream * normal, axis=0), mask=channel < num_channels)


@triton.jit
def _group_sums_kernel(
    sums,
    products,
    weight,
    group_sums,
    group_products,
    num_positions,
    num_channels,
    num_tiles,
    num_groups,
    tiles: tl.constexpr,
    width: tl.constexpr,
):
    """Means over a group of the weighted gradient and of its product with the normalised values: [B, G] each."""
    size = num_channels // num_groups
    member = tl.arange(0, width)
    scale = tl.load(weight + tl.program_id(1) * size + member, mask=member < size, other=0.0).to(tl.float32)
    total, product = tl.zeros([tiles, width], tl.float32), tl.zeros([tiles, width], tl.float32)
    for start in range(0, num_tiles, tiles):
        offsets, inside, _ = _group_tiles(start, num_tiles, num_channels, num_groups, tiles, width)
        total += tl.load(sums + offsets, mask=inside, other=0.0) * scale[None, :]
        product += tl.load(products + offsets, mask=inside, other=0.0) * scale[None, :]
    out = tl.program_id(0) * num_groups + tl.program_id(1)
    tl.store(group_sums + out, tl.sum(tl.sum(total, axis=1), axis=0) / (num_positions * size))
    tl.store(group_products + out, tl.sum(tl.sum(product, axis=1), axis=0) / (num_positions * size))


@triton.jit
def _input_gradient_kernel(
    gradient,
    x,
    weight,
    bias,
    mean,
    rstd,
    group_sums,
    group_products,
    input_gradient,
    num_positions,
    num_channels,
    num_groups,
    silu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Gradient of a tile of the input."""
    sample, channel, offsets, inside = _place(num_positions, num_channels, rows, columns)
    normal, group = _normalise(x, mean, rstd, sample, channel, offsets, inside, num_channels, num_groups)
    scale, shift = _affine(weight, bias, channel, num_channels)
    upstream = _upstream(gradient, normal, scale, shift, offsets, inside, silu)
    valid = channel < num_channels
    along = tl.load(group_products + group, mask=valid, other=0.0)[None, :]
    constant = tl.load(group_sums + group, mask=valid, other=0.0)[None, :]
    spread = tl.load(rstd + group, mask=valid, other=0.0)[None, :]
    out = (upstream * scale - constant - normal * along) * spread
    tl.store(input_gradient + offsets, out.to(input_gradient.dtype.element_ty), mask=inside)


def _grid(x: Tensor) -> tuple[int, int, int]:
    """Programs by sample, by tile along the positions and by tile along the channels."""
    return x.shape[0], triton.cdiv(x.shape[2] * x.shape[3], ROWS), triton.cdiv(x.shape[1], COLUMNS)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise [B, C, H, W], channels last.

    Returns:
        The result in the dtype and order of x; mean and reciprocal standard deviation of the groups, float32 [B, G].
    """
    grid, (num_channels, num_positions) = _grid(x), (x.shape[1], x.shape[2] * x.shape[3])
    means, squares = x.new_empty(2, grid[0], grid[1], num_channels, dtype=torch.float32)
    mean = x.new_empty(grid[0], num_groups, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    y, tile = torch.empty_like(x), {"rows": ROWS, "columns": COLUMNS}
    width = triton.next_power_of_2(num_channels // num_groups)
    _moments_kernel[grid](x, means, squares, num_positions, num_channels, **tile)
    _statistics_kernel[(grid[0], num_groups)](
        means, squares, mean, rstd, eps, num_positions, num_channels, grid[1], num_groups, ROWS, TILES, width
    )
    _apply_kernel[grid](x, weight, bias, mean, rstd, y, num_positions, num_channels, num_groups, silu, **tile)
    return y, mean, rstd


def backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; `gradient` and `x` are channels last."""
    grid, (num_channels, num_positions) = _grid(x), (x.shape[1], x.shape[2] * x.shape[3])
    sums, products = x.new_empty(2, grid[0], grid[1], num_channels, dtype=torch.float32)
    group_sums, group_products = torch.empty_like(mean), torch.empty_like(mean)
    input_gradient, tile = torch.empty_like(x), {"rows": ROWS, "columns": COLUMNS}
    width = triton.next_power_of_2(num_channels // num_groups)
    shared = (gradient, x, weight, bias, mean, rstd)
    sizes = (num_positions, num_channels)
    _gradient_sums_kernel[grid](*shared, sums, products, *sizes, num_groups, silu, **tile)
    _group_sums_kernel[(grid[0], num_groups)](
        sums, products, weight, group_sums, group_products, *sizes, grid[1], num_groups, TILES, width
    )
    _input_gradient_kernel[grid](*shared, group_sums, group_products, input_gradient, *sizes, num_groups, silu, **tile)
    return input_gradient, products.sum(dim=(0, 1)).to(weight.dtype), sums.sum(dim=(0, 1)).to(bias.dtype)
