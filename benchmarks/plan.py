"""Which rows there are: the plan for the first 40 minutes on a GPU, and the parts of `benchmarks/__main__.py`."""

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml
import torch
from composer.utils import dist
from torch.version import cuda as cuda_version

from benchmarks import first_contact, steps
from benchmarks.encoding import measure_encoding
from benchmarks.loading import measure_image_loading, measure_latent_loading
from benchmarks.moved_bytes import measure_moved_bytes
from benchmarks.preparing import measure_preparing
from benchmarks.rows import Row
from benchmarks.saving import measure_saving
from benchmarks.step_runs import free_memory
from diffusion.config.model import Architecture

STOCK = [
    "model.low_precision_norms=false",
    *(f"performance.{name}=false" for name in ("channels_last", "fused_norms", "fused_projections", "cudnn_benchmark")),
    "performance.compilation=none",
]
"""The U-Net as diffusers builds it."""

LADDER: dict[str, tuple[list[str], bool]] = {
    "bf16 stock": (["trainer.precision=amp_bf16"], True),
    "+ cuDNN's benchmark": (["performance.cudnn_benchmark=true"], True),
    "+ low-precision norms": (["model.low_precision_norms=true"], False),
    "+ channels last": (["performance.channels_last=true"], False),
    "+ fused projections": (["performance.fused_projections=true"], False),
    "+ compiled blocks": (["performance.compilation=blocks"], True),
    "+ fused norms": (["performance.fused_norms=true"], True),
    "+ compiled as a whole": (["performance.compilation=unet"], True),
}
"""Each with those before it: overrides, and whether they are for GPUs only."""


