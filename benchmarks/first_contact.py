"""What has to be right on a GPU before its speed counts, and the rates of single operators.

Shape letters: B batch, C channels, H W height and width, N and M positions, D width of a head.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from composer import Trainer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.step_runs import build_on, run_config, run_trainer, seconds_of, train_on_device
from diffusion.config.model import Architecture, Compilation, ModelConfig, PerformanceConfig
from diffusion.config.training import Device
from diffusion.ema.averaging import full_tensor
from diffusion.models import fast
from diffusion.models.architectures import ARCHITECTURES, build_unet
from diffusion.models.fast.norms import use_low_precision_norms
from diffusion.operations.checks.device import measure_device, time_runs
from diffusion.randomness import Purpose, normal

REPEATS = 10
"""Calls between two waits for the device."""


def measure_rates(device: torch.device) -> dict[str, Any]:
    """Measure the rates of matrix products and of copies; see `Machine`."""
    return asdict(measure_device(device))


def measure_precision(
    device: torch.device,
    *,
    architecture: str,
    resolution: int,
    batch_size: int,
    stock: Sequence[str],
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Compare forward and backward pass of the U-Net with those of a stock one in float64.

    Args:
        device: Where.
        architecture: Of the model.
        resolution: Side of the images in pixels.
        batch_size: Number of images.
        stock: Overrides of the stock U-Net in the same precision, whose errors stand beside ours.
        overrides: Overrides of ours.

    Returns:
        By kind of U-Net, `ours_` and `stock_`: `output_error` and `gradient_error` (of all weights): norm of the
        difference over the norm.
    """
    spec = ARCHITECTURES[Architecture(architecture)]
    side, generator = resolution // spec.vae_factor, torch.Generator().manual_seed(0)
    latents, target = torch.randn(2, batch_size, spec.vae["latent_channels"], side, side, generator=generator)
    timesteps = torch.randint(1000, (batch_size,), generator=generator).to(device)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, options in {"exact": stock, "stock": stock, "ours": overrides}.items():
        with tempfile.TemporaryDirectory() as folder:
            kind = Architecture(architecture)
            settings: dict[str, Any] = {"resolution": resolution, "batch_size": batch_size, "num_steps": 1}
            config = run_config(Path(folder), kind, overrides=options, **settings)
        unet: Any = build_on(config, device).unet.train()
        dtype = torch.float64 if name == "exact" else torch.float32
        text = torch.randn(batch_size, spec.max_tokens, unet.config["cross_attention_dim"], generator=_seeded())
        inputs = (latents.to(device, dtype), timesteps, text.to(device, dtype))
        is_half = name != "exact" and config.trainer.precision.value == "amp_bf16"
        with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
            output = torch.nn.Module.to(unet, dtype)(*inputs, return_dict=False)[0]
        F.mse_loss(output.to(dtype), target.to(device, dtype)).backward()
        gradient = torch.cat([parameter.grad.flatten().double().cpu() for parameter in unet.parameters()])
        found[name] = output.detach().double().cpu(), gradient
    errors = {}
    for name in ("ours", "stock"):
        for part, ours, exact in zip(("output", "gradient"), found[name], found["exact"], strict=True):
            errors[f"{name}_{part}_error"] = ((ours - exact).norm() / exact.norm()).item()
    return errors


