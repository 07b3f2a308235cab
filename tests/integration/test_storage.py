"""Files by URI: of this machine, of fsspec, of a web server, and of a real S3 server that fails."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest.mock import Mock

import fsspec
import pytest
from botocore.exceptions import ClientError
from google.api_core import exceptions

from diffusion import storage
from diffusion.distributed import agree
from diffusion.errors import ConfigurationError, DataError, MachineError, UserError, error_context
from diffusion.files import hash_file
from diffusion.storage import Access, ForbiddenFileError, MissingFileError, UnavailableError
from tests.tools.faulty_proxy import FaultyProxy, proxy
from tests.tools.s3_server import KEY, S3Server, object_file, s3_process, s3_server
from tests.tools.web import WebServer, send

assert proxy
assert s3_process
assert s3_server

SECRET = "correct-horse"
SHORT = Access(seconds=0.5, timeout=1.0)


@pytest.fixture(params=["path", "file", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder of each kind of store."""
    name = request.node.originalname
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    yield {
        "path": str(tmp_path / "store"),
        "file": f"file://{tmp_path}/store",
        "memory": f"memory://{name}",
        "s3": f"s3://tests/{name}",
    }[request.param]
    if request.param == "memory" and (memory := fsspec.filesystem("memory")).exists(f"/{name}"):
        memory.rm(f"/{name}", recursive=True)


def put(uri: str, content: bytes) -> None:
    """Write a file of any store."""
    if uri.startswith("s3:"):
        return storage.write(uri, content)
    with fsspec.open(uri, "wb", auto_mkdir=True) as file:
        file.write(content)  # pyright: ignore[reportAttributeAccessIssue]
    return None


def test_every_store_does_the_same(root: str, tmp_path: Path):
    content = bytes(range(256)) * 100
    uri = storage.join(root, "a", "b.bin")
    assert storage.list_files(root) == {}
    put(uri, content)
    put(storage.join(root, "c"), content[::-1])
    put(storage.join(f"{root}-more", "d"), b"of a neighbour with a longer name")

    files = storage.list_files(root)
    assert {name: (file.uri, file.size) for name, file in files.items()} == {
        "a/b.bin": (uri, len(content)),
        "c": (storage.join(root, "c"), len(content)),
    }
    found = storage.stat(uri)
    assert (found.uri, found.size) == (uri, len(content))
    assert storage.read(uri) == content
    assert storage.read(uri, 10, 20) == content[10:20]
    assert storage.read(uri, len(content) - 5, len(content) + 5, version=found.version) == content[-5:]
    with storage.open_file(uri, buffer_bytes=100) as file:
        assert file.read(7) == content[:7]
        file.seek(-9, os.SEEK_END)
        assert file.read() == content[-9:]

    storage.download(uri, tmp_path / "new" / "b.bin", size=len(content))
    assert (tmp_path / "new" / "b.bin").read_bytes() == content


def test_a_missing_file_is_named(root: str, tmp_path: Path):
    uri = storage.join(root, "none")
    for request in (storage.read, storage.stat, storage.open_file, lambda uri: storage.download(uri, tmp_path / "x")):
        with pytest.raises(MissingFileError, match="none"):
            request(uri)
    assert not (tmp_path / "x").exists()


def test_a_file_that_changes_while_it_is_read_is_an_error(root: str):
    uri = storage.join(root, "a")
    put(uri, b"1" * 100)
    with storage.open_file(uri, buffer_bytes=10) as file:
        assert file.read(5) == b"1" * 5
        version = storage.stat(uri).version
        time.sleep(0.01)
        put(uri, b"2" * 100)
        with pytest.raises(DataError, match="/a"):
            storage.read(uri, 5, 20, version=version)


def test_hash_and_size_of_a_download(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source, path = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"content")
    good = hash_file(source, "xxh64")
    storage.download(str(source), path, size=7, digest=("xxh64", good))
    path.unlink()
    with pytest.raises(DataError, match="source"):
        storage.download(str(source), path, digest=("xxh64", "0" * 16))
    assert "its xxh64 is wrong" in caplog.text
    with pytest.raises(MachineError, match="7 bytes came instead of 8"):
        storage.download(str(source), path, size=8, access=Access(attempts=1))
    with pytest.raises(MachineError, match="/dev/null/x"):
        storage.download(str(source), Path("/dev/null/x"))
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


def test_errors_are_the_users_and_go_through_agreement():
    missing = MissingFileError(2, "there is no such file", "s3://a/b")
    assert isinstance(missing, FileNotFoundError) and str(missing) == "s3://a/b: there is no such file"
    with pytest.raises(MissingFileError, match=r"data.remote: s3://a/b"), error_context("data.remote"):
        raise missing
    assert isinstance(ForbiddenFileError("x"), MachineError)

    def fail() -> None:
        raise missing

    with pytest.raises(UserError, match="s3://a/b"):
        agree(fail)


