import base64
import io
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.httpsession import URLLib3Session

from diffusion import storage
from diffusion.errors import DataError, MachineError, UserError
from diffusion.preparation.records import Reason, Record, Rejected
from diffusion.preparation.sources import Source, open_sources, tables
from diffusion.storage import open_file, shown
from tests.tools.image_files import noise, sample, tree, write_folder, write_mds, write_table, write_tar
from tests.tools.s3_server import S3Server, s3_process, s3_server, upload
from tests.tools.sources import bare, open_source, partitions, read, write_known
from tests.tools.web import WebServer, send

pytestmark = pytest.mark.slow

__all__ = ["s3_process", "s3_server"]

SECRET = "hunter2"


def items_of(source: Source) -> Iterator[Record | Rejected]:
    """Read a source as a stream."""
    for partition in source.partitions().new:
        yield from source.scan(partition)


@pytest.fixture
def layouts(tmp_path) -> Path:
    """One data set in every layout, below `data`."""
    root = tmp_path / "data"
    write_folder(root / "images", 5)
    write_folder(root / "images" / "a", 3)
    write_folder(root / "images" / "ab", 2)
    (root / "images" / "metadata.jsonl").write_text(
        '{"file_name": "0003.png", "text": "table"}\n{"file_name": "z.png"}'
    )
    (root / "images" / ".hidden.png").write_bytes(b"x")
    (root / "tars").mkdir()
    for number in range(3):
        members = [one for at in range(12) for one in sample(f"{at}", noise(30, 30, at), b"x", number=number)]
        write_tar(root / "tars" / f"{number}.tar", members)
        (root / "tars" / f"{number}.parquet").write_bytes(b"a log")
    columns = {
        "image": [noise(30, 30, number) for number in range(100)],
        "caption": [f"{number}" for number in range(100)],
    }
    write_table(root / "parquet" / "0.parquet", columns, row_group_size=6)
    paths = {"file_name": ["a/0001.data", "gone.png", "../x"], "caption": ["one", "two", "three"]}
    write_table(root / "paths" / "x.parquet", paths)
    (root / "paths" / "a").mkdir()
    (root / "paths" / "a" / "0001.data").write_bytes(noise(30, 30))
    samples = [{"image": noise(30, 30, number), "caption": f"{number}"} for number in range(6)]
    write_mds(root / "mds", {"image": "bytes", "caption": "str"}, samples, size_limit=9000)
    (root / "arrow").mkdir()
    with pa.ipc.new_stream(root / "arrow" / "0.arrow", pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns), max_chunksize=7)
    return root


