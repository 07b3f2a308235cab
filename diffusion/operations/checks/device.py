"""Precision and speed of a device: rates of a matrix product and of a copy."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DATASHEET_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16, by a part of the device's name."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """Measured limits of a device."""

    name: str
    datasheet_flops: float | None
    matmul_flops: float
    """Operations per second (multiply-adds count twice); bf16 on a GPU, fp32 on a CPU."""

    copy_bytes_per_second: float
    """Bytes read and written."""


def computes_bf16() -> bool:
    """Return whether there are GPUs with bfloat16; emulation by the library does not count."""
    return torch.cuda.device_count() > 0 and torch.cuda.is_bf16_supported(including_emulation=False)


def measure_device(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> DeviceSpeed:
    """Measure the rates of a matrix product and of a copy, by a clock."""
    is_gpu = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if is_gpu else (1024, torch.float32)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    source = torch.empty(2**30 if is_gpu else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(time_runs(lambda: a @ b, device, 10 if is_gpu else 3, clock))
    copied = min(time_runs(lambda: target.copy_(source), device, 10 if is_gpu else 3, clock))
    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    return DeviceSpeed(
        name=name,
        datasheet_flops=next((rate for part, rate in DATASHEET_FLOPS.items() if part in name), None),
        matmul_flops=2 * side**3 / product,
        copy_bytes_per_second=2 * source.numel() / copied,
    )


def time_runs(
    run: Callable[[], Any], device: torch.device, number: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of each run, after one for warm-up."""
    run()
    times = []
    for _ in range(number):
        synchronize(device)
        start = clock()
        run()
        synchronize(device)
        times.append(clock() - start)
    return times


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
