import functools
import io
import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from streaming.base.compression import compress, decompress
from streaming.base.format.mds.encodings import mds_encode

from diffusion.errors import DataError
from diffusion.preparation.config import LimitsConfig
from diffusion.preparation.records import Reason, Record, Rejected
from diffusion.preparation.sources import mds, open_sources
from tests.tools import image_files
from tests.tools.image_files import noise
from tests.tools.sources import details, open_source, partitions, read, reasons, write_known

write_mds = functools.partial(image_files.write_mds, size_limit=2000, hashes=["sha1"])

IMAGES = {f"set/{number:04d}.png": noise(37, 32, number) for number in range(12)}


@pytest.fixture
def prepared(tmp_path) -> Path:
    """A data set as `prepare` writes it."""
    root, columns = tmp_path / "prepared", {"image": "bytes", "captions": "json", "width": "int32", "height": "int32"}
    columns |= {"key": "str", "metadata": "json"}
    for below, keys in {"train/16-34": list(IMAGES)[:7], "validation/34-up": list(IMAGES)[7:]}.items():
        samples = [
            {"image": IMAGES[key], "captions": ["a", "b"], "width": np.int32(37), "height": np.int32(32), "key": key,
             "metadata": {"score": 1}}
            for key in keys
        ]  # fmt: skip
        write_mds(root / below, columns, samples)
    (root / "manifest.json").write_text('{"kind": "prepared", "version": 1}')
    return root


class TestPrepared:
    def test_images_captions_and_keys_come_through(self, prepared):
        records = {item.key: item for item in read(prepared) if isinstance(item, Record)}
        assert open_source(prepared).kind == "mds"
        assert {key: record.image for key, record in records.items()} == {
            f"prepared/{key}": image for key, image in IMAGES.items()
        }
        assert all(one.captions == ["a", "b"] and one.metadata == {"score": 1} for one in records.values())

    def test_a_split_alone(self, prepared):
        items = read(prepared / "validation")
        assert [item.key for item in items] == [f"validation/{key}" for key in list(IMAGES)[7:]]

    def test_removed_samples_are_rejected(self, prepared, tmp_path):
        known = write_known(tmp_path / "known.parquet", read(prepared))
        (prepared / "withdrawn.json").write_text(json.dumps({"train/16-34": [1, 6]}))
        items = read(prepared)
        removed = [item for item in items if isinstance(item, Rejected)]
        assert [(item.key, item.reason) for item in removed] == [
            (f"prepared/set/000{number}.png", Reason.REMOVED) for number in (1, 6)
        ]
        assert read(prepared / "train" / "16-34")[1].key == "16-34/set/0001.png"
        found = open_source(prepared).partitions(known)
        assert [one.file for one in found.changed] == [item.location.file for item in removed]
        assert len({item.location.file for item in removed}) == 2
        assert (list(found.new), list(found.gone)) == ([], [])

    def test_half_written_and_encoded_data(self, tmp_path):
        (tmp_path / "half").mkdir()
        (tmp_path / "half" / "scan.json").write_text("{}")
        with pytest.raises(DataError, match="half is half-written"):
            open_source(tmp_path / "half")
        (tmp_path / "encoded").mkdir()
        (tmp_path / "encoded" / "manifest.json").write_text('{"kind": "encoded"}')
        with pytest.raises(DataError, match="holds latents, no images; name the prepared data"):
            open_source(tmp_path / "encoded")


