import os
import pickle
import sys
from dataclasses import replace
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Reason, Record, Rejected
from diffusion.preparation.sources import detection, open_sources
from diffusion.preparation.sources.huggingface import HuggingFaceSource
from diffusion.preparation.sources.reading import list_folder
from tests.tools.image_files import noise, write_table, write_tar
from tests.tools.preparing import prepare
from tests.tools.sources import open_source, partitions, read, reasons, write_known

datasets = pytest.importorskip("datasets", reason="needs datasets: uv pip install -e '.[huggingface]'")

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
        items = read(tmp_path / "saved")
        check(items, "saved/data-00000-of-00003.arrow#0")
        assert len(items) == NUM and len({item.key for item in items}) == NUM
        files = [one.file for one in partitions(open_source(tmp_path / "saved"))]
        assert files == [f"data-0000{number}-of-00003.arrow" for number in range(3)]

    def test_more_files_than_detection_looks_at(self, dataset, tmp_path, monkeypatch):
        dataset.save_to_disk(tmp_path / "saved", num_shards=3)
        monkeypatch.setattr(detection, "LOOKED_AT", 4)
        monkeypatch.setattr(detection, "list_folder", lambda path: sorted(list_folder(path), reverse=True))
        check(read(tmp_path / "saved"), "saved/data-00000-of-00003.arrow#0")
        (tmp_path / "saved" / "data-00000-of-00003.arrow").unlink()
        with pytest.raises(DataError, match=r"lacks data-00000-of-00003\.arrow, which a state\.json lists"):
            open_source(tmp_path / "saved")

    def test_splits(self, dataset, tmp_path, caplog):
        datasets.DatasetDict(train=dataset, test=dataset.select(range(3))).save_to_disk(tmp_path / "both")
        assert len(read(tmp_path / "both")) == NUM + 3
        assert "test, train" in caplog.text
        check(read(tmp_path / "both" / "train"), "train/")

    def test_selected_rows_only(self, dataset, tmp_path):
        dataset.select([4, 2]).save_to_disk(tmp_path / "two")
        assert [captions[0] for captions in reasons(read(tmp_path / "two"))] == ["4", "2"]

    def test_damage(self, dataset, tmp_path):
        dataset.save_to_disk(tmp_path / "saved", num_shards=2)
        first, second = sorted((tmp_path / "saved").glob("*.arrow"))
        first.write_bytes(first.read_bytes()[:-600])
        items = read(tmp_path / "saved")
        assert [item.reason for item in items if isinstance(item, Rejected)] == [Reason.DAMAGED_FILE]
        assert sum(isinstance(item, Record) for item in items) == NUM // 2
        second.write_bytes(b"no arrow")
        assert reasons(read(tmp_path / "saved")) == ["damaged_file", "damaged_file"]

    @pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
    def test_read_on_behind_a_batch_that_is_not_sound(self, tmp_path, new):
        table = pa.table({"image": [noise(4, 4, number) for number in range(9)], "caption": ["words"] * 9})
        with new(tmp_path / "x.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        content = bytearray((tmp_path / "x.arrow").read_bytes())
        offsets = b"".join(number.to_bytes(4, "little") for number in (0, 5, 10, 15))
        start = -1
        for _ in range(2):
            start = content.index(offsets, start + 1)
        content[start : start + 16] = b"".join(number.to_bytes(4, "little") for number in (0, 2**31 - 9, 10, 15))
        (tmp_path / "x.arrow").write_bytes(content)
        assert reasons(read(tmp_path / "x.arrow")) == [["words"]] * 3 + ["damaged_file"] * 2 + [["words"]] * 4

    def test_a_name_that_is_not_utf8(self, dataset, tmp_path):
        folder = tmp_path / os.fsdecode(b"\xff")
        dataset.save_to_disk(tmp_path / "saved")
        (tmp_path / "saved").rename(folder)
        assert len(read(folder)) == NUM

    @pytest.mark.timeout(300)
    def test_pipes(self, dataset, tmp_path):
        dataset.save_to_disk(tmp_path / "saved", num_shards=2)
        first, _ = sorted((tmp_path / "saved").glob("*.arrow"))
        first.unlink()
        os.mkfifo(first)
        assert reasons(read(tmp_path / "saved"))[:2] == ["unreadable", ["5", "again"]]
        (tmp_path / "saved" / "state.json").unlink()
        os.mkfifo(tmp_path / "saved" / "state.json")
        with pytest.raises(DataError, match=r"state\.json"):
            open_source(tmp_path / "saved")

    def test_file_format_and_columns(self, tmp_path):
        columns = {"photo": [noise(4, 4)], "words": pa.array([b"\xff"]).view(pa.string())}
        write_table(tmp_path / "x.arrow", columns)
        with pytest.raises(DataError, match=r"no column image or .*it has photo, words.*image_column"):
            open_source(tmp_path / "x.arrow")
        (item,) = read(tmp_path / "x.arrow", image_column="photo", caption_column="words")
        assert isinstance(item, Rejected) and item.reason is Reason.INVALID_UTF8


class TestStreaming:
    def test_data_files_are_partitions(self, dataset, tmp_path):
        (tmp_path / "set").mkdir()
        for number, rows in enumerate((range(4), range(4, NUM))):
            dataset.select(rows).to_parquet(tmp_path / "set" / f"train-{number}.parquet")
        source = open_source(f"hf-dataset:{tmp_path / 'set'}:train")
        items = read(f"hf-dataset:{tmp_path / 'set'}:train")
        check(items, "set/00000#0")
        assert [item.key for item in items[3:5]] == ["set/00000#3", "set/00001#0"]
        second = partitions(source)[1]
        sent = pickle.loads(pickle.dumps(source))
        assert list(sent.scan(second)) == items[4:]

    @pytest.mark.parametrize("columns", [{"note": ["text"]}, {"note": pa.nulls(1), "more": ["text"]}])
    def test_columns_that_differ(self, tmp_path, columns):
        given = {"image": [noise(4, 4)], "caption": ["x"]}
        pq.write_table(pa.table({**given, "note": pa.nulls(1)}), tmp_path / "train-0.parquet")
        pq.write_table(pa.table({**given, **columns}), tmp_path / "train-1.parquet")
        with pytest.raises(DataError, match=r"data file 00001 .*name its parquet files"):
            read(f"hf-dataset:{tmp_path}")

    def test_growth(self, dataset, tmp_path):
        (tmp_path / "set").mkdir()
        dataset.to_parquet(tmp_path / "set" / "train-0.parquet")
        known = write_known(tmp_path / "known.parquet", read(f"hf-dataset:{tmp_path / 'set'}"))
        found = open_source(f"hf-dataset:{tmp_path / 'set'}").partitions(known)
        assert (list(found.new), list(found.gone), list(found.changed)) == ([], [], [])

    def test_the_files_of_a_commit_are_listed_once_in_a_process(self, dataset, tmp_path, monkeypatch):
        dataset.to_parquet(tmp_path / "train-0.parquet")
        source = replace(open_source(f"hf-dataset:{tmp_path}"), revision="main")
        builder, made = datasets.load_dataset_builder(str(tmp_path)), []
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: made.append(1) or builder)
        (partition,) = partitions(source)
        for _ in range(3):
            assert len(list(pickle.loads(pickle.dumps(source)).scan(partition))) == NUM
        assert len(made) == 1

    def test_a_branch_is_the_commit_that_it_was_when_the_source_was_opened(self, dataset, tmp_path, monkeypatch):
        dataset.to_parquet(tmp_path / "train-0.parquet")
        builder, commits = datasets.load_dataset_builder(str(tmp_path)), {"main": "a" * 40, None: "b" * 40}

        def find(_, name, revision=None):
            if revision not in commits:
                raise RevisionNotFoundError("404", response=Mock())
            return Mock(sha=commits[revision])

        monkeypatch.setattr(HfApi, "dataset_info", find)
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
        for text, revision in (("someone/set", None), ("someone/set@main", "main")):
            source = open_source(f"hf-dataset:{text}")
            assert isinstance(source, HuggingFaceSource) and source.revision == commits[revision]
        with pytest.raises(DataError, match="no such data set or revision"):
            open_source("hf-dataset:someone/set@none")

    def test_a_preparation_stays_at_the_commit_that_it_began_with(self, dataset, tmp_path, monkeypatch):
        dataset.to_parquet(tmp_path / "train-0.parquet")
        builder, out = datasets.load_dataset_builder(str(tmp_path)), tmp_path / "out"
        head = Mock(sha="a" * 40)
        monkeypatch.setattr(HfApi, "dataset_info", lambda _, name, revision: Mock(sha=revision or head.sha))
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: builder)
        entry = "hf-dataset:someone/moving"
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("diffusion.preparation.prepare.write", Mock(side_effect=KeyboardInterrupt))
            prepare([entry], out, edges=[4])
        head.sha = "b" * 40
        manifest = prepare([entry], out, edges=[4])
        assert manifest.sources[0].path == f"{entry}@{'a' * 40}:train"
        assert prepare([entry], out, edges=[4]) == manifest
        assert prepare([entry], out, edges=[4], overwrite=True).sources[0].path == f"{entry}@{head.sha}:train"

    def test_the_files_of_a_folder_are_listed_again_when_it_has_grown(self, dataset, tmp_path, monkeypatch):
        (tmp_path / "set").mkdir()
        dataset.to_parquet(tmp_path / "set" / "train-0.parquet")
        source = open_source(f"hf-dataset:{tmp_path / 'set'}")
        load, made = datasets.load_dataset_builder, []
        monkeypatch.setattr(datasets, "load_dataset_builder", lambda *all, **by: made.append(1) or load(*all, **by))
        for number in (1, 2):
            dataset.to_parquet(tmp_path / "set" / f"train-{number}.parquet")
            made.clear()
            found = partitions(source)
            for one in found:
                assert len(list(pickle.loads(pickle.dumps(source)).scan(one))) == NUM
            assert len(found) == number + 1
            assert len(made) == 2, "the listing, and one for all partitions"

    def test_webdataset_in_streaming(self, tmp_path):
        (tmp_path / "set").mkdir()
        write_tar(tmp_path / "set" / "train-0.tar", [("0.png", noise(4, 4)), ("0.txt", b"one")])
        (item,) = read(f"hf-dataset:{tmp_path / 'set'}:train", image_column="png", caption_column="txt")
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
