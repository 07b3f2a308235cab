"""Files by URI: paths, `s3://bucket/key` (or any store that speaks S3), web servers, and what fsspec reaches.

Every function makes several attempts while a store does not answer, with growing pauses. Its errors are
`MissingFileError`, `ForbiddenFileError`, `ChangedFileError`, `UnavailableError` (the attempts are used up), `DataError`
(the URI or the content is wrong) and `MachineError` (credentials, a package or space are missing, or the store refuses
the request). Messages name the URI without user, password and query, and hold no text of a library, which could hold
credentials. Nothing else in this package opens a boto3 client for S3. Only paths and S3 are written to.

Credentials are never part of a URI. S3 takes them from the profile of the AWS configuration files that `Access` names,
else from where boto3 finds them; a public bucket needs none. Web servers take them from `~/.netrc`.
"""

import datetime
import errno
import functools
import itertools
import json
import logging
import os
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, TypeVar

from fsspec.spec import AbstractBufferedFile

from diffusion.errors import (
    ConfigurationError,
    DataError,
    MachineError,
    UnavailableError,
    error_context,
    explained_writes,
)
from diffusion.files import atomic_path, hash_file, unique_partial

logger = logging.getLogger(__name__)

BLOCK_BYTES = 8 * 2**20
"""Bytes of a remote file that `open_file` requests at once."""

CONCURRENT_REQUESTS = 16
"""Calls of `concurrent_map` at a time."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between the first two attempts, doubled each time, and their limit, beside a random half second."""

FIRST_CONTACT = 20.0
"""Seconds for which the first request of a run to a store waits: a wrong address is reported soon."""

_CONNECT_SECONDS = 10.0
_CHUNK_BYTES = 2**20
_PAGE_KEYS = 1000
"""Objects listed or deleted by one request."""

_PASSING_ERRNOS = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EREMOTEIO)
"""Failures of network file systems; a file that is opened again may be read."""

_WEB = ("http", "https")
_FSSPEC = ("file", "gs", "gcs", "hf", "az", "abfs", "memory")
_STREAMING = ("gs", "oci", "azure", "azure-dl", "sftp", "dbfs", "dbfs-uc", "alipan")
"""Schemes whose downloads Streaming's own clients make: their packages are installed with it."""

_PASSING_CODES = (
    *("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestTimeTooSkewed", "InternalError"),
    "ConditionalRequestConflict",  # Two conditional writes of one object at a time.
)
_CREDENTIAL_CODES = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    "AuthorizationHeaderMalformed",
)

T = TypeVar("T")
Item = TypeVar("Item")


class _FileError(Exception):
    """Prints the errors below as `URI: what`, however they were made."""

    def __str__(self) -> str:
        name, what = getattr(self, "filename", None), getattr(self, "strerror", None)
        return f"{name}: {what}" if name else super().__str__()


class MissingFileError(_FileError, DataError, FileNotFoundError):
    """A file does not exist."""


class ForbiddenFileError(_FileError, MachineError, PermissionError):
    """A file exists, or may exist, but access with these credentials is denied."""


class ChangedFileError(_FileError, DataError):
    """A file has another version than the requested one."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access to a store, and time-outs of its attempts."""

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
    time: float | None = None
    """Seconds since 1970 of the last change; None where the store does not say."""


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
    """Raise a DataError if the scheme of a URI is unknown, or if it names no bucket."""
    _store_of(uri, Access())


def list_files(uri: str, access: Access | None = None) -> dict[str, StoredFile]:
    """List the files below a folder by their names below it, in the order of the store; none if there is no folder."""
    root = uri.rstrip("/") + "/"
    return {file.uri.removeprefix(root): file for file in iterate_files(uri, access)}


def iterate_files(uri: str, access: Access | None = None) -> Iterator[StoredFile]:
    """List the files below a folder as `list_files` does, but as a stream: S3 page by page."""
    root = uri.rstrip("/") + "/"
    token: str | None = ""
    while token is not None:
        files, token = _attempt(root, access, lambda store, token=token: store.page(root, token))
        yield from files


