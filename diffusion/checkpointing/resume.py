"""Parts of a resumption: the checkpoint, changed settings, and what is left after the last step; `train` calls them."""

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from composer import Event, Trainer
from composer.utils import dist as composer_dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from diffusion.checkpointing.find import (
    Checkpoints,
    LocalCheckpoints,
    check_checkpoint,
    check_whole,
    checkpoints_at,
    is_complete,
    newest_that_passes,
    read_damaged,
    write_damaged,
)
from diffusion.checkpointing.layout import batch_of, list_checkpoints, remove_copy
from diffusion.checkpointing.read import AVERAGES_PREFIX, StoredState, check_safe, read_config_values, read_metadata
from diffusion.checkpointing.remote import RemoteCheckpoint, RemoteCheckpoints
from diffusion.config.keys import field_types, split_optional
from diffusion.config.loading import from_dict, to_dict
from diffusion.config.resumption import Effect, effect_of
from diffusion.config.schema import Config, Task
from diffusion.config.secrets import redact
from diffusion.distributed import agree, barrier, is_first_rank, local_rank, on_first_rank
from diffusion.errors import ConfigurationError, DataError, explained_writes
from diffusion.files import write_json
from diffusion.formats.run_folder import (
    CHECKPOINTS,
    DOWNLOADS,
    FINISHED,
    STARTS,
    UPLOADS,
    checkpoint_folder,
    finished_step,
)
from diffusion.storage import is_url

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointStorage:
    """The folders and the store of a run's checkpoints."""

    run: Path
    """The run folder."""

    folder: Path
    """Folder of checkpoints: `checkpoints/`, or `uploads/` where they are uploaded from."""

    remote: RemoteCheckpoints | None
    """The object store that they are uploaded to, if any."""

    @property
    def downloads(self) -> Path:
        """Downloads of this node."""
        return self.run / DOWNLOADS / f"node-{composer_dist.get_node_rank()}"

    @property
    def kept(self) -> Checkpoints:
        """The checkpoints that stay: those of the store, if there is one."""
        return self.remote or LocalCheckpoints(self.folder)

    def fetched(self, checkpoint: Path | RemoteCheckpoint) -> Path:
        """Path of a checkpoint on this node, downloaded if it is in the store."""
        if isinstance(checkpoint, Path):
            return checkpoint
        assert self.remote is not None
        return self.remote.download(checkpoint, self.downloads)


def checkpoint_storage(config: Config, run: Path) -> CheckpointStorage:
    """The storage that `trainer.checkpoint_folder` names, of a run in the folder `run`."""
    location = config.trainer.checkpoint_folder
    if location is None:
        return CheckpointStorage(run, run / CHECKPOINTS, None)
    if not is_url(location):
        return CheckpointStorage(run, Path(location).expanduser(), None)
    remote = RemoteCheckpoints(location, timeout=config.trainer.store_timeout)
    return CheckpointStorage(run, run / UPLOADS, remote)


# The checkpoint


def find_resumption(config: Config, storage: CheckpointStorage) -> str | None:
    """Find the newest checkpoint of a run that is whole and runs no code when it is loaded; None for a new run.

    Rank 0 decides; the first rank of each other node looks for the same checkpoint. From an object store it is
    downloaded once per node, to `downloads/` in the run folder. To be called by all ranks.

    Raises:
        ConfigurationError: a key has another value than in the checkpoint that is refused on resumption.
        DataError: it would run code, or all checkpoints are damaged.
        MachineError: half-written files cannot be removed, or the store cannot be used.
    """
    remote = storage.remote
    if remote is not None:
        on_first_rank(remote.check_access, takes_long=True)
        if config.trainer.autoresume:
            _finish_upload(storage.folder, remote)
    found = on_first_rank(lambda: _find_newest(config, storage), takes_long=True)
    if found is None:
        return None

    def check_again() -> None:
        """Check on another node, whose folder may be another one, what rank 0 has read in full."""
        if local_rank() != 0 or is_first_rank():
            return
        if isinstance(found, Path):
            check_whole(found)
            check_safe(found)
        else:
            shutil.rmtree(storage.downloads, ignore_errors=True)
            check_checkpoint(storage.fetched(found))

    agree(check_again, takes_long=True)
    if is_first_rank():
        log.info("resuming from %s", found)
    return str(found if isinstance(found, Path) else storage.downloads / found.name)