@pytest.mark.s3
class TestS3:
    def test_every_layout_is_read_as_from_the_disk(self, layouts, s3_server: S3Server, monkeypatch):
        monkeypatch.setattr(storage, "_PAGE_KEYS", 3)
        monkeypatch.setattr(storage, "BLOCK_BYTES", 8000)
        upload(layouts, "s3://tests/layouts")
        for name in ("images", "tars", "tars/*.tar", "tars/1.tar", "parquet", "parquet/0.parquet", "paths/x.parquet",
                     "mds", "arrow", "images/a"):  # fmt: skip
            local, remote = open_source(layouts / name), open_source(f"s3://tests/layouts/{name}")
            items = read(layouts / name)
            assert items and bare(read(f"s3://tests/layouts/{name}")) == bare(items), name
            assert (remote.kind, remote.name) == (local.kind, local.name)
            assert remote.path == f"s3://tests/layouts/{name}"
            assert [(one.file, one.start, one.stop) for one in partitions(remote)] == [
                (one.file, one.start, one.stop) for one in partitions(local)
            ], name

    def test_a_changed_object_changes_its_partition_only(self, layouts, s3_server: S3Server):
        upload(layouts / "tars", "s3://tests/changing")
        known = write_known(layouts / "known.parquet", read("s3://tests/changing"))
        storage.write("s3://tests/changing/1.tar", b"new")
        found = open_source("s3://tests/changing").partitions(known)
        assert [one.file for one in found.changed] == ["1.tar"]
        assert (list(found.new), list(found.gone)) == ([], [])

    def test_requests(self, tmp_path, s3_server: S3Server, monkeypatch):
        (tmp_path / "tars").mkdir()
        images = [os.urandom(100_000) for _ in range(300)]
        members = [one for at, image in enumerate(images) for one in sample(f"{at:04d}", image, b"x", width=4)]
        size = write_tar(tmp_path / "tars" / "0.tar", members).stat().st_size
        write_folder(tmp_path / "images", 20)
        (tmp_path / "images" / "0003.json").write_text("{}")
        upload(tmp_path, "s3://tests/counted")
        requests = Counter[str]()
        send = URLLib3Session.send

        def counted(session, request):
            requests[request.method] += 1
            return send(session, request)

        monkeypatch.setattr(URLLib3Session, "send", counted)
        most = -(-size // (8 * 2**20)) + 1
        source = open_source("s3://tests/counted/tars/0.tar")
        assert requests == {"HEAD": 1}
        (partition,) = partitions(source)
        requests.clear()
        items = list(source.scan(partition))
        assert requests["GET"] <= most
        requests.clear()
        locations = [item.location for item in items]
        assert list(source.images(partition, locations)) == images
        assert requests["GET"] <= most
        requests.clear()
        assert list(source.images(partition, [locations[0], locations[-1]])) == [images[0], images[-1]]
        assert requests["GET"] == 2

        for name, rows in {"small": 20, "large": 300}.items():
            path = tmp_path / f"{name}.parquet"
            columns = {"image": images, "caption": ["x"] * 300, "note": ["y"] * 300}
            pq.write_table(pa.table(columns), path, row_group_size=rows)
            storage.write(f"s3://tests/counted/{name}.parquet", path.read_bytes())
            source = open_source(f"s3://tests/counted/{name}.parquet", partition_size=10_000)
            (partition,) = partitions(source)
            requests.clear()
            items = list(source.scan(partition))
            assert requests["GET"] <= -(-path.stat().st_size // (8 * 2**20)) + 4, name
            requests.clear()
            assert list(source.images(partition, [item.location for item in items])) == images
            assert requests["GET"] <= -(-path.stat().st_size // (8 * 2**20)) + 2, name

        source = open_source("s3://tests/counted/images")
        requests.clear()
        found = partitions(source)
        assert requests == {"GET": 1}, "one page of a listing"
        requests.clear()
        assert len([item for partition in found for item in source.scan(partition)]) == 20
        assert requests == {"GET": 41}, "an image and a caption each, one .json, nothing that is not there"

    def test_changed_while_it_is_read(self, layouts, s3_server: S3Server):
        upload(layouts / "tars", "s3://tests/racing")
        with open_file("s3://tests/racing/0.tar", buffer_bytes=512) as file:
            assert len(file.read(512)) == 512
            size = (layouts / "tars" / "0.tar").stat().st_size
            storage.write("s3://tests/racing/0.tar", bytes(size))
            with pytest.raises(DataError, match=r"s3://tests/racing/0.tar was changed while it was read"):
                file.read(2048)

    def test_messages(self, layouts, s3_server: S3Server, monkeypatch):
        upload(layouts / "arrow", "s3://tests/some")
        for url, message in (
            ("s3://nowhere/x", rf"s3://nowhere/x: there is no such bucket at {s3_server.endpoint}"),
            ("s3://nowhere/x.tar", "there is no such bucket"),
            ("s3://tests/nothing", "s3://tests/nothing: there is nothing"),
            ("s3://tests/gone.tar", "there is nothing"),
            ("s3://tests/some/*.tar", "no file matches"),
            ("s3:///x", "names no bucket"),
            ("s3://*/x.tar", "without wildcards"),
            ("s4://x/y", "s4:// is not known"),
        ):
            with pytest.raises(DataError, match=message):
                open_source(url)
        for twice in (["s3://tests/some", "s3://tests/some/"], ["s3://tests/some/0.arrow", "s3://tests/some"]):
            with pytest.raises(DataError, match="hold the same files"):
                open_sources(twice)

    def test_credentials_come_from_the_environment_and_are_never_told(self, s3_server: S3Server, monkeypatch, tmp_path):
        for name in ("HOME", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "nothing"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknown")
        said = []
        for url, message in (("s3://tests/data", "refuses the credentials"), ("s3://tests/x.tar", "access denied")):
            storage._s3_client.cache_clear()
            with pytest.raises(MachineError, match=message) as refused:
                open_source(url)
            said.append(str(refused.value))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        storage._s3_client.cache_clear()
        with pytest.raises(DataError, match="there is nothing"):  # The bucket is public.
            open_source("s3://tests/data")
        storage._s3_client.cache_clear()
        with pytest.raises(DataError, match=r"s3://tests/x: the URL holds a user or password") as refused:
            open_source(f"s3://user:{SECRET}@tests/x")
        assert SECRET not in "".join([*said, str(refused.value)])

    def test_an_outage_for_good_is_one_message(self, layouts, s3_server: S3Server, monkeypatch):
        monkeypatch.setattr(storage, "BLOCK_BYTES", 8000)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        storage._s3_client.cache_clear()
        write_folder(layouts / "images", 50, start=100)
        upload(layouts, "s3://tests/dead")
        for name in ("tars/0.tar", "parquet/0.parquet", "images", "mds", "arrow/0.arrow"):
            items = items_of(open_source(f"s3://tests/dead/{name}", partition_size=1_000))
            first = next(items)
            assert isinstance(first, Record)
            s3_server.kill()
            with pytest.raises(MachineError, match=r"does not answer \(\w+\)"):
                list(items)
            s3_server.start()
        storage._s3_client.cache_clear()


class FaultyServer(WebServer):
    """Serves a folder with ranges; some answers fail, one needs a password.

    Attributes:
        failures: For each path how many answers are an error 503, a body that breaks off, or none at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.failures, self.asked = folder, Counter[tuple[str, str]](), Counter[str]()
        super().__init__()

    def fails(self, path: str, how: str) -> bool:
        if self.failures[path, how] > 0:
            self.failures[path, how] -= 1
            return True
        return False

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked[path] += 1
        file = self.folder / path.lstrip("/")
        password = base64.b64encode(f"user:{SECRET}".encode()).decode()
        if path.startswith("/private") and request.headers.get("Authorization") != f"Basic {password}":
            return send(request, 401)
        if self.fails(path, "busy"):
            return send(request, 503, b"busy")
        if not file.is_file():
            return send(request, 404)
        content, wanted = file.read_bytes(), request.headers.get("Range")
        headers = {"ETag": f'"{hash(content)}"'}
        status = 200
        if wanted and not path.startswith("/plain"):
            start, stop = map(int, wanted.removeprefix("bytes=").split("-"))
            headers["Content_Range"] = f"bytes {start}-{stop}/{len(content)}"
            content, status = content[start : stop + 1], 206
        if self.fails(path, "broken"):
            headers["Content_Length"], content = str(len(content)), content[: len(content) // 2]
            request.close_connection = True
        return send(request, status, content, **headers)


@pytest.fixture
def web(layouts, monkeypatch) -> Iterator[FaultyServer]:
    for name in ("plain", "private"):
        shutil.copytree(layouts / "tars", layouts / name)
    server = FaultyServer(layouts)
    storage._web_session.cache_clear()
    yield server
    server.close()


class TestWeb:
    @pytest.mark.parametrize("how", ["busy", "broken"])
    def test_files_and_failures_that_pass(self, layouts, web: FaultyServer, monkeypatch, how):
        monkeypatch.setattr(storage, "BLOCK_BYTES", 4000)
        for path in ("/tars/0.tar", "/parquet/0.parquet"):
            web.failures[path, how] = 2
            assert bare(read(web.url + path)) == bare(read(layouts / path.lstrip("/")))
            assert web.failures[path, how] == 0
            assert web.asked[path] > 5, "by ranges"

    def test_a_file_that_was_scanned_before(self, web: FaultyServer):
        source = open_source(f"{web.url}/tars/0.tar")
        assert open_sources([source.root], scanned=[source]) == [source]

    def test_failures_that_stay(self, web: FaultyServer, monkeypatch):
        web.failures["/tars/0.tar", "broken"] = 1000
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        with pytest.raises(MachineError, match=r"/tars/0.tar: the store does not answer"):
            read(web.url + "/tars/0.tar")

    def test_messages_hide_passwords(self, web: FaultyServer, tmp_path, monkeypatch):
        host = web.url.removeprefix("http://")
        for url, message in (
            (f"http://user:{SECRET}@{host}/private/0.tar", "the URL holds a user or password"),
            (f"{web.url}/tars/0.tar?token={SECRET}", "the URL holds a query"),
            (f"{web.url}/private/0.tar", "access denied"),
            (f"{web.url}/gone.tar", "there is no such file"),
            (f"{web.url}/tars", "a web server does not list folders"),
            (f"{web.url}/plain/0.tar", "serves no ranges; download the file"),
        ):
            with pytest.raises(UserError, match=message) as refused:
                read(url)
            assert SECRET not in str(refused.value)
        assert shown(f"https://u:{SECRET}@h/x?y={SECRET}#z") == "https://h/x"
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {SECRET}\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        assert len(read(f"{web.url}/private/0.tar")) == 12


def test_what_fsspec_reaches(layouts):
    memory = fsspec.filesystem("memory")
    (layouts / "joined.tar").write_bytes((layouts / "tars" / "1.tar").read_bytes() * 2)
    for name, content in tree(layouts).items():
        memory.pipe_file(f"/bucket/data/{name}", content)
    try:
        for name in ("images", "tars", "tars/1.tar", "joined.tar", "parquet", "mds", "arrow"):
            assert bare(read(f"memory://bucket/data/{name}")) == bare(read(layouts / name)), name
        damaged = read("memory://bucket/data/joined.tar")[-1]
        assert isinstance(damaged, Rejected) and damaged.reason is Reason.DAMAGED_FILE
        with pytest.raises(DataError, match="there is nothing"):
            open_source("memory://bucket/none")
    finally:
        memory.rm("/bucket", recursive=True)


def test_images_that_a_table_of_a_store_names_are_read_at_once(monkeypatch):
    barrier = threading.Barrier(8, timeout=5)
    monkeypatch.setattr(tables, "read_below", lambda *_: str(barrier.wait()).encode())
    memory, file = fsspec.filesystem("memory"), io.BytesIO()
    pq.write_table(pa.table({"path": [f"{i}.png" for i in range(8)], "caption": ["x"] * 8}), file)
    memory.pipe_file("/paths/x.parquet", file.getvalue())
    source = open_source("memory://paths")
    (partition,) = partitions(source)
    records = list(source.scan(partition))
    assert all(isinstance(item, Record) for item in records)
    assert len(list(source.images(partition, [item.location for item in records]))) == 8
    memory.rm("/paths", recursive=True)


def test_a_remote_file_seeks_and_ends_like_a_local_one(layouts, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK_BYTES", 7)
    content = os.urandom(100)
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/x", content)
    with open_file("memory://bucket/x", buffer_bytes=0) as remote, io.BytesIO(content) as local:
        for offset, whence, size in ((3, 0, 20), (-5, 1, 30), (-10, 2, 20), (200, 0, 5), (0, 0, -1), (99, 0, 1)):
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            assert remote.read(size) == local.read(size)
            assert remote.tell() == local.tell()
    memory.rm("/bucket", recursive=True)
