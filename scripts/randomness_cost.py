"""Measure the cost of the addressed random numbers relative to a training step of the SD2 U-Net.

    python scripts/randomness_cost.py [--device cuda] [--batch 2] [--resolution 256]

Both are measured in turns in one process: noise, posterior, timesteps and dropped captions of a microbatch, and the
U-Net's forward and backward pass. On the CPU, where nothing is fused, operations and moved bytes are counted.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig
from diffusion.models.architectures import build_unet
from diffusion.models.objectives import TRAINING, draw_noise, draw_timesteps
from diffusion.randomness import Purpose, bernoulli, normal


class Count(TorchDispatchMode):
    """Count operations that are not views, and the bytes of their inputs and outputs."""

    num_operations = 0
    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.num_operations += 1
            tensors = [one for one in (*args, result) if isinstance(one, torch.Tensor)]
            self.num_bytes += sum(one.numel() * one.element_size() for one in tensors)
        return result


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time one call to its end."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=2, help="images of a microbatch")
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    device = torch.device(options.device)
    side = options.resolution // 8
    step = torch.full((options.batch,), 7, device=device)
    sample = torch.arange(options.batch, device=device)

    def draw() -> None:
        draw_noise(ObjectiveConfig(), TRAINING, 17, step, sample, (4, side, side))
        normal(17, Purpose.POSTERIOR, step, sample, (4, side, side))
        draw_timesteps(TRAINING, 17, step, sample, 1000)
        bernoulli(17, Purpose.CAPTION_DROP, step, sample, 0.1)

    count = Count()
    if device.type == "cpu":
        with count:
            draw()
    with device:
        unet = build_unet(ModelConfig(architecture=Architecture.stable_diffusion_2))
        latents = torch.randn(options.batch, 4, side, side)
        text = torch.randn(options.batch, 77, 1024)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def train() -> None:
        unet.zero_grad()
        with autocast:
            unet(latents, 500, text, return_dict=False)[0].square().mean().backward()

    for warm_up in (train, draw):
        warm_up()
    times = [(seconds(train, device), seconds(draw, device)) for _ in range(options.repeats)]
    trained, drawn = (statistics.median(values) for values in zip(*times, strict=True))
    print(f"{options.batch} images of {options.resolution} px on {device}")
    print(f"forward and backward of the U-Net {trained * 1e3:.1f} ms")
    print(f"random numbers {drawn * 1e3:.2f} ms = {100 * drawn / trained:.4f} % of it")
    if device.type == "cpu":
        print(f"{count.num_operations} operations, {count.num_bytes / options.batch / 1e6:.2f} MB moved per image")


if __name__ == "__main__":
    main()