def _find_newest(config: Config, storage: CheckpointStorage) -> Path | RemoteCheckpoint | None:
    """Find the newest whole checkpoint, and record newer ones as damaged: later starts do not read them."""
    kept = storage.kept
    kept.remove_half_written()
    present = kept.present()
    check_beginning(config, storage, present)
    if not config.trainer.autoresume:
        return None
    if storage.remote is not None:
        shutil.rmtree(storage.downloads, ignore_errors=True)

    def check(checkpoint: Path | RemoteCheckpoint) -> None:
        path = storage.fetched(checkpoint)
        try:
            check_checkpoint(path)
        except DataError:
            if path != checkpoint:
                remove_copy(path)
            raise

    newest = newest_that_passes(present, check)
    if newest is not None:
        known = read_damaged(kept.uri)
        damaged = known.union(one.name for one in present[present.index(newest) + 1 :]) - {newest.name}
        if damaged != known:
            write_damaged(kept.uri, damaged)
        path = newest if isinstance(newest, Path) else storage.downloads / newest.name
        check_changes(config, path, str(newest))
    elif present:
        raise DataError(
            f"all checkpoints in {kept.uri} are damaged, and the run would begin anew. Remove them if that is "
            "intended, or restore a whole one"
        )
    return newest


def remove_downloads(storage: CheckpointStorage) -> None:
    """Remove the downloads of `find_resumption`, when all ranks have loaded them. To be called by all ranks."""
    if storage.remote is not None:
        barrier()
        if local_rank() == 0:
            shutil.rmtree(storage.downloads, ignore_errors=True)


def check_beginning(config: Config, storage: CheckpointStorage, present: Sequence[object]) -> None:
    """Check that a run does not begin anew although there are checkpoints.

    Raises:
        ConfigurationError: a run that does not resume has some, whose numbers would be those of its own; or none are
            `present`, but where an earlier start may have written them.
    """
    if not config.trainer.autoresume:
        if present:
            raise ConfigurationError(
                f"trainer.autoresume=false, but {storage.kept.uri} has checkpoints (the newest is {present[-1]}): "
                "choose another run_name, or remove them"
            )
        return
    run, configured = storage.run, config.trainer.checkpoint_folder
    recorded = checkpoint_folder(run) if (run / STARTS).is_file() else None  # Not of a start that failed before.
    for location in set() if present else {recorded, str(run / CHECKPOINTS)} - {None, configured}:
        if checkpoints_at(location, timeout=config.trainer.store_timeout).present():
            raise ConfigurationError(
                f"trainer.checkpoint_folder={configured or 'null'} holds no checkpoint, but {location} does, and the "
                "run would begin anew. Copy them there, or set trainer.checkpoint_folder back"
            )


# Uploads of an earlier start


def _finish_upload(folder: Path, remote: RemoteCheckpoints) -> None:
    """Upload the newest checkpoint that an earlier start has written, if the whole ones in the store are older.

    To be called by all ranks. Each node uploads the files that it has: each rank's file may be on its own node only.
    """

    def find_newest() -> Path | None:
        damaged = read_damaged(remote.uri)
        whole = [found for found in remote.present() if found.is_complete and found.name not in damaged]
        stored = max(map(batch_of, whole), default=-1)
        written = [path for path in list_checkpoints(folder) if _is_written(path)]
        return written[-1] if written and batch_of(written[-1]) > stored else None

    def finish_upload(local: Path) -> None:
        if missing := remote.find_missing(local):
            log.warning("checkpoint %s is not uploaded and dropped: no node has %s", local, missing)
        else:
            log.info("uploading %s, which an earlier start has written", local)
            remote.finish_upload(local)

    local = on_first_rank(find_newest, takes_long=True)
    if local is not None:
        agree(lambda: remote.upload_parts(local) if local_rank() == 0 else None, takes_long=True)
        on_first_rank(lambda: finish_upload(local), takes_long=True)
    if local_rank() == 0:
        for path in list_checkpoints(folder):
            remove_copy(path)


