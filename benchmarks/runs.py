"""Training steps on latents in memory: runs of the Trainer, and the callbacks that measure it."""

import contextlib
import json
import math
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Event, Logger, State
from composer.models import ComposerModel
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from diffusion.config.loading import load_config
from diffusion.config.model import Architecture
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.batch import BatchKey
from diffusion.distributed import barrier, broadcast
from diffusion.files import write_json
from diffusion.models.architectures import ARCHITECTURES, ArchitectureSpec
from diffusion.operations.checks.nodes import synchronize
from diffusion.train import build_training_model, train

YAML = Path(__file__).with_name("run.yaml")
NUM_DIFFERENT = 64


class ResidentLatents(Dataset):
    """Random latents and token ids that are drawn once; 64 different samples repeat.

    Captions have any length up to `num_chunks` chunks; with `stores_text` there are embeddings of them, too.
    """

    def __init__(self, architecture: str, resolution: int, *, num_chunks: int = 1, stores_text: bool = False) -> None:
        spec = ARCHITECTURES[Architecture(architecture)]
        side, generator = resolution // spec.vae_factor, torch.Generator().manual_seed(0)
        shape = (NUM_DIFFERENT, spec.network["in_channels"], side, side)
        self.means = torch.randn(shape, generator=generator).half()
        self.logvar = torch.full(shape[1:], -8.0).half()
        self.token_ids = _random_captions(spec, num_chunks, generator)
        self.stored: dict[str, Tensor] = {}
        if stores_text:
            shape = (*self.token_ids.shape[1:], spec.text_width)
            self.stored[BatchKey.TEXT_EMBEDDING.value] = torch.randn(shape, generator=generator).half()
            self.stored[BatchKey.POOLED_TEXT_EMBEDDING.value] = torch.zeros(1).half()
        self.placement = torch.tensor([resolution, resolution, 0, 0, resolution, resolution])

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            BatchKey.LATENT_MEAN.value: self.means[index % NUM_DIFFERENT],
            BatchKey.LATENT_LOGVAR.value: self.logvar,
            BatchKey.TOKEN_IDS.value: self.token_ids[index % NUM_DIFFERENT],
            BatchKey.PLACEMENT.value: self.placement,
            BatchKey.SAMPLE.value: torch.tensor(index),
            **self.stored,
        }


def _random_captions(spec: ArchitectureSpec, num_chunks: int, generator: torch.Generator) -> Tensor:
    """Draw token ids int64 [NUM_DIFFERENT, L] of captions, of any length up to all chunks."""
    size, vocabulary = spec.max_tokens, spec.text_encoder["vocab_size"]
    start, end = vocabulary - 2, vocabulary - 1
    ids = torch.randint(start, (NUM_DIFFERENT, num_chunks, size), generator=generator)
    length = torch.randint(1, num_chunks * (size - 2) + 1, (NUM_DIFFERENT, 1, 1), generator=generator)
    first = torch.arange(num_chunks)[:, None] * (size - 2)
    position = torch.arange(size) - 1
    is_end = (position >= 0) & ((position >= size - 2) | (first + position >= length))
    ids[is_end] = end
    ids[is_end & is_end.roll(1, dims=-1)] = 0  # CLIP's padding
    ids[..., 0] = start
    return ids.flatten(1)


def run_config(
    *,
    architecture: str,
    resolution: int,
    batch_size: int,
    overrides: Sequence[str] = (),
    num_steps: int = 1,
    folder: Path = Path("unused"),
    callback: str | None = None,
    arguments: dict[str, Any] | None = None,
) -> Config:
    """Load the configuration of a run with random weights, and with a callback of this file if one is named."""
    settings = [
        f"output_folder={folder / 'run'}",
        f"model.architecture={architecture}",
        f"data.resolution={resolution}",
        f"data.global_batch_size={batch_size}",
        f"trainer.max_duration={num_steps}ba",
        f"plugins.train_dataset.arguments={{architecture: {architecture}, resolution: {resolution}}}",
    ]
    if callback is not None:
        plugin = {"path": f"{__name__}.{callback}", "arguments": arguments or {}}
        settings.append(f"plugins.callbacks={json.dumps([plugin])}")
    return load_config(YAML, [*settings, *overrides])


