"""Files by URI: paths, `s3://bucket/key` (or any store that speaks S3), web servers, and what fsspec reaches.

Every function makes several attempts while a store does not answer, with growing pauses, and raises one of four errors:
`MissingFileError`, `ForbiddenFileError`, `UnavailableError` (the attempts are used up) and `DataError` (the URI or the
content is wrong). Messages name the URI without user, password and query, and hold no text of a library, which could
hold credentials. Nothing else in this package opens a boto3 client.

Credentials are never part of a URI. S3 takes them from the profile of the AWS configuration files that `Access` names,
else from where boto3 finds them; a public bucket needs none. Web servers take them from `~/.netrc`.
"""

import contextlib
import errno
import functools
import io
import itertools
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.files import atomic_path, hash_file, unique_partial, write_atomically

logger = logging.getLogger(__name__)

BLOCK_BYTES = 8 * 2**20
"""Bytes of a remote file that `open_file` requests at once."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between the first two attempts, doubled each time, and their limit, beside a random half second."""

_CONNECT_SECONDS = 10.0
_CHUNK_BYTES = 2**20
_PAGE_KEYS = 1000
"""Objects listed or deleted by one request."""

_WEB = ("http", "https")
_FSSPEC = ("gs", "gcs", "hf", "az", "abfs", "memory")
_STREAMING = ("gs", "oci", "azure", "azure-dl", "sftp", "dbfs", "dbfs-uc", "alipan")
"""Schemes whose downloads Streaming's own clients make: their packages are installed with it."""

_PASSING_CODES = frozenset({"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestTimeTooSkewed"})
_CREDENTIAL_CODES = frozenset(
    {
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
        "AuthorizationHeaderMalformed",
    }
)

T = TypeVar("T")


class _FileError(Exception):
    """Prints the errors below as `URI: what`, however they were made."""

    def __str__(self) -> str:
        name, what = getattr(self, "filename", None), getattr(self, "strerror", None)
        return f"{name}: {what}" if name else super().__str__()


class MissingFileError(_FileError, DataError, FileNotFoundError):
    """A file does not exist."""


class ForbiddenFileError(_FileError, MachineError, PermissionError):
    """A file exists, or may exist, but access with these credentials is denied."""


class UnavailableError(MachineError):
    """A store does not answer, or answers with a failure that may pass."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a store is reached, and for how long a failure that may pass is tried again."""

    endpoint_url: str | None = None
    """Address of an S3 store; None is `S3_ENDPOINT_URL`, or AWS."""

    profile: str | None = None
    """Profile of the AWS configuration files with the credentials; None is what boto3 finds."""

    timeout: float = 60.0
    """Seconds without an answer after which an attempt has failed."""

    attempts: int = 8
    """Attempts for each request. Without an `Access` it is `AWS_MAX_ATTEMPTS`, or 8."""

    seconds: float | None = None
    """Seconds from the first failure in which the request is tried again, in place of a number of attempts."""


@dataclass(frozen=True)
class StoredFile:
    """A file as a store lists it."""

    uri: str
    size: int
    """Bytes."""
    version: str
    """Changes with the content (an ETag, or a time); empty where the store has none."""


def is_url(uri: str) -> bool:
    """Return whether a URI is a URL, not a path."""
    return "://" in uri or uri.startswith("dbfs:")


def join(root: str, *names: str) -> str:
    """Join a folder, path or URL, and names below it."""
    return "/".join([root.rstrip("/") or "/", *names]) if is_url(root) else str(Path(root, *names))


