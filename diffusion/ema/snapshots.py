"""Storing power-function averages while training, from which an average of any width is made afterwards."""

from pathlib import Path

import torch
from composer import Callback, Logger, State, Time
from composer.utils import dist

from diffusion.checkpointing.object_store import ObjectStore
from diffusion.config.training import EMAConfig, NumberFormat
from diffusion.distributed import agree
from diffusion.ema.average_files import AVERAGE_SUFFIX, STORED, AverageRecord, write_average
from diffusion.ema.averaging import gather_on_rank_0
from diffusion.ema.ema import LateStartEMA
from diffusion.ema.profiles import PowerFunction, build_profiles
from diffusion.errors import MachineError

DTYPES = {
    NumberFormat.fp32: torch.float32,
    NumberFormat.fp16: torch.float16,
    NumberFormat.bf16: torch.bfloat16,
}


class AverageSnapshots(Callback):
    """Write the power-function averages at intervals and at the end; they are never removed.

    With an object store, each is uploaded as `averages/NAME` while training goes on, and before the next checkpoint
    there is whole, so that none is missing after a continued run. A file holds one
    average, gathered tensor by tensor on rank 0, which needs its size in memory; its content does not
    depend on the number of ranks beyond the order of sums in training. A run that continues from a checkpoint writes
    the files of the steps that it repeats again, with the same bytes. Comes after the callback that updates the
    averages.

    Args:
        ema: holds the averages.
        folder: where the files go.
        interval: batches between them, counted from the beginning of the run: `5000ba`.
        dtype: of the stored tensors.
        store: of the run's checkpoints; None if they are in a folder.
    """

    def __init__(
        self, ema: LateStartEMA, folder: Path, *, interval: str, dtype: torch.dtype, store: ObjectStore | None = None
    ) -> None:
        self.ema, self.folder, self.dtype, self.store = ema, folder, dtype, store
        self.interval = Time.from_timestring(interval)
        self._last_step = -1

    def fit_start(self, state: State, logger: Logger) -> None:
        """Upload what an earlier start has written only."""
        agree(self._upload_missing, takes_long=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write at the interval."""
        if state.timestamp.batch.value % self.interval.value == 0:
            self._write(state.timestamp.batch.value)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write at the end, unless that was just done."""
        self._write(state.timestamp.batch.value)
        if self.store is not None:
            agree(self.store.await_uploads, takes_long=True)

    def _write(self, step: int) -> None:
        averages = [average for average in self.ema.averages if isinstance(average.profile, PowerFunction)]
        if step == self._last_step or not averages or averages[0].num_updates == 0:
            return
        self._last_step = step
        for average in averages:
            record = AverageRecord(label=average.profile.label, step=step, time=average.time)
            tensors = gather_on_rank_0(average.averages, self.dtype)
            agree(lambda record=record, tensors=tensors: self._store(record, tensors))

    def _upload_missing(self) -> None:
        if self.store is None or dist.get_global_rank() != 0:
            return
        there = self.store.files()
        for path in sorted(self.folder.glob(f"*{AVERAGE_SUFFIX}")):
            if (name := f"{STORED}/{path.name}") not in there:
                self.store.upload_later(path, name)

    def _store(self, record: AverageRecord, tensors: dict[str, torch.Tensor]) -> None:
        if dist.get_global_rank() != 0:
            return
        try:
            path = write_average(self.folder, record, tensors)
        except OSError as error:
            raise MachineError(
                f"{self.folder / record.file_name} cannot be written: {error.strerror or error}. Make room and start "
                "the same command again"
            ) from error
        if self.store is not None:
            self.store.upload_later(path, f"{STORED}/{path.name}")


def build_averages(
    config: EMAConfig | None, folder: Path, store: ObjectStore | None = None
) -> tuple[LateStartEMA | None, list[Callback]]:
    """The callbacks that average and store.

    Args:
        config: None for no averages.
        folder: the run folder.
        store: of the run's checkpoints; None if they are in a folder.

    Returns:
        The one with which to sample and export, None if the weights are to be; and all, in the order in which they run.
    """
    if config is None:
        return None, []
    power = config.power
    profiles = build_profiles(config.decays, power.relative_widths if power is not None else [])
    ema = LateStartEMA(start=config.start, profiles=profiles, interval=config.interval, evaluate=config.evaluate)
    callbacks: list[Callback] = [ema]
    if power is not None:
        dtype = DTYPES[power.snapshot_precision]
        snapshots = AverageSnapshots(ema, folder / STORED, interval=power.snapshot_interval, dtype=dtype, store=store)
        callbacks.append(snapshots)
    return ema if config.evaluate else None, callbacks
