"""Rates of single operators of a device."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusion.operations.checks.nodes import measure_device, time_runs

REPEATS = 10
"""Calls between two waits for the device."""


def measure_rates(device: torch.device) -> dict[str, Any]:
    """Time a matrix product, a copy, and masked attention at a transformer's shape.

    Returns:
        As `measure_device`; `attention`: milliseconds forward and backward in bf16, 16 images of 512 px in 1,024 tokens
        beside 231 of text, 28 heads of 64, by kernel and form of the mask, or an error.
    """
    sizes = (16, 28, 1024, 231) if device.type == "cuda" else (1, 1, 16, 7)
    found: dict[str, Any] = {}
    for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH") if device.type == "cuda" else ("MATH",):
        for form in ("none", "broadcast", "expanded"):
            if (backend, form) == ("MATH", "expanded"):
                continue
            name = f"{backend.removesuffix('_ATTENTION').lower()}, mask {form}"
            try:
                found[name] = _time_attention(device, getattr(SDPBackend, backend), form, *sizes)
            except RuntimeError as error:
                found[name] = str(error)[:200]
    return {**asdict(measure_device(device)), "attention": found}


def _time_attention(
    device: torch.device, backend: SDPBackend, form: str, batch_size: int, num_heads: int, num_image: int, num_text: int
) -> list[float]:
    num_keys = num_image + num_text
    shapes = [(batch_size, num_heads, num, 64) for num in (num_image, num_keys, num_keys)]
    leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    mask = None
    if form != "none":
        mask = (torch.rand(batch_size, 1, 1, num_keys, device=device) < 0.8).contiguous()
        mask[..., :num_image] = True
        if form == "expanded":
            mask = mask.expand(-1, num_heads, num_image, -1).contiguous()
    with sdpa_kernel(backend):
        attended = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        gradient = torch.randn_like(attended)
        forward = _seconds(lambda: F.scaled_dot_product_attention(*leaves, attn_mask=mask), device)
    backward = _seconds(lambda: torch.autograd.grad(attended, leaves, gradient, retain_graph=True), device)
    return [1000 * forward, 1000 * backward]


def _seconds(run: Callable[[], Tensor | tuple[Tensor, ...]], device: torch.device) -> float:
    """Seconds of a call, the best of five rounds."""
    return min(time_runs(lambda: [run() for _ in range(REPEATS)], device, 5)) / REPEATS
