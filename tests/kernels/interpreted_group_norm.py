"""Compare the kernels with float64, in Triton's interpreter (TRITON_INTERPRET=1) or on a GPU (`cuda`); print JSON."""

import itertools
import json
import sys

import torch
import torch.nn.functional as F

from diffusion.kernels.group_norm import group_norm

SHAPES = [(2, 12, 3, 5, 4), (1, 40, 8, 16, 4), (2, 80, 9, 15, 1), (3, 64, 2, 2, 32), (1, 24, 33, 33, 8)]
"""B, C, H, W and groups: parts of tiles along positions and channels, several tiles, more than one round of them."""


def reference(x, weight, bias, num_groups, silu):
    y = F.group_norm(x, num_groups, weight, bias, 1e-5)
    return F.silu(y) if silu else y


def relative(value, expected):
    return float((value.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def compare(shape, dtype, weight_dtype, silu, offset, device):
    *size, num_groups = shape
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(size, generator=generator) + offset).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(size[1], generator=generator).to(weight_dtype) for _ in range(2))
    gradient = torch.randn(size, generator=generator).to(dtype)  # In NCHW order.
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = reference(*exact, num_groups, silu)
    ours = [tensor.to(device).requires_grad_() for tensor in (x, weight, bias)]
    y = group_norm(*ours, num_groups, 1e-5, silu)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.backward(gradient.to(device))
    expected.backward(gradient.double())
    pairs = [(y, expected), *((one.grad, other.grad) for one, other in zip(ours, exact, strict=True))]
    return max(relative(one.detach(), other.detach()) for one, other in pairs)


def main() -> None:
    device = sys.argv[1]
    errors: dict[str, float] = {}
    for shape, silu in itertools.product(SHAPES, (False, True)):
        errors["float32"] = max(
            errors.get("float32", 0.0), compare(shape, torch.float32, torch.float32, silu, 0.0, device)
        )
    for dtype, weight_dtype in itertools.product((torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)):
        name = str(dtype).removeprefix("torch.")
        error = compare(SHAPES[1], dtype, weight_dtype, True, 0.0, device)
        errors[name] = max(errors.get(name, 0.0), error)
    errors["large mean"] = compare(SHAPES[1], torch.float32, torch.float32, True, 300.0, device)

    x, weight, bias = torch.randn(2, 8, 4, 4, device=device), torch.rand(8, device=device), torch.rand(8, device=device)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    checks = torch.library.opcheck(torch.ops.diffusion.group_norm.default, (*leaves, 4, 1e-5, True))
    errors.update({f"opcheck {name}": 0.0 for name, result in checks.items() if result == "SUCCESS"})
    compiled = torch.compile(
        lambda x: group_norm(x, weight, bias, 4, 1e-5, True).square(), backend="aot_eager", fullgraph=True
    )
    errors["compiled"] = relative(
        compiled(x).detach(), group_norm(x, weight, bias, 4, 1e-5, True).square().double().cpu().detach()
    )
    sys.stdout.write(json.dumps(errors))


if __name__ == "__main__":
    main()
