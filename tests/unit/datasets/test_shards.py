import tracemalloc

import numpy as np
import pytest
from streaming import MDSWriter, StreamingDataset
from streaming.base.compression import compress

from diffusion.datasets.cache import StreamShards
from diffusion.datasets.streams import StreamLocation
from diffusion.errors import ConfigurationError, DataError
from diffusion.formats.shards import (
    SampleDecoder,
    Shard,
    ShardFile,
    ShardFormat,
    check_sizes,
    encode_sample,
    encode_shard,
    read_index,
    read_shard,
    shard_name,
    write_index,
)
from tests.tools.image_files import tree

COLUMNS = {"number": "int32", "data": "bytes"}


def write(folder, num=10, shard_bytes=2**20):
    shards = ShardFormat.of(COLUMNS, shard_bytes=shard_bytes)
    samples = [encode_sample({"number": n, "data": bytes([n]) * 100}, COLUMNS) for n in range(num)]
    per_shard = num if shard_bytes > num * 200 else 2
    folder.mkdir(parents=True)
    parts = [samples[first : first + per_shard] for first in range(0, num, per_shard)]
    write_index(folder, [write_shard(folder, n, part, shards) for n, part in enumerate(parts)])


def write_shard(folder, number, samples, shards):
    content, entry = encode_shard(samples, shard_name(number), shards)
    (folder / entry.stored.name).write_bytes(content)
    return entry


def test_what_is_written_is_read(tmp_path):
    folder = tmp_path / "train" / "256-512"
    write(folder, shard_bytes=600)
    stock = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    assert [sample["number"] for sample in stock] == list(range(10))
    index = read_index(folder).summary
    assert (index.num_samples, index.num_shards) == (10, 5)
    assert index.num_bytes == sum(path.stat().st_size for path in folder.glob("*.mds"))


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_shards_written_one_by_one_are_those_of_streaming(tmp_path, compression):
    columns = {"data": "bytes", "name": "str", "number": "int32", "other": "json", "array": "ndarray:float16:2,3"}
    samples = [
        {"data": bytes([i]) * i, "name": "ä" * i, "number": i, "other": {"i": [i]}, "array": np.full((2, 3), i, "f2")}
        for i in range(9)
    ]
    shards = ShardFormat.of(columns, shard_bytes=2**20, hashes=("sha1", "xxh64"), compression=compression)
    options = {"columns": columns, "hashes": ["sha1", "xxh64"], "size_limit": 2**20, "compression": compression}
    with MDSWriter(out=str(tmp_path / "theirs"), **options) as writer:
        for sample in samples:
            writer.write(sample)
    (tmp_path / "ours").mkdir()
    encoded = [encode_sample(sample, columns) for sample in samples]
    entry = write_shard(tmp_path / "ours", 0, encoded, shards)
    write_index(tmp_path / "ours", [entry])
    assert tree(tmp_path / "ours") == tree(tmp_path / "theirs")
    (found,) = read_index(tmp_path / "ours").shards
    assert (found, found.format) == (entry, shards)
    assert read_shard(tmp_path / "ours", found) == encoded
    decoded = SampleDecoder(shards)(encoded[3])
    assert (decoded["name"], decoded["other"]) == ("äää", {"i": [3]})


def test_a_shard_that_grows_beyond_its_index_does_not_fill_the_memory(tmp_path):
    columns, content = {"data": "bytes"}, compress("zstd:3", bytes(2**28))
    file = ShardFile("shard.00000.mds.zstd", len(content), {})
    layout = ShardFormat.of(columns, compression="zstd:3")
    (tmp_path / file.name).write_bytes(content)
    write_index(tmp_path, [Shard(1, ShardFile("shard.00000.mds", 100, {}), file, layout)])
    (shard,) = read_index(tmp_path).shards
    tracemalloc.start()
    with pytest.raises(DataError, match="more instead of 100 bytes"):
        read_shard(tmp_path, shard)
    with pytest.raises(DataError, match="more instead of 100 bytes"):
        StreamShards(StreamLocation(name="a", remote=None, local=str(tmp_path))).ensure(0)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_damage_is_named(tmp_path):
    with pytest.raises(DataError, match=r"index\.json"):
        read_index(tmp_path)
    write(tmp_path / "a", shard_bytes=600)
    shards = read_index(tmp_path / "a").shards
    shard = tmp_path / "a" / "shard.00001.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"shard.00001.mds has {len(content) - 1} bytes instead of {len(content)}"):
        check_sizes(tmp_path / "a", shards)
    for damaged in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        shard.write_bytes(damaged)
        with pytest.raises(DataError, match=r"shard\.00001\.mds"):
            read_shard(tmp_path / "a", shards[1])
    shard.unlink()
    with pytest.raises(DataError, match=r"shard.00001.mds is missing"):
        check_sizes(tmp_path / "a", shards)
    (tmp_path / "a" / "index.json").write_text('{"shards": [{}]}')
    with pytest.raises(DataError, match="not the index of an MDS folder"):
        read_index(tmp_path / "a")


def test_hash_of_the_index_follows_the_content(tmp_path):
    for name, num in (("a", 10), ("b", 10), ("c", 9)):
        write(tmp_path / name, num)
    hashes = {name: read_index(tmp_path / name).summary.sha256 for name in "abc"}
    assert hashes["a"] == hashes["b"] != hashes["c"]


def test_shard_size_out_of_range():
    for shard_bytes in (0, 2**31):
        with pytest.raises(ConfigurationError, match="shard size"):
            ShardFormat.of(COLUMNS, shard_bytes=shard_bytes).check()
