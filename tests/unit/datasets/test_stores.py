import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diffusion.datasets.stores import Store

from diffusion.config.data import Representation, StreamConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.dataset import TextImageDataset
from diffusion.datasets.loader import BatchLoader, train_loader
from diffusion.errors import DataError
from tests.tools.faulty_proxy import FaultyProxy
from tests.tools.s3_server import KEY, S3Server, find_s3rver, object_file, s3_process, s3_server
from tests.tools.written_data import data_config, write_encoded
from verification.ports import free_port

assert s3_process
assert s3_server
pytestmark = pytest.mark.s3


def upload(server: S3Server, folder: Path, url: str) -> None:
    """Put the files of a folder into a bucket."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=KEY,
        region_name="us-east-1",
    )
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(folder)}")


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the server, with which streams are fetched."""
    proxy = FaultyProxy(s3_server.port)
    monkeypatch.setenv("S3_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.close()


def open_loader(local: Path, remote: str | None = None, *names: str, **options: Any) -> BatchLoader:
    defaults: dict[str, Any] = {
        "representation": Representation.latents,
        "remote": remote,
        "download_retry": 3,
        "validate_hash": "xxh64",
    }
    config = data_config(local, *names, **(defaults | options))
    return train_loader(config, seed=3, tokenize=None, rank_batch_size=config.global_batch_size)


def read(loader: BatchLoader) -> list[tuple[list[int], list[float]]]:
    return [(batch[BatchKey.SAMPLE].tolist(), batch[BatchKey.LATENT_MEAN][:, 0, 0, 0].tolist()) for batch in loader]


def dataset_of(loader: BatchLoader) -> TextImageDataset:
    assert isinstance(loader.dataset, TextImageDataset)
    return loader.dataset


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoded(tmp_path_factory.mktemp("original"), {"a": 120, "b": 72})


@pytest.fixture(scope="module")
def expected(original: Path) -> list[tuple[list[int], list[float]]]:
    return read(open_loader(original, None, "a", "b"))


@pytest.fixture
def remote(original: Path, s3_server: S3Server, request: pytest.FixtureRequest) -> str:
    url = f"s3://tests/{request.node.originalname}"
    upload(s3_server, original, url)
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
        upload(other, original / "b", "s3://elsewhere/b")
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
        with pytest.raises(DataError, match=r"s3://elsewhere/.*s3:GetObject"):
            open_loader(tmp_path / "refused", streams=streams("wrong", f"{remote}/a"))
    finally:
        other.kill()


def test_a_large_object_is_one_request(tmp_path, s3_server, proxy) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "shard.mds").write_bytes(bytes(9 * 2**20))  # boto3 asks for more than 8 MiB in ranges.
    upload(s3_server, tmp_path / "large", "s3://tests/large")
    Store().fetch("s3://tests/large/shard.mds", str(tmp_path / "fetched"), timeout=30.0)
    assert proxy.requests["shard.mds"] == 1
    assert (tmp_path / "fetched").stat().st_size == 9 * 2**20


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
    loader = open_loader(tmp_path, remote, "a", "b", num_workers=num_workers, download_retry=8)
    assert read(loader) == expected
    assert killed.is_set()


def test_a_server_that_is_slow_fails_now_and_then_or_cuts_its_answers(tmp_path, remote, expected, proxy) -> None:
    faults = {"shard.00000.mds": "error", "shard.00001.mds": "cut", "shard.00002.mds": "damage", "index.json": "slow"}
    proxy.fault = lambda name, count: faults.get(name) if count == 1 else None
    assert read(open_loader(tmp_path, remote, "a", "b")) == expected
    assert all(proxy.requests[name] >= 3 for name in faults if name != "index.json")  # of a and b, and once more


