"""Checkpoints of a run in an object store: `s3://bucket/prefix/ep0-ba100/...` or `s3://bucket/prefix/ep0-ba100.pt`.

They are written to the run folder first and uploaded from there: each rank its own file, then the checksums, and the
index when all files are there. So an incomplete checkpoint is recognised as in a folder. To be read, a checkpoint is
downloaded.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.layout import CHECKSUMS, INDEX, batch_of
from diffusion.checkpointing.object_store import ObjectStore, StoredFile
from diffusion.files import PARTIAL

log = logging.getLogger(__name__)

READ_PATIENCE = 120.0
"""Seconds for which requests that fail are repeated when a checkpoint is only read."""

_LAST = (CHECKSUMS, INDEX)
"""Files that are uploaded after all others, in this order."""


@dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """The files of a checkpoint in a store."""

    uri: str

    files: dict[str, StoredFile]
    """Its files, by names below the run's prefix."""

    def __str__(self) -> str:
        return self.uri

    @property
    def name(self) -> str:
        """`ep0-ba10` or `ep0-ba10.pt`."""
        return self.uri.rpartition("/")[2]

    @property
    def identity(self) -> str:
        """A hash that changes with any of its files."""
        versions = sorted((name, file.num_bytes, file.version) for name, file in self.files.items())
        return hashlib.sha256(repr(versions).encode()).hexdigest()[:32]

    @property
    def is_complete(self) -> bool:
        """Whether its upload was finished: a single object is there entirely or not at all."""
        return self.name in self.files or f"{self.name}/{INDEX}" in self.files


class RemoteCheckpoints:
    """The checkpoints of one run.

    Args:
        uri: `s3://bucket/prefix`.
        patience: seconds for which requests that fail are repeated.

    Raises:
        ConfigurationError: the URI is of another kind.
    """

    def __init__(self, uri: str, *, patience: float) -> None:
        self.store = ObjectStore(uri, patience=patience)

    def uri_of(self, name: str) -> str:
        """The URI of a checkpoint."""
        return self.store.place(name)

    def present(self) -> list[RemoteCheckpoint]:
        """List all of them, complete or not, oldest first.

        Raises:
            MachineError: the store cannot be read.
        """
        found: dict[str, dict[str, StoredFile]] = {}
        for file, stored in self.store.files().items():
            name = file.partition("/")[0]
            if batch_of(Path(name)) >= 0:
                found.setdefault(name, {})[file] = stored
        names = sorted(found, key=lambda name: (batch_of(Path(name)), name))
        return [RemoteCheckpoint(uri=self.uri_of(name), files=found[name]) for name in names]

    def upload_parts(self, local: Path, files: Sequence[str] | None = None) -> None:
        """Upload this rank's or this node's files of a sharded checkpoint, all but the last ones.

        Args:
            local: the checkpoint as it was written.
            files: names in its folder; None for all that are there.

        Raises:
            MachineError: the store cannot be written.
        """
        if not local.is_dir():
            return
        names = sorted(path.name for path in local.iterdir()) if files is None else files
        for name in names:
            if name not in _LAST and not name.endswith(PARTIAL):
                self.store.upload(local / name, f"{local.name}/{name}")

    def finish_upload(self, local: Path) -> None:
        """Upload the files that make a checkpoint complete, after uploads in the background have ended.

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
        """Remove a checkpoint, its index first: after an interruption the rest counts as half-written.

        Raises:
            MachineError: the store cannot be written.
        """
        index = f"{checkpoint.name}/{INDEX}"
        self.store.remove([file for file in checkpoint.files if file == index])
        self.store.remove([file for file in checkpoint.files if file != index])

    def remove_named(self, name: str) -> None:
        """Remove the files of a name."""
        for checkpoint in self.present():
            if checkpoint.name == name:
                self.remove(checkpoint)

    def remove_half_written(self) -> None:
        """Remove what interrupted uploads have left.

        Raises:
            MachineError: the store cannot be written.
        """
        for checkpoint in self.present():
            if not checkpoint.is_complete:
                log.warning("removing %s, which is incomplete", checkpoint)
                self.remove(checkpoint)

    def download(self, checkpoint: RemoteCheckpoint, folder: Path) -> Path:
        """Download a checkpoint, or the rest of it: files of the same name and size are kept.

        Args:
            checkpoint: one of `present`.
            folder: parent of the copy; it holds files of this very checkpoint or nothing.

        Returns:
            The copy.

        Raises:
            MachineError: the store cannot be read, or the disk not be written.
        """
        for file in sorted(checkpoint.files, key=lambda file: file.endswith(f"/{INDEX}")):
            local = folder / file
            if not local.is_file() or local.stat().st_size != checkpoint.files[file].num_bytes:
                self.store.download(file, local)
        return folder / checkpoint.name
