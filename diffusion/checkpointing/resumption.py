"""Where a run goes on when it is started again."""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.utils import dist

from diffusion.checkpointing.changes import check_changes
from diffusion.checkpointing.reading import (
    check_checkpoint,
    find_damage,
    find_newest,
    list_checkpoints,
    open_remote,
    remove_half_written,
)
from diffusion.checkpointing.remote import RemoteCheckpoint, RemoteCheckpoints, remove_copy
from diffusion.checkpointing.safe_loading import read_entries
from diffusion.config.schema import Config
from diffusion.config.training import Parallelism
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError, DataError, MachineError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointPlaces:
    """Where the checkpoints of a run are."""

    run: Path
    """The run folder."""

    folder: Path
    """Where they are written: `checkpoints/`, or `uploads/` where they are uploaded from."""

    remote: RemoteCheckpoints | None
    """The store that they go to, if it is not a folder."""

    @property
    def downloads(self) -> Path:
        """What this node has downloaded."""
        return self.run / "downloads" / f"node-{dist.get_node_rank()}"


def checkpoint_places(config: Config, run: Path) -> CheckpointPlaces:
    """Where `trainer.checkpoint_folder` says that checkpoints are.

    Args:
        config: the configuration of the run.
        run: its folder.

    Raises:
        ConfigurationError: it is a URL of another kind.
        MachineError: the address of the store is not one.
    """
    place = config.trainer.checkpoint_folder
    if place is None:
        return CheckpointPlaces(run, run / "checkpoints", None)
    if "://" not in place:
        return CheckpointPlaces(run, Path(place).expanduser(), None)
    return CheckpointPlaces(run, run / "uploads", open_remote(place, config.trainer.store_patience))


def find_resumption(config: Config, places: CheckpointPlaces) -> str | None:
    """The newest checkpoint of a run that is whole and runs no code when it is loaded; None for a new run.

    Rank 0 decides; the first rank of each other node looks at the same checkpoint again. From a store it is
    downloaded once per node, to `downloads/` in the run folder. To be called by all ranks.

    Args:
        config: the configuration of the run.
        places: where its checkpoints are.

    Returns:
        Its path on this machine.

    Raises:
        ConfigurationError: the checkpoint was written with another parallelism, or is of another model or objective.
        DataError: it would run code, or all checkpoints are damaged.
        MachineError: what was left half-written cannot be removed, or the store cannot be used.
    """
    if places.remote is not None:
        return _find_remote(config, places, places.remote)
    path = _broadcast(
        agree(lambda: _find(config, places.folder) if dist.get_global_rank() == 0 else None, takes_long=True)
    )
    if path is None:
        return None
    agree(lambda: check_checkpoint(Path(path), thoroughly=False) if _is_first_of_another_node() else None)
    _tell(path)
    return path


def remove_downloads(places: CheckpointPlaces) -> None:
    """Remove what `find_resumption` has downloaded, when all ranks have loaded it. To be called by all ranks."""
    if places.remote is not None:
        dist.barrier()
        if dist.get_local_rank() == 0:
            shutil.rmtree(places.downloads, ignore_errors=True)


def _tell(place: str) -> None:
    if dist.get_global_rank() == 0:
        log.info("continuing from %s", place)


