"""The newest whole checkpoint of a run.

Whole means that all files are there and long enough, which is seen without reading them; `check_checkpoint` reads them.
"""

import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusion import storage
from diffusion.checkpointing.layout import (
    CHECKPOINT_INDEX,
    Checkpoint,
    batch_of,
    is_half_written,
    list_checkpoints,
    remove_checkpoint,
    remove_copy,
)
from diffusion.checkpointing.read import (
    UnsafeCheckpointError,
    check_bytes,
    check_safe,
    is_sharded,
    patiently,
    read_metadata,
    stored_files,
)
from diffusion.checkpointing.remote import READ_TIMEOUT, RemoteCheckpoint, RemoteCheckpoints
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.files import PARTIAL
from diffusion.formats.run_folder import CHECKPOINTS, checkpoint_folder
from diffusion.storage import is_url, join

log = logging.getLogger(__name__)

DAMAGED = "damaged.json"
"""Names of checkpoints that a start has read and found damaged, beside them in their folder or store."""


def find_damage(path: Path) -> str | None:
    """Look for damage without reading tensors.

    Returns:
        The damage; None if the checkpoint is whole.

    Raises:
        UnsafeCheckpointError: its index would run code.
        MachineError: it cannot be read.
    """
    try:
        if patiently(path, lambda: is_half_written(path)):
            return "it is incomplete"
        if is_sharded(path):
            ends = stored_files(read_metadata(path))
            return patiently(path, lambda: _find_missing(path, ends))
        names = patiently(path, lambda: _list_archive(path))
    except UnsafeCheckpointError:
        raise
    except (DataError, zipfile.BadZipFile) as error:
        return str(error)
    return None if any(name.endswith("/data.pkl") for name in names) else "it holds no state"


def _find_missing(path: Path, ends: Mapping[str, int]) -> str | None:
    for file, end in sorted(ends.items()):
        try:
            size = (path / file).stat().st_size
        except FileNotFoundError:
            return f"{file} is missing"
        if size < end:
            return f"{file} has {size:,} of at least {end:,} bytes"
    return None


def _list_archive(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def is_complete(checkpoint: Path | RemoteCheckpoint) -> bool:
    """Return whether a checkpoint is whole."""
    return checkpoint.is_complete if isinstance(checkpoint, RemoteCheckpoint) else find_damage(checkpoint) is None


def check_checkpoint(path: Path) -> None:
    """Check that a checkpoint is whole, has its checksums and runs no code when it is read; reads all of it.

    Raises:
        UnsafeCheckpointError: it would run code.
        DataError: it is damaged.
    """
    check_whole(path)
    check_bytes(path)
    check_safe(path)


def check_whole(path: Path) -> None:
    """Raise a DataError if `find_damage` finds some."""
    if damage := find_damage(path):
        raise DataError(f"checkpoint {path} is damaged: {damage}")


def read_damaged(location: str) -> set[str]:
    """Read the names of a run's checkpoints, in a folder or store, that do not count as kept."""
    try:
        names = storage.read_json(join(location, DAMAGED))
    except DataError:  # There is none.
        return set()
    return set(names) if isinstance(names, list) else set()


def write_damaged(location: str, names: set[str]) -> None:
    """Write what `read_damaged` reads."""
    storage.write_json(join(location, DAMAGED), sorted(names))


def find_checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a run's `checkpoints` folder, oldest first."""
    return [path for path in list_checkpoints(folder) if is_complete(path)]


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise a MachineError for a file that cannot be `what`, with the remedy."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{error.filename} ({error.strerror}) cannot be {what}") from error


