"""What a cold start fetches before its first batch does not grow with the number of shards."""

import json
import shutil
from pathlib import Path

import pytest

from diffusion.datasets.batch import BatchKey
from tests.tools.faulty_proxy import FaultyProxy
from tests.tools.s3_server import S3Server, s3_process, s3_server
from tests.tools.written_data import write_encoded
from tests.unit.datasets.test_stores import dataset_of, open_loader, proxy, upload

__all__ = ["proxy", "s3_process", "s3_server"]

SAMPLES = 8
"""Of a shard."""

NUM_AHEAD = 16
"""Samples of two batches, which are fetched before the first one is there; each may be of another shard."""


def write_shards(server: S3Server, url: str, num_shards: int, folder: Path) -> None:
    """Write a stream of many equal shards: one goes through the server, which keeps an object in a few files."""
    stream = write_encoded(folder, {"a": SAMPLES}) / "a"
    index = json.loads((stream / "index.json").read_text())
    (shard,) = index["shards"]
    name = shard["raw_data"]["basename"]
    for number in range(1, num_shards):
        raw_data = shard["raw_data"] | {"basename": f"{number:06}.mds"}
        index["shards"].append(shard | {"raw_data": raw_data})
    (stream / "index.json").write_text(json.dumps(index))
    upload(server, stream, f"{url}/a")
    for file in server.path(f"{url}/a").glob(f"{name}.*"):
        for number in range(1, num_shards):
            shutil.copyfile(file, file.with_name(file.name.replace(name, f"{number:06}.mds")))


@pytest.mark.s3
def test_the_first_batch_of_a_cold_start(s3_server: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    requests = {}
    for num_shards in (50, 500):
        url = f"s3://tests/shards-{num_shards}"
        write_shards(s3_server, url, num_shards, tmp_path / f"{num_shards}")
        proxy.requests.clear()
        loader = open_loader(tmp_path / f"cache-{num_shards}", url, "a", predownload=8, download_timeout=60.0)
        assert len(next(iter(loader))[BatchKey.SAMPLE]) == 8
        requests[num_shards] = proxy.requests.total()
        dataset_of(loader).close()
    assert max(requests.values()) <= 2 + NUM_AHEAD, requests
