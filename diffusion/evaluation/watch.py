"""Evaluation of runs during training: each complete checkpoint once, by any number of watchers, without delaying a run.

A watcher takes the lease of a checkpoint (`leases/` in the output folder), evaluates it, and records it in `ledger/`
after its results. The lease of a killed watcher runs out, and another watcher continues from its results and images.
The run's removal of a checkpoint does not affect the one that is being read, which is linked or copied to the output
folder.
"""

import hashlib
import json
import logging
import math
import os
import posixpath
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diffusion import storage
from diffusion.callbacks.loggers import starting_wandb
from diffusion.checkpointing.find import find_damage
from diffusion.checkpointing.layout import CHECKPOINT_INDEX, batch_of, list_checkpoints, remove_copy
from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoints
from diffusion.config.schema import Config
from diffusion.distributed import barrier, is_first_rank, on_first_rank, start_process_group
from diffusion.errors import ConfigurationError, DataError, MachineError, explained_writes
from diffusion.evaluation.config import EvaluationConfig, run_label
from diffusion.evaluation.evaluate import Evaluation, write_table
from diffusion.evaluation.generate import WeightsError, checkpoint_models
from diffusion.evaluation.protocol import Result, read_results, text_hash
from diffusion.files import read_json, write_json
from diffusion.formats.run_folder import CHECKPOINTS, METRICS, TENSORBOARD, checkpoint_folder, finished_step
from diffusion.loading import load_config_of
from diffusion.operations.lease import Applicant, Lease, held
from diffusion.operations.metrics import DONE, LEASED, QUEUE, served
from diffusion.storage import is_url

log = logging.getLogger(__name__)

COPIES = "copies"
"""Folder of the checkpoints that are being read, in the output folder of a run."""

LEDGER = "ledger"
"""Folder with a file for each evaluated checkpoint, in the output folder of a run."""

LEASES = "leases"
"""Folder of the leases of checkpoints that are being evaluated, and of the loggers, in the output folder of a run."""

LOGGERS = "loggers"
"""Name of the lease of TensorBoard and wandb."""

STEP = "trainer/step"
"""Step axis of the numbers in wandb."""


def watch(config: EvaluationConfig) -> None:
    """Evaluate the checkpoints of `model` or `runs` until the runs are finished; collective.

    Raises:
        UserError: on every rank, for errors of the configuration, the data or the machine.
    """
    start_process_group()
    Watcher(config).run()