def _is_written(path: Path) -> bool:
    """Return whether all ranks have written their files, which may be on other nodes."""
    try:
        return bool(read_metadata(path).storage_data) if path.is_dir() else is_complete(path)
    except DataError:
        return False


# Changed settings

Change = tuple[str, Any, Any]
"""Key, value in the checkpoint, value now."""


def check_changes(config: Config, checkpoint: Path, name: str) -> None:
    """Reject what makes another run than that of a checkpoint, which messages call `name`; log other changes.

    Raises:
        ConfigurationError: a key has another value than in the checkpoint that is refused on resumption.
        DataError: the checkpoint has no configuration.
    """
    before = redact(read_config_values(checkpoint))  # Earlier versions knew fewer secrets.
    now = redact(to_dict(config))
    for values in (before, now):  # `trainer.max_duration` may move it.
        if (ema := values.get("algorithms", {}).get("ema")) is not None:
            ema["start"] = f"{_step_of(config, values, ema['start'], 'algorithms.ema.start')}ba"
    changes = [(effect_of(change[0], config.task), change) for change in _differences(before, now)]
    refused = {Effect.refused}
    plugins = before.get("plugins", {}).get("train_dataset"), config.plugins.train_dataset
    if any(plugin is not None for plugin in plugins):  # This package's own data has a fingerprint of its order.
        refused.add(Effect.same_order)
    if any(effect is Effect.same_averages for effect, _ in changes):
        if StoredState(checkpoint).keys(AVERAGES_PREFIX):
            refused.add(Effect.same_averages)
        else:
            _check_start_of_averages(config, batch_of(checkpoint), name)
    rejected = [
        (key, was, value)
        for effect, (key, was, value) in changes
        if effect in refused
        or (effect is Effect.same_weights and (was is None or value is None))
        or (key == "data.streams" and _are_reordered(was, value))
    ]
    if rejected:
        raise ConfigurationError(
            f"the run cannot resume from {name}, which was trained with other settings: {_list_changes(rejected)}. Set "
            f"{'this' if len(rejected) == 1 else 'these'} back; or begin another run, with another run_name or "
            "output_folder, from its weights if that is intended (init_from.checkpoint)"
        )
    if config.task is Task.autoencoder and config.autoencoder.adversarial_weight > 0:
        _check_discriminator(config, before, batch_of(checkpoint), name)
    if kept := [change for effect, change in changes if effect is Effect.kept]:
        log.warning("settings without effect on a resumption, which stay as in %s: %s", name, _list_changes(kept))
    if others := [change for effect, change in changes if effect is not Effect.kept]:
        log.info("settings that differ from %s: %s", name, _list_changes(others))


def _check_start_of_averages(config: Config, step: int, name: str) -> None:
    """Raise a ConfigurationError if averages were to begin at or before a step, and so would at the next instead."""
    if (ema := config.algorithms.ema) is None:
        return
    start = _step_of(config, to_dict(config), ema.start, "algorithms.ema.start")
    if start <= step < config.planned_steps():
        raise ConfigurationError(
            f"algorithms.ema.start={ema.start} is step {start} of this run, and {name} has no averages: set "
            f"algorithms.ema.start={step + 1}ba or later, or algorithms.ema=null"
        )


def _check_discriminator(config: Config, before: Mapping[str, Any], step: int, name: str) -> None:
    """Raise a ConfigurationError if the training of a discriminator has begun, and would stop until a later start."""
    key = "autoencoder.adversarial_start"
    was, now = (
        _step_of(config, values, values["autoencoder"]["adversarial_start"], key)
        for values in (before, to_dict(config))
    )
    if was < step < now:
        raise ConfigurationError(
            f"{key}={config.autoencoder.adversarial_start} is step {now} of this run, but {name} has trained the "
            f"discriminator since step {was}: set {key}={was}ba"
        )