class TestOthers:
    @pytest.mark.parametrize("compression", [None, "zstd:3"])
    def test_encodings(self, tmp_path, compression):
        original = Image.open(io.BytesIO(noise(20, 10)))
        jpeg = noise(20, 10, image_format="JPEG")
        columns = {
            "jpg": "jpeg",
            "caption": "json",
            "key": "str",
            "score": "float32",
            "rank": "int",
            "tags": "json",
            "embedding": "ndarray:float32:4",
            "blob": "bytes",
            "object": "pkl",
            "width": "int32",
        }
        sample = {
            "jpg": Image.open(io.BytesIO(jpeg)),
            "caption": ["a", "b"],
            "key": "same",
            "score": np.float32(0.5),
            "rank": 7,
            "tags": ["x"],
            "embedding": np.zeros(4, np.float32),
            "blob": b"x",
            "object": {"a": 1},
            "width": np.int32(20),
        }
        folder = write_mds(tmp_path / "set", columns, [sample] * 5, compression=compression)
        items = read(folder)
        metadata = {"key": "same", "score": 0.5, "rank": 7, "tags": ["x"], "width": 20}
        assert [item.key for item in items] == [f"set#{number}" for number in range(5)]
        assert all(isinstance(item, Record) and item.captions == ["a", "b"] for item in items)
        assert all(isinstance(item, Record) and item.metadata == metadata for item in items)
        assert {item.image for item in items if isinstance(item, Record)} == {mds_encode("jpeg", sample["jpg"])}
        assert len(partitions(open_source(folder))) > 1, "shards are small"

        pil = write_mds(tmp_path / "pil", {"image": "pil", "text": "str"}, [{"image": original, "text": "x"}])
        (record,) = read(pil)
        assert isinstance(record, Record)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(record.image))), np.asarray(original))

    def test_folders_below_and_named_columns(self, tmp_path):
        for name in ("b", "a/c"):
            write_mds(tmp_path / "set" / name, {"photo": "bytes", "words": "str"}, [{"photo": b"x", "words": name}])
        items = read(tmp_path / "set", image_column="photo", caption_column="words")
        assert [(item.key, item.captions) for item in items if isinstance(item, Record)] == [
            ("set/a/c#0", ["a/c"]),
            ("set/b#0", ["b"]),
        ]
        with pytest.raises(DataError, match=r"no column image or .* photo \(bytes\), words \(str\).*image_column"):
            open_source(tmp_path / "set")
        with pytest.raises(DataError, match="hold the same files"):
            open_sources([tmp_path / "set", tmp_path / "set" / "b"], image_column="photo", caption_column="words")

    def test_captions_that_are_not_utf8(self, tmp_path):
        folder = write_mds(
            tmp_path / "set", {"image": "bytes", "caption": "bytes"},
            [{"image": b"x", "caption": text} for text in ("é".encode() * 60_000, b"caf\xe9", b" ")],
        )  # fmt: skip
        index = folder / "index.json"
        index.write_text(index.read_text().replace('["bytes", "bytes"]', '["str", "bytes"]'))
        limits = LimitsConfig(max_caption_characters=60_000, max_word_characters=60_000)
        long, bad, blank = read(folder, limits=limits)
        assert isinstance(long, Record) and long.captions == ["é" * 60_000]
        assert [item.reason for item in (bad, blank) if isinstance(item, Rejected)] == [
            Reason.INVALID_UTF8,
            Reason.EMPTY_CAPTION,
        ]

    def test_read_on_behind_damage(self, tmp_path):
        samples = [{"image": noise(12, 12, number), "caption": "x"} for number in range(24)]
        folder = write_mds(tmp_path / "set", {"image": "bytes", "caption": "str"}, samples)
        shards = json.loads((folder / "index.json").read_text())["shards"]
        num = shards[0]["samples"]
        assert num >= 3 and len(shards) >= 6
        files = [folder / shard["raw_data"]["basename"] for shard in shards]

        def damage(file, position, content):
            data = bytearray(file.read_bytes())
            data[position : position + len(content)] = content
            file.write_bytes(data)

        damage(files[0], -9, b"?")  # In the last image: it is cut out, and may not decode.
        damage(files[1], 8, b"\xff\xff\xff\xff")  # Where the second sample begins.
        damage(files[2], 0, b"\xff\xff\xff\xff")  # The number of samples.
        files[3].write_bytes(files[3].read_bytes()[:-1])
        files[4].unlink()
        os.mkfifo(files[4])
        items = read(folder)
        assert len(items) == 24
        lost = [number for number, item in enumerate(items) if isinstance(item, Rejected)]
        assert lost == [num, num + 1, *range(2 * num, 3 * num), 4 * num - 1, *range(4 * num, 5 * num)]
        assert {item.reason.value for item in items if isinstance(item, Rejected)} == {"damaged_file", "unreadable"}
        assert len({item.key for item in items}) == 24
        kept = [number for number in range(24) if number not in lost and number != num - 1]
        assert all(items[number].image == samples[number]["image"] for number in kept)

        (folder / "index.json").write_text('{"shards": [{}]}')
        with pytest.raises(DataError, match="not the index of an MDS folder"):
            open_source(folder)

    @pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd"])
    def test_compressions(self, tmp_path, compression):
        samples = [{"image": IMAGES["set/0000.png"], "caption": f"{number}"} for number in range(4)]
        columns = {"image": "bytes", "caption": "str"}
        items = read(write_mds(tmp_path / "set", columns, samples, compression=compression))
        assert reasons(items) == [["0"], ["1"], ["2"], ["3"]]

    @pytest.mark.parametrize("promised", [0, 2**27])
    def test_a_shard_that_grows_is_not_held(self, tmp_path, promised):
        columns, samples = {"image": "bytes", "caption": "str"}, [{"image": noise(4, 4), "caption": "x"}]
        folder = write_mds(tmp_path / "set", columns, samples, compression="zstd:3")
        (shard,) = folder.glob("*.zstd")
        content = decompress("zstd:3", shard.read_bytes())
        shard.write_bytes(compress("zstd:3", content + bytes(2**27 - len(content))))
        index = json.loads((folder / "index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] = promised or len(content)
        (folder / "index.json").write_text(json.dumps(index))
        tracemalloc.start()
        items = read(folder)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert reasons(items) == [["x"]]
        assert peak < 2**25

    def test_large_texts_are_not_parsed(self, tmp_path):
        samples = [{"image": b"", "captions": 20_000 * [0]}]
        folder = write_mds(tmp_path / "set", {"image": "bytes", "captions": "json"}, samples)
        assert reasons(read(folder, limits=LimitsConfig(max_metadata_kb=1, max_caption_characters=100))) == [
            "too_large"
        ]

    @pytest.mark.parametrize(
        ("column", "encoding", "content"),
        [
            ("n", "str_decimal", b"x"), ("n", "str_int", b"x"), ("n", "int", b""), ("n", "float32", b"1"),
            ("image", "pil", b""), ("image", "pil", struct.pack("<3I", 300_000, 300_000, 3) + b"RGB"),
            ("image", "pil", struct.pack("<3I", 0, 2**31, 3) + b"RGB"),
            ("image", "pil", struct.pack("<3I", 2**31 - 1, 0, 3) + b"RGB"),
        ],
    )  # fmt: skip
    def test_values_that_are_not_of_their_encoding(self, tmp_path, column, encoding, content):
        sample = {"image": noise(4, 4), "caption": b"x", "n": b""} | {column: content}
        folder = write_mds(tmp_path / "set", dict.fromkeys(sample, "bytes"), [sample])
        index = json.loads((folder / "index.json").read_text())
        (shard,) = index["shards"]
        encodings = {"image": "bytes", "caption": "str", "n": "bytes"} | {column: encoding}
        shard["column_encodings"] = [encodings[name] for name in shard["column_names"]]
        (folder / "index.json").write_text(json.dumps(index))
        assert reasons(read(folder)) == ["undecodable" if column == "image" else "invalid_json"]

    def test_damaged_compression(self, tmp_path):
        samples = [{"image": noise(12, 12, number), "caption": "x"} for number in range(6)]
        folder = write_mds(tmp_path / "set", {"image": "bytes", "caption": "str"}, samples, compression="zstd:3")
        first = sorted(folder.glob("*.zstd"))[0]
        num = json.loads((folder / "index.json").read_text())["shards"][0]["samples"]
        first.write_bytes(bytes(first.stat().st_size))
        items = read(folder)
        assert reasons(items) == ["damaged_file"] * num + [["x"]] * (6 - num)
        assert "zstd" in details(items)[0]

    def test_an_index_is_looked_through_once(self, tmp_path, monkeypatch):
        columns, samples = {"image": "bytes", "caption": "str"}, [{"image": noise(12, 12), "caption": "x"}] * 60
        source = open_source(write_mds(tmp_path / "set", columns, samples))
        cut, calls = partitions(source), []
        monkeypatch.setattr(mds, "stored_file", lambda entry, of=mds.stored_file: calls.append(1) or of(entry))
        assert sum(len(list(source.scan(one))) for one in cut) == 60
        assert len(cut) > 10
        assert len(calls) <= 2 * len(cut), "not every entry for each shard"

    def test_an_index_that_changes_in_a_process(self, tmp_path):
        columns, samples = {"image": "bytes", "caption": "str"}, [{"image": noise(12, 12), "caption": "x"}] * 6
        source = open_source(write_mds(tmp_path / "set", columns, samples))
        (first, *_) = partitions(source)
        index = json.loads((tmp_path / "set" / "index.json").read_text())
        (tmp_path / "set" / "index.json").write_text(json.dumps(index | {"shards": index["shards"][1:]}))
        with pytest.raises(DataError, match=r"no longer names shard\.00000\.mds"):
            list(source.scan(first))
        (tmp_path / "set" / "index.json").write_text(json.dumps(index | {"shards": index["shards"][:1] * 2}))
        with pytest.raises(DataError, match="names a shard twice"):
            partitions(source)

    def test_growth(self, tmp_path):
        columns, samples = {"image": "bytes", "caption": "str"}, [{"image": noise(12, 12), "caption": "x"}] * 6
        write_mds(tmp_path / "set" / "a", columns, samples)
        known = write_known(tmp_path / "known.parquet", read(tmp_path / "set"))
        write_mds(tmp_path / "set" / "b", columns, samples[:1])
        found = open_source(tmp_path / "set").partitions(known)
        assert [one.file for one in found.new] == ["b/shard.00000.mds"]
        assert (list(found.gone), list(found.changed)) == ([], [])
