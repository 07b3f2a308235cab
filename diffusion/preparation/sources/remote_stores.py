"""Object stores and web servers: what lies there, and ranges of it, with patience where a server fails for a while."""

import errno
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from diffusion.errors import DataError, MachineError

_WEB = ("http", "https")
_FSSPEC_SCHEMES = ("gs", "gcs", "hf", "az", "abfs", "memory")
_PAGE_KEYS = 1000
_ATTEMPTS = 8
_BACKOFF = 0.5
_BODY_ATTEMPTS = 5
_TIMEOUTS = (10, 60)
_CREDENTIAL_CODES = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    "AuthorizationHeaderMalformed",
)
_SAME_COMMAND = "see whether the server is up and run the same command again"

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFile:
    """A file in a store.

    Attributes:
        url: Where it is.
        size: Bytes.
        version: Changes when the content does; empty where the store tells none.
    """

    url: str
    size: int
    version: str


class Store(Protocol):
    """What is asked of a store. All methods raise MachineError when it does not answer after several attempts."""

    def find(self, folder: str) -> Iterator[RemoteFile]:
        """Yield the files below a folder's URL, which ends in a slash, in any order."""
        ...

    def look(self, url: str) -> RemoteFile:
        """Return what is known of a file; FileNotFoundError or PermissionError if it is not to be had."""
        ...

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to before `stop`; DataError if the file is another one by now."""
        ...

    def read_whole(self, url: str, limit: int) -> bytes:
        """Return a file, but not more than `limit` bytes and one; errors as for `look`."""
        ...


def shown(place: str) -> str:
    """Return a place as messages and manifests may name it: without user, password and, on the web, query."""
    scheme, separator, rest = place.partition("://")
    if not separator:
        return place
    if scheme.lower() in _WEB:
        rest = rest.partition("?")[0].partition("#")[0]
    host, slash, below = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{below}"


def store_of(url: str) -> Store:
    """Return the store that holds a URL.

    Raises:
        DataError: No store has that scheme.
        MachineError: The package for it is not installed.
    """
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        return S3Store()
    if scheme in _WEB:
        return WebStore()
    if scheme in _FSSPEC_SCHEMES:
        return FsspecStore(scheme)
    raise DataError(f"{scheme}:// is not known; a URL begins with s3, https, http, gs, hf, az or abfs")


def _missing(url: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such file", shown(url))


def _forbidden(url: str) -> PermissionError:
    return PermissionError(errno.EACCES, "access denied", shown(url))


def _changed(url: str) -> DataError:
    return DataError(f"{shown(url)} was changed while it was read; prepare again when nothing writes there")


class S3Store:
    """S3 and what speaks like it (`S3_ENDPOINT_URL`), with the credentials that boto3 finds.

    A request that is not answered, or whose answer breaks off, is repeated up to 8 times (or AWS_MAX_ATTEMPTS) with
    pauses that double up to 8 s: an outage of 30 s is bridged.
    """

    def find(self, folder: str) -> Iterator[RemoteFile]:
        """See `Store`."""
        bucket, prefix = _bucket_and_key(folder)
        wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "MaxKeys": _PAGE_KEYS}
        token = ""
        while token is not None:
            page = _patiently(folder, lambda client: client.list_objects_v2(**wanted))
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):
                    yield RemoteFile(f"s3://{bucket}/{entry['Key']}", entry["Size"], entry["ETag"].strip('"'))
            wanted["ContinuationToken"] = token = page.get("NextContinuationToken")

    def look(self, url: str) -> RemoteFile:
        """See `Store`."""
        bucket, key = _bucket_and_key(url)
        head = _patiently(url, lambda client: client.head_object(Bucket=bucket, Key=key))
        return RemoteFile(url, head["ContentLength"], head["ETag"].strip('"'))

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """See `Store`."""
        wanted = {"Range": f"bytes={start}-{stop - 1}", "IfMatch": f'"{file.version}"'}
        body, version = self._get(file.url, stop - start, wanted)
        if version != file.version or len(body) != stop - start:
            raise _changed(file.url)
        return body

    def read_whole(self, url: str, limit: int) -> bytes:
        """See `Store`."""
        return self._get(url, limit + 1, {})[0]

    def _get(self, url: str, limit: int, wanted: dict[str, str]) -> tuple[bytes, str]:
        """Return at most `limit` bytes of an object, and its version."""
        bucket, key = _bucket_and_key(url)

        def get(client: Any) -> tuple[bytes, str]:
            answer = client.get_object(Bucket=bucket, Key=key, **wanted)
            body = answer["Body"].read(limit)
            if len(body) != min(limit, answer["ContentLength"]):
                raise ConnectionError("the transfer broke off")
            return body, answer["ETag"].strip('"')

        return _patiently(url, get)


class _NoAnswerError(MachineError):
    """The store did not answer; it may when it is asked again."""


def _patiently(url: str, request: Callable[[Any], T]) -> T:
    """Return what a request to S3 yields, repeated with growing pauses while the store does not answer."""
    from urllib3.util import Retry

    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))
    retry = Retry(total=attempts - 1, backoff_factor=_BACKOFF, backoff_max=8.0)
    while True:
        try:
            with _s3_errors(url):
                return request(_s3_client(os.getpid(), os.environ.get("S3_ENDPOINT_URL")))
        except _NoAnswerError as error:
            if not retry.total:
                raise
            retry = retry.increment(error=error)
            retry.sleep()


def _bucket_and_key(url: str) -> tuple[str, str]:
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise DataError(f"{shown(url)} names no bucket; write s3://BUCKET/PREFIX")
    return bucket, key


@functools.cache
def _s3_client(pid: int, endpoint: str | None) -> Any:
    """Make a client for a process (connections must not be shared by forked ones) and an endpoint."""
    from boto3.session import Session
    from botocore.config import Config

    connect, read = _TIMEOUTS
    config = Config(
        retries={"total_max_attempts": 1}, connect_timeout=connect, read_timeout=read, max_pool_connections=32
    )
    return Session().client("s3", endpoint_url=endpoint, config=config)


@contextmanager
def _s3_errors(url: str) -> Iterator[None]:
    """Turn what boto3 raises into one message that holds no text of the library: that could hold credentials."""
    from botocore import exceptions
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError) as error:
        raise MachineError(
            f"{shown(url)}: no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        ) from error
    except exceptions.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        raise _s3_message(url, code, status) from error
    except (exceptions.BotoCoreError, exceptions.HTTPClientError, HTTPError, ConnectionError) as error:
        raise _NoAnswerError(
            f"{shown(url)}: the store does not answer ({type(error).__name__}) after several attempts; {_SAME_COMMAND}"
        ) from error


def _s3_message(url: str, code: str, status: int | None) -> Exception:
    """Return the exception for an error that the store answered with."""
    if code == "NoSuchBucket":
        where = f" at {shown(endpoint)}" if (endpoint := os.environ.get("S3_ENDPOINT_URL")) else ""
        return DataError(
            f"{shown(url).rstrip('/')}: there is no such bucket{where}; correct the name or S3_ENDPOINT_URL"
        )
    if status == 404:
        return _missing(url)
    if status == 412 or code == "PreconditionFailed":
        return _changed(url)
    if code in _CREDENTIAL_CODES:
        return MachineError(f"{shown(url)}: the store refuses the credentials ({code}); correct AWS_ACCESS_KEY_ID, "
                            "AWS_SECRET_ACCESS_KEY and the region")  # fmt: skip
    if status in (401, 403):
        return _forbidden(url)
    return _NoAnswerError(f"{shown(url)}: the store answers {code or status}; {_SAME_COMMAND}")


class WebStore:
    """Single files on web servers; a tar or parquet file there needs a server that serves ranges.

    Requests are repeated up to 8 times with urllib3's back-off. Passwords come from ~/.netrc, as requests reads it.
    """

    def find(self, folder: str) -> Iterator[RemoteFile]:
        """See `Store`."""
        raise DataError(f"{shown(folder)}: a web server does not list folders; name tar or parquet files")

    def look(self, url: str) -> RemoteFile:
        """See `Store`."""
        answer, _ = self._get(url, 1, {"Range": "bytes=0-0"})
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        if answer.status_code != 206 or not total.isdecimal():
            raise DataError(f"{shown(url)}: the server serves no ranges; download the file and name the copy")
        return RemoteFile(url, int(total), _web_version(answer))

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """See `Store`."""
        answer, body = self._get(file.url, stop - start, {"Range": f"bytes={start}-{stop - 1}"})
        if answer.status_code != 206 or _web_version(answer) != file.version or len(body) != stop - start:
            raise _changed(file.url)
        return body

    def read_whole(self, url: str, limit: int) -> bytes:
        """See `Store`."""
        return self._get(url, limit + 1, {})[1]

    def _get(self, url: str, limit: int, headers: dict[str, str]) -> tuple[Any, bytes]:
        """Return an answer and at most `limit` bytes of its body."""
        from requests.exceptions import InvalidURL, RequestException
        from urllib3.exceptions import HTTPError, LocationParseError

        headers = {"Accept-Encoding": "identity", **headers}
        for _ in range(_BODY_ATTEMPTS):
            try:
                answer = _web_session(os.getpid()).get(url, headers=headers, stream=True, timeout=_TIMEOUTS)
            except (InvalidURL, LocationParseError) as error:
                raise _missing(url) from error
            except RequestException as error:
                raise MachineError(f"{shown(url)}: the server does not answer ({type(error).__name__}) after several "
                                   f"attempts; {_SAME_COMMAND}") from error  # fmt: skip
            with answer:
                if answer.status_code in (401, 403):
                    raise _forbidden(url)
                if 400 <= answer.status_code < 500:
                    raise _missing(url)
                if answer.status_code >= 300:
                    raise MachineError(f"{shown(url)}: the server answers {answer.status_code}; {_SAME_COMMAND}")
                try:
                    return answer, answer.raw.read(limit)
                except HTTPError:
                    continue
        raise MachineError(f"{shown(url)}: the transfer broke off {_BODY_ATTEMPTS} times; {_SAME_COMMAND}")


def _web_version(answer: Any) -> str:
    """Return what the server says of the version of a file."""
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


@functools.cache
def _web_session(pid: int) -> Any:
    """Make a session for a process: connections must not be shared by forked ones."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    retries = Retry(
        total=_ATTEMPTS - 1, redirect=10, backoff_factor=_BACKOFF, status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=("GET",), raise_on_status=False,
    )  # fmt: skip
    session = requests.Session()
    for scheme in _WEB:
        session.mount(f"{scheme}://", HTTPAdapter(max_retries=retries))
    return session