def shown(uri: str) -> str:
    """Return a URI for messages and manifests: without user, password and, on the web, query."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    if scheme.lower() in _WEB:
        rest = rest.partition("?")[0].partition("#")[0]
    host, slash, below = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{below}"


def check_uri(uri: str) -> None:
    """Check that a URI can be read.

    Raises:
        DataError: its scheme is unknown, or it names no bucket.
        MachineError: the package for its scheme is not installed.
    """
    _store_of(uri, Access())


def list_files(uri: str, access: Access | None = None) -> dict[str, StoredFile]:
    """List the files below a folder.

    Returns:
        The files by their names below the folder, in the order of the store; empty if there is no such folder.

    Raises:
        DataError: there is no such bucket, or web servers do not list folders.
        MachineError: the store cannot be read.
    """
    root = uri.rstrip("/") + "/"
    files = _attempt(root, access, lambda store: list(store.find(root)))
    return {file.uri.removeprefix(root): file for file in files}


def stat(uri: str, access: Access | None = None) -> StoredFile:
    """Return size and version of a file.

    Raises:
        MissingFileError: it does not exist.
        MachineError: the store cannot be read.
    """
    return _attempt(uri, access, lambda store: store.stat(uri))


def exists(uri: str, access: Access | None = None) -> bool:
    """Return whether a file exists.

    Raises:
        MachineError: the store cannot be read.
    """
    try:
        stat(uri, access)
    except MissingFileError:
        return False
    return True


def read(
    uri: str, start: int = 0, stop: int | None = None, *, version: str | None = None, access: Access | None = None
) -> bytes:
    """Read a file, or a range of it.

    Args:
        uri: the file.
        start: first byte.
        stop: end of the range; None is that of the file. The result is shorter where the file ends before.
        version: that of `stat`; a file with another one is an error.
        access: how its store is reached.

    Raises:
        MissingFileError: it does not exist.
        DataError: it has another version.
        MachineError: the store cannot be read.
    """
    return _attempt(uri, access, lambda store: store.read(uri, start, stop, version))


def open_file(uri: str, *, buffer_bytes: int | None = None, access: Access | None = None) -> BinaryIO:
    """Open a file for reading by ranges: nothing is requested that is not read, nothing is kept.

    Args:
        uri: the file.
        buffer_bytes: bytes that a remote file is read ahead, None for BLOCK_BYTES; 0 where the caller reads in large
            pieces.
        access: how its store is reached.

    Raises:
        MissingFileError: it does not exist.
        DataError: a later read finds that the file was changed.
        MachineError: the store cannot be read, now or later.
    """
    if not is_url(uri):
        with _local_errors(uri):
            return Path(uri).open("rb")
    file = _RangeFile(stat(uri, access), access)
    buffer_bytes = BLOCK_BYTES if buffer_bytes is None else buffer_bytes
    return io.BufferedReader(file, buffer_bytes) if buffer_bytes else file  # pyright: ignore[reportReturnType]


def write(uri: str, content: bytes, access: Access | None = None) -> None:
    """Write a small file; it exists with the whole content, or as before.

    Raises:
        MachineError: it cannot be written.
    """
    _attempt(uri, access, lambda store: store.write(uri, content))


def upload(path: Path, uri: str, access: Access | None = None) -> None:
    """Copy a file of this machine to a store; it exists there as a whole, or as before.

    Raises:
        MachineError: it cannot be written.
    """
    _attempt(uri, access, lambda store: store.upload(path, uri))


def download(
    uri: str,
    path: Path,
    *,
    size: int | None = None,
    digest: tuple[str, str] | None = None,
    parallel: int = 1,
    access: Access | None = None,
) -> None:
    """Copy a file to this machine; it has its name when its size and hash have been checked.

    Args:
        uri: the file.
        path: the copy; an existing one is replaced. Its folder is created.
        size: expected bytes. Another size counts as a failed attempt.
        digest: kind and value of the expected hash, such as `("xxh64", "...")`. After another one the file is
            downloaded once more.
        parallel: requests at a time for one large object of S3; 1 makes one request for a file.
        access: how its store is reached.

    Raises:
        MissingFileError: it does not exist.
        DataError: its hash is wrong, twice.
        MachineError: the store cannot be read, or the disk not be written.
    """

    def fetch(store: _Store, partial: Path) -> None:
        partial.unlink(missing_ok=True)
        store.download(uri, partial, parallel)
        if size is not None and (found := partial.stat().st_size) != size:
            raise UnavailableError(f"{shown(uri)}: {found} bytes came instead of {size}")

    def fetch_and_check(partial: Path) -> bool:
        _attempt(uri, access, lambda store: fetch(store, partial))
        return digest is None or hash_file(partial, digest[0]) == digest[1]

    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path, partial=unique_partial(path), durable=False) as partial:
            if fetch_and_check(partial):
                return
            logger.warning("%s: its %s is wrong; downloading it once more", shown(uri), digest and digest[0])
            if not fetch_and_check(partial):
                raise DataError(f"{shown(uri)} is damaged: its {digest and digest[0]} is not the expected one")


def delete(uris: Iterable[str], access: Access | None = None) -> None:
    """Delete files; a missing one is no error.

    Args:
        uris: the files, all in one store.
        access: how their store is reached.

    Raises:
        MachineError: they cannot be deleted.
    """
    uris = list(uris)
    for start in range(0, len(uris), _PAGE_KEYS):
        some = uris[start : start + _PAGE_KEYS]
        _attempt(some[0], access, lambda store, some=some: store.delete(some))


def _attempt(uri: str, access: Access | None, request: Callable[["_Store"], T]) -> T:
    """Make a request to the store of a URI, several times while the store does not answer."""
    access = access or Access(attempts=int(os.environ.get("AWS_MAX_ATTEMPTS", "8")))
    store = _store_of(uri, access)
    first_failure: float | None = None
    for number in itertools.count(1):
        try:
            return request(store)
        except UnavailableError as error:
            first_failure = first_failure or time.monotonic()
            pause = min(FIRST_PAUSE * 2.0 ** (number - 1), LONGEST_PAUSE) + random.random() / 2
            if access.seconds is not None:
                pause = min(pause, first_failure + access.seconds - time.monotonic())
            if pause <= 0 or (access.seconds is None and number >= access.attempts):
                raise
            logger.warning("%s. Attempt %d failed; trying again in %.1f s", error, number, pause)
        threading.Event().wait(pause)
    raise AssertionError


# Stores: each method makes one attempt.


class _Store(Protocol):
    """What the functions above ask of a store."""

    def find(self, folder: str) -> Iterator[StoredFile]: ...
    def stat(self, uri: str) -> StoredFile: ...
    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes: ...
    def write(self, uri: str, content: bytes) -> None: ...
    def upload(self, path: Path, uri: str) -> None: ...
    def download(self, uri: str, path: Path, parallel: int) -> None: ...
    def delete(self, uris: list[str]) -> None: ...


def _store_of(uri: str, access: Access) -> _Store:
    scheme = uri.partition(":")[0].lower()
    if not is_url(uri) or scheme == "file":
        return _LocalStore()
    if scheme == "s3":
        _bucket_and_key(uri)
        return _S3Store(access)
    if scheme in _WEB:
        return _WebStore(access)
    if scheme in _FSSPEC or scheme in _STREAMING:
        return _FsspecStore(scheme, access)
    known = ", ".join(dict.fromkeys(("s3", *_WEB, *_FSSPEC, *_STREAMING, "file")))
    raise DataError(f"{shown(uri)}: {scheme}:// is not known; a URL begins with {known}")


def _missing(uri: str) -> MissingFileError:
    return MissingFileError(errno.ENOENT, "there is no such file", shown(uri))


def _forbidden(uri: str) -> ForbiddenFileError:
    return ForbiddenFileError(errno.EACCES, "access denied", shown(uri))


def _changed(uri: str) -> DataError:
    return DataError(f"{shown(uri)} was changed while it was read; start again when nothing writes there")


def _silent(uri: str, error: Exception) -> UnavailableError:
    return UnavailableError(f"{shown(uri)}: the store does not answer ({type(error).__name__}). {_CHECK}")


_CHECK = "Check the address (S3_ENDPOINT_URL) and the network, and run the same command again"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failure to write to this machine's disk into a message."""
    try:
        yield
    except (DataError, MachineError):
        raise
    except OSError as error:
        raise MachineError(f"cannot write to {path}: {error.strerror or error}") from error


