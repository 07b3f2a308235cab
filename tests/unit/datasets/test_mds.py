import json

import pytest
from streaming import MDSWriter, StreamingDataset

from diffusion.datasets.mds import (
    ShardFormat,
    ShardTemplate,
    encode_sample,
    read_index,
    remove_mds,
    write_index,
    write_mds,
    write_shard,
)
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import read_json, write_json
from tests.tools.image_files import tree

COLUMNS = {"number": "int32", "data": "bytes"}


def write(folder, num=10, **options):
    with write_mds(folder, COLUMNS, **options) as writer:
        for number in range(num):
            writer.write({"number": number, "data": bytes([number]) * 100})


def test_what_is_written_is_read(tmp_path):
    folder = tmp_path / "train" / "256-512"
    write(folder, shard_bytes=600)
    stock = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    assert [sample["number"] for sample in stock] == list(range(10))
    index = read_index(folder)
    assert (index.num_samples, index.columns) == (10, COLUMNS)
    assert index.num_shards > 1
    assert index.num_bytes == sum(path.stat().st_size for path in folder.glob("*.mds"))
    shards = json.loads((folder / "index.json").read_text())["shards"]
    assert all(shard["compression"] is None and list(shard["raw_data"]["hashes"]) == ["xxh64"] for shard in shards)
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_shards_written_one_by_one_are_those_of_streaming(tmp_path, compression):
    columns = {"data": "bytes", "name": "str", "number": "int32", "other": "json"}
    samples = [{"data": bytes([i]) * i, "name": "ä" * i, "number": i, "other": {"i": [i]}} for i in range(9)]
    shards = ShardFormat(columns=columns, shard_bytes=2**20, hashes=("sha1", "xxh64"), compression=compression)
    options = {"columns": columns, "hashes": ["sha1", "xxh64"], "size_limit": 2**20, "compression": compression}
    with MDSWriter(out=str(tmp_path / "theirs"), **options) as writer:
        for sample in samples:
            writer.write(sample)
    (tmp_path / "ours").mkdir()
    encoded = [encode_sample(sample, columns) for sample in samples]
    entry = write_shard(tmp_path / "ours", 0, encoded, ShardTemplate.of(shards), partial=tmp_path / "partial")
    write_index(tmp_path / "ours", [entry])
    assert tree(tmp_path / "ours") == tree(tmp_path / "theirs")


def test_nothing_has_the_name_before_the_end(tmp_path):
    folder = tmp_path / "256-512"
    with write_mds(folder, COLUMNS, shard_bytes=300) as writer:
        for number in range(10):
            writer.write({"number": number, "data": b"x" * 100})
        assert not folder.exists()
        assert (tmp_path / "256-512.partial").exists()
    assert folder.exists()
    assert not (tmp_path / "256-512.partial").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_an_exception_leaves_nothing(tmp_path, error):
    folder = tmp_path / "256-512"
    with pytest.raises(error), write_mds(folder, COLUMNS, shard_bytes=300) as writer:
        for number in range(10):
            writer.write({"number": number, "data": b"x" * 100})
        raise error
    assert list(tmp_path.iterdir()) == []


def test_rest_of_an_interrupted_run_is_replaced(tmp_path):
    partial = tmp_path / "256-512.partial"
    partial.mkdir()
    (partial / "shard.00007.mds").write_bytes(b"old")
    write(tmp_path / "256-512")
    assert sorted(path.name for path in (tmp_path / "256-512").iterdir()) == ["index.json", "shard.00000.mds"]
    with pytest.raises(DataError, match="exists"):
        write(tmp_path / "256-512")


def test_damage_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_index(tmp_path)
    write(tmp_path / "a", shard_bytes=600)
    shard = tmp_path / "a" / "shard.00001.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"shard.00001.mds has {len(content) - 1} bytes instead of {len(content)}"):
        read_index(tmp_path / "a")
    shard.unlink()
    with pytest.raises(DataError, match=r"shard.00001.mds is missing"):
        read_index(tmp_path / "a")
    (tmp_path / "a" / "index.json").write_text('{"shards": [{}]}')
    with pytest.raises(DataError, match="not the index of an MDS folder"):
        read_index(tmp_path / "a")
    remove_mds(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_hash_of_the_index_follows_the_content(tmp_path):
    for name, num in (("a", 10), ("b", 10), ("c", 9)):
        write(tmp_path / name, num)
    hashes = {name: read_index(tmp_path / name).sha256 for name in "abc"}
    assert hashes["a"] == hashes["b"] != hashes["c"]


def test_shard_size_out_of_range(tmp_path):
    for shard_bytes in (0, 2**31):
        with pytest.raises(ConfigurationError, match="shard size"):
            write(tmp_path / "a", shard_bytes=shard_bytes)
    assert list(tmp_path.iterdir()) == []


def test_json_is_replaced_or_kept(tmp_path):
    path = tmp_path / "manifest.json"
    write_json(path, {"a": [1, "é"]})
    for bad in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises((TypeError, ValueError)):
            write_json(path, bad)
    assert read_json(path) == {"a": [1, "é"]}
    assert list(tmp_path.iterdir()) == [path]
    path.write_text('{"a": ')
    with pytest.raises(DataError, match="damaged"):
        read_json(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_json(tmp_path / "none.json")