def _broadcast(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _is_first_of_another_node() -> bool:
    return dist.get_local_rank() == 0 and dist.get_global_rank() != 0


def _find(config: Config, checkpoints: Path) -> str | None:
    try:
        remove_half_written(checkpoints)
    except OSError as error:
        raise MachineError(f"{error.filename} cannot be removed: {error.strerror}. Remove it") from error
    if not config.trainer.autoresume:
        return None
    newest = find_newest(checkpoints, check_checkpoint)
    if newest is None:
        if checkpoints.is_dir() and any(checkpoints.glob("ep*-ba*")):
            raise _none_is_whole(str(checkpoints))
        return None
    _check_parallelism(config, newest.is_dir(), str(newest))
    check_changes(config, newest, str(newest))
    return str(newest)


def _none_is_whole(place: str) -> DataError:
    return DataError(
        f"no checkpoint in {place} is whole, and the run would begin anew. Remove them if that is meant, "
        "or put a good one back"
    )


def _check_parallelism(config: Config, is_sharded: bool, place: str) -> None:
    if is_sharded != (config.trainer.parallelism == Parallelism.fsdp):
        raise ConfigurationError(
            f"trainer.parallelism={config.trainer.parallelism.value} cannot continue {place}, which "
            f"{'fsdp' if is_sharded else 'ddp'} wrote: set it back, or choose another run_name"
        )


# From a store


def _find_remote(config: Config, places: CheckpointPlaces, remote: RemoteCheckpoints) -> str | None:
    agree(lambda: remote.store.check_access() if dist.get_global_rank() == 0 else None, takes_long=True)
    if config.trainer.autoresume:
        _finish_upload(places.folder, remote)
    found: RemoteCheckpoint | None = _broadcast(
        agree(lambda: _fetch_newest(config, places, remote) if dist.get_global_rank() == 0 else None, takes_long=True)
    )
    if found is None:
        return None
    path = places.downloads / found.name

    def fetch() -> None:
        if _is_first_of_another_node():
            shutil.rmtree(places.downloads, ignore_errors=True)
            remote.fetch(found, places.downloads)
            check_checkpoint(path)

    agree(fetch, takes_long=True)
    _tell(remote.place(found.name))
    return str(path)


def _fetch_newest(config: Config, places: CheckpointPlaces, remote: RemoteCheckpoints) -> RemoteCheckpoint | None:
    remote.remove_half_written()
    if not config.trainer.autoresume:
        return None
    present = {found.name: found for found in remote.present()}
    shutil.rmtree(places.downloads, ignore_errors=True)
    newest = remote.fetch_newest(places.downloads, check_checkpoint)
    if newest is None:
        if present:
            raise _none_is_whole(remote.store.url)
        if list_checkpoints(places.run / "checkpoints"):
            raise ConfigurationError(
                f"trainer.checkpoint_folder={remote.store.url} holds no checkpoint, but {places.run / 'checkpoints'} "
                "does, and the run would begin anew. Copy them there, or set trainer.checkpoint_folder=null"
            )
        return None
    _check_parallelism(config, newest.is_dir(), remote.place(newest.name))
    check_changes(config, newest, remote.place(newest.name))
    return present[newest.name]


def _finish_upload(folder: Path, remote: RemoteCheckpoints) -> None:
    """Upload a checkpoint that an earlier start has written, but not uploaded to its end; on all ranks.

    Each node uploads the files that it has, since each rank's file may be on its own node only.
    """
    local: Path | None = _broadcast(
        agree(lambda: _not_uploaded(folder, remote) if dist.get_global_rank() == 0 else None, takes_long=True)
    )

    def upload_parts() -> None:
        if local is not None and dist.get_local_rank() == 0:
            remote.upload_parts(local)

    def complete() -> None:
        if local is not None and dist.get_global_rank() == 0:
            if (damage := _missing_part(local, remote)) is not None:
                log.warning("checkpoint %s was not uploaded and is given up: %s", local, damage)
            else:
                log.info("uploading %s, which an earlier start has written", local)
                remote.complete(local)

    agree(upload_parts, takes_long=True)
    agree(complete, takes_long=True)
    if dist.get_local_rank() == 0:
        for path in list_checkpoints(folder):
            remove_copy(path)


def _not_uploaded(folder: Path, remote: RemoteCheckpoints) -> Path | None:
    """The newest checkpoint that was written to its end, if it is not in the store."""
    there = {found.name for found in remote.present() if found.is_complete}
    written = [path for path in list_checkpoints(folder) if _is_written(path)]
    return written[-1] if written and written[-1].name not in there else None


def _is_written(path: Path) -> bool:
    """Whether rank 0's files say that all ranks have written theirs, which may be on other nodes."""
    try:
        return bool(read_entries(path)) if path.is_dir() else find_damage(path) is None
    except DataError:
        return False


def _missing_part(local: Path, remote: RemoteCheckpoints) -> str | None:
    if not local.is_dir():
        return None
    there = {file for found in remote.present() if found.name == local.name for file in found.files}
    needed = {entry.file for entry in read_entries(local)}
    missing = sorted(file for file in needed if f"{local.name}/{file}" not in there)
    return f"{missing[0]} is on no node" if missing else None