class Watcher:
    """Evaluates new checkpoints of runs, which it may share with other watchers."""

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        root, settings = Path(config.output_folder).expanduser(), None
        if not config.watch_only:
            settings = text_hash(repr((config.protocol, sorted(config.weights), sorted(config.guidance_scales))))
        if config.model is not None:
            self.runs = [WatchedRun(config.model, root, settings)]
        else:
            self.runs = [WatchedRun(uri, root / run_label(uri), settings) for uri in config.runs]
        on_first_rank(self._look_for_checkpoints)
        self.evaluation = None if config.watch_only else Evaluation(config=config)
        self._loggers = [WatchLoggers(config, run) for run in self.runs]
        self._lease: Lease | None = None
        """Lease of the checkpoint that is being evaluated, on the first rank."""

        self._idle_since = time.monotonic()

    def _look_for_checkpoints(self) -> None:
        """Report mistyped runs before networks are loaded, which takes minutes."""
        for run in self.runs:
            if not list_complete(locate(run.uri)[1]):
                log.info("%s has no checkpoints yet: waiting", run.uri)

    def run(self) -> None:
        """Evaluate until the runs are finished; with `watch_forever`, until the process ends."""
        with ExitStack() as stack:
            for loggers in self._loggers:
                stack.callback(loggers.close)
            if is_first_rank():
                settings = self.config.loggers.prometheus
                stack.enter_context(served(settings, lambda: {run.label: run.count() for run in self.runs}))
            while True:
                is_over, task = on_first_rank(self._find_task)
                if is_over:
                    break
                if task is not None:
                    self._evaluate(*task)
                else:
                    time.sleep(self.config.poll_seconds)

    def _find_task(self) -> tuple[bool, tuple[int, str] | None]:
        """Return True at the end; else the number of a run and a checkpoint whose lease was acquired, or None."""
        for run, loggers in zip(self.runs, self._loggers, strict=True):
            run.update()
            loggers.write(run.rows)
        if not self.config.watch_only:
            tasks = [(i, number, name) for number, run in enumerate(self.runs) for i, name in enumerate(run.pending)]
            for _, number, name in sorted(tasks):  # The oldest of each run first.
                if (lease := self.runs[number].acquire(name)) is not None:
                    self._lease = lease
                    return False, (number, name)
        if not self.config.watch_forever and all(run.is_finished and not run.pending for run in self.runs):
            for run in self.runs:
                log.info("run %s is finished; %d checkpoints in the ledger", run.uri, len(run.entries))
            return True, None
        idle = self.config.idle_seconds
        return idle is not None and time.monotonic() - self._idle_since >= idle, None

    def _evaluate(self, number: int, name: str) -> None:
        """Evaluate a checkpoint and record it."""
        run, lease = self.runs[number], self._lease
        copy = run.folder / COPIES / name
        with nullcontext() if lease is None else held(lease):
            skipped = on_first_rank(lambda: copy_checkpoint(locate(run.uri)[1], name, copy.parent))
            if skipped is None:
                skipped = self._evaluate_weights(run, name, copy)
            barrier()  # All ranks have read the copy.

            def record() -> None:
                assert lease is not None
                lease.renew()  # After a suspension of this process another watcher may have taken it over.
                config = None
                with suppress(DataError):  # A damaged checkpoint, which is skipped.
                    config = load_config_of(copy) if copy.exists() else None
                remove_copy(copy)  # Before the record: what is recorded is not looked at again.
                run.record(name, skipped, config)

            on_first_rank(record)
        self._idle_since = time.monotonic()

    def _evaluate_weights(self, run: "WatchedRun", name: str, copy: Path) -> str | None:
        """Evaluate each of the weights of a checkpoint; return the errors if none could be evaluated."""
        assert self.evaluation is not None
        evaluation, problems = self.evaluation.of_run(run.folder), []
        models = checkpoint_models(copy, self.config.weights)
        for model in models:
            try:
                evaluation.evaluate(replace(model, origin=f"{locate(run.uri)[1].rstrip('/')}/{name}"))
            except WeightsError as error:
                # An average may not have started yet; the other weights are evaluated.
                log.warning("%s of %s: %s", model.weights, name, error)
                problems.append(str(error))
        return "; ".join(problems) if len(problems) == len(models) else None


# The ledger


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """Record of an evaluated checkpoint."""

    run: str
    """Location of the run."""

    step: int
    skipped: str | None
    """Reason for skipping it; None if it was evaluated."""

    is_last: bool
    """True if it is the checkpoint of the last step in the run's configuration."""

    host: str
    pid: int
    """Process of the watcher."""

    run_name: str | None
    """Name, group and output folder in the run's configuration; None if it was removed or is damaged."""

    group: str | None
    output_folder: str | None

    identity: str | None = None
    """Identity of its files; None in ledgers of earlier versions."""

    settings: list[str] | None = None
    """Hash of protocol, weights and guidance scales of each evaluation; None in ledgers of earlier versions."""

    def has(self, settings: str | None) -> bool:
        """Check for an evaluation with these settings; None, and an entry without settings, are any."""
        return settings is None or self.settings is None or settings in self.settings


def read_ledger(folder: Path, run: str, known: Mapping[str, LedgerEntry] | None = None) -> dict[str, LedgerEntry]:
    """Read the entries of a ledger by the names of checkpoints (`ep0-ba100`), except for those that are known.

    The ledger of another run is a DataError.
    """
    entries = dict(known or {})
    for path in folder.glob("*.json"):
        if (name := path.name.removesuffix(".json")) in entries:
            continue
        try:
            entries[name] = LedgerEntry(**read_json(path))
        except TypeError as error:
            raise DataError(f"{path} is no entry of a ledger: choose another output_folder") from error
        if (owner := entries[name].run) != run:
            raise DataError(f"{path} is of the run {owner}, not of {run}: choose another output_folder")
    return entries


