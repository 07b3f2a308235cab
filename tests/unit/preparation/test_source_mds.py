import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from streaming import MDSWriter
from streaming.base.format.mds.encodings import mds_encode

from diffusion.errors import DataError
from tests.tools.preparing import prepare
from diffusion.preparation.sources.opening import Reason, Record, Refused, open_source, open_sources
from tests.tools.image_files import noise, write_folder


def write_mds(folder: Path, columns: dict[str, str], samples: list[dict], **options) -> Path:
    with MDSWriter(out=str(folder), columns=columns, size_limit=2000, hashes=["sha1"], **options) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mds")
    write_folder(root / "set", 12)
    prepare([root / "set"], root / "prepared", edges=[16, 34], validation_fraction=0.3, num_workers=1)
    return root / "prepared"


def original(root: Path) -> list[Record | Refused]:
    return list(open_source(root.parent / "set").read())


class TestPrepared:
    def test_images_captions_and_keys_come_through(self, prepared):
        source = open_source(prepared)
        records = {record.key: record for record in source.read() if isinstance(record, Record)}
        assert (source.kind, source.num_records, len(records)) == ("mds", 12, 12)
        for one in original(prepared):
            assert isinstance(one, Record)
            again = records[f"prepared/{one.key}"]
            assert (again.image, again.captions) == (one.image, one.captions)

    def test_a_split_alone(self, prepared):
        below = [open_source(prepared / split).num_records or 0 for split in ("train", "validation")]
        assert sum(below) == 12 and min(below) > 0
        key = next(iter(open_source(prepared / "validation").read())).key
        assert key.startswith("validation/set/")

    def test_prepared_again_it_is_the_same_images(self, prepared, tmp_path):
        manifest = prepare([prepared], tmp_path / "again", edges=[16, 34], num_workers=1)
        assert manifest.kept == 12
        images = {record.image for record in open_source(tmp_path / "again").read() if isinstance(record, Record)}
        assert images == {record.image for record in original(prepared) if isinstance(record, Record)}

    def test_withdrawn_samples_are_refused(self, prepared):
        folder = sorted(path.parent for path in (prepared / "train").rglob("index.json"))[0]
        below = str(folder.relative_to(prepared))
        before = open_source(prepared).partitions(100)
        (prepared / "withdrawn.json").write_text(json.dumps({below: [1]}))
        try:
            source = open_source(prepared)
            refused = [item for item in source.read() if isinstance(item, Refused)]
            again = source.partitions(100, before)
            assert list(open_source(folder).read())[1] == Refused(
                refused[0].key.replace("prepared/", f"{folder.name}/", 1), Reason.WITHDRAWN, refused[0].detail
            )
        finally:
            (prepared / "withdrawn.json").unlink()
        assert [item.reason for item in refused] == [Reason.WITHDRAWN]
        assert all(one.fingerprint != two.fingerprint for one, two in zip(before, again, strict=True))

    def test_half_written_and_encoded_data(self, prepared, tmp_path):
        (tmp_path / "half" / "work.partial").mkdir(parents=True)
        (tmp_path / "half" / "work.partial" / "x").write_text("")
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
        source = open_source(folder)
        items = list(source.read())
        metadata = {"key": "same", "score": 0.5, "rank": 7, "tags": ["x"], "width": 20}
        assert [item.key for item in items] == [f"set#{number}" for number in range(5)]
        assert all(isinstance(item, Record) and item.captions == ["a", "b"] for item in items)
        assert all(isinstance(item, Record) and item.metadata == metadata for item in items)
        assert {item.image for item in items if isinstance(item, Record)} == {mds_encode("jpeg", sample["jpg"])}
        assert source.num_records == 5
        partitions = source.partitions(1)
        assert len(partitions) > 1, "shards are small"
        assert [item for one in partitions for item in source.only(one).read(one)] == items

        pil = write_mds(tmp_path / "pil", {"image": "pil", "text": "str"}, [{"image": original, "text": "x"}])
        (record,) = open_source(pil).read()
        assert isinstance(record, Record)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(record.image))), np.asarray(original))

    def test_folders_below_and_named_columns(self, tmp_path):
        for name in ("b", "a/c"):
            write_mds(tmp_path / "set" / name, {"photo": "bytes", "words": "str"}, [{"photo": b"x", "words": name}])
        items = list(open_source(tmp_path / "set", image_column="photo", caption_column="words").read())
        assert [(item.key, item.captions) for item in items if isinstance(item, Record)] == [
            ("set/a/c#0", ["a/c"]),
            ("set/b#0", ["b"]),
        ]
        with pytest.raises(DataError, match=r"no column image or .* photo \(bytes\), words \(str\).*--image-column"):
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
        long, bad, blank = open_source(folder).read()
        assert isinstance(long, Record) and long.captions == ["é" * 60_000]
        assert [item.reason for item in (bad, blank) if isinstance(item, Refused)] == [
            Reason.INVALID_UTF8,
            Reason.EMPTY_CAPTION,
        ]

    def test_damaged_shards_are_refused_by_their_hash(self, tmp_path):
        samples = [{"image": noise(12, 12, number), "caption": "x"} for number in range(12)]
        folder = write_mds(tmp_path / "set", {"image": "bytes", "caption": "str"}, samples)
        first, second, *_, last = sorted(folder.glob("*.mds"))
        content = bytearray(second.read_bytes())
        content[-9] ^= 1
        second.write_bytes(content)
        last.write_bytes(last.read_bytes()[:-1])
        items = list(open_source(folder).read())
        assert [item.key for item in items if isinstance(item, Refused)] == [f"set/{second.name}", f"set/{last.name}"]
        assert {item.reason for item in items if isinstance(item, Refused)} == {Reason.DAMAGED_FILE}
        assert items[0].key == "set#0" and first.name == "shard.00000.mds"
        (folder / "index.json").write_text('{"shards": [{}]}')
        with pytest.raises(DataError, match="not the index of an MDS folder"):
            open_source(folder)