class LocalCheckpoints:
    """The checkpoints of one run in a folder, as `RemoteCheckpoints` has those in a store.

    A MachineError says that one cannot be read or removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.uri = folder, str(folder)

    def present(self) -> list[Any]:
        """List the paths of all checkpoints, complete or not, oldest first."""
        with _explained("read: check its permissions"):
            return list_checkpoints(self.folder)

    def remove(self, checkpoint: Any) -> None:
        """Remove a checkpoint, its index first."""
        with _explained("removed: remove it"):
            remove_checkpoint(checkpoint)

    def remove_half_written(self) -> None:
        """Remove what interrupted saves have left."""
        for path in self.present():
            with _explained("read: check its permissions"):
                is_incomplete = is_half_written(path)
            if is_incomplete:
                log.warning("removing %s, which is incomplete", path)
                self.remove(path)
        for path in self.folder.glob(f"*ep*.pt{PARTIAL}"):
            self.remove(path)


Checkpoints = LocalCheckpoints | RemoteCheckpoints


def checkpoints_at(location: str, *, timeout: float) -> Checkpoints:
    """Return the checkpoints in a folder or store, whose failed requests are repeated for `timeout` seconds."""
    if is_url(location):
        return RemoteCheckpoints(location, timeout=timeout)
    return LocalCheckpoints(Path(location).expanduser())


def newest_that_passes(checkpoints: Sequence[Checkpoint], check: Callable[[Checkpoint], None]) -> Checkpoint | None:
    """Find the newest of checkpoints, oldest first, that passes a check; the damaged ones that are skipped are logged.

    The check raises a `DataError` for a damaged one.

    Raises:
        UnsafeCheckpointError: a checkpoint would run code: no other is used in its stead.
    """
    for checkpoint in reversed(checkpoints):
        try:
            check(checkpoint)
            return checkpoint
        except UnsafeCheckpointError:
            raise
        except DataError as error:
            log.warning("skipping checkpoint %s: %s", checkpoint, error)
    return None


def resolve_checkpoint(location: str) -> Path:
    """Find a checkpoint: itself, or the newest complete one of a run or of its `checkpoints` folder.

    One in an object store, `s3://bucket/prefix` of a run's checkpoints or of one of them, is downloaded to
    `$XDG_CACHE_HOME/diffusion` (by default `~/.cache/diffusion`), once.

    Raises:
        ConfigurationError: there is none.
        UnsafeCheckpointError: it would run code.
        MachineError: the store cannot be read.
    """
    found = locate_checkpoint(location, timeout=READ_TIMEOUT)
    if isinstance(found, Path):
        return found
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "diffusion"
    remote = RemoteCheckpoints(found.uri.rpartition("/")[0], timeout=READ_TIMEOUT)
    path = remote.download(found, cache / found.identity)
    if damage := find_damage(path):
        remove_copy(path)
        raise DataError(f"checkpoint {found} is damaged: {damage}")
    return path


def locate_checkpoint(location: str, *, timeout: float) -> Path | RemoteCheckpoint:
    """Find a checkpoint as `resolve_checkpoint` does, without a download.

    A store that does not answer is asked again for `timeout` seconds.
    """
    if is_url(location):
        return _find_remote(location.rstrip("/"), timeout)
    path = Path(location).expanduser()
    elsewhere = checkpoint_folder(path)
    if elsewhere and is_url(elsewhere):
        return _find_remote(elsewhere.rstrip("/"), timeout)
    if path.is_file() or (path / CHECKPOINT_INDEX).is_file():
        if damage := find_damage(path):
            raise ConfigurationError(f"checkpoint {path} is not whole ({damage}): choose another one")
        return path
    for folder in (Path(elsewhere).expanduser(),) if elsewhere else (path, path / CHECKPOINTS):
        if found := newest_that_passes(list_checkpoints(folder), check_whole):
            return found
    problem = "holds no complete checkpoint" if path.exists() else "does not exist"
    raise ConfigurationError(f"{path} {problem}: give a checkpoint, a run's folder, or its `checkpoints` folder")


def _find_remote(uri: str, timeout: float) -> RemoteCheckpoint:
    parent, _, name = uri.rpartition("/")
    is_named = batch_of(Path(name)) >= 0
    present = RemoteCheckpoints(parent if is_named else uri, timeout=timeout).present()
    whole = [found for found in present if found.is_complete and (not is_named or found.name == name)]
    if not whole:
        raise ConfigurationError(f"{uri} holds no complete checkpoint: give s3://bucket/prefix of a run's checkpoints")
    return whole[-1]
