"""Nothing of ours reads a number from the device in a step: on a GPU each such read waits for all work before it.

Composer reads one number: the loss for the loggers, if they do not get it one step later.
"""

import traceback
import warnings
from pathlib import Path

import pytest
import torch
from composer import Callback, Logger, State
from torch.utils._python_dispatch import TorchDispatchMode

import diffusion
from diffusion.callbacks.metrics_file import MetricsFile
from diffusion.config.loading import load_config
from diffusion.formats.run_folder import TRAIN_LOSS
from diffusion.train import train
from diffusion.trainer import HostNumber

PACKAGE = str(Path(diffusion.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
IN_HOST_MEMORY = (HostNumber.read.__code__.co_filename, HostNumber.read.__name__)
"""Reads what was copied into host memory before."""

FIRST, END = 2, 4
"""Steps that are watched: [FIRST, END)."""

SIZE_FROM_VALUES = ("nonzero", "masked_select", "unique", "_local_scalar_dense", "equal", "repeat_interleave")
"""Operations whose result the host has to know."""


class WatchReads(TorchDispatchMode):
    """Notes who asks for a tensor's value: the innermost position that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.startswith(SIZE_FROM_VALUES):
            frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(TORCH)]
            if (frames[-1].filename, frames[-1].name) != IN_HOST_MEMORY:
                self.positions.append(f"{frames[-1].filename}:{frames[-1].lineno}")
        return func(*args, **(kwargs or {}))


class WatchSteps(Callback):
    """Watches some steps of a run, everything between the beginnings of two steps, and the delay of logged losses."""

    found: list[str] = []
    delays: list[int] = []

    def __init__(self) -> None:
        self.mode = WatchReads()

    def fit_start(self, state: State, logger: Logger) -> None:
        type(self).delays = []
        (file,) = [each for each in logger.destinations if isinstance(each, MetricsFile)]
        log_metrics = file.log_metrics

        def noted(metrics, step):
            if TRAIN_LOSS in metrics and FIRST <= step < END:
                self.delays.append(state.timestamp.batch.value - step)
            log_metrics(metrics, step)

        file.log_metrics = noted

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == FIRST:
            self.mode.__enter__()
        if state.timestamp.batch.value == END:
            self.mode.__exit__(None, None, None)
            type(self).found = self.mode.positions


class WatchSynchronisations(Callback):
    """Watches some steps of a run on a GPU for what torch says to wait for it."""

    found: list[str] = []

    def __init__(self) -> None:
        self.caught = warnings.catch_warnings(record=True)

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == FIRST:
            self.messages = self.caught.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if state.timestamp.batch.value == END:
            torch.cuda.set_sync_debug_mode("default")
            self.caught.__exit__(None, None, None)
            synchronising = [
                caught for caught in self.messages or [] if "called a synchronizing" in str(caught.message)
            ]
            type(self).found = [f"{caught.filename}:{caught.lineno}" for caught in synchronising]


def train_watched(tmp_path, callback, *settings):
    overrides = [
        f"output_folder={tmp_path}",
        "trainer.max_duration=5ba",
        "trainer.save_interval=1000ba",
        "trainer.device_train_microbatch_size=4",
        "algorithms.ema.start=1ba",
        "optimizer.max_grad_norm=1.0",
        f"plugins.callbacks=[{{path: {__name__}.{callback.__name__}}}]",
        *settings,
    ]
    is_first = not torch.distributed.is_initialized()
    train(load_config("tests/tools/toy.yaml", overrides))
    if is_first:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("is_late", "num_reads"), [(False, 1), (True, 0)])
def test_nothing_of_ours_reads_from_the_device_in_a_step(tmp_path, is_late, num_reads):
    train_watched(tmp_path, WatchSteps, f"performance.log_late={is_late}")
    reads = WatchSteps.found
    assert [position for position in reads if position.startswith(PACKAGE)] == []
    assert len(reads) == num_reads * (END - FIRST), reads
    assert WatchSteps.delays == [int(is_late)] * (END - FIRST)


@pytest.mark.gpu
@pytest.mark.parametrize(("is_late", "num_reads"), [(False, 1), (True, 0)])
def test_a_step_on_a_gpu_waits_for_the_loss_only(tmp_path, is_late, num_reads):
    settings = ["trainer.device=gpu", "trainer.precision=amp_bf16", f"performance.log_late={is_late}"]
    train_watched(tmp_path, WatchSynchronisations, *settings)
    positions = WatchSynchronisations.found
    assert [position for position in positions if position.startswith(PACKAGE)] == []
    assert len(positions) == num_reads * (END - FIRST), positions