def build_on_device(config: Config, device: Device) -> ComposerModel:
    """Build a model with weights drawn on the device: on one core, those of Stable Diffusion 2 take 15 s."""
    with torch.device("cuda" if device is Device.gpu else "cpu"):
        return build_training_model(config, device)


def run_trainer(callback: str, arguments: dict[str, Any], **run: Any) -> dict[str, Any]:
    """Train as `run_config` says, measure with a callback of this file, and return its `result()`."""
    with shared_folder() as folder:
        config = run_config(**run, folder=folder, callback=callback, arguments=arguments)
        trainer = train(config, build_on_device)
        [measured] = [each for each in trainer.state.callbacks if type(each).__name__ == callback]
        return measured.result()  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder of rank 0 that all ranks use."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(broadcast(folder))
        barrier()


# Callbacks


class StepClock(Callback):
    """Measures blocks of `block` steps from one step to another, and waits for the device between blocks only."""

    def __init__(self, block: int, begin: int = 0, end: float = math.inf) -> None:
        self.block, self.begin, self.end = block, begin, end
        self.times: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Record the time at the end of a block."""
        step = state.timestamp.batch.value
        if self.begin <= step <= self.end and (step - self.begin) % self.block == 0:
            synchronize(_device(state))
            self.times.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        """`seconds`: per step, of each block after the first recorded time."""
        return {"seconds": [(after - before) / self.block for before, after in pairwise(self.times)]}


class Turn(StepClock):
    """Makes the first steps, waits for its turn, then times blocks of steps and profiles the last ones.

    It writes the file `ready` after the first steps, waits for the file `go`, makes `warm_up` steps, and writes the
    file `done` when it no longer uses the device.
    """

    FIRST = 2

    def __init__(
        self, *, ready: str, go: str, done: str, warm_up: int, num_steps: int, block: int, num_profiled: int
    ) -> None:
        begin = self.FIRST + warm_up
        super().__init__(block, begin, begin + num_steps)
        self.ready, self.go, self.done, self.num_profiled = Path(ready), Path(go), Path(done), num_profiled
        self.start, self.first_seconds = time.perf_counter(), 0.0
        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self.profiler = profile(activities=[kind])

    def batch_end(self, state: State, logger: Logger) -> None:
        """Wait, record the time, or profile."""
        step, device = state.timestamp.batch.value, _device(state)
        if step == self.FIRST:
            synchronize(device)
            self.first_seconds = time.perf_counter() - self.start
            if device.type == "cuda":
                torch.cuda.empty_cache()
            self.ready.touch()
            while not self.go.exists():
                time.sleep(0.1)
        super().batch_end(state, logger)
        if step == self.end:
            self.profiler.start()
        if step == self.end + self.num_profiled:
            synchronize(device)
            self.done.touch()
            self.profiler.stop()

    def result(self) -> dict[str, Any]:
        """`seconds` per step of each block; `first_seconds` until it was ready; `kernels` (see `kernels_by_class`)."""
        with tempfile.TemporaryDirectory() as folder:
            self.profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        kernels = kernels_by_class(events, self.num_profiled)
        return {**super().result(), "first_seconds": self.first_seconds, **kernels}


CLASSES = {
    "attention": r"sdpa|flash|fmha|attention",
    "layout": r"nchwtonhwc|nhwctonchw|ncxhwx",
    "convolution": r"conv|fprop|dgrad|wgrad|implicit",
    "matrix product": r"gemm|nvjet|cutlass|cublas|splitk",
    "optimizer": r"multi_tensor|adam|foreach",
    "fused": r"^triton_",
    "copy": r"memcpy|memset|copy|_cast|catarray",
}
"""Classes of kernels by their names, in this order; all others are `other`."""


def kernels_by_class(events: Sequence[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Sum up the kernels of a trace of some steps.

    Returns:
        Per step: `busy_ms` (any kernel runs), `num_kernels`; `classes`: milliseconds and
        kernels of each class; `kernels`: the same of the longest 40 names; `host`: milliseconds and number of the
        calls of CUDA by the host, by name.
    """
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    busy = end = 0.0
    for event in sorted(kernels, key=lambda event: event["ts"]):
        until = event["ts"] + event["dur"]
        busy += max(until - max(event["ts"], end), 0.0)
        end = max(end, until)

    def sums(events: Sequence[dict[str, Any]], group: Callable[[str], str]) -> dict[str, list[float]]:
        """Milliseconds and number of the events of each group, per step."""
        found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in events:
            of = found[group(event["name"])]
            of[:] = of[0] + event["dur"] / 1000 / num_steps, of[1] + 1 / num_steps
        return dict(found)

    def kind(name: str) -> str:
        return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name.lower())), "other")

    longest = sorted(sums(kernels, lambda name: name[:120]).items(), key=lambda item: -item[1][0])[:40]
    return {
        "busy_ms": busy / 1000 / num_steps,
        "num_kernels": len(kernels) / num_steps,
        "classes": sums(kernels, kind),
        "host": {name: both for name, both in sums(calls, str).items() if both[0] > 0.05},
        "kernels": [[name, *both] for name, both in longest],
    }