def measure_norm(device: torch.device, *, architecture: str, batch_size: int, side: int) -> dict[str, Any]:
    """Time the U-Net's first GroupNorm and SiLU on channels-last bf16 activations, as trained and as diffusers has it.

    Args:
        device: Where; on a GPU ours is compiled.
        architecture: Of the U-Net.
        batch_size: B.
        side: H and W.

    Returns:
        `ours_` and `stock_`: `forward_gb_per_second` and `backward_gb_per_second`, of the bytes that have to be moved:
        input and output; and input, gradient and its gradient.
    """
    is_gpu, config = device.type == "cuda", ModelConfig(architecture=Architecture(architecture))
    norms: list[Any] = []
    for is_fast in (True, False):
        with device:
            unet: Any = build_unet(config)
        use_low_precision_norms(unet)
        if is_fast:
            performance = PerformanceConfig(compilation=Compilation.none)
            fast.apply(unet, performance, Device.gpu if is_gpu else Device.cpu)
        norms.append(unet.down_blocks[0].resnets[0].norm1)
    ours, stock = norms
    x = torch.randn(batch_size, ours.num_channels, side, side, device=device, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    gradient, result = torch.randn_like(x), {}
    ways: dict[str, Callable[[Tensor], Tensor]] = {"ours": torch.compile(ours) if is_gpu else ours}
    for name, norm in {**ways, "stock": lambda x: F.silu(stock(x))}.items():
        with torch.autocast(device.type, torch.bfloat16):
            y = norm(x)
            forward = _rate(partial(norm, x), device)
        backward = _rate(partial(torch.autograd.grad, y, x, gradient, retain_graph=True), device)
        result[f"{name}_forward_gb_per_second"] = 2 * x.nbytes * forward / 1e9
        result[f"{name}_backward_gb_per_second"] = 3 * x.nbytes * backward / 1e9
    return result


def measure_attention(
    device: torch.device, *, backend: str, batch_size: int, num_heads: int, num_queries: int, num_keys: int
) -> dict[str, Any]:
    """Time one kernel of attention in bf16, with heads of 64.

    Args:
        device: Where.
        backend: Name of a `torch.nn.attention.SDPBackend`.
        batch_size: B.
        num_heads: Number of heads.
        num_queries: N.
        num_keys: M.

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
    size = tuple(shape)
    expected = normal(17, Purpose.NOISE, step, sample, size)
    step, sample = step.to(device), sample.to(device)
    found = normal(17, Purpose.NOISE, step, sample, size)
    rate = _rate(lambda: normal(17, Purpose.NOISE, step, sample, size), device)
    return {"largest_difference": (found.cpu() - expected).abs().max().item(), "milliseconds": 1000 / rate}


def measure_resumption(
    device: torch.device, *, architecture: str, resolution: int, batch_size: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Train four steps with `trainer.deterministic`, at once, again, and stopped after two and resumed.

    Returns:
        `different_when_repeated` and `different_when_resumed`: tensors of weights and optimizer that are not equal to
        the bit, and `num_tensors`.
    """
    states = []
    for lengths in ([4], [4], [2, 4]):
        with tempfile.TemporaryDirectory() as folder:
            for length in lengths:
                config = run_config(
                    Path(folder),
                    Architecture(architecture),
                    resolution=resolution,
                    batch_size=batch_size,
                    num_steps=length,
                    overrides=[*overrides, "trainer.deterministic=true", "trainer.save_interval=2ba"],
                )
                state = _state(train_on_device(config))
            states.append(state)
    whole, repeated, resumed = states
    return {
        "different_when_repeated": _num_different(whole, repeated),
        "different_when_resumed": _num_different(whole, resumed),
        "num_tensors": len(whole),
    }


def measure_synchronisations(
    device: torch.device, *, architecture: str, resolution: int, batch_size: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Count the calls in two steps of the Trainer that stop the host until the device is done, on a GPU.

    Returns:
        `num_warnings` and `places`: lines of code with their calls.
    """
    return run_trainer(
        Architecture(architecture),
        resolution=resolution,
        batch_size=batch_size,
        num_steps=6,
        overrides=overrides,
        callback="SynchronisationWatch",
        arguments={},
    )


def measure_samples(
    device: torch.device, *, architecture: str, resolution: int, num_images: int, num_inference_steps: int
) -> dict[str, Any]:
    """Generate images with random weights, in bf16 on a GPU.

    Returns:
        `first_seconds` and `seconds` (of all images, the second time), and `is_finite`.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"resolution": resolution, "batch_size": num_images, "num_steps": 1}
        config = run_config(Path(folder), Architecture(architecture), overrides=["trainer.precision=fp32"], **settings)
    model = build_on(config, device).eval()
    if device.type == "cuda":
        model.to(torch.bfloat16)
    images: list[Any] = []

    def generate() -> None:
        options: dict[str, Any] = {"num_inference_steps": num_inference_steps, "batch_size": num_images}
        images.append(model.generate(["a red circle"] * num_images, seed=0, output="tensor", progress=False, **options))

    first, second = (seconds_of(generate, device) for _ in range(2))
    return {"first_seconds": first, "seconds": second, "is_finite": bool(torch.isfinite(images[-1]).all())}


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


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
