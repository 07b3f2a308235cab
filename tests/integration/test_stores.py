"""Training data from object stores and SFTP servers: the same batches as from the disk, whatever the servers do."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffusion.config.data import Representation, StreamConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import BatchLoader, train_loader
from diffusion.errors import DataError
from diffusion.storage import Access
from tests.tools.faulty_proxy import proxy
from tests.tools.forking import free_port
from tests.tools.s3_server import KEY, S3Server, find_s3rver, s3_process, s3_server, upload
from tests.tools.waiting import wait_until
from tests.tools.written_data import data_config, write_encoded

assert proxy
assert s3_process
assert s3_server
pytestmark = [pytest.mark.s3, pytest.mark.slow]


def open_loader(local: Path, remote: str | None = None, *names: str, **options: Any) -> BatchLoader:
    defaults: dict[str, Any] = {
        "representation": Representation.latents,
        "remote": remote,
        "download_attempts": 3,
        "download_timeout": 60.0,
        "validate_hash": "xxh64",
    }
    config = data_config(local, *names, **(defaults | options))
    return train_loader(config, seed=3, tokenize=None)


def read(loader: BatchLoader) -> list[tuple[list[int], list[float]]]:
    return [(batch[BatchKey.SAMPLE].tolist(), batch[BatchKey.LATENT_MEAN][:, 0, 0, 0].tolist()) for batch in loader]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoded(tmp_path_factory.mktemp("original"), {"a": 120, "b": 72})


@pytest.fixture(scope="module")
def expected(original: Path) -> list[tuple[list[int], list[float]]]:
    return read(open_loader(original, None, "a", "b"))


@pytest.fixture
def remote(original: Path, s3_server: S3Server, request: pytest.FixtureRequest) -> str:
    url = f"s3://tests/{request.node.originalname}"
    upload(original, url)
    return url


@pytest.mark.parametrize("num_workers", [0, 2])
def test_from_s3_as_from_the_disk(tmp_path, remote, expected, num_workers) -> None:
    assert read(open_loader(tmp_path, remote, "a", "b", num_workers=num_workers)) == expected


def test_several_stores_in_one_run(tmp_path, original, remote, expected, monkeypatch) -> None:
    program = find_s3rver()
    assert program is not None
    other = S3Server(tmp_path / "other", program)
    other.start("elsewhere")
    try:
        upload(original / "b", "s3://elsewhere/b", Access(endpoint_url=other.endpoint))
        credentials = tmp_path / "credentials"
        lines = [f"[other]\naws_access_key_id = {KEY}\naws_secret_access_key = {KEY}\n"]
        lines.append("[wrong]\naws_access_key_id = nobody\naws_secret_access_key = nothing\n")
        credentials.write_text("".join(lines))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))

        def streams(profile: str, a: str) -> list[StreamConfig]:
            b = StreamConfig(name="b", remote="s3://elsewhere/b", endpoint_url=other.endpoint, profile=profile)
            return [StreamConfig(name="a", remote=a), b]

        for name, a in (("s3", f"{remote}/a"), ("disk", str(original / "a"))):
            assert read(open_loader(tmp_path / name, streams=streams("other", a))) == expected
        with pytest.raises(DataError, match=r"s3://elsewhere/"):
            open_loader(tmp_path / "refused", streams=streams("wrong", f"{remote}/a"))
    finally:
        other.kill()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_server_that_is_killed_and_comes_back(tmp_path, remote, expected, proxy, s3_server, num_workers) -> None:
    killed = threading.Event()

    def kill(name: str, count: int) -> str | None:
        if name == "shard.00003.mds" and not killed.is_set():
            killed.set()
            s3_server.kill()
            threading.Timer(0.7, s3_server.start).start()
            return "drop"
        return None

    proxy.fault = kill
    loader = open_loader(tmp_path, remote, "a", "b", num_workers=num_workers, download_attempts=25)
    assert read(loader) == expected
    assert killed.is_set()


def test_a_silent_server_is_waited_for_as_long_as_configured(tmp_path, remote, proxy) -> None:
    proxy.fault = lambda name, count: "silent" if name == "shard.00002.mds" else None
    loader = open_loader(tmp_path, remote, "a", download_attempts=2, download_timeout=1.0)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"shard\.00002\.mds could not be fetched"):
        read(loader)
    assert time.monotonic() - began < 60


@pytest.fixture
def sftp_root(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of an SFTP server that shows the original."""
    import paramiko

    program = shutil.which("rclone")
    if program is None:
        pytest.skip("needs rclone (Debian)")
    key = paramiko.RSAKey.generate(2048)
    key.write_private_key_file(str(tmp_path / "host-key"))
    port = free_port()
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n")
    monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(known))
    command = [program, "serve", "sftp", str(original), "--addr", f"127.0.0.1:{port}", "--user", "me"]
    server = subprocess.Popen([*command, "--pass", "secret", "--key", str(tmp_path / "host-key"), "--read-only"])
    try:
        wait_until(lambda: _listens(port), "rclone does not answer", process=server)
        yield f"sftp://me:secret@127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_from_sftp_s3_and_the_disk(tmp_path, remote, expected, sftp_root) -> None:
    streams = [StreamConfig(name="a", remote=f"{remote}/a"), StreamConfig(name="b", remote=f"{sftp_root}/b")]
    assert read(open_loader(tmp_path / "cache", streams=streams, num_workers=2)) == expected
    streams[1] = StreamConfig(name="b", remote=f"{sftp_root}/nothing")
    with pytest.raises(DataError, match=r"/nothing/index\.json") as caught:
        open_loader(tmp_path / "other", streams=streams)
    assert "secret" not in str(caught.value)


def test_a_store_that_is_not_there(tmp_path, remote, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"nothing/index\.json"):
        open_loader(tmp_path / "a", remote, "nothing")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"S3_ENDPOINT_URL"):
        open_loader(tmp_path / "b", remote, "a", download_attempts=1)
