"""Files in an S3 bucket, or in any store that speaks S3: `S3_ENDPOINT_URL` and the AWS_* variables say where.

Failures that may pass (no connection, a server that is overloaded or starting) are tried again, with growing pauses,
for as long as the configuration says; what is left is one message.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from diffusion.config.stores import is_store, url_problem
from diffusion.errors import ConfigurationError, MachineError

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between the first two attempts, doubled each time, and their limit."""

FIRST_CONTACT = 20.0
"""Seconds for which the start of a run tries a store that does not answer, at most, to tell a wrong address soon."""

_CONNECT_TIMEOUT, _READ_TIMEOUT = 10.0, 60.0
_PASSING = frozenset({"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestTimeTooSkewed"})
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500
_DELETED_AT_ONCE = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class StoredFile:
    """A file as the store lists it."""

    num_bytes: int
    version: str
    """Its ETag, which changes with its content."""


class ObjectStore:
    """The files below a prefix of a bucket.

    Args:
        url: `s3://bucket/prefix`.
        patience: seconds for which failures that may pass are tried again.

    Raises:
        ConfigurationError: the URL is of another kind.
        MachineError: `S3_ENDPOINT_URL` is no address.
    """

    def __init__(self, url: str, *, patience: float) -> None:
        import boto3.session
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        if not is_store(url) or (problem := url_problem(url, "the place of checkpoints")):
            raise ConfigurationError(problem if is_store(url) else f"'{url}' is not s3://bucket/prefix")
        parts = urlsplit(url)
        self.url, self.patience = url.rstrip("/"), patience
        self._bucket, self._prefix = parts.netloc, f"{parts.path.strip('/')}/".lstrip("/")
        timeout = max(1.0, min(_READ_TIMEOUT, patience))
        settings = Config(
            connect_timeout=min(_CONNECT_TIMEOUT, timeout),
            read_timeout=timeout,
            retries={"mode": "standard", "total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        endpoint = os.environ.get("S3_ENDPOINT_URL") or None
        try:
            self._client: Any = boto3.session.Session().client("s3", endpoint_url=endpoint, config=settings)
        except ValueError as error:
            raise MachineError(f"S3_ENDPOINT_URL is '{endpoint}': {error}") from error
        self._transfer = TransferConfig(max_concurrency=4)
        self._pause = threading.Event()
        self._uploader: ThreadPoolExecutor | None = None
        self._uploads: list[Future[None]] = []

    def place(self, name: str) -> str:
        """The URL of a file."""
        return f"{self.url}/{name}"

    def check_access(self) -> None:
        """See that files can be written and removed here, with the patience of `FIRST_CONTACT`.

        Raises:
            MachineError: they cannot.
        """
        probe = ".access"
        self._write(probe, b"", min(self.patience, FIRST_CONTACT))
        self.remove([probe])

    def files(self) -> dict[str, StoredFile]:
        """What there is, by names below the prefix.

        Raises:
            MachineError: the store cannot be read.
        """

        def request() -> dict[str, StoredFile]:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            found = (entry for page in pages for entry in page.get("Contents", ()))
            return {
                entry["Key"].removeprefix(self._prefix): StoredFile(entry["Size"], entry.get("ETag", ""))
                for entry in found
            }

        return self._attempt(f"{self.url} cannot be listed", request)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file.

        Raises:
            MachineError: it cannot be written.
        """
        self._write(name, content, self.patience)

    def _write(self, name: str, content: bytes, patience: float) -> None:
        self._attempt(
            f"{self.place(name)} cannot be written",
            lambda: self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=content),
            patience,
        )

    def read(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            MachineError: it cannot be read.
        """
        return self._attempt(
            f"{self.place(name)} cannot be read",
            lambda: self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read(),
        )

    def upload(self, path: Path, name: str) -> None:
        """Upload a file; it is there entirely, or not at all.

        Raises:
            MachineError: it cannot be uploaded.
        """

        def request() -> None:
            with path.open("rb") as file:
                self._client.upload_fileobj(file, self._bucket, self._prefix + name, Config=self._transfer)

        self._attempt(f"{self.place(name)} cannot be written", request)

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
        """Download a file; it has its name when it is whole.

        Raises:
            MachineError: it cannot be downloaded, or not be written here.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._attempt(
            f"{self.place(name)} cannot be downloaded to {path}",
            lambda: self._client.download_file(self._bucket, self._prefix + name, str(path), Config=self._transfer),
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no error.

        Raises:
            MachineError: they cannot be removed.
        """
        keys = [{"Key": self._prefix + name} for name in names]
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            some = {"Objects": keys[start : start + _DELETED_AT_ONCE], "Quiet": True}
            self._attempt(
                f"{self.url}: files cannot be removed",
                lambda some=some: self._client.delete_objects(Bucket=self._bucket, Delete=some),
            )

    def _attempt(self, what: str, request: Callable[[], T], patience: float | None = None) -> T:
        """The result of a request, tried again while it may succeed: for `patience` seconds, None is the store's."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        deadline, pause = None, FIRST_PAUSE
        while True:
            try:
                return request()
            except (BotoCoreError, ClientError, Boto3Error, OSError) as error:
                deadline = deadline or time.monotonic() + (self.patience if patience is None else patience)
                left = deadline - time.monotonic()
                if not _may_pass(error) or left <= 0:
                    raise MachineError(f"{what}: {_reason(error)}") from error
                log.warning("%s: %s. It is tried again for %.0f s", what, _reason(error), left)
            self._pause.wait(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


def _may_pass(error: Exception) -> bool:
    from botocore.exceptions import ClientError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = error.response.get("Error", {}).get("Code", "")
        return status >= _SERVER_ERROR or status == _TOO_MANY_REQUESTS or code in _PASSING
    return _is_silence(error)


def _is_silence(error: Exception) -> bool:
    """Whether the store did not answer, or not to its end."""
    import botocore.exceptions as aws
    from boto3.exceptions import RetriesExceededError

    silent = (aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, RetriesExceededError)
    return isinstance(error, (*silent, ConnectionError, TimeoutError))


def _reason(error: Exception) -> str:
    """What went wrong and what to do, in a sentence."""
    from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return "there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        if code == "NoSuchBucket":
            return "there is no such bucket. Create it, or name another one"
        if code in {"AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch"}:
            return f"access is denied ({code}). Check the AWS_* variables and the rights on the bucket"
    if _is_silence(error):
        return f"the store does not answer ({type(error).__name__}). Check S3_ENDPOINT_URL and the network"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