TRAINER_RUNS = (steps.measure_trainer, steps.measure_parts, steps.measure_stall, steps.measure_ratio)
"""Runs of the Trainer, which leave models behind that are never freed: on a GPU each has a process of its own."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Makes the rows for a device."""

    device: torch.device
    architecture: Architecture
    overrides: Sequence[str] = ()
    """`key.sub=value` of the Trainer's runs."""

    quick: bool = False
    """Few steps: shows that it runs, not how fast."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def scale(self) -> int:
        """What batches of the plan are divided by."""
        return 1 if self.architecture is Architecture.stable_diffusion_2 else 16

    @property
    def precision(self) -> str:
        """The configuration's precision on this device, as an override."""
        return f"trainer.precision={'amp_bf16' if self.is_gpu else 'fp32'}"

    @property
    def trainer_overrides(self) -> list[str]:
        """Of the Trainer's runs."""
        return [f"trainer.device={'gpu' if self.is_gpu else 'cpu'}", self.precision, *self.overrides]

    # The plan

    def call(self, number: int) -> list[Row]:
        """Rows of one of the plan's four calls."""
        return (self._correctness, self._large, self._small, self._parity)[number - 1]()

    def _correctness(self) -> list[Row]:
        small, large = self._resolutions()
        toy = {"architecture": Architecture.tiny.value, "resolution": 32, "batch_size": 8}
        toy = {**toy, "overrides": self.trainer_overrides}
        rows = [
            self._row("resumption", first_contact.measure_resumption, 120, **toy),
            self._row("rates", first_contact.measure_rates, 15),
        ]
        eager = "performance.compilation=none"
        kinds = {"fp32, eager": ("fp32", [eager])}
        if self.is_gpu:
            kinds |= {"bf16, eager": ("amp_bf16", [eager]), "bf16, compiled": ("amp_bf16", [])}
        for name, (precision, options) in kinds.items():
            overrides = [f"trainer.precision={precision}", *options]
            stock = [*STOCK, f"trainer.precision={precision}"]
            same = {"architecture": self.architecture.value, "resolution": small, "batch_size": 2}
            measure = first_contact.measure_precision
            rows.append(self._row(f"precision/{name}", measure, 60, **same, stock=stock, overrides=overrides))
        side = large // 8
        for number in (1, 5, 64):
            settings: dict[str, Any] = {"num_samples": number, "shape": [4, side, side]}
            rows.append(self._row(f"normals/{number}", first_contact.measure_normals, 15, **settings))
        rows.append(self._row("synchronisations", first_contact.measure_synchronisations, 60, **toy))
        norm = {"architecture": self.architecture.value, "batch_size": 64 // self.scale, "side": side}
        rows.append(self._row("norm", first_contact.measure_norm, 30, **norm))
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION") if self.is_gpu else ("MATH",):
            for keys in (side**2, 77):
                size = {"batch_size": 64 // self.scale, "num_heads": 5, "num_queries": side**2, "num_keys": keys}
                name = f"attention/{backend.removesuffix('_ATTENTION').lower()}/{side**2} x {keys}"
                rows.append(self._row(name, first_contact.measure_attention, 15, backend=backend, **size))
        return rows

    def _large(self) -> list[Row]:
        _, side = self._resolutions()
        size = 64 // self.scale
        word = "bf16" if self.is_gpu else "fp32"
        kinds = {"stock": STOCK, "ours, eager": ["performance.compilation=none"]}
        kinds |= {"ours, compiled": []} if self.is_gpu else {}
        rows = [
            self.step(f"{word} {name}", side, size, [*options, self.precision], seconds=90, num_kernels=30)
            for name, options in kinds.items()
        ]
        return [*rows, self.trainer(side, size), self.parts(side, size)]

    def _small(self) -> list[Row]:
        side, _ = self._resolutions()
        rows = [self.trainer(side, number // self.scale) for number in (128, 16, 64, 256)]
        kinds = {"norms not fused": ["performance.fused_norms=false"]}
        if self.is_gpu:
            kinds |= {f"{name} attention": [f"performance.attention={name}"] for name in ("flash", "cudnn")}
        for name, options in kinds.items():
            rows.append(self.trainer(side, 128 // self.scale, name, options))
        if self.is_gpu:
            ddp = "trainer.parallelism=ddp"
            rows.append(self.trainer(side, 16, "ddp", [ddp]))
            rows.append(self.trainer(side, 16, "ddp, CUDA graphs", [ddp, "performance.cuda_graphs=true"]))
        return rows

    def _parity(self) -> list[Row]:
        small, large = self._resolutions()
        size = 64 // self.scale
        divided = f"trainer.device_train_microbatch_size={16 // self.scale}"
        stock = [*STOCK, "trainer.precision=fp32", divided]
        rows = [self.losses("fp32 stock", small, size, stock)]
        if self.is_gpu:
            rows.append(self.losses("tf32 stock", small, size, stock, tf32=True))
        rows.append(self.losses(f"ours in microbatches of {16 // self.scale}", small, size, [self.precision, divided]))
        rows.append(self.losses(f"ours in microbatches of {size}", small, size, [self.precision]))
        common = {"architecture": self.architecture.value, "overrides": self.trainer_overrides}
        stall = {"resolution": small, "microbatch_size": 16 // self.scale, "num_steps": 6 if self.quick else 40}
        rows.append(self._row("stall", steps.measure_stall, 100, **common, **stall))
        samples = {"num_images": 8, "num_inference_steps": 2 if self.quick else 50, "resolution": large}
        common = {"architecture": self.architecture.value}
        return [*rows, self._row("samples", first_contact.measure_samples, 40, **common, **samples)]

    def _resolutions(self) -> tuple[int, int]:
        return (256, 512) if self.scale == 1 else (32, 64)

    # Rows of one kind

    def step(
        self,
        name: str,
        resolution: int,
        size: int,
        overrides: Sequence[str],
        *,
        contender: str = "bare",
        tf32: bool = False,
        seconds: float = 60,
        num_kernels: int = 0,
    ) -> Row:
        """A bare step, or a loop's."""
        options = {"overrides": list(overrides), "contender": contender, "tf32": tf32, "num_kernels": num_kernels}
        where = self._where(resolution, size)
        return self._row(
            f"step/{resolution}/{size}/{name}", steps.measure_step, seconds, **where, **options, **self._blocks
        )

    def trainer(self, resolution: int, size: int, name: str = "", overrides: Sequence[str] = ()) -> Row:
        """The Trainer's step."""
        name = "/".join(filter(None, (f"trainer/{resolution}/{size}", name)))
        where, options = self._where(resolution, size), [*self.trainer_overrides, *overrides]
        return self._row(name, steps.measure_trainer, 90, **where, overrides=options, **self._blocks)

    def parts(self, resolution: int, size: int) -> Row:
        """The parts of the Trainer's step."""
        where, options = self._where(resolution, size), self.trainer_overrides
        name, number = f"parts/{resolution}/{size}", 4 if self.quick else 12
        return self._row(name, steps.measure_parts, 60, **where, overrides=options, num_steps=number)

    def losses(self, name: str, resolution: int, size: int, overrides: Sequence[str], *, tf32: bool = False) -> Row:
        """Losses over 100 steps."""
        settings: dict[str, Any] = {"resolution": resolution, "batch_size": size, "tf32": tf32}
        settings |= {"overrides": list(overrides), "num_steps": 3 if self.quick else 100}
        name = f"losses/{resolution}/{size}/{name}"
        return self._row(name, steps.measure_losses, 100, architecture=self.architecture.value, **settings)

    def _where(self, resolution: int, size: int) -> dict[str, Any]:
        return {"architecture": self.architecture.value, "resolution": resolution, "microbatch_size": size}

    @property
    def _blocks(self) -> dict[str, int]:
        return {"num_blocks": 2 if self.quick else 10, "block": 5 if self.is_gpu and not self.quick else 1}

    def _row(self, name: str, measure: Callable[..., Any], seconds: float, /, **parameters: Any) -> Row:
        return Row(
            name=name,
            kind=name.split("/")[0],
            measure=functools.partial(_measure, measure, self.device),
            parameters=parameters,
            seconds=0 if self.quick else seconds,
            is_alone=name == "resumption" or (self.is_gpu and measure in TRAINER_RUNS),
        )

    # The parts of the command

    def part(self, name: str, resolutions: Sequence[int], sizes: Sequence[int]) -> list[Row]:
        """Rows of a part of `benchmarks/__main__.py`, of steps at several sizes."""
        places = [(side, size) for side in resolutions for size in sizes]
        if name == "step":
            alone = [row for place in places for row in self._contenders(*place)] if dist.get_world_size() == 1 else []
            return alone + [row for place in places for row in (self.trainer(*place), self.parts(*place))]
        if name == "parity":
            return [
                self.losses(rung, *places[0], options, tf32=rung.startswith("tf32"))
                for rung, options in self._ladder().items()
            ]
        if name == "ratio":
            options = {"overrides": self.trainer_overrides, "num_steps": 3 if self.quick else 30}
            side, size = places[0]
            return [self._row(f"ratio/{side}/{size}", steps.measure_ratio, 120, **self._where(side, size), **options)]
        if name == "bytes":
            measure, architecture = _without_device(_measure_bytes), self.architecture.value
            return [
                self._row(f"bytes/{side}", measure, 60, architecture=architecture, resolution=side)
                for side in resolutions
            ]
        return [
            self._row(row, _without_device(measure), 300, **parameters)
            for row, (measure, parameters) in self._data()[name].items()
        ]

    def _contenders(self, resolution: int, size: int) -> list[Row]:
        ladder = self._ladder()
        stock = ladder["bf16 stock" if self.is_gpu else "fp32 stock"]
        rows = [
            self.step(name, resolution, size, options, tf32=name.startswith("tf32")) for name, options in ladder.items()
        ]
        return [*rows, self.step("loop", resolution, size, stock, contender="loop")]

    def _ladder(self) -> dict[str, list[str]]:
        """Names and overrides of the bare step: stock in fp32, then with one option more each."""
        overrides = [*STOCK, "trainer.precision=fp32"]
        rungs = {"fp32 stock": overrides, **({"tf32 stock": overrides} if self.is_gpu else {})}
        for name, (options, needs_gpu) in LADDER.items():
            if self.is_gpu or not needs_gpu:
                overrides = [*overrides, *options]
                rungs[name] = overrides
        return rungs

    def _data(self) -> dict[str, dict[str, tuple[Callable[..., Any], dict[str, Any]]]]:
        quick = self.quick
        tiny = {"architecture": "tiny", "resolution": 32, "image_side": 40} if quick else {}
        return {
            "save": {"save": (measure_saving, {"num_megabytes": 16 if quick else 1024, "rounds": 3 if quick else 5})},
            "prepare": {
                "prepare": (measure_preparing, {"num_images": 50 if quick else 4000, "rounds": 1 if quick else 3})
            },
            "load": {
                "load latents": (measure_latent_loading, {"num_samples": 1024 if quick else 8192}),
                "load images": (measure_image_loading, {"num_samples": 32 if quick else 256}),
            },
            "encode": {
                "encode": (_measure_encoding, {"num_images": 16, "device": str(self.device), "rounds": 2, **tiny})
            },
        }


def _measure(
    measure: Callable[..., dict[str, Any]], where: torch.device, /, *, tf32: bool = False, **parameters: Any
) -> dict[str, Any]:
    """Measure from an empty GPU, and with TF32 as the row says; Composer's device for GPUs switches it on."""
    free_memory()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    result = measure(where, **parameters)
    if where.type == "cuda":
        result |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        result |= {"tf32_at_the_end": torch.backends.cuda.matmul.allow_tf32}
    return result


def _without_device(measure: Callable[..., Any]) -> Callable[..., Any]:
    return lambda where, /, **parameters: measure(**parameters)


def _measure_bytes(architecture: str, resolution: int) -> dict[str, Any]:
    return measure_moved_bytes(Architecture(architecture), [resolution])


def _measure_encoding(architecture: str = "stable_diffusion_2", **parameters: Any) -> dict[str, Any]:
    return measure_encoding(architecture=Architecture(architecture), **parameters)


def describe_machine(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what computes on it."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    if device.type == "cpu":
        name = platform.processor() or platform.machine()
        return {"device": f"{os.cpu_count()} x {name}, {torch.get_num_threads()} threads", "type": "cpu", **found}
    properties = torch.cuda.get_device_properties(device)
    found |= {"device": properties.name, "type": "cuda", "memory_bytes": properties.total_memory}
    found |= {"cuda": cuda_version, "cudnn": torch.backends.cudnn.version(), "triton": _triton_version()}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
    return found


def _triton_version() -> str:
    import triton

    return triton.__version__
