"""Where remote files are fetched from: which S3 endpoint and credentials, and how long an attempt may wait.

S3 is fetched by a downloader of our own, because Streaming's reads the endpoint from the environment only, repeats each
attempt up to 15 times by itself, and does not tell a missing object from other failures. What else Streaming supports
(SFTP, Google, Azure, OCI ...) is fetched by its own downloaders.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from streaming.base.storage import CloudDownloader
from streaming.base.storage.download import S3Downloader

DEFAULT_TIMEOUT = 60.0


@dataclass(frozen=True, kw_only=True)
class Store:
    """Which S3 store a stream lies in; without effect for other remotes."""

    endpoint_url: str | None = None
    """Address of the store; None is `S3_ENDPOINT_URL`, or AWS."""

    profile: str | None = None
    """Profile in the AWS configuration files that holds the credentials; None is what boto3 finds."""

    def downloader(self, remote: str | None) -> CloudDownloader:
        """What fetches files from a remote.

        Raises:
            ValueError: Streaming does not support it.
        """
        return S3Store(self) if remote is not None and remote.startswith("s3://") else CloudDownloader.get(remote)

    def fetch(self, remote: str, local: str, timeout: float) -> None:
        """Fetch one file with a connection of its own, in one attempt.

        Raises:
            FileNotFoundError: there is no such file.
            OSError: it cannot be fetched; clients of some stores raise exceptions of their own (`fetch_errors`).
        """
        downloader = self.downloader(remote)
        try:
            downloader.download(remote, local, timeout)
        finally:
            downloader.clean_up()


def shown(remote: str) -> str:
    """A remote for messages, without a password."""
    place = urlparse(remote)
    return remote.replace(f":{place.password}@", ":***@", 1) if place.password else remote


class S3Store(S3Downloader):
    """Fetches objects from one S3 store; each attempt is one attempt.

    Args:
        store: address and credentials.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def _create_s3_client(self, unsigned: bool = False, timeout: float = DEFAULT_TIMEOUT) -> None:
        from boto3.session import Session
        from botocore import UNSIGNED
        from botocore.config import Config

        config = Config(
            connect_timeout=timeout,
            read_timeout=timeout,
            retries={"total_max_attempts": 1},
            signature_version=UNSIGNED if unsigned else None,
        )
        address = self._store.endpoint_url or os.environ.get("S3_ENDPOINT_URL")
        self._s3_client = Session(profile_name=self._store.profile).client("s3", config=config, endpoint_url=address)

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        from botocore.exceptions import ClientError, NoCredentialsError

        if self._s3_client is None:
            self._create_s3_client(timeout=timeout)
        try:
            try:
                self._get(remote, local)
            except NoCredentialsError:  # The bucket may be public.
                self._create_s3_client(unsigned=True, timeout=timeout)
                self._get(remote, local)
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code in ("404", "NoSuchKey", "NoSuchBucket"):
                raise FileNotFoundError(f"{remote} does not exist") from error
            if code in ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
                raise PermissionError(f"{remote} may not be read with these credentials ({code})") from error
            raise

    def _get(self, remote: str, local: str) -> None:
        from boto3.s3.transfer import TransferConfig

        place = urlparse(remote)
        extra: dict[str, Any] = {"RequestPayer": "requester"} if place.netloc in self._requester_pays_buckets else {}
        assert self._s3_client is not None
        # Without threads, ranges of a file would be asked for one after the other: each file is one request.
        transfer = TransferConfig(use_threads=False, num_download_attempts=1, multipart_threshold=sys.maxsize)
        self._s3_client.download_file(place.netloc, place.path.lstrip("/"), local, ExtraArgs=extra, Config=transfer)