class WatchedRun:
    """A run, what is recorded of it in its output folder, and its checkpoints to evaluate; for the first rank.

    The location is as in `EvaluationConfig.model`; all watchers of the run share the output folder.
    """

    def __init__(self, uri: str, folder: Path, settings: str | None = None) -> None:
        self.uri, self.folder, self.label, self.settings = uri, folder, run_label(uri), settings
        self.entries: dict[str, LedgerEntry] = {}
        self.identities: dict[str, str] = {}
        """Complete checkpoints, as `list_complete` has found them last."""

        self.pending: list[str] = []
        """Complete checkpoints without an entry that has the settings, oldest first."""

        self.is_finished = False
        self.rows: list[dict[str, float]] = []
        """Numbers of the steps before the first pending checkpoint."""

        self._applicants: dict[str, Applicant] = {}
        self._summarised: tuple[list[str], list[str]] = [], []
        """Entries and pending checkpoints of the last summary."""

    def update(self) -> None:
        """Look for new checkpoints and new entries, of any watcher."""
        run, checkpoints = locate(self.uri)
        # Before the list of checkpoints, which is then complete.
        finished = finished_step(run) if run is not None else None
        self.identities = list_complete(checkpoints)
        names = list(self.identities)
        self.entries, done = self._read_ledger(self.identities)
        self.pending = [name for name in names if name not in done]
        if is_url(self.uri):  # Only a run folder says when it has ended.
            self.is_finished = any(entry.is_last for entry in self.entries.values())
        else:  # A finished run may have been continued.
            self.is_finished = finished is not None and (not names or step_of(names[-1]) <= finished)
        self._summarise()

    def _read_ledger(self, identities: Mapping[str, str]) -> tuple[dict[str, LedgerEntry], set[str]]:
        """Read the entries that are not known, and return all, and the names of those that have the settings.

        Those of checkpoints that the run has removed and written again, as after a rollback, are left out.
        """

        def current(entries: Mapping[str, LedgerEntry]) -> dict[str, LedgerEntry]:
            pairs = ((name, entry, identities.get(name, entry.identity)) for name, entry in entries.items())
            return {name: entry for name, entry, identity in pairs if entry.identity in (None, identity)}

        known = {name: entry for name, entry in self.entries.items() if entry.has(self.settings)}
        found = current(read_ledger(self.folder / LEDGER, self.uri, current(known)))
        return found, {name for name, entry in found.items() if entry.has(self.settings)}

    def _summarise(self) -> None:
        """Write table and metrics file again after new entries: another watcher may have written them without these."""
        steps = {entry.step for entry in self.entries.values() if entry.skipped is None}
        state = list(self.entries), self.pending
        if not steps:
            self.rows = []
        if not steps or state == self._summarised:
            return
        rows = [row for row in rows_of(read_results([self.folder])) if row["step"] in steps]
        storage.write(str(self.folder / METRICS), "".join(json.dumps(row) + "\n" for row in rows).encode())
        write_table(self.folder)
        first_pending = min(map(step_of, self.pending), default=math.inf)
        self.rows = [row for row in rows if row["step"] < first_pending]
        self._summarised = state

    def acquire(self, name: str) -> Lease | None:
        """Acquire the lease of a pending checkpoint, unless another watcher evaluates or has evaluated it."""
        lease = self.applicant(name).acquire()
        if lease is not None:
            self.entries, done = self._read_ledger(self.identities)
            if name in done:
                lease.release()
                return None
        return lease

    def applicant(self, name: str) -> Applicant:
        """Return the applicant for a lease; the same each time, since it observes the holder."""
        if name not in self._applicants:
            (self.folder / LEASES).mkdir(parents=True, exist_ok=True)
            self._applicants[name] = Applicant(self.folder / LEASES / f"{name}.json")
        return self._applicants[name]

    def record(self, name: str, skipped: str | None, config: Config | None) -> None:
        """Record a checkpoint in the ledger, with the reason if it was skipped.

        A checkpoint that was removed or is damaged has no configuration.
        """
        step, earlier = step_of(name), self.entries.get(name)
        settings = [] if earlier is None else earlier.settings or []
        entry = LedgerEntry(
            run=self.uri,
            step=step,
            skipped=skipped,
            is_last=config is not None and step >= config.planned_steps(),
            host=socket.gethostname(),
            pid=os.getpid(),
            run_name=config and config.run_name,
            group=config and config.group,
            output_folder=config and config.output_folder,
            identity=self.identities.get(name),
            settings=None if self.settings is None else [*settings, self.settings],
        )
        if earlier is not None and skipped is not None:  # Its numbers by other settings stay.
            entry = replace(earlier, settings=entry.settings)
        path = self.folder / LEDGER / f"{name}.json"
        with explained_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, asdict(entry))
        if skipped is None:
            log.info("checkpoint %s of %s is evaluated", name, self.uri)
        else:
            log.warning("checkpoint %s of %s is skipped: %s", name, self.uri, skipped)

    def count(self) -> dict[str, float]:
        """Count the checkpoints as they are now, for Prometheus, in any thread."""
        identities = list_complete(locate(self.uri)[1])
        _, done = self._read_ledger(identities)
        leased = {path.name.removesuffix(".json") for path in (self.folder / LEASES).glob("*.json")}
        queue = identities.keys() - done
        return {QUEUE: len(queue), LEASED: len(queue & leased), DONE: len(done)}


