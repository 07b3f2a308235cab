"""Scans and shards written straight to a real S3 server: how often, how much, and after a kill."""

from collections import Counter
from pathlib import Path

import pytest

from diffusion import storage
from diffusion.errors import DataError
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.shards import read_index
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.scan import Scan, scan_sources
from diffusion.preparation.takedown import take_down
from tests.tools.image_files import noise, sample, tree, write_folder, write_tar
from tests.tools.s3_server import S3Server, s3_process, s3_server
from tests.tools.selected_data import SETTINGS, make_images, select_images

__all__ = ["s3_process", "s3_server"]

pytestmark = pytest.mark.s3

SIZES = (30, 20, 35, 25, 40, 28, 33, 21)
KILLED = """
import os, sys
from diffusion import storage
from tests.tools.selected_data import NumberedSource, SelectedData
original, count = storage.write, 0

def write(uri, content, access=None):
    global count
    original(uri, content, access)
    count += uri.endswith(".mds")
    if count == int(sys.argv[3]):
        os._exit(9)

storage.write = write
SelectedData(sys.argv[1], NumberedSource(sys.argv[2]), [], [], []).write()
"""


def stored(url):
    """Content of each object of a data set."""
    return {name: storage.read(file.uri) for name, file in storage.list_files(url).items()}


@pytest.fixture
def uploads(monkeypatch):
    """Bytes of each object that is uploaded by this process, in order."""
    sent = []
    original = storage._S3Store.write

    def write(self, uri, content):
        original(self, uri, content)
        sent.append((uri, len(content)))

    monkeypatch.setattr(storage._S3Store, "write", write)
    return sent


def test_a_shard_is_one_upload_and_the_bytes_are_those_of_a_folder(s3_server: S3Server, tmp_path: Path, uploads):
    source, url = make_images(tmp_path / "images", range(sum(SIZES))), "s3://tests/counted"
    data = select_images(url, source, SIZES)
    before = len(uploads)
    manifest = data.write()
    sent = uploads[before:]
    assert max(Counter(uri for uri, _ in sent).values()) == 1
    entries = [entry for buckets in manifest.splits.values() for entry in buckets.values()]
    assert sum(uri.endswith(".mds") for uri, _ in sent) == sum(entry.num_shards for entry in entries)
    content = stored(url)
    written = sum(size for _, size in sent)
    result = sum(len(data) for name, data in content.items() if name.startswith(("train/", "validation/")))
    assert written <= 1.02 * (result + sum(len(content[n]) for n in content if n.startswith(("positions", "manifest"))))
    assert not [name for name in content if "partial" in name]
    local = select_images(str(tmp_path / "out"), source, SIZES)
    local.write()
    assert content == tree(tmp_path / "out")
    assert PreparedManifest.read(url) == manifest
    assert read_index(f"{url}/train/24x32").summary == manifest.splits["train"]["24x32"]


def test_killed_and_continued(server, s3_server: S3Server, tmp_path: Path, uploads):
    source, url = make_images(tmp_path / "images", range(sum(SIZES))), "s3://tests/killed"
    data = select_images(url, source, SIZES)
    for number in (2, 40, 1):
        assert server.start(0, ["-c", KILLED, url, source.path, str(number)]).finish().codes == [9]
        assert not storage.exists(f"{url}/manifest.json")
    there = {name for name in stored(url) if "shard.00000" in name or name == "positions/00000.parquet"}
    assert "positions/00000.parquet" in there
    before = len(uploads)
    manifest = data.write(workers=1)
    assert not there & {uri.removeprefix(f"{url}/") for uri, _ in uploads[before:]}, "a task is finished once"
    local = select_images(str(tmp_path / "out"), source, SIZES)
    local.write(workers=2)
    assert stored(url) == tree(tmp_path / "out")
    assert manifest.settings == SETTINGS


def test_takedown_in_a_store(s3_server: S3Server, tmp_path: Path):
    source, url = make_images(tmp_path / "images", range(24)), "s3://tests/takedown"
    data = select_images(url, source, (12, 12))
    local = select_images(str(tmp_path / "out"), source, (12, 12))
    for one in (data, local):
        one.write()
        take_down(one.out, {one.key(7), one.key(9)})
        take_down(one.out, {one.key(3)}, erase=True)
    content = stored(url)
    assert content == tree(tmp_path / "out")
    image = (tmp_path / "images" / "0007.png").read_bytes()
    assert not [name for name, data in content.items() if image in data or b"set/0007.png" in data]


def test_scan_of_a_store_and_growth_there(s3_server: S3Server, tmp_path: Path):
    write_folder(tmp_path / "folder", 30)
    members = [member for i in range(10) for member in sample(f"{i}", noise(40, 36, i), b"x")]
    sources, url = [str(tmp_path / "folder"), str(write_tar(tmp_path / "one.tar", members))], "s3://tests/scanned"

    def scan(*more: str, out: str = url, workers: int = 1) -> Scan:
        config = PrepareConfig(sources=[*sources, *more], out=out, partition_size=10)
        return scan_sources(config, workers=Workers(number=workers))

    scan(out=str(tmp_path / "out"))
    scan(workers=2)
    assert stored(url) == tree(tmp_path / "out")
    assert len(scan().partitions) == len(Scan.read(url).partitions)
    write_folder(tmp_path / "more", 3)
    grown = scan(str(tmp_path / "more"))
    assert len(storage.list_files(f"{url}/metadata")) == len(grown.partitions)
    (tmp_path / "more" / "0001.txt").write_text("another")
    with pytest.raises(DataError, match=r"more/0001\.png"):
        scan(str(tmp_path / "more"))
    assert not storage.list_files(f"{url}/reread")
