"""The speed of this node, and the comparison of nodes with their median, which names the slow ones.

    python -m diffusion.operations.checks.nodes CONFIG.yaml [key.sub=value ...]

checks this node in seconds, without model, data and other ranks, and prints the results as one line of JSON, which
`diffusion.operations.hosts` reads. They do not depend on the demand of the run, so this also suits a machine that only
starts the job elsewhere.
"""

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from diffusion.config.fields import size_text
from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.launch import run_command
from diffusion.operations.checks.gpu import check_gpu_errors
from diffusion.operations.checks.machine import check_output_folder, checkpoint_folder
from diffusion.operations.checks.verdicts import Level, Verdict, ok, warning

DATASHEET_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bf16, by a part of the device's name."""


# Speed of a device


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """Measured limits of a device."""

    name: str
    datasheet_flops: float | None
    matmul_flops: float
    """Operations per second (multiply-adds count twice); bf16 on a GPU, fp32 on a CPU."""

    copy_bytes_per_second: float
    """Bytes read and written."""


def measure_device(device: torch.device) -> DeviceSpeed:
    """Measure the rates of a matrix product and of a copy."""
    is_gpu = device.type == "cuda"
    side, dtype = (8192, torch.bfloat16) if is_gpu else (1024, torch.float32)
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    source = torch.empty(2**30 if is_gpu else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product = min(time_runs(lambda: a @ b, device, 10 if is_gpu else 3))
    copied = min(time_runs(lambda: target.copy_(source), device, 10 if is_gpu else 3))
    name = torch.cuda.get_device_name(device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    return DeviceSpeed(
        name=name,
        datasheet_flops=next((rate for part, rate in DATASHEET_FLOPS.items() if part in name), None),
        matmul_flops=2 * side**3 / product,
        copy_bytes_per_second=2 * source.numel() / copied,
    )


def time_runs(run: Callable[[], Any], device: torch.device, number: int) -> list[float]:
    """Return the seconds of each run, after one for warm-up."""
    run()
    times = []
    for _ in range(number):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Comparison


@dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """Measurements of one node, of its slowest rank; None is not measured."""

    name: str
    """Such as `node 3`."""

    host: str
    num_gpus: int
    """Visible GPUs; 0 for training on the CPU."""

    flops: float | None = None
    """Operations per second of a matrix product."""

    copied: float | None = None
    """Bytes per second of a copy in the device's memory, read and written."""

    link: float | None = None
    """Bytes per second to the better of two other nodes, and back."""


@dataclass(frozen=True)
class Comparison:
    """A quantity by which nodes are compared."""

    check: str
    value: Callable[[NodeSpeed], float | None]
    share: float
    """Share of the median below which a node is slow."""

    unit: str
    remedy: str


# Each step waits for the slowest node.
COMPARISONS = [
    Comparison(
        "GPUs of nodes", lambda node: float(node.num_gpus) or None, 1.0, "GPUs", "look for lost GPUs in its kernel log"
    ),
    Comparison("matrix product", lambda node: node.flops, 0.8, "operations/s", "check its clocks and its cooling"),
    Comparison("memory copy", lambda node: node.copied, 0.8, "B/s", "check it for other processes, and its clocks"),
    Comparison(
        "network of nodes", lambda node: node.link, 0.5, "B/s", "check its cable, its NIC and its error counters"
    ),
]


def compare_nodes(nodes: Sequence[NodeSpeed]) -> list[Verdict]:
    """Compare nodes with their median; of two nodes the slower one with the faster one."""
    return [_compare(nodes, by) for by in COMPARISONS if any(by.value(node) is not None for node in nodes)]


def _compare(nodes: Sequence[NodeSpeed], by: Comparison) -> Verdict:
    values = [by.value(node) or 0.0 for node in nodes]
    usual = max(values) if len(nodes) == 2 else statistics.median(values)
    slow = [(node, value) for node, value in zip(nodes, values, strict=True) if value < by.share * usual]
    if not slow:
        return ok(by.check, f"{_text(min(values), by.unit)} on the slowest of {len(nodes)} nodes")
    found = ", ".join(f"{node.host} has {_text(value, by.unit)}" for node, value in slow)
    what = f"{found}, the median of the {len(nodes)} nodes is {_text(usual, by.unit)}"
    where = ", ".join(node.name for node, _ in slow)
    return replace(warning(by.check, what, f"{by.remedy}, or remove it from the job"), where=where)


def _text(value: float, unit: str) -> str:
    if unit == "B/s":
        return f"{size_text(value)}/s"
    return f"{value:,.0f} {unit}" if value < 1e9 else f"{value / 1e12:,.4g} T{unit}"


def unfit_nodes(names: Sequence[str], verdicts: Sequence[Verdict]) -> list[str]:
    """Return the slow ones of all nodes, and those with a problem that not all nodes have."""
    comparisons = {by.check for by in COMPARISONS}
    unfit: set[str] = set()
    for verdict in verdicts:
        if verdict.level is Level.problem or (verdict.level is Level.warning and verdict.check in comparisons):
            unfit.update(verdict.where.split(", "))
    return [name for name in names if name in unfit]


# This node


def check_this_node(config: Config) -> tuple[NodeSpeed, list[Verdict]]:
    """Measure and check this node.

    Only GPUs are measured: the speed of cores depends on their load at the moment.
    """
    host, num_gpus = socket.gethostname(), torch.cuda.device_count()
    verdicts = [check_output_folder(checkpoint_folder(config))]
    if config.trainer.device.resolve(num_gpus) is not Device.gpu:
        return NodeSpeed(name=host, host=host, num_gpus=0), verdicts
    verdicts += check_gpu_errors()
    speeds = [measure_device(torch.device("cuda", number)) for number in range(num_gpus)]
    flops = min((speed.matmul_flops for speed in speeds), default=None)
    copied = min((speed.copy_bytes_per_second for speed in speeds), default=None)
    return NodeSpeed(name=host, host=host, num_gpus=num_gpus, flops=flops, copied=copied), verdicts


def main() -> None:
    """Print the results."""
    speed, verdicts = check_this_node(load_config(sys.argv[1], sys.argv[2:]))
    rows = [asdict(verdict) for verdict in verdicts]
    sys.stdout.write(json.dumps({"reading": asdict(speed), "verdicts": rows}) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
