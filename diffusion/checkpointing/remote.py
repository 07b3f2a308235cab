"""Checkpoints of a run in an object store: `s3://bucket/prefix/ep0-ba100/...` or `s3://bucket/prefix/ep0-ba100.pt`.

They are written to the run folder first and uploaded from there: each rank its own file, then the checksums, and the
index when all files are there. So an incomplete checkpoint is recognised as in a folder. To be read, a checkpoint is
downloaded.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from diffusion import storage
from diffusion.checkpointing.layout import CHECKPOINT_INDEX, CHECKSUMS, batch_of
from diffusion.checkpointing.read import read_metadata, stored_files
from diffusion.errors import DataError
from diffusion.files import PARTIAL
from diffusion.storage import FIRST_CONTACT, Access, StoredFile

log = logging.getLogger(__name__)

READ_TIMEOUT = 120.0
"""Seconds for which requests that fail are repeated when a checkpoint is only read."""

_PARALLEL_DOWNLOADS = 4

_LAST = (CHECKSUMS, CHECKPOINT_INDEX)
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
        versions = sorted((name, file.size, file.version) for name, file in self.files.items())
        return hashlib.sha256(repr(versions).encode()).hexdigest()[:32]

    @property
    def is_complete(self) -> bool:
        """Return whether its upload was finished: a single object is there entirely or not at all."""
        return self.name in self.files or f"{self.name}/{CHECKPOINT_INDEX}" in self.files


class RemoteCheckpoints:
    """The checkpoints of one run at `s3://bucket/prefix`.

    Requests that fail are repeated for `timeout` seconds. All methods raise a `MachineError` if the store cannot be
    read or written, or a download not be stored.
    """

    def __init__(self, uri: str, *, timeout: float) -> None:
        self.uri = uri.rstrip("/")
        self._access = Access(seconds=timeout)
        self._uploader: ThreadPoolExecutor | None = None
        self._uploads: list[Future[None]] = []

    def uri_of(self, name: str) -> str:
        """The URI of a checkpoint or of another file."""
        return storage.join(self.uri, name)

    def check_access(self) -> None:
        """Write and remove a file, repeating requests for `FIRST_CONTACT` seconds at most.

        A DataError says that there is no such bucket.
        """
        probe = self.uri_of(".access")
        seconds = min(self._access.seconds or FIRST_CONTACT, FIRST_CONTACT)
        storage.write(probe, b"", dataclasses.replace(self._access, seconds=seconds))
        storage.delete([probe], self._access)

    def files(self) -> dict[str, StoredFile]:
        """List all files by their names below the URI: those of checkpoints, and averages of weights.

        Raises:
            DataError: a name leads out of the folder of its download.
        """
        files = storage.list_files(self.uri, self._access)
        if unsafe := next((name for name in files if ".." in name.split("/")), None):
            raise DataError(f"{storage.shown(self.uri)} holds {unsafe!a}, which leads out of its folder")
        return files

    def present(self) -> list[RemoteCheckpoint]:
        """List all checkpoints, complete or not, oldest first."""
        found: dict[str, dict[str, StoredFile]] = {}
        for file, stored in self.files().items():
            name = file.partition("/")[0]
            if batch_of(Path(name)) >= 0:
                found.setdefault(name, {})[file] = stored
        names = sorted(found, key=lambda name: (batch_of(Path(name)), name))
        return [RemoteCheckpoint(uri=self.uri_of(name), files=found[name]) for name in names]

    def upload_parts(self, local: Path, files: Sequence[str] | None = None) -> None:
        """Upload files of a sharded checkpoint by their names, or all that are there, but for the last ones."""
        if not local.is_dir():
            return
        names = sorted(path.name for path in local.iterdir()) if files is None else files
        for name in names:
            if name not in _LAST and not name.endswith(PARTIAL):
                self.upload(local / name, f"{local.name}/{name}")

    def find_missing(self, local: Path) -> str | None:
        """Find a file that the index of a checkpoint names, and that is missing or too short in the store."""
        if not local.is_dir():
            return None
        stored = storage.list_files(self.uri_of(local.name), self._access)
        sizes = {name: file.size for name, file in stored.items()}
        ends = sorted(stored_files(read_metadata(local)).items())
        return next((name for name, end in ends if sizes.get(name, -1) < end), None)

    def finish_upload(self, local: Path) -> None:
        """Upload the files that make a checkpoint complete, after uploads in the background have ended."""
        self.await_uploads()
        if not local.is_dir():
            self.upload(local, local.name)
            return
        for name in _LAST:
            self.upload(local / name, f"{local.name}/{name}")

    def remove(self, checkpoint: RemoteCheckpoint) -> None:
        """Remove a checkpoint, its index first: after an interruption the rest counts as half-written."""
        index = self.uri_of(f"{checkpoint.name}/{CHECKPOINT_INDEX}")
        files = checkpoint.files.values()
        self.remove_files(file for file in files if file.uri == index)
        self.remove_files(file for file in files if file.uri != index)

    def remove_named(self, name: str) -> None:
        """Remove the checkpoint of a name, if there is one."""
        for checkpoint in self.present():
            if checkpoint.name == name:
                self.remove(checkpoint)

    def remove_half_written(self) -> None:
        """Remove what interrupted uploads have left."""
        for checkpoint in self.present():
            if not checkpoint.is_complete:
                log.warning("removing %s, which is incomplete", checkpoint)
                self.remove(checkpoint)

    def download(self, checkpoint: RemoteCheckpoint, folder: Path) -> Path:
        """Download a checkpoint, or the rest of it, below `folder`, which holds files of this very checkpoint only."""
        for name in sorted(checkpoint.files, key=lambda name: name.endswith(f"/{CHECKPOINT_INDEX}")):
            self.download_file(checkpoint.files[name], folder / name)
        return folder / checkpoint.name

    # Single files

    def remove_files(self, files: Iterable[StoredFile]) -> None:
        """Remove files from the store."""
        storage.delete([file.uri for file in files], self._access)

    def download_file(self, file: StoredFile, path: Path) -> None:
        """Download a file, unless a copy of its size is there that is not older."""
        found = path.stat() if path.is_file() else None
        if found is None or found.st_size != file.size or found.st_mtime < (file.time or 0.0):
            storage.download(file.uri, path, size=file.size, parallel=_PARALLEL_DOWNLOADS, access=self._access)

    def upload(self, path: Path, name: str) -> None:
        """Upload a file."""
        storage.upload(path, self.uri_of(name), self._access)

    def upload_later(self, path: Path, name: str) -> None:
        """Upload a file in the background, after those before it."""
        self._uploader = self._uploader or ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._uploads.append(self._uploader.submit(self.upload, path, name))

    def await_uploads(self) -> None:
        """Wait for the uploads in the background, and raise the first error of them."""
        for upload in list(self._uploads):
            upload.result()