def _step_of(config: Config, values: Mapping[str, Any], text: str, key: str) -> int:
    """Return the first step at or after a time, in a run of the length in a configuration's values."""
    run = replace(config, trainer=replace(config.trainer, max_duration=values["trainer"]["max_duration"]))
    steps = run.steps_of(text, key)
    assert steps is not None
    return math.ceil(steps - 1e-6)  # 0.07dur of 100 steps is 7.000000000000001.


def with_kept_settings(config: Config, checkpoint: Path) -> Config:
    """Replace settings without effect on a resumption by those of the checkpoint, which records are to name."""
    before = read_config_values(checkpoint)
    autoencoder = {key: value for key, value in before.get("autoencoder", {}).items() if key == "initial_logvar"}
    values = {"init_from": before.get("init_from"), "autoencoder": autoencoder}
    kept = from_dict(Config, values, str(checkpoint))
    logvar = kept.autoencoder.initial_logvar
    return replace(config, init_from=kept.init_from, autoencoder=replace(config.autoencoder, initial_logvar=logvar))


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], section: type = Config, prefix: str = ""
) -> Iterator[Change]:
    """Keys of today's schema whose values differ; a key that is not in the checkpoint had its default."""
    defaults = to_dict(section())
    for key, annotation in field_types(section).items():
        kind, _ = split_optional(annotation)
        was, value = before.get(key, defaults[key]), now[key]
        if is_dataclass(kind) and isinstance(was, dict) and isinstance(value, dict):
            yield from _differences(was, value, cast("type", kind), f"{prefix}{key}.")
        elif was != value:
            yield prefix + key, was, value


def _are_reordered(was: Any, now: Any) -> bool:
    """Return whether streams of the same names are in another order, which their fingerprint may not show."""
    before, after = (
        [stream["name"] for stream in streams] if isinstance(streams, list) else [] for streams in (was, now)
    )
    return before != after and sorted(before) == sorted(after)


def _list_changes(changes: list[Change]) -> str:
    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return "; ".join(f"{key} (was {text(was)}, is {text(value)})" for key, was, value in changes)


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copy the settings of each parameter group, such as learning rate and weight decay."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def restore_group_settings(trainer: Trainer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set what the configuration gave the optimizer in place of what a checkpoint has brought.

    Composer computes the learning rate of a step at the end of the one before: another schedule has its effect from
    the second step on.
    """
    (optimizer,), (scheduler,) = trainer.state.optimizers, trainer.state.schedulers
    assert isinstance(scheduler, LambdaLR)
    scheduler.base_lrs = [own["lr"] for own in settings]
    for group, own, multiplier in zip(optimizer.param_groups, settings, scheduler.lr_lambdas, strict=True):
        if group["initial_lr"]:
            lr = group["lr"] * (own["lr"] / group["initial_lr"])
        else:
            lr = own["lr"] * multiplier(scheduler.last_epoch)
        group.update(own, initial_lr=own["lr"], lr=lr)


# After the last checkpoint


def has_ended(trainer: Trainer) -> bool:
    """Return whether the checkpoint that was loaded is that of the run's last step."""
    end = trainer.state.max_duration
    return end is not None and trainer.state.timestamp.get(end.unit) >= end


def finish(trainer: Trainer) -> None:
    """Finish a run that was killed after its last checkpoint: samples, the last metrics, the VAE's statistics.

    Callbacks see the end of a training without steps. To be called by all ranks.
    """
    trainer.engine.run_event(Event.FIT_START)
    if trainer.state.evaluators:
        trainer.eval()
    trainer.engine.run_event(Event.FIT_END)


def is_finished(run: Path, step: int) -> bool:
    """Return whether nothing is left to do after a step, as rank 0 sees it. To be called by all ranks."""
    return on_first_rank(lambda: finished_step(run) == step, takes_long=True)


def mark_finished(run: Path, step: int) -> None:
    """Record on rank 0 that nothing is left to do after a step; a MachineError if that cannot be written."""
    if is_first_rank():
        with explained_writes(run / FINISHED):
            write_json(run / FINISHED, {"step": step})