class _LocalStore:
    """Files of this machine, named by paths or `file://` URLs."""

    def find(self, folder: str) -> Iterator[StoredFile]:
        root = _path_of(folder)
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield self._describe(f"{folder}{path.relative_to(root).as_posix()}", path)

    def stat(self, uri: str) -> StoredFile:
        with _local_errors(uri):
            return self._describe(uri, _path_of(uri))

    def _describe(self, uri: str, path: Path) -> StoredFile:
        found = path.stat()
        return StoredFile(uri, found.st_size, str(found.st_mtime_ns))

    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes:
        with _local_errors(uri), _path_of(uri).open("rb") as file:
            if version is not None and str(os.fstat(file.fileno()).st_mtime_ns) != version:
                raise _changed(uri)
            file.seek(start)
            return file.read(-1 if stop is None else max(0, stop - start))

    def write(self, uri: str, content: bytes) -> None:
        path = _path_of(uri)
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)

    def upload(self, path: Path, uri: str) -> None:
        target = _path_of(uri)
        with _writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(target) as partial:
                shutil.copyfile(path, partial)

    def download(self, uri: str, path: Path, parallel: int) -> None:
        with _local_errors(uri), _path_of(uri).open("rb") as file, _writing(path), path.open("wb") as copy:
            shutil.copyfileobj(file, copy, _CHUNK_BYTES)

    def delete(self, uris: list[str]) -> None:
        for uri in uris:
            with _writing(_path_of(uri)):
                _path_of(uri).unlink(missing_ok=True)