def stat(uri: str) -> StoredFile:
    """Return size and version of a file."""
    return _attempt(uri, None, lambda store: store.stat(uri))


def exists(uri: str) -> bool:
    """Return whether a file exists."""
    try:
        stat(uri)
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
        version: that of `stat`; a file with another one is a DataError.
        access: how its store is reached.
    """
    return _attempt(uri, access, lambda store: store.read(uri, start, stop, version))


def open_file(uri: str, *, buffer_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading by ranges. A later read raises a DataError if the file was changed.

    Args:
        uri: the file.
        buffer_bytes: bytes that are read ahead, None for BLOCK_BYTES; 0 where the caller reads in large pieces.
    """
    return _RangeFile(stat(uri), BLOCK_BYTES if buffer_bytes is None else buffer_bytes)  # pyright: ignore[reportReturnType]


class _RangeFile(AbstractBufferedFile):
    """A file that is read by ranges through `read`."""

    def __init__(self, file: StoredFile, buffer_bytes: int) -> None:
        self._file = file
        cache = "readahead" if buffer_bytes else "none"
        super().__init__(None, file.uri, block_size=buffer_bytes, cache_type=cache, size=file.size)  # pyright: ignore[reportArgumentType]

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self._file.size)
        data = read(self._file.uri, start, end, version=self._file.version)
        if len(data) != end - start:
            raise _changed(self._file.uri)
        return data


def write(uri: str, content: bytes, access: Access | None = None) -> None:
    """Write a file of this machine or an object of S3; it exists with the whole content, or as before.

    Folders are made. One request to a store, so at most 5 GiB.
    """
    if is_url(uri):
        _attempt(uri, access, lambda store: _s3(store, uri).write(uri, content))
        return
    path = Path(uri)
    with explained_writes(uri):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path, partial=unique_partial(path)) as partial:  # Two workers may write the same file.
            partial.write_bytes(content)


def read_version(uri: str, access: Access | None = None) -> tuple[bytes, str]:
    """Read an object of S3 and its version."""
    return _attempt(uri, access, lambda store: _s3(store, uri).read_version(uri))


def replace(uri: str, content: bytes, version: str | None, access: Access | None = None) -> str:
    """Write an object of S3 if it has a version still, None for none, and return its new version.

    A store that does not know conditions writes it in any case.

    Raises:
        ChangedFileError: it has another version. If an answer was lost, that may be the one of an earlier attempt.
    """
    condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": f'"{version}"'}
    return _attempt(uri, access, lambda store: _s3(store, uri).write(uri, content, **condition))


def delete_version(uri: str, version: str, access: Access | None = None) -> None:
    """Delete an object of S3 if it has a version still.

    Raises:
        ChangedFileError: it has another version.
    """
    with error_context("cannot delete"):
        _attempt(uri, access, lambda store: _s3(store, uri).delete_version(uri, version))


