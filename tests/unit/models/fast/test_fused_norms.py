import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from diffusion.models.fast.channels_last import ChannelsLastResnet
from diffusion.models.fast.compilation import compile_modules
from diffusion.models.fast.norms import FusedGroupNorm, fuse, group_norm, use_low_precision_norms
from tests.tools.inductor_aot import Graph, lowering_for_gpu, traffic
from tests.tools.triton_aot import ARCHITECTURES

SHAPES = [(2, 12, 3, 5, 4), (1, 40, 8, 16, 4), (2, 80, 9, 15, 1), (3, 64, 2, 2, 32), (1, 24, 33, 33, 8)]
"""B, C, H, W and groups."""

TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest error relative to the largest value, of result and gradients."""


def inputs(shape, dtype, weight_dtype, offset=0.0):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + offset).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], generator=generator).to(weight_dtype) for _ in range(2))
    return x, weight, bias, torch.randn(shape[:2], generator=generator).to(weight_dtype)


def largest_error(shape, dtype, weight_dtype, silu, has_shift, offset=0.0):
    *size, num_groups = shape
    leaves = inputs(size, dtype, weight_dtype, offset)[: 4 if has_shift else 3]
    ours, exact = (
        [leaf.clone().to(kind or leaf.dtype).requires_grad_() for leaf in leaves] for kind in (None, torch.float64)
    )
    x, weight, bias = ours[:3]
    y = group_norm(x, weight, bias, num_groups, 1e-5, ours[3] if has_shift else None)
    assert y.is_contiguous(memory_format=torch.channels_last)
    shifted = exact[0] + exact[3][:, :, None, None] if has_shift else exact[0]
    expected = F.group_norm(shifted, num_groups, exact[1], exact[2], 1e-5)
    y, expected = (F.silu(value) if silu else value for value in (y, expected))
    upstream = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = (y.to(dtype), *torch.autograd.grad(y.to(dtype), ours, upstream))
    wanted = (expected, *torch.autograd.grad(expected, exact, upstream.double()))
    return max(
        float((one.double() - two).abs().max() / two.abs().max()) for one, two in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_results_and_gradients_agree_with_float64(dtype):
    for shape, silu, has_shift in itertools.product(SHAPES, (False, True), (False, True)):
        for weight_dtype in {torch.float32, dtype}:
            assert largest_error(shape, dtype, weight_dtype, silu, has_shift) < TOLERANCES[dtype], shape


def test_a_mean_far_from_zero_costs_few_digits():
    assert largest_error(SHAPES[1], torch.float32, torch.float32, True, True, offset=300.0) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_norm_has_the_dtype_and_the_order_of_the_eager_one(dtype):
    norm = norm_of(16, dtype)
    x, _, _, shift = inputs((2, 16, 4, 4), torch.bfloat16, dtype)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = compiled(x, shift), norm(x, shift)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def norm_of(num_channels: int, dtype: torch.dtype, num_groups: int = 4) -> FusedGroupNorm:
    norm = nn.GroupNorm(num_groups, num_channels).to(dtype)
    use_low_precision_norms(norm)
    fuse(norm, silu=True, is_fused=True)
    assert isinstance(norm, FusedGroupNorm)
    return norm


# Inductor's code for a GPU


NUM_SAMPLES, NUM_CHANNELS, SIDE = 4, 320, 64
FEATURE_MAP = 2 * NUM_SAMPLES * NUM_CHANNELS * SIDE**2
"""Bytes in bf16."""


@functools.cache
def block_code(is_fused: bool) -> list[Graph]:
    """A ResNet block of SD2 in bf16: forward and backward pass."""
    block = ResnetBlock2D(in_channels=NUM_CHANNELS, out_channels=NUM_CHANNELS, temb_channels=1280).bfloat16()
    for norm in (block.norm1, block.norm2):
        fuse(norm, silu=True, is_fused=is_fused)
    block.__class__ = ChannelsLastResnet
    compile_modules([block])
    x = torch.empty(NUM_SAMPLES, NUM_CHANNELS, SIDE, SIDE, dtype=torch.bfloat16)
    return lowered(block, x, torch.empty(NUM_SAMPLES, 1280, dtype=torch.bfloat16))


def lowered(module: nn.Module, x: torch.Tensor, other: torch.Tensor) -> list[Graph]:
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    with lowering_for_gpu() as graphs:
        y = module(x, other.requires_grad_())
        y.backward(torch.empty_like(y))
    assert [graph.is_backward for graph in graphs] == [False, True]
    return graphs


def num_bytes(graphs: list[Graph]) -> list[int]:
    return [sum(launch.num_read + launch.num_written for launch in traffic(graph)) for graph in graphs]


@pytest.mark.slow
def test_a_resnet_block_reads_and_writes_its_feature_maps_as_rarely_as_can_be():
    forward, backward = num_bytes(block_code(True))
    weights = 2 * 2 * 2 * 9 * NUM_CHANNELS**2  # Two convolutions' weights are read and written in channels-last order.
    norms = 2 * 3  # Moments read; the result reads and writes.
    assert (forward - weights) / FEATURE_MAP < norms + 3.3, "and the sum with the input; partial sums"
    norms = 2 * (2 + 3)  # Sums read two; the gradient reads two and writes.
    assert backward / FEATURE_MAP < norms + 1.3, "and the gradient of that sum; partial sums"


@pytest.mark.slow
def test_torchs_own_norm_moves_more():
    ours, torchs = (num_bytes(block_code(is_fused)) for is_fused in (True, False))
    assert sum(torchs) > 1.01 * sum(ours)


@pytest.mark.slow
def test_reductions_run_along_neighbouring_channels():
    for graph in block_code(True):
        for launch in traffic(graph):
            definition = graph.source[graph.source.index(f"def {launch.kernel}(") - 3000 :]
            if launch.num_read > FEATURE_MAP / 2 and "_poi_" not in launch.kernel:
                assert (
                    "ReductionHint.OUTER" in definition.split(f"def {launch.kernel}(")[0].rpartition("@triton_heur")[2]
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "num_channels", "side"),
    [(torch.bfloat16, 320, 128), (torch.bfloat16, 1920, 32), (torch.bfloat16, 1280, 4), (torch.float32, 2560, 16)],
)
def test_generated_kernels_hardly_spill(dtype, num_channels, side):
    """Cases are the largest and the smallest feature map of SD2 and SDXL, one between and the widest."""
    norm = norm_of(num_channels, dtype, num_groups=32)
    compile_modules([norm])
    graphs = lowered(
        norm, torch.empty(4, num_channels, side, side, dtype=dtype), torch.empty(4, num_channels, dtype=dtype)
    )
    allowed = 64 if dtype is torch.float32 else 0  # Inductor's tiles for variances are the same for each dtype.
    for arch in ARCHITECTURES:
        kernels = [kernel for graph in graphs for kernel in graph.kernels(arch)]
        assert len(kernels) >= 6
        assert [kernel.name for kernel in kernels if kernel.num_spilled > allowed] == []
