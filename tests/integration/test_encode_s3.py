"""Encoding from a real S3 server to it: the bytes of local folders, one upload per shard, killed and continued."""

from pathlib import Path

import pytest

from diffusion import storage
from diffusion.config.data import Representation, StreamConfig
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import train_loader
from diffusion.errors import DataError
from diffusion.formats.shards import read_index
from tests.tools.faulty_proxy import FaultyProxy, proxy
from tests.tools.s3_server import S3Server, object_file, s3_process, s3_server, upload
from tests.tools.training_runs import TrainingServer
from tests.tools.written_data import append_prepared, data_config, prepared_sample
from tests.unit.preparation.test_encode import run

__all__ = ["proxy", "s3_process", "s3_server"]

pytestmark = pytest.mark.slow

OPTIONS = ["--architecture", "tiny", "--device", "cpu", "--batch-size", "4", "--workers", "1",
           "--resolution", "32"]  # fmt: skip


def grow(prepared: Path, first: int, number: int) -> None:
    samples = [prepared_sample("source", i) for i in range(first, first + number)]
    append_prepared(prepared / "train/32-64", samples, per_shard=6, compression="zstd:3")


def content(uri: str) -> dict[str, bytes]:
    return {name: storage.read(storage.join(uri, name)) for name in storage.list_files(uri)}


def test_encoded_from_a_store_to_it(proxy: FaultyProxy, tmp_path: Path) -> None:
    prepared, out = "s3://tests/once/prepared", "s3://tests/once/out"
    grow(tmp_path / "prepared", 0, 20)
    upload(tmp_path / "prepared", prepared)
    run(prepared, out)
    run(tmp_path / "prepared", tmp_path / "out")
    assert content(out) == content(str(tmp_path / "out"))
    grow(tmp_path / "prepared", 20, 8)
    upload(tmp_path / "prepared", prepared)
    storage.write_json(f"{prepared}/withdrawn.json", {"train/32-64": [2, 25]})
    storage.write_json(str(tmp_path / "prepared/withdrawn.json"), {"train/32-64": [2, 25]})
    proxy.uploads.clear()
    proxy.requests.clear()
    run(prepared, out)
    written = {name: count for name, count in proxy.uploads.items() if name.endswith(".mds")}
    assert written == {"shard.00004.mds": 1, "shard.00005.mds": 1}, "only new shards are written, each by one request"
    read = {name: count for name, count in proxy.requests.items() if ".mds" in name}
    assert read == {"shard.00004.mds.zstd": 1, "shard.00005.mds.zstd": 1}
    run(tmp_path / "prepared", tmp_path / "out")
    assert content(out) == content(str(tmp_path / "out"))


def test_damaged_shards_of_a_store_are_named(s3_server: S3Server, tmp_path: Path) -> None:
    grow(tmp_path / "prepared", 0, 8)
    upload(tmp_path / "prepared", "s3://tests/damaged")
    file = object_file(s3_server, "s3://tests/damaged/train/32-64/shard.00001.mds.zstd")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match=r"s3://tests/damaged/train/32-64/shard\.00001\.mds\.zstd"):
        run("s3://tests/damaged", tmp_path / "out")
    with pytest.raises(DataError, match="s3://tests/nothing"):
        run("s3://tests/nothing", tmp_path / "out")


def test_killed_and_continued_in_a_store(
    s3_server: S3Server, server: TrainingServer, tmp_path: Path, kills: int
) -> None:
    prepared, out = "s3://tests/killed/prepared", "s3://tests/killed/out"
    grow(tmp_path / "prepared", 0, 6 * 20)
    upload(tmp_path / "prepared", prepared)
    marks = s3_server.path(f"{out}/work.partial/shards")

    def num_finished() -> int:
        return len(list(marks.glob("*._S3rver_object")))

    for kill in range(kills):
        options = ["--processes", "2"] if kill % 2 else []
        wanted = num_finished() + 2
        job = server.start(0, ["scripts/encode.py", prepared, out, *OPTIONS, *options])
        job.wait_for(lambda wanted=wanted: num_finished() >= wanted)
        job.kill()
        assert not storage.exists(f"{out}/manifest.json")
    server.command(0, ["scripts/encode.py", prepared, out, *OPTIONS])
    server.command(0, ["scripts/encode.py", str(tmp_path / "prepared"), str(tmp_path / "out"), *OPTIONS])
    assert content(out) == content(str(tmp_path / "out"))
    assert len(read_index(f"{out}/train/32-64").shards) == 20


def test_trained_from_a_store(s3_server: S3Server, tmp_path: Path) -> None:
    grow(tmp_path / "prepared", 0, 12)
    run(tmp_path / "prepared", "s3://tests/trained")
    config = data_config(
        tmp_path / "cache", resolution=32, representation=Representation.latents, global_batch_size=4,
        streams=[StreamConfig(name="32-64", remote="s3://tests/trained/train/32-64", endpoint_url=s3_server.endpoint)],
    )  # fmt: skip
    batches = list(train_loader(config, seed=1, tokenize=None))
    assert sorted(i for batch in batches for i in batch[BatchKey.SAMPLE].tolist()) == list(range(12))
