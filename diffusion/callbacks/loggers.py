"""TensorBoard, Weights & Biases, Prometheus and progress lines, for runs that are interrupted and resumed.

A resumed run repeats the steps after its checkpoint and logs their points again. TensorBoard hides the earlier ones
(`purge_step`), and a wandb server ignores the later ones (`resume`).
"""

import atexit
import hashlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from composer import Logger, State
from composer.loggers import LoggerDestination, WandBLogger

from diffusion.config.loading import to_dict
from diffusion.config.operations import PrometheusConfig
from diffusion.config.schema import Config
from diffusion.config.secrets import redact, redact_arguments
from diffusion.distributed import agree, is_first_rank
from diffusion.errors import MachineError
from diffusion.formats.run_folder import TRAIN_LOSS
from diffusion.operations import metrics as names
from diffusion.operations.metrics import read_run_metrics, served

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 30.0
"""Least time between two progress lines."""

PROGRESS: dict[str, Callable[[float], str]] = {
    TRAIN_LOSS: "loss {:.4g}".format,
    "throughput/batches_per_sec": "{:.3g} steps/s".format,
    "time/remaining_estimate": lambda hours: f"{hours:.1f} h left" if hours >= 1 else f"{60 * hours:.0f} min left",
}
"""Formats of the numbers in a progress line."""

_LOGGED = {
    TRAIN_LOSS: names.LOSS,
    "throughput/samples_per_sec": names.IMAGES_PER_SECOND,
    "throughput/batches_per_sec": names.STEPS_PER_SECOND,
    "throughput/device/mfu": names.MFU,
    "time/data_waiting_share": names.DATA_WAITING,
}
"""Names of logged numbers in Prometheus."""


class TensorBoardLogger(LoggerDestination):
    """Write numbers and images on rank 0 to one event file per start, which hides later points of earlier starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the event file of this start.

        The points of the checkpoint's own step stay: most were logged before it was saved, and are not logged again.
        """
        if is_first_rank():
            from torch.utils.tensorboard.writer import SummaryWriter

            step = state.timestamp.batch.value
            self._writer = SummaryWriter(str(self.folder / state.run_name), purge_step=step + 1 if step else 0)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Write numbers."""
        if self._writer is not None:
            for name, value in metrics.items():
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
    """Composer's WandBLogger with the run's configuration, an id by which a resumed run is found, and captions."""

    def __init__(self, folder: Path, config: Config) -> None:
        settings = config.loggers.wandb
        assert settings is not None
        self.prompts = config.samples.prompts
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
                "config": redact(to_dict(config)),
                "job_type": "train",
            },
        )

    def init(self, state: State, logger: Logger) -> None:
        """Start, on rank 0; a MachineError on every rank if wandb rejects a name or the account."""
        agree(self._start)  # Composer's own `init` asks for `Run.get_url`, which wandb no longer has.

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Log images; the samples, arrays uint8 [H, W, 3], with their prompts as captions."""
        if not self._enabled or name != "samples":
            super().log_images(images, name, channels_last, step, *args, **kwargs)
            return
        import wandb

        pairs = zip(images, self.prompts, strict=True)
        wandb.log({name: [wandb.Image(image, caption=prompt) for image, prompt in pairs]}, step=step)

    def _start(self) -> None:
        import wandb

        if self._enabled:
            with starting_wandb():
                wandb.init(**self._init_kwargs)
            atexit.register(self._set_is_in_atexit)


@contextmanager
def starting_wandb() -> Iterator[None]:
    """Hide secrets in the command line, which wandb stores; explain by the keys of the configuration why it fails.

    Raises:
        MachineError: wandb rejects a name or the account.
    """
    from wandb.errors import Error

    command = sys.argv
    sys.argv = [command[0], *redact_arguments(command[1:])]
    try:
        yield
    except Error as error:
        raise MachineError(
            f"loggers.wandb: Weights & Biases does not start: {str(error).rstrip('.')}. Change the name that it "
            "refuses, log in (`wandb login`, or WANDB_API_KEY), or write to the run folder only with "
            "loggers.wandb.offline=true."
        ) from error
    finally:
        sys.argv = command


class ProgressLines(LoggerDestination):
    """Log a line of progress on rank 0 at most every `PROGRESS_SECONDS`, for logs that are no terminal."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._numbers: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the newest numbers."""
        self._numbers |= metrics

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log where the run is."""
        if time.monotonic() - self._last >= PROGRESS_SECONDS:
            self._last = time.monotonic()
            self._log(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Log the end."""
        self._log(state)

    def _log(self, state: State) -> None:
        elapsed = state.get_elapsed_duration()
        if not is_first_rank() or elapsed is None:
            return
        known = ", ".join(text(self._numbers[name]) for name, text in PROGRESS.items() if name in self._numbers)
        log.info("step %d (%.1f %%): %s", state.timestamp.batch.value, 100 * elapsed.value, known)


class PrometheusLogger(LoggerDestination):
    """Serve the newest logged numbers, and what the run folder shows, from the beginning of training to its end."""

    def __init__(self, settings: PrometheusConfig, run: Path, heartbeats: Path) -> None:
        self._settings, self._run, self._heartbeats = settings, run, heartbeats
        self._numbers = dict.fromkeys(_LOGGED.values(), math.nan)
        self._server = ExitStack()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the server; a MachineError on all ranks if the address cannot be used."""
        agree(lambda: self._server.enter_context(served(self._settings, self._read)) if is_first_rank() else None)

    def _read(self) -> names.MetricValues:
        return {self._run.name: self._numbers | read_run_metrics(self._run, self._heartbeats)}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the newest numbers, all at once: a scrape reads them in another thread."""
        self._numbers |= {_LOGGED[name]: float(metrics[name]) for name in _LOGGED.keys() & metrics.keys()}

    def close(self, state: State, logger: Logger) -> None:
        """End the server."""
        self._server.close()