def write_json(uri: str, value: Any) -> None:
    """Write a JSON file as `write` does; NaN and infinity, which are not JSON, are a ValueError."""
    write(uri, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(uri: str, default: Any = ..., access: Access | None = None) -> Any:
    """Read a JSON file (by `fetch`, with an `Access`); a DataError if it is not JSON, or missing without a default."""
    try:
        return json.loads(read(uri) if access is None else fetch(uri, access))
    except MissingFileError:
        if default is ...:
            raise
        return default
    except (ValueError, RecursionError) as error:
        raise DataError(f"{shown(uri)} is damaged, it is not JSON: {error}") from error


def upload(path: Path, uri: str, access: Access | None = None) -> None:
    """Copy a file of this machine to S3; it exists there as a whole, or as before."""
    _attempt(uri, access, lambda store: _s3(store, uri).upload(path, uri))


def delete(uris: Iterable[str], access: Access | None = None) -> None:
    """Delete files of this machine, or objects of one bucket of S3; a missing one is no error."""
    uris = list(uris)
    for uri in uris:
        if not is_url(uri):
            with explained_writes(uri):
                Path(uri).unlink(missing_ok=True)
    uris = list(filter(is_url, uris))
    for start in range(0, len(uris), _PAGE_KEYS):
        some = uris[start : start + _PAGE_KEYS]
        with error_context("cannot delete"):
            _attempt(some[0], access, lambda store, some=some: _s3(store, some[0]).delete(some))


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
        DataError: its hash is wrong, twice.
        MachineError: the store cannot be read, or the disk not be written.
    """

    def attempt(store: "_Store") -> None:
        partial.unlink(missing_ok=True)
        store.download(uri, partial, parallel)
        if size is not None and (found := partial.stat().st_size) != size:
            raise UnavailableError(f"{shown(uri)}: {found} bytes came instead of {size}")

    partial = unique_partial(path)
    with explained_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path, partial=partial, durable=False):
            for _ in range(2):
                _attempt(uri, access, attempt)
                if digest is None or hash_file(partial, digest[0]) == digest[1]:
                    return
                logger.warning("%s: its %s is wrong", shown(uri), digest[0])
            raise DataError(f"{shown(uri)} is damaged: its {digest and digest[0]} is wrong, twice")


def fetch(uri: str, access: Access) -> bytes:
    """Read a small file by a download, the only way to read from some stores (`_STREAMING`)."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "content")
        download(uri, path, access=access)
        return path.read_bytes()


def concurrent_map(function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
    """Yield the result of a function for each item, in order, with CONCURRENT_REQUESTS calls at a time."""
    rest = iter(items)
    with ThreadPoolExecutor(CONCURRENT_REQUESTS) as threads:
        waiting = deque(threads.submit(function, item) for item in itertools.islice(rest, CONCURRENT_REQUESTS))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(threads.submit(function, item) for item in itertools.islice(rest, 1))
                yield result
        finally:
            threads.shutdown(cancel_futures=True)


def retry(path: str, read: Callable[[], T]) -> T:
    """Read a file of this machine, several times while its file system fails in a way that may pass.

    Raises:
        UnavailableError: the attempts are used up.
        OSError: another failure, at once.
    """

    def request(_: "_Store") -> T:
        try:
            return read()
        except OSError as error:
            if error.errno in _PASSING_ERRNOS:
                raise _unreadable(path, error) from error
            raise

    return _attempt(path, None, request)


def _attempt(uri: str, access: Access | None, request: Callable[["_Store"], T]) -> T:
    """Make a request to the store of a URI, several times while the store does not answer."""
    access = access or Access(attempts=_num_attempts())
    store = _store_of(uri, access)
    first_failure: float | None = None
    for number in itertools.count(1):
        try:
            return request(store)
        except UnavailableError as error:
            first_failure = first_failure or time.monotonic()
            pause = min(FIRST_PAUSE * 2.0 ** min(number - 1, 10), LONGEST_PAUSE) + random.random() / 2
            if access.seconds is not None:
                pause = min(pause, first_failure + access.seconds - time.monotonic())
            if pause <= 0 or (access.seconds is None and number >= access.attempts):
                raise
            logger.warning("%s. Attempt %d failed; trying again in %.1f s", error, number, pause)
        threading.Event().wait(pause)
    raise AssertionError


def _num_attempts() -> int:
    given = os.environ.get("AWS_MAX_ATTEMPTS") or "8"
    if not given.isdecimal():
        raise ConfigurationError(f"AWS_MAX_ATTEMPTS is {given!r}; set it to a number, or unset it")
    return int(given)


def _s3(store: "_Store", uri: str) -> "_S3Store":
    if not isinstance(store, _S3Store):
        raise DataError(f"{shown(uri)} cannot be written to; choose a folder or s3://BUCKET/PREFIX")
    return store


# Stores: each method makes one attempt.


def _store_of(uri: str, access: Access) -> "_Store":
    scheme = uri.partition(":")[0].lower() if is_url(uri) else "file"
    if scheme == "s3":
        _object(uri)
        return _S3Store(access)
    if scheme in _WEB:
        return _WebStore(access)
    if scheme in _FSSPEC or scheme in _STREAMING:
        return _FsspecStore(scheme, access)
    known = ", ".join(dict.fromkeys(("s3", *_WEB, *_FSSPEC, *_STREAMING)))
    raise DataError(f"{shown(uri)}: {scheme}:// is not known; a URL begins with {known}")


def _missing(uri: str) -> MissingFileError:
    return MissingFileError(errno.ENOENT, "there is no such file", shown(uri))


def _forbidden(uri: str) -> ForbiddenFileError:
    return ForbiddenFileError(errno.EACCES, "access denied", shown(uri))


def _changed(uri: str) -> ChangedFileError:
    return ChangedFileError(f"{shown(uri)} was changed while it was read; start again when nothing writes there")


def _unavailable(uri: str, error: Exception | str | int) -> UnavailableError:
    what = f"does not answer ({type(error).__name__})" if isinstance(error, Exception) else f"answers {error}"
    return UnavailableError(
        f"{shown(uri)}: the store {what}. Check the address (S3_ENDPOINT_URL) and the network, and run the same "
        "command again"
    )


def _unreadable(path: str, error: OSError) -> UnavailableError:
    return UnavailableError(
        f"{path} cannot be read: {error.strerror}. Check its disk or file system, and run the same command again"
    )


class _S3Store:
    """Objects of S3, and of what speaks like it."""

    def __init__(self, access: Access) -> None:
        self._endpoint = access.endpoint_url or os.environ.get("S3_ENDPOINT_URL") or None
        self._profile = access.profile
        self._timeout = access.timeout if access.seconds is None else max(1.0, min(access.timeout, access.seconds))

    def page(self, folder: str, token: str) -> tuple[list[StoredFile], str | None]:
        """List a page of the files below a folder, and return the token of the next; None behind the last."""
        bucket, prefix = _object(folder).values()
        wanted = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": _PAGE_KEYS}
        if token:
            wanted["ContinuationToken"] = token
        answer = self._read(folder, lambda client: client.list_objects_v2(**wanted))
        files = [
            StoredFile(
                f"s3://{bucket}/{entry['Key']}",
                entry["Size"],
                entry.get("ETag", "").strip('"'),
                entry["LastModified"].timestamp(),
            )
            for entry in answer.get("Contents", ())
            if not entry["Key"].endswith("/")
        ]
        return files, answer.get("NextContinuationToken")

    def stat(self, uri: str) -> StoredFile:
        head = self._read(uri, lambda client: client.head_object(**_object(uri)))
        time = head["LastModified"].timestamp()
        return StoredFile(uri, head["ContentLength"], head["ETag"].strip('"'), time)

    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes:
        wanted = _object(uri)
        if version is not None:
            wanted["IfMatch"] = f'"{version}"'
        if start or (stop is not None and version is not None):
            wanted["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        limit = None if stop is None else stop - start

        def request(client: Any) -> bytes:
            answer = client.get_object(**wanted)
            body = answer["Body"].read(limit)
            if limit is not None and len(body) < min(limit, answer["ContentLength"]):
                raise ConnectionError("the transfer broke off")
            if version is not None and answer["ETag"].strip('"') != version:
                raise _changed(uri)
            return body

        return self._read(uri, request)

    def download(self, uri: str, path: Path, parallel: int) -> None:
        from boto3.s3.transfer import TransferConfig

        def request(client: Any) -> None:
            if parallel > 1:
                config = TransferConfig(max_concurrency=parallel)
                client.download_file(**_object(uri), Filename=str(path), Config=config)
                return
            with path.open("wb") as file:
                for chunk in client.get_object(**_object(uri))["Body"].iter_chunks(_CHUNK_BYTES):
                    file.write(chunk)

        self._read(uri, request)

    def write(self, uri: str, content: bytes, **condition: str) -> str:
        """Write an object on a condition, and return its version."""
        with self._errors(uri):
            return self._client().put_object(**_object(uri), Body=content, **condition).get("ETag", "").strip('"')

    def read_version(self, uri: str) -> tuple[bytes, str]:
        with self._errors(uri):
            answer = self._client().get_object(**_object(uri))
            return answer["Body"].read(), answer["ETag"].strip('"')

    def delete_version(self, uri: str, version: str) -> None:
        with self._errors(uri):
            self._client().delete_object(**_object(uri), IfMatch=f'"{version}"')

    def upload(self, path: Path, uri: str) -> None:
        from boto3.s3.transfer import TransferConfig

        try:
            file = path.open("rb")
        except OSError as error:
            raise MachineError(f"{path} cannot be read: {error.strerror}") from error
        with file, self._errors(uri):
            self._client().upload_fileobj(file, **_object(uri), Config=TransferConfig(max_concurrency=4))

    def delete(self, uris: list[str]) -> None:
        keys = {_object(uri)["Key"]: uri for uri in uris}
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        with self._errors(uris[0]):
            answer = self._client().delete_objects(Bucket=_object(uris[0])["Bucket"], Delete=objects)
        for failure in answer.get("Errors", ()):  # Of single objects, in an answer of status 200.
            if failure["Code"] != "NoSuchKey":
                raise self._answer(keys[failure["Key"]], failure["Code"])

    def _read(self, uri: str, request: Callable[[Any], T]) -> T:
        """Make a request that a public bucket grants to anybody: without credentials where there are none."""
        from botocore.exceptions import ClientError, NoCredentialsError

        with self._errors(uri):
            try:
                return request(self._client())
            except NoCredentialsError as error:
                try:
                    return request(self._client(signed=False))
                except ClientError as answer:
                    if _status(answer) in (401, 403):
                        raise error from answer
                    raise

    def _client(self, *, signed: bool = True) -> Any:
        try:
            return _s3_client(os.getpid(), self._endpoint, self._profile, self._timeout, signed)
        except ValueError as error:
            raise MachineError(f"{shown(self._endpoint or '')} is no address of an S3 store: correct it") from error

    @contextmanager
    def _errors(self, uri: str) -> Iterator[None]:
        import botocore.exceptions as aws
        from boto3.exceptions import Boto3Error
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.ProfileNotFound) as error:
            where = f"the profile {self._profile}" if self._profile else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise MachineError(f"{shown(uri)}: no credentials were found; set {where}, or AWS_PROFILE") from error
        except aws.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            raise self._answer(uri, code, _status(error)) from error
        except (
            *(aws.ConnectionError, aws.HTTPClientError, aws.IncompleteReadError, aws.ResponseStreamingError),
            *(Boto3Error, HTTPError, ConnectionError, TimeoutError),
        ) as error:
            raise _unavailable(uri, error) from error
        except aws.BotoCoreError as error:
            raise MachineError(f"{shown(uri)}: the request failed ({type(error).__name__})") from error

    def _answer(self, uri: str, code: str, status: int = 0) -> Exception:
        """Make the error for a code of the store, and for the HTTP status of its answer."""
        if code == "NoSuchBucket":
            where = f" at {shown(self._endpoint)}" if self._endpoint else ""
            return DataError(
                f"{shown(uri).rstrip('/')}: there is no such bucket{where}; correct the name or S3_ENDPOINT_URL"
            )
        if status == 404:
            return _missing(uri)
        if status == 412:
            return _changed(uri)
        if code in _CREDENTIAL_CODES:
            return MachineError(
                f"{shown(uri)}: the store refuses the credentials ({code}); correct AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and the region"
            )
        if status in (401, 403) or code == "AccessDenied":
            return _forbidden(uri)
        if status >= 500 or status == 429 or code in _PASSING_CODES:
            return _unavailable(uri, code or status)
        return MachineError(f"{shown(uri)}: the store refuses the request ({code or status})")


def _status(error: Any) -> int:
    """Return the HTTP status of an error of boto3, or of a client of Google, Azure or Oracle; 0 if it has none."""
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    found = (getattr(error, name, None) for name in ("code", "status_code", "status"))
    return next((status for status in found if isinstance(status, int)), 0)


def _object(uri: str) -> dict[str, str]:
    bucket, _, key = uri.partition("://")[2].partition("/")
    if not bucket:
        raise DataError(f"{shown(uri)} names no bucket; write s3://BUCKET/PREFIX")
    return {"Bucket": bucket, "Key": key}


@functools.cache
def _s3_client(process: int, endpoint: str | None, profile: str | None, timeout: float, signed: bool) -> Any:
    """Make a client for a process: forked ones must not share connections."""
    from boto3.session import Session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import get_session

    session = get_session()
    session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    config = Config(
        connect_timeout=min(_CONNECT_SECONDS, timeout),
        read_timeout=timeout,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=32,
        request_checksum_calculation="when_required",  # Not every store that speaks S3 knows the new checksums.
        response_checksum_validation="when_required",
        signature_version=None if signed else UNSIGNED,
    )
    session = Session(botocore_session=session, profile_name=profile)
    return session.client("s3", endpoint_url=endpoint, config=config)


def _timestamp(text: Any) -> datetime.datetime:
    """Parse the time of an answer; those of listings, which have many, without botocore's slow search for a format."""
    from botocore.utils import parse_timestamp

    is_listed = isinstance(text, str) and text.endswith("Z")
    return datetime.datetime.fromisoformat(text) if is_listed else parse_timestamp(text)


class _WebStore:
    """Single files of web servers; ranges need a server that serves them.

    Not fsspec's: it takes every failure for a missing file, and knows no versions.
    """

    def __init__(self, access: Access) -> None:
        self._timeouts = (min(_CONNECT_SECONDS, access.timeout), access.timeout)

    def page(self, folder: str, token: str) -> tuple[list[StoredFile], str | None]:
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
        with self._get(uri, headers) as answer:
            if ranged and (answer.status_code != 206 or (version is not None and _web_version(answer) != version)):
                raise _changed(uri)
            limit = None if stop is None else stop - start
            body = answer.raw.read(limit)
            if len(body) < (_length(answer) if limit is None else min(limit, _length(answer))):
                raise ConnectionError("the transfer broke off")
            return body

    def download(self, uri: str, path: Path, parallel: int) -> None:
        with self._get(uri, {}) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer.raw, file, _CHUNK_BYTES)
            if file.tell() < _length(answer):
                raise ConnectionError("the transfer broke off")

    @contextmanager
    def _get(self, uri: str, headers: Mapping[str, str]) -> Iterator[Any]:
        from requests.exceptions import InvalidURL, RequestException
        from urllib3.exceptions import HTTPError, LocationParseError

        headers = {"Accept-Encoding": "identity", **headers}
        try:
            with _web_session(os.getpid()).get(uri, headers=headers, stream=True, timeout=self._timeouts) as answer:
                if answer.status_code in (401, 403):
                    raise _forbidden(uri)
                if answer.status_code >= 500 or answer.status_code == 429:
                    raise _unavailable(uri, answer.status_code)
                if answer.status_code >= 300:
                    raise _missing(uri)
                yield answer
        except (DataError, MachineError):
            raise
        except (InvalidURL, LocationParseError) as error:
            raise _missing(uri) from error
        except (RequestException, HTTPError, ConnectionError, TimeoutError) as error:
            raise _unavailable(uri, error) from error


def _length(answer: Any) -> int:
    """Bytes that the server announced; 0 if it did not."""
    return int(answer.headers.get("Content-Length") or 0)


def _web_version(answer: Any) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


@functools.cache
def _web_session(process: int) -> Any:
    """Make a session for a process: forked ones must not share connections."""
    import requests

    return requests.Session()


class _FsspecStore:
    """Files of this machine, and what fsspec reaches. Downloads of `_STREAMING` are made by Streaming's clients.

    Any exception of a remote client is a failure that may pass: each has its own.
    """

    def __init__(self, scheme: str, access: Access) -> None:
        self._scheme, self._timeout = scheme, access.timeout

    @property
    def _files(self) -> Any:
        import fsspec

        try:
            fsspec.get_filesystem_class(self._scheme)
        except (ImportError, ValueError) as error:  # A ValueError says that fsspec knows no package for it.
            raise MachineError(f"{self._scheme}:// needs a package: {error}; install it with pip") from error
        try:
            return fsspec.filesystem(self._scheme)
        except ValueError as error:
            raise MachineError(
                f"{self._scheme}:// has no valid credentials; set those that its package reads from the environment"
            ) from error

    def page(self, folder: str, token: str) -> tuple[list[StoredFile], str | None]:
        store, files = self._files, []
        with self._errors(folder):
            is_local = self._scheme == "file"
            found = _find_local(store, folder) if is_local else store.find(folder, detail=True, refresh=True)
        root = store._strip_protocol(folder).strip("/")
        for path, entry in found.items():
            name = path.lstrip("/").removeprefix(root).lstrip("/")
            time = entry.get("mtime") if self._scheme == "file" else None
            files.append(StoredFile(folder + name, entry["size"], _fsspec_version(entry), time))
        return files, None

    def stat(self, uri: str) -> StoredFile:
        with self._errors(uri):
            entry = self._files.info(uri, refresh=True)
        if entry["type"] != "file":
            raise _missing(uri)
        return StoredFile(uri, entry["size"], _fsspec_version(entry))

    def read(self, uri: str, start: int, stop: int | None, version: str | None) -> bytes:
        found = self.stat(uri)
        if version is not None and found.version != version:
            raise _changed(uri)
        with self._errors(uri):
            return self._files.cat_file(uri, start=start, end=found.size if stop is None else min(stop, found.size))

    def download(self, uri: str, path: Path, parallel: int) -> None:
        with self._errors(uri):
            if self._scheme not in _STREAMING:
                self._files.get_file(uri, str(path))
                return
            try:
                root = "/".join(uri.split("/")[:3])
                client = _streaming_client(os.getpid(), threading.get_ident(), root)
                client.download(uri, str(path), self._timeout)
                if not path.exists():  # Streaming's client of gs:// passes over most answers to HMAC keys.
                    raise _unavailable(uri, "without the file")
            except Exception:
                _streaming_client.cache_clear()  # The connection may be broken.
                path.with_name(f"{path.name}.tmp").unlink(missing_ok=True)  # Of some clients.
                raise

    @contextmanager
    def _errors(self, uri: str) -> Iterator[None]:
        try:
            yield
        except (DataError, MachineError):
            raise
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            is_denied = _status(error.__cause__) in (401, 403)
            raise (_forbidden if is_denied else _missing)(uri) from error
        except PermissionError as error:
            raise _forbidden(uri) from error
        except ImportError as error:
            raise MachineError(f"{shown(uri)} needs a package: {error}; install it with pip") from error
        except Exception as error:
            if (status := _status(error)) in (401, 403, 404):
                raise (_missing if status == 404 else _forbidden)(uri) from error
            if isinstance(error, OSError) and self._scheme == "file" and error.errno in _PASSING_ERRNOS:
                raise _unreadable(uri, error) from error
            if isinstance(error, OSError) and (self._scheme == "file" or error.errno in (errno.ENOSPC, errno.EDQUOT)):
                raise MachineError(f"{shown(uri)} cannot be read or copied: {error.strerror or error}") from error
            raise _unavailable(uri, error) from error


def _find_local(store: Any, root: str) -> dict[str, Mapping[str, Any]]:
    """Find the files below a local folder; none if there is no folder. Below it, links to folders are not followed.

    The `find` of fsspec leaves out folders that it cannot list.
    """
    found, folders = {}, [store._strip_protocol(root)]
    for folder in folders:
        try:
            entries = store.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(folder):  # noqa: PTH114 - its disk may not be mounted
                raise
            continue
        folders += [entry["name"] for entry in entries if entry["type"] == "directory"]
        found |= {entry["name"]: entry for entry in entries if entry["type"] != "directory"}
    return dict(sorted(found.items()))


def _fsspec_version(entry: Mapping[str, Any]) -> str:
    """Return what a file system says of the version of a file."""
    known = ("etag", "ETag", "generation", "md5Hash", "blob_id", "mtime", "last_modified", "created")
    return next((str(entry[name]) for name in known if entry.get(name)), "")


@functools.lru_cache(maxsize=32)
def _streaming_client(process: int, thread: int, root: str) -> Any:
    """Make a client of a store for a thread: it keeps its connection from file to file."""
    from streaming.base.storage import CloudDownloader

    return CloudDownloader.get(root)


_Store = _S3Store | _WebStore | _FsspecStore