def _path_of(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


@contextmanager
def _local_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (DataError, MachineError):
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(uri) from error
    except PermissionError as error:
        raise _forbidden(uri) from error
    except OSError as error:
        raise MachineError(f"{uri} cannot be read: {error.strerror or error}") from error


class _S3Store:
    """Objects of S3, and of what speaks like it."""

    def __init__(self, access: Access) -> None:
        self._endpoint = access.endpoint_url or os.environ.get("S3_ENDPOINT_URL") or None
        self._profile = access.profile
        self._timeout = access.timeout if access.seconds is None else max(1.0, min(access.timeout, access.seconds))

    def find(self, folder: str) -> Iterator[StoredFile]:
        bucket, prefix = _bucket_and_key(folder)
        wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": _PAGE_KEYS}
        while True:
            page = self._read(folder, lambda client: client.list_objects_v2(**wanted))
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):
                    yield StoredFile(f"s3://{bucket}/{entry['Key']}", entry["Size"], entry.get("ETag", "").strip('"'))
            if not page.get("NextContinuationToken"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def stat(self, uri: str) -> StoredFile:
        bucket, key = _bucket_and_key(uri)
        head = self._read(uri, lambda client: client.head_object(Bucket=bucket, Key=key, **_payer(bucket)))
        return StoredFile(uri, head["ContentLength"], head["ETag"].strip('"'))

    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes:
        bucket, key = _bucket_and_key(uri)
        wanted: dict[str, Any] = {"Bucket": bucket, "Key": key, **_payer(bucket)}
        if version is not None:
            wanted["IfMatch"] = f'"{version}"'
        if start or (stop is not None and version is not None):
            wanted["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        limit = None if stop is None else stop - start

        def request(client: Any) -> bytes:
            answer = client.get_object(**wanted)
            body = answer["Body"].read(limit)
            if len(body) != (answer["ContentLength"] if limit is None else min(limit, answer["ContentLength"])):
                raise ConnectionError("the transfer broke off")
            if version is not None and answer["ETag"].strip('"') != version:
                raise _changed(uri)
            return body

        return self._read(uri, request)

    def write(self, uri: str, content: bytes) -> None:
        bucket, key = _bucket_and_key(uri)
        self._write(uri, lambda client: client.put_object(Bucket=bucket, Key=key, Body=content))

    def upload(self, path: Path, uri: str) -> None:
        from boto3.s3.transfer import TransferConfig

        bucket, key = _bucket_and_key(uri)
        config = TransferConfig(max_concurrency=4)

        def request(client: Any) -> None:
            with path.open("rb") as file:
                client.upload_fileobj(file, bucket, key, Config=config)

        with _local_errors(str(path)):
            self._write(uri, request)

    def download(self, uri: str, path: Path, parallel: int) -> None:
        bucket, key = _bucket_and_key(uri)

        def in_one_request(client: Any) -> None:
            answer = client.get_object(Bucket=bucket, Key=key, **_payer(bucket))
            with path.open("wb") as file:
                for chunk in answer["Body"].iter_chunks(_CHUNK_BYTES):
                    file.write(chunk)
                if file.tell() != answer["ContentLength"]:
                    raise ConnectionError("the transfer broke off")

        def in_parts(client: Any) -> None:
            from boto3.s3.transfer import TransferConfig

            config = TransferConfig(max_concurrency=parallel)
            client.download_file(bucket, key, str(path), ExtraArgs=_payer(bucket), Config=config)

        self._read(uri, in_one_request if parallel == 1 else in_parts)

    def delete(self, uris: list[str]) -> None:
        bucket = _bucket_and_key(uris[0])[0]
        objects = [{"Key": _bucket_and_key(uri)[1]} for uri in uris]
        self._write(
            uris[0], lambda client: client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        )

    def _read(self, uri: str, request: Callable[[Any], T]) -> T:
        """Make a request that a public bucket grants to anybody: without credentials where there are none."""
        from botocore.exceptions import ClientError, NoCredentialsError

        def request_either_way(client: Any) -> T:
            try:
                return request(client)
            except NoCredentialsError as error:
                try:
                    return request(self._client(signed=False))
                except ClientError as answer:
                    if answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (401, 403):
                        raise error from answer
                    raise

        return self._request(uri, request_either_way)

    def _write(self, uri: str, request: Callable[[Any], Any]) -> None:
        try:
            self._request(uri, request)
        except DataError as error:  # There is no such bucket, which is no fault of the data here.
            raise MachineError(str(error)) from error

    def _request(self, uri: str, request: Callable[[Any], T]) -> T:
        with self._errors(uri):
            return request(self._client())

    def _client(self, *, signed: bool = True) -> Any:
        try:
            return _s3_client(os.getpid(), self._endpoint, self._profile, self._timeout, signed)
        except ValueError as error:
            raise MachineError(f"{shown(self._endpoint or '')} is no address of an S3 store: correct it") from error

    @contextmanager
    def _errors(self, uri: str) -> Iterator[None]:
        import botocore.exceptions as aws
        from boto3.exceptions import Boto3Error, S3UploadFailedError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.ProfileNotFound) as error:
            where = f"the profile {self._profile}" if self._profile else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise MachineError(f"{shown(uri)}: no credentials were found; set {where}, or AWS_PROFILE") from error
        except aws.ClientError as error:
            raise self._answer(uri, error) from error
        except S3UploadFailedError as error:
            cause = error.__context__
            raise (self._answer(uri, cause) if isinstance(cause, aws.ClientError) else _silent(uri, error)) from error
        except (
            *(aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, aws.ResponseStreamingError),
            *(Boto3Error, HTTPError, ConnectionError, TimeoutError),
        ) as error:
            raise _silent(uri, error) from error
        except aws.BotoCoreError as error:
            raise MachineError(f"{shown(uri)}: the request failed ({type(error).__name__})") from error

    def _answer(self, uri: str, error: Any) -> Exception:
        """Make the error for one that the store answered with."""
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "NoSuchBucket":
            where = f" at {shown(self._endpoint)}" if self._endpoint else ""
            return DataError(
                f"{shown(uri).rstrip('/')}: there is no such bucket{where}; correct the name or S3_ENDPOINT_URL"
            )
        if status == 404:
            return _missing(uri)
        if status == 412 or code == "PreconditionFailed":
            return _changed(uri)
        if code in _CREDENTIAL_CODES:
            return MachineError(
                f"{shown(uri)}: the store refuses the credentials ({code}); correct AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and the region"
            )
        if status in (401, 403):
            return _forbidden(uri)
        if status >= 500 or status == 429 or code in _PASSING_CODES:
            return UnavailableError(f"{shown(uri)}: the store answers {code or status}. {_CHECK}")
        return MachineError(f"{shown(uri)}: the store refuses the request ({code or status})")


def _bucket_and_key(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.partition("://")[2].partition("/")
    if not bucket:
        raise DataError(f"{shown(uri)} names no bucket; write s3://BUCKET/PREFIX")
    return bucket, key


def _payer(bucket: str) -> dict[str, str]:
    """Arguments for a bucket whose requests we pay, as Streaming's variable names it."""
    buckets = os.environ.get("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "").split(",")
    return {"RequestPayer": "requester"} if bucket in buckets else {}


@functools.cache
def _s3_client(process: int, endpoint: str | None, profile: str | None, timeout: float, signed: bool) -> Any:
    """Make a client for a process: forked ones must not share connections."""
    from boto3.session import Session
    from botocore import UNSIGNED
    from botocore.config import Config

    config = Config(
        connect_timeout=min(_CONNECT_SECONDS, timeout),
        read_timeout=timeout,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=32,
        request_checksum_calculation="when_required",  # Not every store that speaks S3 knows the new checksums.
        response_checksum_validation="when_required",
        signature_version=None if signed else UNSIGNED,
    )
    return Session(profile_name=profile).client("s3", endpoint_url=endpoint, config=config)


class _WebStore:
    """Single files of web servers; ranges need a server that serves them."""

    def __init__(self, access: Access) -> None:
        self._timeouts = (min(_CONNECT_SECONDS, access.timeout), access.timeout)

    def find(self, folder: str) -> Iterator[StoredFile]:
        raise DataError(f"{shown(folder)}: a web server does not list folders; name single files")

    def stat(self, uri: str) -> StoredFile:
        with self._get(uri, {"Range": "bytes=0-0"}) as answer:
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if answer.status_code != 206 or not total.isdecimal():
            raise DataError(f"{shown(uri)}: the server serves no ranges; download the file and name the copy")
        return StoredFile(uri, int(total), _web_version(answer))

    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes:
        ranged = start > 0 or version is not None
        headers = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"} if ranged else {}
        with self._get(uri, headers) as answer, _web_errors(uri):
            if ranged and (answer.status_code != 206 or (version is not None and _web_version(answer) != version)):
                raise _changed(uri)
            limit = None if stop is None else stop - start
            body = answer.raw.read(limit)
            expected = _length(answer) if limit is None else min(limit, _length(answer))
            if len(body) < expected:
                raise ConnectionError("the transfer broke off")
            return body

    def download(self, uri: str, path: Path, parallel: int) -> None:
        with self._get(uri, {}) as answer, _web_errors(uri), path.open("wb") as file:
            shutil.copyfileobj(answer.raw, file, _CHUNK_BYTES)
            if file.tell() < _length(answer):
                raise ConnectionError("the transfer broke off")

    def write(self, uri: str, content: bytes) -> None:
        raise ConfigurationError(f"{shown(uri)}: files on a web server cannot be written")

    def upload(self, path: Path, uri: str) -> None:
        self.write(uri, b"")

    def delete(self, uris: list[str]) -> None:
        self.write(uris[0], b"")

    @contextmanager
    def _get(self, uri: str, headers: Mapping[str, str]) -> Iterator[Any]:
        from requests.exceptions import InvalidURL
        from urllib3.exceptions import LocationParseError

        try:
            with _web_errors(uri):
                answer = _web_session(os.getpid()).get(
                    uri, headers={"Accept-Encoding": "identity", **headers}, stream=True, timeout=self._timeouts
                )
        except (InvalidURL, LocationParseError) as error:
            raise _missing(uri) from error
        with answer:
            if answer.status_code in (401, 403):
                raise _forbidden(uri)
            if answer.status_code >= 500 or answer.status_code == 429:
                raise UnavailableError(f"{shown(uri)}: the server answers {answer.status_code}. {_CHECK}")
            if answer.status_code >= 300:
                raise _missing(uri)
            yield answer


@contextmanager
def _web_errors(uri: str) -> Iterator[None]:
    from requests.exceptions import InvalidURL, RequestException
    from urllib3.exceptions import HTTPError, LocationParseError

    try:
        yield
    except (InvalidURL, LocationParseError):
        raise
    except (RequestException, HTTPError, ConnectionError, TimeoutError) as error:
        raise _silent(uri, error) from error


def _length(answer: Any) -> int:
    """Bytes that the server announced; 0 if it did not."""
    return int(answer.headers.get("Content-Length") or 0)


def _web_version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


@functools.cache
def _web_session(process: int) -> Any:
    """Make a session for a process: forked ones must not share connections."""
    import requests

    session = requests.Session()
    session.max_redirects = 10
    return session


class _FsspecStore:
    """What fsspec reaches. Downloads of `_STREAMING` are made by Streaming's clients.

    Any exception of such a client is a failure that may pass: each has its own.
    """

    def __init__(self, scheme: str, access: Access) -> None:
        self._scheme, self._timeout = scheme, access.timeout

    @property
    def _files(self) -> Any:
        import fsspec

        try:
            return fsspec.filesystem(self._scheme)
        except (ImportError, ValueError) as error:
            raise MachineError(f"{self._scheme}:// needs a package: {error}; install it with pip") from error

    def find(self, folder: str) -> Iterator[StoredFile]:
        files = self._files
        with _client_errors(folder):
            found = files.find(folder, detail=True, refresh=True)
        root = files._strip_protocol(folder).strip("/")
        for path, entry in found.items():
            yield StoredFile(
                folder + path.lstrip("/").removeprefix(root).lstrip("/"), entry["size"], _fsspec_version(entry)
            )

    def stat(self, uri: str) -> StoredFile:
        with _client_errors(uri):
            entry = self._files.info(uri, refresh=True)
        if entry["type"] != "file":
            raise _missing(uri)
        return StoredFile(uri, entry["size"], _fsspec_version(entry))

    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes:
        found = self.stat(uri)
        if version is not None and found.version != version:
            raise _changed(uri)
        with _client_errors(uri):
            return self._files.cat_file(uri, start=start, end=found.size if stop is None else min(stop, found.size))

    def write(self, uri: str, content: bytes) -> None:
        with _client_errors(uri):
            self._files.pipe_file(uri, content)

    def upload(self, path: Path, uri: str) -> None:
        with _client_errors(uri):
            self._files.put_file(str(path), uri)

    def download(self, uri: str, path: Path, parallel: int) -> None:
        if self._scheme not in _STREAMING:
            with _client_errors(uri):
                self._files.get_file(uri, str(path))
            return
        from streaming.base.storage import CloudDownloader

        client = CloudDownloader.get(uri)
        with _client_errors(uri):
            try:
                client.download(uri, str(path), self._timeout)
            finally:
                client.clean_up()
                path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)  # Of some clients.

    def delete(self, uris: list[str]) -> None:
        for uri in uris:
            with _client_errors(uri), contextlib.suppress(FileNotFoundError):
                self._files.rm_file(uri)


@contextmanager
def _client_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except (DataError, MachineError):
        raise
    except FileNotFoundError as error:
        raise _missing(uri) from error
    except PermissionError as error:
        raise _forbidden(uri) from error
    except ImportError as error:
        raise MachineError(f"{shown(uri)} needs a package: {error}; install it with pip") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _silent(uri, error) from error


def _fsspec_version(entry: Mapping[str, Any]) -> str:
    """Return what a file system says of the version of a file."""
    known = ("etag", "ETag", "generation", "md5Hash", "blob_id", "mtime", "last_modified", "created")
    return next((str(entry[name]) for name in known if entry.get(name)), "")


class _RangeFile(io.RawIOBase):
    """A remote file that is read by ranges."""

    def __init__(self, file: StoredFile, access: Access | None) -> None:
        super().__init__()
        self._file, self._access, self._position = file, access, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with what one request yields; return the number of bytes, 0 at the end."""
        view = memoryview(buffer).cast("B")
        stop = min(self._position + len(view), self._position + BLOCK_BYTES, self._file.size)
        if stop <= self._position:
            return 0
        data = read(self._file.uri, self._position, stop, version=self._file.version, access=self._access)
        if len(data) != stop - self._position:
            raise _changed(self._file.uri)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size: int | None = -1, /) -> bytes:
        """Return exactly `size` bytes unless the file ends, which Arrow relies on."""
        rest = max(0, self._file.size - self._position)
        data = bytearray(rest if size is None or size < 0 else min(size, rest))
        filled = 0
        while filled < len(data):
            filled += self.readinto(memoryview(data)[filled:])
        return bytes(data)
