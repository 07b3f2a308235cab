"""The files below a prefix of an object store, and uploads in the background."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from diffusion import storage
from diffusion.config.stores import is_store, url_problem
from diffusion.errors import ConfigurationError
from diffusion.storage import Access, StoredFile

FIRST_CONTACT = 20.0
"""Seconds of attempts at the start of a run, at most: a wrong address is reported soon."""

_PARALLEL = 4
"""Requests at a time for one large file."""


class ObjectStore:
    """The files below a prefix of a bucket.

    Args:
        url: `s3://bucket/prefix`.
        patience: seconds for which requests that fail are repeated.

    Raises:
        ConfigurationError: the URL is of another kind.
    """

    def __init__(self, url: str, *, patience: float) -> None:
        if not is_store(url) or (problem := url_problem(url, "the folder of checkpoints")):
            raise ConfigurationError(problem if is_store(url) else f"'{url}' is not s3://bucket/prefix")
        self.url, self.access = url.rstrip("/"), Access(seconds=patience)
        self._uploader: ThreadPoolExecutor | None = None
        self._uploads: list[Future[None]] = []

    def uri_of(self, name: str) -> str:
        """The URI of a file."""
        return f"{self.url}/{name}"

    def check_access(self) -> None:
        """Check that files can be written and removed.

        Raises:
            MachineError: they cannot.
        """
        access = replace(self.access, seconds=min(self.access.seconds or 0.0, FIRST_CONTACT))
        storage.write(self.uri_of(".access"), b"", access)
        self.remove([".access"])

    def files(self) -> dict[str, StoredFile]:
        """List all files by their names below the prefix.

        Raises:
            MachineError: the store cannot be read.
        """
        return storage.list_files(self.url, self.access)

    def upload(self, path: Path, name: str) -> None:
        """Upload a file.

        Raises:
            MachineError: it cannot be uploaded.
        """
        storage.upload(path, self.uri_of(name), self.access)

    def upload_later(self, path: Path, name: str) -> None:
        """Upload a file in the background, after those before it."""
        self._uploader = self._uploader or ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._uploads.append(self._uploader.submit(self.upload, path, name))

    def await_uploads(self) -> None:
        """Wait for the uploads in the background.

        Raises:
            MachineError: a file cannot be uploaded.
        """
        for upload in list(self._uploads):
            upload.result()

    def download(self, name: str, path: Path) -> None:
        """Download a file.

        Raises:
            MachineError: it cannot be downloaded, or not be written here.
        """
        storage.download(self.uri_of(name), path, parallel=_PARALLEL, access=self.access)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; a missing one is no error.

        Raises:
            MachineError: they cannot be removed.
        """
        storage.delete(map(self.uri_of, names), self.access)
