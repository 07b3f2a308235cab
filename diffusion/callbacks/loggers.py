"""TensorBoard, Weights & Biases and progress lines, for runs that are interrupted and resumed.

A resumed run repeats the steps after its checkpoint and logs their points again. TensorBoard hides the earlier ones
(`purge_step`), and a wandb server ignores the later ones (`resume`).
"""

import hashlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from composer import Logger, State
from composer.loggers import LoggerDestination, WandBLogger
from composer.utils import dist

from diffusion.callbacks.metrics_file import TRAIN_LOSS, MetricsFile
from diffusion.callbacks.run_record import last_logged_step
from diffusion.config.loading import to_dict
from diffusion.config.schema import Config
from diffusion.config.secrets import redact, redact_arguments
from diffusion.distributed import agree
from diffusion.errors import MachineError

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 30.0
"""Least time between two progress lines."""


class TensorBoardLogger(LoggerDestination):
    """Write numbers and images on rank 0 to one event file per start, which hides later points of earlier starts.

    Args:
        folder: parent of the folder of event files, which has the name of the run.
        metrics: the metrics file, whose row has the numbers of the checkpoint's step, which `purge_step` hides.
    """

    def __init__(self, folder: Path, metrics: MetricsFile | None) -> None:
        self.folder, self.metrics = folder, metrics
        self._writer: Any = None
        self._restored: dict[str, float] = {}
        self._restored_step = -1

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the event file at the step of the checkpoint."""
        if dist.get_global_rank() != 0:
            return
        from torch.utils.tensorboard.writer import SummaryWriter

        step = state.timestamp.batch.value
        self._writer = SummaryWriter(str(self.folder / state.run_name), purge_step=step)
        if self.metrics is not None:
            self.log_metrics(self.metrics.row, step)
            self._restored, self._restored_step = dict(self.metrics.row), step

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write the numbers that were not restored."""
        if self._writer is not None:
            for name, value in metrics.items():
                if step != self._restored_step or name not in self._restored:
                    self._writer.add_scalar(name, value, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Write images of one size as one grid."""
        if self._writer is not None:
            batch = np.stack([np.asarray(image) for image in images])
            self._writer.add_images(name, batch, step, dataformats="NHWC" if channels_last else "NCHW")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, but flush the points before the checkpoint, which a resumed run does not repeat."""
        if self._writer is not None:
            self._writer.flush()
        return {}

    def close(self, state: State, logger: Logger) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB(WandBLogger):
    """Composer's WandBLogger with the configuration of the run, captions below images, and resumption by a fixed id.

    Offline, wandb does not know which steps it has. The steps that earlier starts have logged according to the metrics
    file are therefore dropped here. Rows that wandb had not written when its process was killed (it writes blocks of
    32 KiB) are in the metrics file only.

    Args:
        folder: the run folder, below which wandb writes.
        config: the configuration of the run.
        metrics: the metrics file; without it, an offline run that is resumed logs the repeated steps again.
    """

    def __init__(self, folder: Path, config: Config, metrics: MetricsFile | None) -> None:
        settings = config.loggers.wandb
        assert settings is not None
        super().__init__(
            project=settings.project,
            entity=settings.entity,
            group=config.group,
            name=config.run_name,
            tags=settings.tags,
            init_kwargs={
                "dir": str(folder),
                "id": hashlib.sha256(f"{config.run_name} {folder.resolve()}".encode()).hexdigest()[:12],
                "resume": "allow",
                "mode": "offline" if settings.offline else "online",
                "config": wandb_config(to_dict(config)),
                "job_type": "train",
                # wandb stores the command line, in which an override may be a secret.
                "settings": {"_args": redact_arguments(sys.argv[1:])},
            },
        )
        self.folder, self.metrics, self.offline = folder, metrics, settings.offline
        self.captions = {"samples": config.samples.prompts}
        self._last_step: float = -1
        self._last_names: set[str] = set()

    def init(self, state: State, logger: Logger) -> None:
        """Start, on rank 0.

        Raises:
            MachineError: on every rank: wandb rejects a name or the account.
        """
        agree(self._start)
        super().init(state, logger)  # Finds the run that is started.

    def _start(self) -> None:
        import wandb

        if self._enabled:
            with as_machine_error():
                wandb.init(**self._init_kwargs)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the last point that earlier starts have logged."""
        if self.offline and self._enabled and self.metrics is not None:
            self._last_step = last_logged_step(self.folder)
            if self.metrics.last_row.get("step") == self._last_step:
                self._last_names = set(self.metrics.last_row)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the numbers that earlier starts have not logged."""
        if step is not None and step <= self._last_step:
            is_open = step == self._last_step and self._last_names
            metrics = {name: value for name, value in metrics.items() if is_open and name not in self._last_names}
        if metrics:
            super().log_metrics(metrics, step)

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        """Log images, with captions where there is one for each."""
        if not self._enabled or (step is not None and step <= self._last_step):
            return
        captions = self.captions.get(name, ())
        if not channels_last or not isinstance(images, Sequence) or len(captions) != len(images):
            super().log_images(images, name, channels_last, step, *more, **named)
            return
        import wandb

        pairs = zip(images, captions, strict=True)
        wandb.log({name: [wandb.Image(np.asarray(image), caption=caption) for image, caption in pairs]}, step=step)


@contextmanager
def as_machine_error() -> Iterator[None]:
    """Explain by the keys of the configuration why wandb does not start."""
    from wandb.errors import Error

    try:
        yield
    except Error as error:
        raise MachineError(
            f"loggers.wandb: Weights & Biases does not start: {str(error).rstrip('.')}. Change the name that it "
            "refuses, log in (`wandb login`, or WANDB_API_KEY), or write to the run folder only with "
            "loggers.wandb.offline=true."
        ) from error


def wandb_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration so that wandb's tables can show, filter and group it.

    Nested dictionaries become columns such as `data.streams.256-512.proportion`: lists of dictionaries become
    dictionaries, by `name` or number. Secrets are redacted.
    """
    plain = _named(redact(config))
    assert isinstance(plain, dict)
    return plain


def _named(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _named(child) for key, child in value.items()}
    if isinstance(value, list) and value and all(isinstance(child, Mapping) for child in value):
        names = [str(child.get("name", number)) for number, child in enumerate(value)]
        names = names if len(set(names)) == len(names) else [str(number) for number in range(len(value))]
        return {name: _named(child) for name, child in zip(names, value, strict=True)}
    return [_named(child) for child in value] if isinstance(value, list) else value


class ProgressLines(LoggerDestination):
    """Log a line of progress on rank 0 at most every `PROGRESS_SECONDS`, for logs that are no terminal.

    A progress bar there writes a line for each change of each number.
    """

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._first_step, self._first_share = 0, 0.0
        self._loss = math.nan

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the training loss."""
        if TRAIN_LOSS in metrics:
            self._loss = float(metrics[TRAIN_LOSS])

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self._start = self._last = time.monotonic()
        self._first_step, self._first_share = state.timestamp.batch.value, _share_done(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log where the run is."""
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._log(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the end."""
        self._log(state)

    def _log(self, state: State) -> None:
        if dist.get_global_rank() != 0:
            return
        self._last = time.monotonic()
        seconds = max(self._last - self._start, 1e-9)
        step, share = state.timestamp.batch.value, _share_done(state)
        speed = (step - self._first_step) / seconds
        left = seconds * (1 - share) / max(share - self._first_share, 1e-9)
        log.info(
            "step %d (%.1f %%): loss %.4g, %.3g steps/s, %s left", step, 100 * share, self._loss, speed, _duration(left)
        )


def _share_done(state: State) -> float:
    elapsed = state.get_elapsed_duration()
    return float(elapsed.value) if elapsed is not None else 0.0


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