def test_an_outage_of_hours_is_bridged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 1e-9)
    monkeypatch.setattr("random.random", lambda: 0.0)
    request = Mock(side_effect=[*[UnavailableError("gone")] * 1100, "content"])
    assert storage._attempt("memory://x", Access(seconds=3600.0), request) == "content"


def test_a_wrong_number_of_attempts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a").write_bytes(b"content")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "")
    assert storage.read(str(tmp_path / "a")) == b"content"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    with pytest.raises(ConfigurationError, match="AWS_MAX_ATTEMPTS"):
        storage.read(str(tmp_path / "a"))


def test_a_store_that_cannot_be_written_to_is_named():
    with pytest.raises(DataError, match="memory://x/y"):
        storage.write("memory://x/y", b"")


def test_missing_credentials_are_no_missing_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fsspec, "get_filesystem_class", Mock())
    monkeypatch.setattr(fsspec, "filesystem", Mock(side_effect=ValueError))
    with pytest.raises(MachineError, match="credentials"):
        storage.stat("az://x/y")
    monkeypatch.setattr(fsspec, "get_filesystem_class", Mock(side_effect=ImportError))
    with pytest.raises(MachineError, match="package"):
        storage.stat("az://x/y")


def test_names_and_secrets():
    assert storage.shown(f"https://u:{SECRET}@h/x?y={SECRET}#z") == "https://h/x"
    assert storage.shown(f"sftp://me:{SECRET}@h/x") == "sftp://h/x"
    assert storage.shown("/a/b?c") == "/a/b?c"
    assert storage.join("s3://a/", "b", "c") == "s3://a/b/c"
    assert storage.join("/a/", "b") == "/a/b"
    for uri in ("s4://x/y", "s3:///x"):
        with pytest.raises(DataError):
            storage.check_uri(uri)


@pytest.mark.parametrize(
    ("code", "error"),
    [("AccessDenied", ForbiddenFileError), ("InternalError", UnavailableError), ("ObjectLocked", MachineError)],
)
def test_an_object_that_is_not_deleted(monkeypatch: pytest.MonkeyPatch, code: str, error: type[Exception]):
    """S3 answers with status 200 and a list of what it did not delete."""
    client = Mock(**{"delete_objects.return_value": {"Errors": [{"Key": "x/b", "Code": code}]}})
    monkeypatch.setattr(storage, "_s3_client", lambda *_: client)
    with pytest.raises(error, match="cannot delete: s3://tests/x/b"):
        storage.delete(["s3://tests/x/a", "s3://tests/x/b"], SHORT)
    client.delete_objects.return_value = {"Errors": [{"Key": "x/b", "Code": "NoSuchKey"}]}
    storage.delete(["s3://tests/x/a", "s3://tests/x/b"], SHORT)


DENIED = ClientError({"Error": {"Code": "403"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "HeadObject")
NOT_FOUND = FileNotFoundError("Object not found")
NOT_FOUND.__cause__ = DENIED


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (exceptions.NotFound("x"), MissingFileError),
        (exceptions.Forbidden("x"), ForbiddenFileError),
        (exceptions.TooManyRequests("x"), UnavailableError),
        (NOT_FOUND, ForbiddenFileError),  # With HMAC keys.
        (None, UnavailableError),
    ],
)
def test_answers_of_google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer, error):
    client = Mock(**{"download.side_effect": answer})
    monkeypatch.setattr(storage, "_streaming_client", Mock(return_value=client))
    with pytest.raises(error, match="gs://b/x"):
        storage.download("gs://b/x", tmp_path / "x", access=Access(attempts=1))


