"""TensorBoard and Weights & Biases for runs that are interrupted: no point twice at a step, and none missing.

A killed run has logged points after its last checkpoint, which the continued run comes by again, and with the same
values. A point that is in the files already is not logged again. What was not written yet when the run was killed is
lost with it: TensorBoard's file is therefore flushed with each checkpoint; wandb writes blocks of 32 KiB at its own
pace, and what is missing there is taken from the metrics file. Images that wandb had not written are not logged
again; the run folder has them.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer import Logger, State
from composer.loggers import LoggerDestination, TensorboardLogger, WandBLogger
from composer.utils import dist

from diffusion.callbacks.metrics_file import MetricsFile
from diffusion.distributed import agree
from diffusion.errors import MachineError

log = logging.getLogger(__name__)


class LoggedPoints:
    """The last step at which each name was logged by earlier starts of the run."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    @property
    def last_step(self) -> int:
        """The last step of all; -1 if nothing was logged."""
        return max(self._last.values(), default=-1)

    def add(self, name: str, step: int) -> None:
        """Note a point."""
        self._last[name] = max(step, self._last.get(name, -1))

    def has(self, name: str, step: int | None) -> bool:
        """Whether there is a point of this name at the step or after it."""
        return step is not None and step <= self._last.get(name, -1)

    def without(self, metrics: Mapping[str, Any], step: int | None) -> dict[str, Any]:
        """The metrics that are not there yet."""
        return {name: value for name, value in metrics.items() if not self.has(name, step)}


class _SkipsLoggedImages(LoggerDestination):
    """Leaves out images that an earlier start has written; stands before a logger of Composer."""

    _points: LoggedPoints

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        """Log images, unless they are there."""
        if not self._points.has(name, step):
            super().log_images(images, name, channels_last, step, *more, **named)


class ContinuedTensorboard(_SkipsLoggedImages, TensorboardLogger):
    """Composer's TensorboardLogger, without the points that earlier starts of the run have written.

    Args:
        folder: parent of the folder of event files, which has the run's name.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._points = LoggedPoints()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Read what is there of the steps that follow."""
        if dist.get_global_rank() == 0 and self.log_dir is not None:
            self._points = tensorboard_points(Path(self.log_dir, state.run_name), state.timestamp.batch.value)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write the numbers that are not there yet."""
        super().log_metrics(self._points.without(metrics, step), step)

    def state_dict(self) -> dict[str, Any]:
        """Nothing; but what was logged before a checkpoint is in the file when the checkpoint is."""
        if self.writer is not None and dist.get_global_rank() == 0:
            self.writer.flush()
        return {}


def tensorboard_points(folder: Path, first_step: int) -> LoggedPoints:
    """Points in a folder of event files at a step or after it, and perhaps some before."""
    points = LoggedPoints()
    files = [path for path in folder.glob("events.out.tfevents.*") if path.stat().st_size]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        last_in_file = -1
        for name, step in _event_points(path):
            points.add(name, step)
            last_in_file = max(step, last_in_file)
        if 0 <= last_in_file < first_step:
            break  # Older files hold earlier steps only.
    return points


def _event_points(path: Path) -> Iterator[tuple[str, int]]:
    """Names and steps in an event file; a last one that was cut off is left out."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    for content in RawEventFileLoader(str(path)).Load():
        event: Any = Event()
        event.ParseFromString(content)
        yield from ((value.tag, event.step) for value in event.summary.value)


class ContinuedWandB(_SkipsLoggedImages, WandBLogger):
    """Composer's WandBLogger, which leaves out, when offline, what earlier starts have written and adds what they lost.

    Online, the server refuses steps that it has.

    Args:
        folder: the run folder, below which wandb writes.
        run_id: the run's id for wandb.
        metrics: the run's metrics file; None: what was lost stays lost.
        offline: write to files only.
        options: further arguments of `WandBLogger`.
    """

    def __init__(
        self, folder: Path, run_id: str, *, metrics: MetricsFile | None, offline: bool, **options: Any
    ) -> None:
        mode = "offline" if offline else "online"
        super().__init__(**options, init_kwargs={"dir": str(folder), "id": run_id, "resume": "allow", "mode": mode})
        self.folder, self.run_id, self.metrics, self.offline = folder, run_id, metrics, offline
        self._points = LoggedPoints()

    def init(self, state: State, logger: Logger) -> None:
        """Start, on rank 0.

        Raises:
            MachineError: on every rank: wandb refuses a name, or the account.
        """
        agree(self._start)
        super().init(state, logger)  # Finds the run that is started.

    def _start(self) -> None:
        import wandb

        if self._enabled:
            with as_machine_error():
                wandb.init(**self._init_kwargs)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Read what is there, and log again what an earlier start has logged and not written."""
        step = state.timestamp.batch.value
        if not self.offline or not self._enabled or step == 0:
            return
        self._points = wandb_points(self.folder, self.run_id)
        if self.metrics is None:
            return
        for row in self.metrics.rows():
            if self._points.last_step < row["step"] <= step:
                values = {name: value for name, value in row.items() if name != "step"}
                super().log_metrics(values, int(row["step"]))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the numbers that are not there yet."""
        if missing := self._points.without(metrics, step):
            super().log_metrics(missing, step)


@contextmanager
def as_machine_error() -> Iterator[None]:
    """Tell what wandb refuses when it starts by its keys."""
    from wandb.errors import Error

    try:
        yield
    except Error as error:
        raise MachineError(
            f"loggers.wandb: Weights & Biases does not start: {str(error).rstrip('.')}. Change the name that it "
            "refuses, log in (`wandb login`, or WANDB_API_KEY), or write to the run folder only with "
            "loggers.wandb.offline=true."
        ) from error


def wandb_points(folder: Path, run_id: str) -> LoggedPoints:
    """Points in the offline files of a run."""
    points = LoggedPoints()
    for path in folder.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"):
        for row in read_wandb(path):
            for name in row:
                points.add(name, int(row["_step"]))
    return points


def read_wandb(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of an offline file of wandb, with their `_step`; a last one that was cut off is left out.

    Yields:
        Numbers by name; under the name of images, one of their properties.
    """
    for row in wandb_history(path):
        yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item}


def wandb_history(path: Path) -> Iterator[Any]:
    """Rows of an offline file as wandb stores them (`HistoryRecord`)."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    if path.stat().st_size == 0:
        return
    store = DataStore()
    store.open_for_scan(str(path))
    try:
        while (content := store.scan_data()) is not None:
            record: Any = Record()
            record.ParseFromString(content)
            if record.WhichOneof("record_type") == "history":
                yield record.history
    except AssertionError:  # What the reader raises for a record that is not whole.
        log.debug("%s ends in the middle of a record", path)
    finally:
        store.close()