class FsspecStore:
    """What fsspec reaches; it and the package for the scheme find the credentials and repeat requests.

    Args:
        scheme: What stands before `://`.
    """

    def __init__(self, scheme: str) -> None:
        import fsspec

        try:
            self._files = fsspec.filesystem(scheme)
        except ImportError as error:
            raise MachineError(f"{scheme}:// needs a package: {error}; install it with pip") from error

    def find(self, folder: str) -> Iterator[RemoteFile]:
        """See `Store`."""
        with _fsspec_errors(folder):
            found = self._files.find(folder, detail=True, refresh=True)
        root = self._files._strip_protocol(folder).strip("/")
        for path, entry in found.items():
            below = path.lstrip("/").removeprefix(root).lstrip("/")
            yield RemoteFile(f"{folder}{below}", entry["size"], _fsspec_version(entry))

    def look(self, url: str) -> RemoteFile:
        """See `Store`."""
        with _fsspec_errors(url):
            entry = self._files.info(url, refresh=True)
        if entry["type"] != "file":
            raise _missing(url)
        return RemoteFile(url, entry["size"], _fsspec_version(entry))

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """See `Store`."""
        with _fsspec_errors(file.url):
            data = self._files.cat_file(file.url, start=start, end=stop)
        if len(data) != stop - start:
            raise _changed(file.url)
        return data

    def read_whole(self, url: str, limit: int) -> bytes:
        """See `Store`."""
        with _fsspec_errors(url):
            return self._files.cat_file(url, start=0, end=min(limit + 1, self.look(url).size))


@contextmanager
def _fsspec_errors(url: str) -> Iterator[None]:
    """Turn failures other than a missing or forbidden file into a message."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:
        raise MachineError(f"{shown(url)}: cannot be read ({type(error).__name__}); {_SAME_COMMAND}") from error


def _fsspec_version(entry: dict[str, Any]) -> str:
    """Return what a file system says of the version of a file."""
    known = ("etag", "ETag", "generation", "md5Hash", "blob_id", "mtime", "last_modified", "created")
    return next((str(entry[name]) for name in known if entry.get(name)), "")
