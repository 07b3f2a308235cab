"""Correctness on a GPU before its speed counts, and the rates of attention kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from composer import Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.runs import PlainLoop, run_config, train_deterministically
from benchmarks.steps import seconds_of
from diffusion.ema.averaging import full_tensor
from diffusion.models.networks import text_width_of
from diffusion.operations.checks.nodes import time_runs
from diffusion.randomness import Purpose, normal

REPEATS = 10
"""Calls between two waits for the device."""


def measure_precision(
    device: torch.device, *, stock: Sequence[str], overrides: Sequence[str], **run: Any
) -> dict[str, Any]:
    """Compare forward and backward pass of the U-Net, and of a stock one in the same precision, with stock float64.

    Returns:
        By kind of U-Net, `ours_` and `stock_`: `output_error` and `gradient_error` (of all weights): norm of the
        difference over the norm.
    """
    found = {
        name: _passes(device, dtype, overrides=options, **run)
        for name, dtype, options in (
            ("exact", torch.float64, stock),
            ("stock", torch.float32, stock),
            ("ours", torch.float32, overrides),
        )
    }
    return {
        f"{name}_{part}_error": ((ours - exact).norm() / exact.norm()).item()
        for name in ("ours", "stock")
        for part, ours, exact in zip(("output", "gradient"), found[name], found["exact"], strict=True)
    }


def _passes(device: torch.device, dtype: torch.dtype, **run: Any) -> tuple[Tensor, Tensor]:
    """Output and gradient of all weights of a network, float64 on the CPU; autocast but for float64."""
    loop = PlainLoop(run_config(**run), device)
    network, generator = loop.model.network.to(dtype), torch.Generator().manual_seed(0)
    means = loop.samples["latent_mean"][: run["batch_size"]]
    target = torch.randn(means.shape, generator=generator)
    size = (len(means), loop.samples["token_ids"].shape[-1], text_width_of(network))
    text = torch.randn(size, generator=generator)
    timesteps = torch.randint(1000, (len(means),), generator=generator).to(device)
    with loop.autocast if dtype != torch.float64 else torch.autocast(device.type, enabled=False):
        output = network(means.to(dtype), timesteps, text.to(device, dtype), return_dict=False)[0]
    F.mse_loss(output.to(dtype), target.to(device, dtype)).backward()
    gradient = torch.cat([parameter.grad.flatten().double().cpu() for parameter in network.parameters()])
    return output.detach().double().cpu(), gradient


def measure_attention(
    device: torch.device, *, backend: str, batch_size: int, num_heads: int, num_queries: int, num_keys: int
) -> dict[str, Any]:
    """Time one kernel of attention in bf16, with heads of 64.

    Returns:
        `forward_ms`, `backward_ms` and their rates `forward_tflops` and `backward_tflops` (4 and 8 N M D operations
        per head and image; nothing recomputed).
    """
    shapes = [(batch_size, num_heads, num, 64) for num in (num_queries, num_keys, num_keys)]
    leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    query, key, value = leaves
    with sdpa_kernel(getattr(SDPBackend, backend)):
        forward = _rate(lambda: F.scaled_dot_product_attention(query, key, value), device)
        attended = F.scaled_dot_product_attention(query, key, value)
    gradient = torch.randn_like(attended)
    backward = _rate(lambda: torch.autograd.grad(attended, leaves, gradient, retain_graph=True), device)
    flops = 4 * batch_size * num_heads * num_queries * num_keys * 64
    return {
        "forward_ms": 1000 / forward,
        "backward_ms": 1000 / backward,
        "forward_tflops": flops * forward / 1e12,
        "backward_tflops": 2 * flops * backward / 1e12,
    }


def measure_normals(device: torch.device, *, num_samples: int, shape: Sequence[int]) -> dict[str, Any]:
    """Draw the same normal numbers on the device and on the CPU.

    Returns:
        `largest_difference` between the two, absolute; `milliseconds` of a draw on the device.
    """
    step, sample = torch.full((num_samples,), 7), torch.arange(num_samples)
    expected = normal(17, Purpose.NOISE, step, sample, tuple(shape))
    step, sample = step.to(device), sample.to(device)
    found = normal(17, Purpose.NOISE, step, sample, tuple(shape))
    rate = _rate(lambda: normal(17, Purpose.NOISE, step, sample, tuple(shape)), device)
    return {"largest_difference": (found.cpu() - expected).abs().max().item(), "milliseconds": 1000 / rate}


def measure_resumption(device: torch.device, **run: Any) -> dict[str, Any]:
    """Train four steps with `trainer.deterministic`, at once, again, and stopped after two and resumed.

    Returns:
        `different_when_repeated` and `different_when_resumed`: tensors of weights and optimizer that are not equal to
        the bit, and `num_tensors`.
    """
    whole, repeated, resumed = (_state(train_deterministically(lengths, **run)) for lengths in ([4], [4], [2, 4]))
    return {
        "different_when_repeated": _num_different(whole, repeated),
        "different_when_resumed": _num_different(whole, resumed),
        "num_tensors": len(whole),
    }


def measure_samples(device: torch.device, *, num_inference_steps: int, **run: Any) -> dict[str, Any]:
    """Generate a batch of images with random weights, in bf16 on a GPU.

    Returns:
        `first_seconds` and `seconds` (of all images, the second time), and `is_finite`.
    """
    model = PlainLoop(run_config(**run), device).model.eval()
    if device.type == "cuda":
        model.to(torch.bfloat16)
    prompts, images = ["a red circle"] * run["batch_size"], []

    def generate() -> None:
        options = {"num_inference_steps": num_inference_steps, "batch_size": len(prompts), "progress": False}
        images.append(model.generate(prompts, seed=0, output="tensor", **options))

    first, second = (seconds_of(generate, device) for _ in range(2))
    return {"first_seconds": first, "seconds": second, "is_finite": bool(torch.isfinite(images[-1]).all())}


def _rate(run: Callable[[], Any], device: torch.device) -> float:
    """Runs per second, the best of five rounds."""
    return REPEATS / min(time_runs(lambda: [run() for _ in range(REPEATS)], device, 5))


def _state(trainer: Trainer) -> list[Tensor]:
    """Weights and optimizer state."""
    weights = [parameter.detach() for parameter in trainer.state.model.parameters()]
    [optimizer] = trainer.state.optimizers
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [full_tensor(tensor).cpu() for tensor in (*weights, *moments)]


def _num_different(one: Sequence[Tensor], other: Sequence[Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