class Meter(Callback):
    """Writes the cost of a training process to a JSON file: steps, CPU-seconds and FLOPs; and CPU-seconds of a step.

    A step's cost is measured between the two steps of `calibration`.
    """

    def __init__(self, path: str, calibration: Sequence[int]) -> None:
        self.path, self.calibration, self.began, self.flops = Path(path), calibration, 0.0, 0.0
        self.times: dict[int, float] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self.began = time.process_time()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Count the arithmetic of a batch."""
        self.flops += state.model.batch_flops(state.batch)  # pyright: ignore[reportCallIssue]

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note the time of two steps."""
        step = state.timestamp.batch.value
        if step in self.calibration:
            self.times[step] = time.process_time()

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write."""
        cost = {
            "steps": state.timestamp.batch.value,
            "cpu_seconds": time.process_time() - self.began,
            "flops": self.flops,
            "parameters": sum(one.numel() for one in state.model.parameters() if one.requires_grad),
        }
        if len(self.times) == 2:
            (first, began), (last, ended) = self.times.items()
            cost["cpu_seconds_per_step"] = (ended - began) / (last - first)
        write_json(self.path, cost)


PARTS = {
    Event.AFTER_DATALOADER: "data",
    Event.AFTER_FORWARD: "forward",
    Event.AFTER_LOSS: "loss",
    Event.AFTER_BACKWARD: "backward",
    Event.AFTER_TRAIN_BATCH: "optimizer",
}
"""Parts of a step by the event that ends them; what ends with another event is `callbacks`."""


class PartClock(Callback):
    """Measures the parts of a step, and waits for the device at each of Composer's events, which makes steps slower.

    The first `skip` steps do not count.
    """

    def __init__(self, skip: int) -> None:
        self.skip, self.num_steps, self.last = skip, 0, 0.0
        self.seconds: dict[str, float] = defaultdict(float)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Add the time since the last event to the part that ends."""
        if event is Event.FIT_END or state.timestamp.batch.value < self.skip:
            return
        synchronize(_device(state))
        now = time.perf_counter()
        if self.last:
            self.seconds[PARTS.get(event, "callbacks")] += now - self.last
            self.num_steps += event is Event.BATCH_END
        self.last = now

    def result(self) -> dict[str, Any]:
        """`parts`: seconds of each in a step; `num_steps`."""
        parts = {name: self.seconds[name] / max(self.num_steps, 1) for name in (*PARTS.values(), "callbacks")}
        return {"parts": parts, "num_steps": self.num_steps}


def _device(state: State) -> torch.device:
    return next(state.model.parameters()).device