@pytest.mark.parametrize("fault", ["error", "silent"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_server_that_is_down_for_good(tmp_path, remote, proxy, fault, num_workers) -> None:
    proxy.fault = lambda name, count: fault if name == "shard.00002.mds" else None
    options = {"num_workers": num_workers, "download_retry": 2, "download_timeout": 1.0}
    loader = open_loader(tmp_path, remote, "a", **options)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        read(loader)
    # Two attempts (perhaps each by the two threads of a reader), a pause; the rest is for a slow machine.
    assert time.monotonic() - began < 30
    message = str(caught.value)
    assert message.startswith(f"stream 'a', shard shard.00002.mds could not be fetched from {remote}/a: ")
    assert "Traceback" not in message


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
    command = [
        program,
        "serve",
        "sftp",
        str(original),
        "--addr",
        f"127.0.0.1:{port}",
        "--user",
        "me",
        "--pass",
        "secret",
    ]
    server = subprocess.Popen([*command, "--key", str(tmp_path / "host-key"), "--read-only"])
    try:
        deadline = time.monotonic() + 60
        while not _listens(port):
            assert server.poll() is None, "rclone has ended"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"sftp://me:secret@127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_from_sftp_s3_and_the_disk(tmp_path, remote, expected, sftp_root, num_workers) -> None:
    streams = [StreamConfig(name="a", remote=f"{remote}/a"), StreamConfig(name="b", remote=f"{sftp_root}/b")]
    assert read(open_loader(tmp_path / "cache", streams=streams, num_workers=num_workers)) == expected
    streams[1] = StreamConfig(name="b", remote=f"{sftp_root}/nothing")
    with pytest.raises(DataError, match=r"/nothing/index.json cannot be fetched") as caught:
        open_loader(tmp_path / "other", streams=streams)
    assert "secret" not in str(caught.value)


def test_a_store_that_is_not_there(tmp_path, remote, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"nothing/index.json cannot be fetched: FileNotFoundError"):
        open_loader(tmp_path / "a", remote, "nothing")
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"cannot be fetched: .*127.0.0.1:9"):
        open_loader(tmp_path / "b", remote, "a", download_retry=1)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_damaged_object_is_fetched_again_and_then_reported(tmp_path, remote, proxy, s3_server, is_cut) -> None:
    path = object_file(s3_server, f"{remote}/a/shard.00001.mds")
    data = path.read_bytes()
    try:
        if is_cut:
            proxy.fault = lambda name, count: "cut" if name == "shard.00001.mds" else None
        else:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(DataError, match=r"stream 'a', shard shard.00001.mds could not be fetched from .*"):
            read(open_loader(tmp_path, remote, "a"))
    finally:
        path.write_bytes(data)
    assert proxy.requests["shard.00001.mds"] >= 2
    assert not (tmp_path / "a" / "shard.00001.mds").exists()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_eviction_does_not_change_the_batches(tmp_path, original, remote, expected, num_workers) -> None:
    shards = sorted(original.glob("*/*.mds"))
    indexes = sum(path.stat().st_size for path in original.glob("*/index.json"))
    limit = indexes + 12 * max(path.stat().st_size for path in shards)
    assert limit < indexes + sum(path.stat().st_size for path in shards)
    options = {"cache_limit": f"{limit}b", "predownload": 8, "num_workers": num_workers}
    loader = open_loader(tmp_path, remote, "a", "b", **options)
    batches = read(loader)
    assert batches == expected
    held = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    # Streaming makes room for a shard before it comes, but two threads of each reader do so at the same time.
    assert held <= limit + 2 * max(1, num_workers) * max(path.stat().st_size for path in shards)
    assert held < indexes + sum(path.stat().st_size for path in shards), "something was removed"


def test_what_comes_before_the_first_batch_does_not_grow_with_the_shards(tmp_path, s3_server, proxy) -> None:
    fetched, seconds = [], []
    for num in (100, 1000):
        root = write_encoded(tmp_path / f"{num}", {"a": num * 8})
        shutil.rmtree(root / "a")
        write_small_shards(root / "a", num)
        upload(s3_server, root, f"s3://tests/shards-{num}")
        proxy.requests.clear()
        began = time.process_time()  # What is waited for is what is fetched.
        loader = open_loader(
            tmp_path / f"cache-{num}", f"s3://tests/shards-{num}", "a", predownload=8, download_timeout=60.0
        )
        next(iter(loader))
        seconds.append(time.process_time() - began)
        fetched.append(sum(count for name, count in proxy.requests.items() if name.endswith(".mds")))
        dataset_of(loader).close()
    assert max(fetched) <= 16, "the shards of two batches of eight"
    assert seconds[1] < 5 * seconds[0] + 5


def write_small_shards(folder: Path, num: int) -> None:
    """Write shards of eight samples each."""
    from tests.tools.written_data import TEXT, encoded_sample, write_mds

    columns = dict.fromkeys(["latent_mean", "latent_logvar"], "ndarray:float16:4,4,4") | TEXT
    write_mds(folder, columns, [encoded_sample("a", number % 100) for number in range(8 * num)], shard_bytes=3600)