# The run


def locate(uri: str) -> tuple[Path | None, str]:
    """Find the folder of a run, if it is known, and the location of its checkpoints.

    The `trainer.checkpoint_folder` of a run folder is followed. A folder need not exist yet.

    Raises:
        ConfigurationError: it is a file, or a single checkpoint.
    """
    path = Path(uri).expanduser()
    if batch_of(path) >= 0 or path.is_file():
        raise ConfigurationError(f"{uri} is a file or a checkpoint, and watch=true follows a run: give its folder")
    if is_url(uri):
        return None, uri
    run = path.parent if path.name == CHECKPOINTS else path
    return run, checkpoint_folder(run) or str(run / CHECKPOINTS)


def step_of(name: str) -> int:
    """Step in the name of a checkpoint."""
    return batch_of(Path(name))


def list_complete(checkpoints: str) -> dict[str, str]:
    """Names of the completely written checkpoints of a run, oldest first, and what changes if one is written again."""
    if is_url(checkpoints):
        remote = RemoteCheckpoints(checkpoints, timeout=READ_TIMEOUT)
        return {found.name: found.identity for found in remote.present() if found.is_complete}
    identities = {}
    for path in list_checkpoints(Path(checkpoints).expanduser()):
        with suppress(FileNotFoundError):  # It is incomplete, or was removed meanwhile.
            status = (path / CHECKPOINT_INDEX if path.is_dir() else path).stat()
            identities[path.name] = f"{status.st_size} {status.st_mtime_ns}"
    return identities


def copy_checkpoint(checkpoints: str, name: str, folder: Path) -> str | None:
    """Download a checkpoint into a folder, or link its files.

    Returns:
        None; or the reason why there is no copy: the run has removed the checkpoint, or it is damaged.

    Raises:
        MachineError: the store cannot be read, or the folder not be written.
    """
    copy = folder / name
    remove_copy(copy)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if is_url(checkpoints):
            remote = RemoteCheckpoints(checkpoints, timeout=READ_TIMEOUT)
            for found in remote.present():
                if found.name == name:
                    remote.download(found, folder)
        elif (source := Path(checkpoints).expanduser() / name).is_dir():
            shutil.copytree(source, copy, copy_function=_link)
        else:
            _link(source, copy)
    except (OSError, DataError, MachineError) as error:
        if name in list_complete(checkpoints):
            raise MachineError(f"checkpoint {name} of {checkpoints} cannot be copied to {folder}: {error}") from error
    if (damage := find_damage(copy)) is None:
        return None
    remove_copy(copy)
    return damage if name in list_complete(checkpoints) else "it was removed before it could be read"


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # Another file system.
        shutil.copyfile(source, target)


