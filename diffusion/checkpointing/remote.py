"""Checkpoints of a run in an object store: `s3://bucket/prefix/ep0-ba100/...` or `s3://bucket/prefix/ep0-ba100.pt`.

They are written to the run folder first and uploaded from there: each rank its own file, and the index when all of
them are there, so that a half-written checkpoint is told from a whole one as in a folder. A single object appears
whole or not at all. To be read, a checkpoint is downloaded.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.checksums import CHECKSUMS
from diffusion.checkpointing.object_store import ObjectStore, StoredFile
from diffusion.checkpointing.safe_loading import INDEX, UnsafeCheckpointError
from diffusion.errors import DataError

log = logging.getLogger(__name__)

_LAST = (CHECKSUMS, INDEX)
"""Files that come after all others, in this order."""


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """What a store holds of a checkpoint."""

    name: str
    """`ep0-ba100` or `ep0-ba100.pt`."""

    files: dict[str, StoredFile]
    """Its files, by names below the run's prefix."""

    @property
    def identity(self) -> str:
        """What changes when anything in it does."""
        versions = sorted((name, file.num_bytes, file.version) for name, file in self.files.items())
        return hashlib.sha256(repr(versions).encode()).hexdigest()[:32]

    @property
    def is_sharded(self) -> bool:
        """Whether it is a folder of shards."""
        return self.name not in self.files

    @property
    def is_complete(self) -> bool:
        """Whether its writing reached its end."""
        return not self.is_sharded or f"{self.name}/{INDEX}" in self.files


class RemoteCheckpoints:
    """The checkpoints of one run.

    Args:
        store: where they are.
        batch_of: the step that a name says; negative for the names of other files.
    """

    def __init__(self, store: ObjectStore, batch_of: Callable[[Path], int]) -> None:
        self.store = store
        self._batch_of = batch_of

    def place(self, name: str) -> str:
        """The URL of a checkpoint."""
        return self.store.place(name)

    def present(self) -> list[RemoteCheckpoint]:
        """All of them, whole or not, oldest first.

        Raises:
            MachineError: the store cannot be read.
        """
        found: dict[str, dict[str, StoredFile]] = {}
        for file, stored in self.store.files().items():
            name = file.partition("/")[0]
            if self._batch_of(Path(name)) >= 0:
                found.setdefault(name, {})[file] = stored
        ordered = sorted(found, key=lambda name: (self._batch_of(Path(name)), name))
        return [RemoteCheckpoint(name=name, files=found[name]) for name in ordered]

    def upload_parts(self, local: Path, files: list[str] | None = None) -> None:
        """Upload what has to be there before the index: this rank's or this node's files.

        Args:
            local: the checkpoint as it was written.
            files: names in its folder; None is all that are there.

        Raises:
            MachineError: the store cannot be written.
        """
        if not local.is_dir():
            return
        names = sorted(path.name for path in local.iterdir()) if files is None else files
        for name in names:
            if name not in _LAST and not name.endswith(".tmp"):
                self.store.upload(local / name, f"{local.name}/{name}")

    def complete(self, local: Path) -> None:
        """Upload what makes a checkpoint whole, once all parts and the files that go before it are there.

        Raises:
            MachineError: the store cannot be written.
        """
        self.store.await_uploads()
        if not local.is_dir():
            self.store.upload(local, local.name)
            return
        for name in _LAST:
            if (local / name).is_file():
                self.store.upload(local / name, f"{local.name}/{name}")

    def remove(self, checkpoint: RemoteCheckpoint) -> None:
        """Remove a checkpoint so that, interrupted in between, it is not taken for whole.

        Raises:
            MachineError: the store cannot be written.
        """
        index = f"{checkpoint.name}/{INDEX}"
        if index in checkpoint.files:
            self.store.remove([index])
        self.store.remove([file for file in checkpoint.files if file != index])

    def remove_named(self, name: str) -> None:
        """Remove what there is under a name."""
        for checkpoint in self.present():
            if checkpoint.name == name:
                self.remove(checkpoint)

    def remove_half_written(self) -> None:
        """Remove what an interrupted upload has left behind.

        Raises:
            MachineError: the store cannot be written.
        """
        for checkpoint in self.present():
            if not checkpoint.is_complete:
                log.warning("removing %s, which was not written to its end", self.place(checkpoint.name))
                self.remove(checkpoint)

    def fetch(self, checkpoint: RemoteCheckpoint, folder: Path) -> Path:
        """Download a checkpoint, or the rest of it: files of the same name and size are kept.

        Args:
            checkpoint: one of `present`.
            folder: its parent on this machine, which holds files of this very checkpoint or nothing.

        Returns:
            Its path there.

        Raises:
            MachineError: the store cannot be read, or the disk not be written.
        """
        path = folder / checkpoint.name
        ordered = sorted(checkpoint.files, key=lambda file: file.endswith(f"/{INDEX}"))
        for file in ordered:
            local = folder / file
            if not local.is_file() or local.stat().st_size != checkpoint.files[file].num_bytes:
                self.store.download(file, local)
        return path

    def fetch_newest(self, folder: Path, check: Callable[[Path], None]) -> Path | None:
        """Download the newest checkpoint that is whole; those that are passed over are told.

        Args:
            folder: its parent on this machine.
            check: raises a `DataError` for a checkpoint that is not to be taken.

        Raises:
            UnsafeCheckpointError: a checkpoint would run code.
            MachineError: the store cannot be read, or the disk not be written.
        """
        for checkpoint in reversed(self.present()):
            place = self.place(checkpoint.name)
            if not checkpoint.is_complete:
                _tell_passed_over(place, "it was not written to its end")
                continue
            path = self.fetch(checkpoint, folder)
            try:
                check(path)
            except UnsafeCheckpointError:
                raise
            except DataError as error:
                _tell_passed_over(place, str(error))
                remove_copy(path)
            else:
                return path
        return None


def remove_copy(path: Path) -> None:
    """Remove a checkpoint, or what there is of it, that is whole elsewhere."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _tell_passed_over(place: str, damage: str) -> None:
    log.warning("checkpoint %s is passed over, and the one before is taken: %s", place, damage)
