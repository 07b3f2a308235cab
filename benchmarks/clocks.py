"""Callbacks that measure a run from within; each writes JSON on rank 0 when the run ends."""

import contextlib
import json
import re
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from benchmarks.step_runs import PlainLoop, run_config
from diffusion.config.model import Architecture
from diffusion.ema.callbacks import LateStartEMA
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.operations.checks.nodes import synchronize


class StepClock(Callback):
    """Measure blocks of steps by the clock and in CPU time; the device is waited for between blocks only.

    Args:
        path: JSON file.
        block: steps of a block.
    """

    def __init__(self, path: str, block: int = 1) -> None:
        self.path, self.block = Path(path), block
        self.times: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note the time at the end of a block."""
        if state.timestamp.batch.value % self.block == 0:
            synchronize(_device(state))
            self.times.append(time.perf_counter())

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the seconds per step of each block."""
        steps = [(after - before) / self.block for before, after in zip(self.times, self.times[1:], strict=False)]
        _write(self.path, {"seconds": steps})


class PartClock(Callback):
    """Measure the parts of a step, waiting for the device at each boundary, which makes steps slower.

    Args:
        path: JSON file.
        skip: steps at the beginning that do not count.
    """

    def __init__(self, path: str, skip: int = 2) -> None:
        self.path, self.skip = Path(path), skip
        self.seconds: dict[str, float] = defaultdict(float)
        self.num_steps, self._encoding = 0, 0.0
        self._step: dict[str, float] = defaultdict(float)
        self._device = torch.device("cpu")
        self._last = self._start = self._began = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Watch the frozen parts and the optimizer."""
        self._device = _device(state)
        model: Any = getattr(state.model, "module", state.model)
        assert isinstance(model, LatentDiffusion)
        for part in (model.text_encoder, model.vae.encoder):
            part.register_forward_pre_hook(lambda *_: self._begin())
            part.register_forward_hook(lambda *_: self._encoded())
        for optimizer in state.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._begin())
            optimizer.register_step_post_hook(lambda *_: self._add("optimizer", self._now() - self._began))

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """The last step is over, and what was noted of it counts."""
        now = self._now()
        if self._start:
            self.num_steps += 1
            for part, seconds in {**self._step, "whole": now - self._start}.items():
                self.seconds[part] += seconds
        self._step.clear()
        self._start = now if state.timestamp.batch.value >= self.skip else 0.0
        self._last = now

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """A batch is there."""
        self._add("data", self._now() - self._last)

    def before_forward(self, state: State, logger: Logger) -> None:
        """The forward pass begins."""
        self._last, self._encoding = self._now(), 0.0

    def after_loss(self, state: State, logger: Logger) -> None:
        """Forward pass and loss are done."""
        self._add("encode", self._encoding)
        self._add("forward", self._now() - self._last - self._encoding)

    def before_backward(self, state: State, logger: Logger) -> None:
        """The backward pass begins."""
        self._last = self._now()

    def after_backward(self, state: State, logger: Logger) -> None:
        """The backward pass is done."""
        self._add("backward", self._now() - self._last)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the seconds of each part in a step; averages of weights are measured by more of their updates."""
        parts = {name: total / max(self.num_steps, 1) for name, total in self.seconds.items()}
        whole = parts.pop("whole", 0.0)
        parts["averages"] = self._average_seconds(state)
        parts["logging and the rest"] = max(0.0, whole - sum(parts.values()))
        _write(self.path, {"parts": parts, "whole": whole, "num_steps": self.num_steps})

    def _average_seconds(self, state: State, rounds: int = 3) -> float:
        updates: list[Callable[[], None]] = [
            average.update
            for callback in state.callbacks
            if isinstance(callback, LateStartEMA)
            for average in callback.averages
        ]
        began = self._now()
        for _ in range(rounds):
            for update in updates:
                update()
        return (self._now() - began) / rounds

    def _begin(self) -> None:
        self._began = self._now()

    def _encoded(self) -> None:
        self._encoding += self._now() - self._began

    def _add(self, part: str, seconds: float) -> None:
        self._step[part] += seconds

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


class TurnsWithLoop(Callback):
    """Let a plain loop make a step after each of the Trainer's, on its own copy of the U-Net, and measure both.

    Args:
        path: JSON file.
        architecture: of the loop's model.
        resolution: side of its images.
        batch_size: of its batches.
        overrides: of its configuration.
    """

    def __init__(self, path: str, architecture: str, resolution: int, batch_size: int, overrides: list[str]) -> None:
        self.path = Path(path)
        folder = self.path.parent / "loop"
        folder.mkdir()
        settings: dict[str, Any] = {"resolution": resolution, "batch_size": batch_size, "overrides": overrides}
        self.config = run_config(folder, Architecture(architecture), num_steps=1, **settings)
        self.loop: PlainLoop | None = None
        self.trainer: list[float] = []
        self.plain: list[float] = []
        self._last = 0.0

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the Trainer's time, make the loop's step and take its time."""
        device = _device(state)
        if self.loop is None:
            self.loop = PlainLoop(self.config, device)
        before = self._now(device)
        self.loop()
        after = self._now(device)
        if self._last:
            self.trainer.append(before - self._last)
            self.plain.append(after - before)
        self._last = after

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the seconds of all steps."""
        _write(self.path, {"trainer": self.trainer, "loop": self.plain})

    def _now(self, device: torch.device) -> float:
        """CPU time of this process on a CPU, which others on the machine disturb little; the clock on a GPU."""
        synchronize(device)
        return time.process_time() if device.type == "cpu" else time.perf_counter()


class SynchronisationWatch(Callback):
    """Count the operations of some steps that stop the host until the device is done, and where they are called.

    Args:
        path: JSON file.
        first: Number of the first step that is watched.
        num_steps: Watched steps.
    """

    def __init__(self, path: str, first: int = 3, num_steps: int = 2) -> None:
        self.path, self.first, self.last = Path(path), first, first + num_steps
        self.places: Counter[str] = Counter()
        self._watching = contextlib.ExitStack()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin or end to watch."""
        step = state.timestamp.batch.value
        if step == self.first:
            self.watch(_device(state))
        elif step == self.last:
            self._watching.close()

    def watch(self, device: torch.device) -> None:
        """Note each warning until the watch is closed, with the innermost line of code outside of torch."""
        self._watching.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
            self._watching.callback(torch.cuda.set_sync_debug_mode, "default")

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the number of warnings, and of each place."""
        self._watching.close()
        _write(self.path, {"num_warnings": self.places.total(), "places": dict(self.places.most_common())})

    def _note(self, message: Warning | str, *rest: Any) -> None:
        if "synchronizing" not in str(message):
            return
        stack = [frame for frame in traceback.extract_stack() if not _IGNORED.search(frame.filename)]
        place = stack[-1] if stack else traceback.extract_stack()[0]
        self.places[f"{'/'.join(Path(place.filename).parts[-3:])}:{place.lineno} {place.name}"] += 1


_IGNORED = re.compile(r"/torch/|/warnings\.py$|/benchmarks/clocks\.py$")


def _device(state: State) -> torch.device:
    return next(state.model.parameters()).device


def _write(path: Path, content: Any) -> None:
    if dist.get_global_rank() == 0:
        path.write_text(json.dumps(content), encoding="utf-8")