# Loggers


def rows_of(results: Sequence[Result]) -> list[dict[str, float]]:
    """Rows of the metrics file, one per step in order."""
    rows: dict[int, dict[str, float]] = {}
    for result in results:
        if result.step is not None:
            scale = "" if result.guidance_scale is None else f"/cfg{result.guidance_scale:g}"
            row = rows.setdefault(result.step, {"step": result.step})
            for name, number in result.numbers.items():
                row[f"evaluation/{result.weights or 'raw'}{scale}/{name}"] = number.value
    return [rows[step] for step in sorted(rows)]


class WatchLoggers:
    """TensorBoard and wandb of a run's evaluation, separate from those of the run, with the steps of training.

    Of several watchers, the one that has their lease writes them. Each one that begins logs the rows of all results,
    because the files of a killed process may lack its last rows. TensorBoard hides those of earlier starts
    (`purge_step`). A run of wandb is resumed at the step after its last one. Offline, wandb knows no earlier start, and
    the newest of its folders has all rows.
    """

    def __init__(self, config: EvaluationConfig, run: WatchedRun) -> None:
        self._config, self._run = config, run
        self._stack = ExitStack()
        self._is_open = False
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._steps: set[float] = set()
        """Steps that this start has logged."""

    def write(self, rows: Sequence[dict[str, float]]) -> None:
        """Log the rows that this start has not logged yet, in order; nothing while another watcher has the lease."""
        settings = self._config.loggers
        if not rows or not (settings.tensorboard or settings.wandb) or not (self._is_open or self._open()):
            return
        for row in rows:
            step = int(row["step"])
            values = {name: value for name, value in row.items() if name != "step"}
            if self._tensorboard is not None and step not in self._steps:
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, step)
                self._tensorboard.flush()
            if self._wandb is not None and step >= self._wandb.step:
                self._wandb.log({STEP: step, **values}, step=step, commit=True)
            self._steps.add(step)

    def _open(self) -> bool:
        """Open the loggers: an event file beside those of the run, or in the output folder; and a run of wandb."""
        lease = self._run.applicant(LOGGERS).acquire()
        if lease is None:
            return False
        self._stack.enter_context(held(lease))
        folder, settings = self._run.folder, self._config.loggers.wandb
        run = next(entry for entry in self._run.entries.values() if entry.skipped is None)
        if self._config.loggers.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            of_run = Path(run.output_folder or "").expanduser() / TENSORBOARD
            parent = of_run if of_run.is_dir() else folder / TENSORBOARD
            name = posixpath.normpath(f"/{run.run_name}").lstrip("/")  # Of a checkpoint: no path out of the folder.
            self._tensorboard = SummaryWriter(str(parent / f"{name}.evaluation"), purge_step=0)
            self._stack.callback(self._tensorboard.close)
        if settings is not None:
            import wandb

            name = f"{run.run_name}-evaluation"
            with starting_wandb():
                self._wandb = wandb.init(
                    project=settings.project,
                    entity=settings.entity,
                    group=run.group or run.run_name,
                    name=name,
                    tags=settings.tags,
                    dir=str(folder),
                    id=hashlib.sha256(f"{name} {folder.resolve()}".encode()).hexdigest()[:12],
                    resume="allow",
                    mode="offline" if settings.offline else "online",
                )
            self._stack.callback(self._wandb.finish)
            self._wandb.define_metric(STEP)
            self._wandb.define_metric("evaluation/*", step_metric=STEP)
        self._is_open = True
        return True

    def close(self) -> None:
        """Close the event file, finish the run in wandb, and give the lease back."""
        self._stack.close()