class TestS3:
    pytestmark = pytest.mark.s3

    def test_large_objects(self, s3_server: S3Server, proxy: FaultyProxy, tmp_path: Path):
        """Written, read in one request and in parts, and deleted."""
        content = os.urandom(20_000_001)
        (tmp_path / "big").write_bytes(content)
        storage.upload(tmp_path / "big", "s3://tests/large/big", Access(endpoint_url=s3_server.endpoint))
        proxy.requests.clear()
        storage.download("s3://tests/large/big", tmp_path / "one")
        assert proxy.requests["big"] == 1
        storage.download("s3://tests/large/big", tmp_path / "parts", parallel=4)
        assert proxy.requests["big"] > 3
        assert (tmp_path / "one").read_bytes() == (tmp_path / "parts").read_bytes() == content
        direct = Access(endpoint_url=s3_server.endpoint)
        storage.delete(["s3://tests/large/big", "s3://tests/large/none"], direct)
        assert storage.list_files("s3://tests/large") == {}

    @pytest.mark.parametrize("fault", ["error", "drop", "cut", "damage", "silent"])
    def test_failures_that_pass(self, s3_server: S3Server, proxy: FaultyProxy, tmp_path: Path, fault: str):
        content = os.urandom(100_000)
        (tmp_path / "source").write_bytes(content)
        storage.write("s3://tests/passing/a", content, Access(endpoint_url=s3_server.endpoint))
        proxy.requests.clear()
        proxy.fault = lambda name, count: fault if name == "a" and count == 1 else None
        digest = ("xxh64", hash_file(tmp_path / "source", "xxh64"))
        storage.download("s3://tests/passing/a", tmp_path / "copy", digest=digest, access=Access(timeout=6.0))
        assert (tmp_path / "copy").read_bytes() == content
        assert proxy.requests["a"] == 2

    def test_an_outage_is_bridged(self, s3_server: S3Server, caplog: pytest.LogCaptureFixture):
        storage.write("s3://tests/outage/a", b"content")
        s3_server.kill()
        restart = threading.Timer(1.0, s3_server.start)
        restart.start()
        with caplog.at_level(logging.WARNING):
            assert storage.read("s3://tests/outage/a", access=Access(seconds=300.0)) == b"content"
        restart.join()
        assert "s3://tests/outage/a: the store does not answer" in caplog.text

    def test_an_outage_for_good_ends(self, s3_server: S3Server, tmp_path: Path):
        storage.write("s3://tests/dead/a", b"content")
        s3_server.freeze()
        try:
            for access in (SHORT, Access(attempts=2, timeout=1.0)):
                began = time.monotonic()
                with pytest.raises(UnavailableError, match="s3://tests/dead/a"):
                    storage.read("s3://tests/dead/a", access=access)
                assert time.monotonic() - began < 60
        finally:
            s3_server.thaw()
        assert storage.read("s3://tests/dead/a") == b"content"

    def test_mistakes_are_not_tried_again(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        access = Access(seconds=300.0)
        began = time.monotonic()
        with pytest.raises(DataError, match="s3://nowhere/x"):
            storage.list_files("s3://nowhere/x", access)
        with pytest.raises(DataError, match="s3://nowhere/x"):
            storage.write("s3://nowhere/x", b"", access)
        with pytest.raises(MachineError, match="nonsense"):
            storage.read("s3://tests/x", access=Access(endpoint_url="nonsense"))
        assert time.monotonic() - began < 120

    def test_credentials_by_profile_and_endpoint(self, s3_server: S3Server, monkeypatch, tmp_path: Path):
        storage.write("s3://tests/profiles/a", b"content")
        credentials = tmp_path / "credentials"
        profiles = {"good": (KEY, KEY), "unknown": ("nobody", SECRET)}
        lines = [
            f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
            for name, (key, secret) in profiles.items()
        ]
        credentials.write_text("".join(lines))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
        for name in ("S3_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)

        def read(profile: str) -> bytes:
            return storage.read(
                "s3://tests/profiles/a", access=Access(endpoint_url=s3_server.endpoint, profile=profile)
            )

        assert read("good") == b"content"
        for profile in ("unknown", "absent"):
            with pytest.raises(MachineError, match="s3://tests/profiles/a") as refused:
                read(profile)
            assert SECRET not in str(refused.value)

    def test_without_credentials(self, s3_server: S3Server, monkeypatch, tmp_path: Path):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        with pytest.raises(MachineError, match="AWS_ACCESS_KEY_ID"):
            storage.write("s3://tests/public/a", b"")

    def test_a_damaged_object_is_downloaded_twice(self, s3_server: S3Server, proxy: FaultyProxy, tmp_path: Path):
        (tmp_path / "a").write_bytes(b"content")
        storage.upload(tmp_path / "a", "s3://tests/damaged/a", Access(endpoint_url=s3_server.endpoint))
        object_file(s3_server, "s3://tests/damaged/a").write_bytes(b"contend")
        proxy.requests.clear()
        with pytest.raises(DataError, match="s3://tests/damaged/a"):
            digest = ("xxh64", hash_file(tmp_path / "a", "xxh64"))
            storage.download("s3://tests/damaged/a", tmp_path / "copy", size=7, digest=digest)
        assert proxy.requests["a"] == 2
        assert not (tmp_path / "copy").exists()


def test_a_web_server_serves_single_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failures = [503, 503]

    class Failing(WebServer):
        def answer(self, request: BaseHTTPRequestHandler) -> None:
            found = 200 if request.path.startswith("/a%20b.txt") else 404
            send(request, failures.pop() if failures else found, b"content")

    server = Failing()
    url = f"{server.url}/a%20b.txt?token={SECRET}"
    try:
        assert storage.read(url) == b"content"
        assert failures == []
        storage.download(url, tmp_path / "copy")
        assert (tmp_path / "copy").read_text() == "content"
        for request, kind in (
            (lambda: storage.stat(url), DataError),
            (lambda: storage.read(url.replace("b.txt", "none")), MissingFileError),
            (lambda: storage.list_files(url), DataError),
            (lambda: storage.write(url, b""), DataError),
        ):
            with pytest.raises(kind) as refused:
                request()
            assert SECRET not in str(refused.value)
    finally:
        server.close()
