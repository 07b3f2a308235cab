"""Which rows there are: the plan for the first hour on a GPU, and the parts of `benchmarks/__main__.py`."""

import functools
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import pynvml
import torch
from composer.utils import dist
from torch.version import cuda as cuda_version

from benchmarks import data, first_contact, steps
from benchmarks.rows import Row
from diffusion.operations.checks.nodes import measure_device

STOCK = [
    "model.low_precision_norms=false",
    *(f"performance.{name}=false" for name in ("channels_last", "fused_norms", "fused_projections", "cudnn_benchmark")),
    "performance.compilation=none",
]
"""The U-Net as diffusers builds it."""

EAGER = ["performance.compilation=none"]

COMPILED = 200
"""Seconds of a row that compiles Stable Diffusion 2."""


class Benchmark:
    """Makes the rows for a device: Stable Diffusion 2 on a GPU; the tiny architecture and smaller batches on a CPU.

    Args:
        device: Of training.
        overrides: `key.sub=value` of the Trainer's runs.
        quick: Few steps: shows that it runs, not how fast.
    """

    def __init__(self, device: torch.device, overrides: Sequence[str] = (), *, quick: bool = False) -> None:
        self.device, self.quick = device, quick
        self.is_gpu = device.type == "cuda"
        self.architecture = "stable_diffusion_2" if self.is_gpu else "tiny"
        self.small, self.large = (256, 512) if self.is_gpu else (32, 64)
        self.precision = "trainer.precision=" + ("amp_bf16" if self.is_gpu else "fp32")
        self.overrides = [f"trainer.device={'gpu' if self.is_gpu else 'cpu'}", self.precision, *overrides]
        self.blocks = {"num_blocks": 2 if quick else 10, "block": 5 if self.is_gpu and not quick else 1}

    # The plan

    def call(self, number: int) -> list[Row]:
        """Rows of one of the plan's four calls."""
        return (self._correctness, self._large, self._small, self._parity)[number - 1]()

    def _correctness(self) -> list[Row]:
        toy = {"architecture": "tiny", "resolution": 32, "batch_size": 8, "overrides": self.overrides}
        rows = [
            self._row("resumption", first_contact.measure_resumption, 120, **toy),
            self._row("rates", lambda device: asdict(measure_device(device)), 15),
        ]
        kinds = {"fp32, eager": ("fp32", EAGER)}
        if self.is_gpu:
            kinds |= {"bf16, eager": ("amp_bf16", EAGER), "bf16, compiled": ("amp_bf16", [])}
        for name, (precision, options) in kinds.items():
            overrides, stock = ([f"trainer.precision={precision}", *each] for each in (options, STOCK))
            size = {"architecture": self.architecture, "resolution": self.small, "batch_size": 2}
            measure = first_contact.measure_precision
            rows.append(self._row(f"precision/{name}", measure, COMPILED, **size, stock=stock, overrides=overrides))
        side = self.large // 8
        for number in (1, 5, 64):
            settings: dict[str, Any] = {"num_samples": number, "shape": [4, side, side]}
            rows.append(self._row(f"normals/{number}", first_contact.measure_normals, 15, **settings))
        rows.append(self._row("synchronisations", steps.measure_synchronisations, 80, **toy))
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if self.is_gpu else ("MATH",):
            for keys in (side**2, 77):
                size = {"batch_size": self._divided(64), "num_heads": 5, "num_queries": side**2, "num_keys": keys}
                name = f"attention/{backend.removesuffix('_ATTENTION').lower()}/{side**2} x {keys}"
                rows.append(self._row(name, first_contact.measure_attention, 15, backend=backend, **size))
        return rows

    def _large(self) -> list[Row]:
        size, word = self._divided(64), "bf16" if self.is_gpu else "fp32"
        kinds = {"stock": STOCK, "ours, eager": EAGER}
        kinds |= {"ours, compiled": []} if self.is_gpu else {}
        rows = []
        for name, options in kinds.items():
            run = self._run(self.large, size, [*options, self.precision])
            name = f"step/{self.large}/{size}/{word} {name}"
            rows.append(self._row(name, steps.measure_loop, COMPILED, **run, **self.blocks, num_kernels=30))
        return [*rows, self.trainer(self.large, size), self.parts(self.large, size)]

    def _small(self) -> list[Row]:
        rows = [self.trainer(self.small, self._divided(number)) for number in (128, 16, 64, 256)]
        kinds = {"norms not fused": ["performance.fused_norms=false"]}
        if self.is_gpu:
            kinds |= {f"{name} attention": [f"performance.attention={name}"] for name in ("flash", "cudnn")}
        rows += [self.trainer(self.small, self._divided(128), name, options) for name, options in kinds.items()]
        if self.is_gpu:
            ddp = "trainer.parallelism=ddp"
            rows.append(self.trainer(self.small, 16, "ddp", [ddp]))
            rows.append(self.trainer(self.small, 16, "ddp, CUDA graphs", [ddp, "performance.cuda_graphs=true"]))
        return rows

    def _parity(self) -> list[Row]:
        size, few = self._divided(64), self._divided(16)
        divided = f"trainer.device_train_microbatch_size={few}"
        stock = [*STOCK, "trainer.precision=fp32", divided]
        kinds: dict[str, tuple[list[str], bool]] = {"fp32 stock": (stock, False)}
        kinds |= {"tf32 stock": (stock, True)} if self.is_gpu else {}
        kinds[f"ours in microbatches of {few}"] = [self.precision, divided], False
        kinds[f"ours in microbatches of {size}"] = [self.precision], False
        rows = []
        for name, (overrides, tf32) in kinds.items():
            run = self._run(self.small, size, overrides) | {"tf32": tf32, "num_steps": 3 if self.quick else 100}
            rows.append(self._row(f"losses/{self.small}/{size}/{name}", steps.measure_losses, COMPILED, **run))
        run = self._run(self.small, few, self.overrides)
        rows.append(self._row("stall", steps.measure_stall, COMPILED, **run, num_steps=6 if self.quick else 40))
        run = self._run(self.large, 8, ["trainer.precision=fp32"])
        number = 2 if self.quick else 50
        return [*rows, self._row("samples", first_contact.measure_samples, 40, **run, num_inference_steps=number)]

    # The parts of the command

    def part(self, name: str, resolutions: Sequence[int], sizes: Sequence[int]) -> list[Row]:
        """Rows of a part of `benchmarks/__main__.py`; steps at several sizes."""
        if name == "step":
            sizes_of_steps = [(side, size) for side in resolutions for size in sizes]
            return [make(*each) for each in sizes_of_steps for make in (self.trainer, self.parts)]
        quick = self.quick
        shards = {"num_shards": 40, "shard_samples": 1000} if quick else {"num_shards": 80_000}
        rows: dict[str, list[tuple[str, Callable[..., Any], dict[str, Any]]]] = {
            "load": [
                ("load latents", data.measure_latent_loading, {"num_samples": 1024 if quick else 8192}),
                ("load images", data.measure_image_loading, {"num_samples": 32 if quick else 256}),
            ],
            "open": [(f"open/{number}", data.measure_opening, {**shards, "num_streams": number}) for number in (1, 40)],
            "prepare": [("prepare", data.measure_preparing, {"num_images": 50 if quick else 4000})],
        }
        return [Row(name=row, measure=measure, parameters=settings) for row, measure, settings in rows[name]]

    # Rows of one kind

    def trainer(self, resolution: int, size: int, name: str = "", overrides: Sequence[str] = ()) -> Row:
        """The Trainer's step with a microbatch per rank."""
        name = "/".join(filter(None, (f"trainer/{resolution}/{size}", name)))
        run = self._run(resolution, size * dist.get_world_size(), [*self.overrides, *overrides])
        return self._row(name, steps.measure_trainer, COMPILED, **run, **self.blocks)

    def parts(self, resolution: int, size: int) -> Row:
        """The parts of the Trainer's step."""
        run = self._run(resolution, size * dist.get_world_size(), self.overrides)
        number = 4 if self.quick else 12
        return self._row(f"parts/{resolution}/{size}", steps.measure_parts, 60, **run, num_steps=number)

    def _divided(self, size: int) -> int:
        return size if self.is_gpu else size // 16

    def _run(self, resolution: int, batch_size: int, overrides: Sequence[str]) -> dict[str, Any]:
        settings = {"architecture": self.architecture, "resolution": resolution, "batch_size": batch_size}
        return {**settings, "overrides": list(overrides)}

    def _row(self, name: str, measure: Callable[..., Any], seconds: float, /, **parameters: Any) -> Row:
        return Row(
            name=name,
            measure=functools.partial(_measure, measure, self.device),
            parameters=parameters,
            seconds=0 if self.quick else seconds,
        )


def _measure(
    measure: Callable[..., dict[str, Any]], device: torch.device, /, *, tf32: bool = False, **parameters: Any
) -> dict[str, Any]:
    """Measure with TF32 as the row says; Composer's device for GPUs switches it on."""
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    result = measure(device, **parameters)
    if device.type == "cuda":
        result |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        result |= {"tf32_at_the_end": torch.backends.cuda.matmul.allow_tf32}
    return result


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what computes on it, without a CUDA context."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if device.type == "cpu":
        name = platform.processor() or platform.machine()
        return {"device": f"{os.cpu_count()} x {name}, {torch.get_num_threads()} threads", "type": "cpu", **found}
    pynvml.nvmlInit()
    found |= {"device": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)), "type": "cuda"}
    cudnn: Any = torch.backends.cudnn
    found |= {"cuda": cuda_version, "cudnn": cudnn._cudnn.getVersionInt(), "triton": version("triton")}
    return {**found, "driver": pynvml.nvmlSystemGetDriverVersion()}
