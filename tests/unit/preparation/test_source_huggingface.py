import pickle
import sys

import pyarrow as pa
import pytest

from diffusion.errors import DataError, MachineError
from diffusion.preparation.sources.opening import Reason, Record, Refused, open_source, open_sources
from tests.tools.image_files import noise, write_tar

datasets = pytest.importorskip("datasets", reason="needs datasets: pip install -e '.[huggingface]'")

NUM = 10
CAPTIONS = [[f"{number}", " ", "again"] for number in range(NUM)]


@pytest.fixture
def dataset():
    datasets.disable_progress_bars()
    features = datasets.Features(
        image=datasets.Image(),
        captions=datasets.List(datasets.Value("string")),
        label=datasets.ClassLabel(names=["cat", "dog"]),
        score=datasets.Value("float32"),
    )
    columns = {
        "image": [{"bytes": noise(4, 4, number), "path": f"{number}.png"} for number in range(NUM)],
        "captions": CAPTIONS,
        "label": [number % 2 for number in range(NUM)],
        "score": [0.5] * NUM,
    }
    return datasets.Dataset.from_dict(columns, features=features)


def check(items, prefix):
    assert [item.key.partition("#")[2] for item in items if item.key.startswith(prefix)] != []
    for number, item in enumerate(items):
        assert isinstance(item, Record)
        assert (item.image, item.captions) == (noise(4, 4, number), [f"{number}", "again"]), "bytes as they came"
        assert item.metadata == {"label": number % 2, "score": 0.5, "image_path": f"{number}.png"}


class TestOnDisk:
    def test_saved(self, dataset, tmp_path):
        dataset.save_to_disk(tmp_path / "saved", num_shards=3)
        (tmp_path / "saved" / "cache-0123.arrow").write_bytes(b"left by a map")
        source = open_source(tmp_path / "saved")
        items = list(source.read())
        check(items, "saved/data-00000-of-00003.arrow#0")
        assert len(items) == NUM and len({item.key for item in items}) == NUM
        partitions = source.partitions(1)
        assert [one.id for one in partitions] == [f"data-0000{number}-of-00003.arrow" for number in range(3)]
        assert [item for one in partitions for item in source.only(one).read(one)] == items
        assert source.partitions(1, partitions[:1]) == partitions

    def test_splits(self, dataset, tmp_path):
        datasets.DatasetDict(train=dataset, test=dataset.select(range(3))).save_to_disk(tmp_path / "both")
        assert len(list(open_source(tmp_path / "both").read())) == NUM + 3
        check(list(open_source(tmp_path / "both" / "train").read()), "train/")

    def test_selected_rows_only(self, dataset, tmp_path):
        dataset.select([4, 2]).save_to_disk(tmp_path / "two")
        assert [item.captions[0] for item in open_source(tmp_path / "two").read() if isinstance(item, Record)] == [
            "4",
            "2",
        ]

    def test_damage(self, dataset, tmp_path):
        dataset.save_to_disk(tmp_path / "saved", num_shards=2)
        first, second = sorted((tmp_path / "saved").glob("*.arrow"))
        first.write_bytes(first.read_bytes()[:-600])
        items = list(open_source(tmp_path / "saved").read())
        assert [item.reason for item in items if isinstance(item, Refused)] == [Reason.DAMAGED_FILE]
        assert sum(isinstance(item, Record) for item in items) == NUM // 2
        second.write_bytes(b"no arrow")
        with pytest.raises(DataError, match="cannot be read as Arrow"):
            open_source(tmp_path / "saved")

    def test_file_format_and_columns(self, tmp_path):
        table = pa.table({"photo": [noise(4, 4)], "words": pa.array([b"\xff"]).view(pa.string())})
        with pa.ipc.new_file(tmp_path / "x.arrow", table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(DataError, match=r"no column image or .*it has photo, words.*--image-column"):
            open_source(tmp_path / "x.arrow")
        (item,) = open_source(tmp_path / "x.arrow", image_column="photo", caption_column="words").read()
        assert isinstance(item, Refused) and item.reason is Reason.INVALID_UTF8


class TestStreaming:
    def test_data_files_are_partitions(self, dataset, tmp_path):
        (tmp_path / "set").mkdir()
        for number, rows in enumerate((range(4), range(4, NUM))):
            dataset.select(rows).to_parquet(tmp_path / "set" / f"train-{number}.parquet")
        source = open_source(f"hf-dataset:{tmp_path / 'set'}:train")
        items = list(source.read())
        check(items, "set/00000#0")
        assert [item.key for item in items[3:5]] == ["set/00000#3", "set/00001#0"]
        partitions = source.partitions(1)
        sent = pickle.loads(pickle.dumps(source))
        assert list(sent.only(partitions[1]).read(partitions[1])) == items[4:]
        dataset.to_parquet(tmp_path / "set" / "train-2.parquet")
        grown = open_source(f"hf-dataset:{tmp_path / 'set'}").partitions(1, partitions)
        assert [one.id for one in grown] == ["00000", "00001", "00002"]

    def test_webdataset_in_streaming(self, tmp_path):
        (tmp_path / "set").mkdir()
        write_tar(tmp_path / "set" / "train-0.tar", [("0.png", noise(4, 4)), ("0.txt", b"one")])
        source = open_source(f"hf-dataset:{tmp_path / 'set'}:train", image_column="png", caption_column="txt")
        (item,) = source.read()
        assert isinstance(item, Record)
        assert (item.image, item.captions) == (noise(4, 4), ["one"])

    def test_messages(self, dataset, tmp_path, monkeypatch):
        (tmp_path / "set").mkdir()
        dataset.to_parquet(tmp_path / "set" / "train-0.parquet")
        (tmp_path / "script").mkdir()
        (tmp_path / "script" / "script.py").write_text("raise SystemExit('code was run')")
        for text, message in (
            (f"{tmp_path / 'set'}:test", "Bad split: test"),
            (f"{tmp_path / 'none'}", "none"),
            (f"{tmp_path / 'script'}", "script"),
            ("", "does not name a data set; write hf-dataset:NAME"),
            (f"{tmp_path / 'set'}:a:b:c", "does not name a data set"),
        ):
            with pytest.raises((DataError, MachineError), match=message):
                open_source(f"hf-dataset:{text}")
        with pytest.raises(DataError, match=r"no column photo.*it has image, captions"):
            open_source(f"hf-dataset:{tmp_path / 'set'}", image_column="photo")
        with pytest.raises(DataError, match="hold the same files"):
            open_sources([f"hf-dataset:{tmp_path / 'set'}"] * 2)
        monkeypatch.setitem(sys.modules, "datasets", None)
        monkeypatch.setitem(sys.modules, "datasets.exceptions", None)
        with pytest.raises(MachineError, match=r"pip install -e '.\[huggingface\]'"):
            open_source(f"hf-dataset:{tmp_path / 'set'}")
