import itertools
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion.errors import DataError
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.shards import encode_shard, read_index
from diffusion.preparation import write as module
from diffusion.preparation.write import COLUMNS
from tests.tools.image_files import tree
from tests.tools.preparing import read_samples
from tests.tools.selected_data import make_images, select_images

SIZES = (7, 5, 9, 6, 8, 1, 12, 4, 6)


def build(root, sizes=SIZES, name="out", **options):
    source = make_images(root / "images", range(sum(sizes) + 20))
    return select_images(str(root / name), source, sizes, **options)


def shards(out):
    return {name: content for name, content in tree(Path(out)).items() if name.endswith(".mds")}


def test_samples_are_the_selected_images(tmp_path):
    data = build(tmp_path, scored=True, rejected=[5, 8])
    manifest = data.write(scorers=[{"column": "score"}], captioner={"path": "x"})
    found = {one["key"]: (place, one) for place, listed in read_samples(data.out).items() for one in listed}
    assert set(found) == {data.key(number) for number in range(sum(SIZES)) if number not in (5, 8)}
    for number in set(range(sum(SIZES))) - {5, 8}:
        place, one = found[data.key(number)]
        assert place == f"{'validation' if number % 7 == 0 else 'train'}/{'32x24' if number % 3 == 0 else '24x32'}"
        assert one["image"] == (tmp_path / "images" / f"{number:04}.png").read_bytes()
        assert (one["width"], one["height"]) == ((24, 32) if number % 3 == 0 else (32, 24))
        assert one["captions"] == [f"caption of {number}", f"generated for {number}"]
        assert one["metadata"] == {"number": number, "generated_captions": [1], "score": float(number)}
        assert one.keys() == COLUMNS.keys()
    assert (manifest.seen, manifest.kept, manifest.rejected["duplicate"].count) == (58, 56, 2)
    assert [one.key for one in manifest.rejected["duplicate"].examples] == [data.key(5), data.key(8)]
    assert [(one.name, one.seen, one.kept) for one in manifest.sources] == [("set", 58, 56)]
    assert {
        f"{split}/{name}": entry.num_samples for split, of in manifest.splits.items() for name, entry in of.items()
    } == {place: len(listed) for place, listed in read_samples(data.out).items()}
    assert list(manifest.splits) == ["train", "validation"]
    assert PreparedManifest.read(data.out) == manifest
    stored = json.loads(Path(data.out, "manifest.json").read_text())
    assert (stored["version"], stored["kind"]) == (2, "prepared")


def test_shards_are_as_long_as_they_may_be(tmp_path):
    data = build(tmp_path)
    data.write()
    limit = 12_000
    for index in Path(data.out).glob("*/*/index.json"):
        for task, entries in itertools.groupby(read_index(index.parent).shards, lambda one: one.raw.name[:11]):
            listed = [entry.raw.num_bytes for entry in entries]
            assert all(size <= limit for size in listed)
            assert all(size + 3000 > limit for size in listed[:-1]), f"only the last of {task} may be shorter"


def test_samples_of_a_window_are_shuffled_and_windows_are_not_mixed(tmp_path):
    data = build(tmp_path, (20, 20, 20, 20), tasks=[[[2, 0], [1, 3]]])
    data.write(shard_mb=1, window_mb=1)
    listed = [int(one["key"][4:8]) for one in read_samples(data.out)["train/24x32"]]
    assert {number // 20 for number in listed[: len(listed) // 2]} == {0, 2}
    first = listed[: len(listed) // 2]
    assert first != sorted(first)
    changes = sum(a // 20 != b // 20 for a, b in itertools.pairwise(first))
    assert changes >= 5, "partitions of a window are mixed"


def test_what_is_carried_is_limited(tmp_path):
    data = build(tmp_path, (10,) * 8, tasks=[[[part] for part in range(8)]])
    data.write(shard_mb=1, window_mb=5_000 / 2**20)
    sizes = [entry.num_samples for entry in read_index(Path(data.out, "train", "24x32")).shards]
    assert len(sizes) > 3


@pytest.mark.parametrize("scratch", [False, True])
def test_a_large_partition_is_written_in_pieces(tmp_path, monkeypatch, scratch):
    """At most the images of a window, and as many that are carried over, are held at a time."""
    data, held, original = build(tmp_path, (40,), tasks=[[[0]]]), [], module._Shards.add

    def add(self, sample):
        original(self, sample)
        held.append(sum(map(len, self._pending.values())))

    monkeypatch.setattr(module._Shards, "add", add)
    written = []
    monkeypatch.setattr(module, "encode_shard", lambda *one: written.append(len(held)) or encode_shard(*one))
    data.write(shard_mb=1, window_mb=15_000 / 2**20, scratch=str(tmp_path) if scratch else None)
    assert written[0] < 10
    assert max(held) < 15
    assert sum(map(len, read_samples(data.out).values())) == 40


def test_bytes_do_not_depend_on_a_scratch_folder(tmp_path):
    data = build(tmp_path)
    data.write()
    expected = tree(Path(data.out))
    other = select_images(str(tmp_path / "other"), data.source, SIZES)
    (tmp_path / "scratch").mkdir()
    other.write(scratch=str(tmp_path / "scratch"))
    assert tree(tmp_path / "other") == expected
    assert not list((tmp_path / "scratch").iterdir())


class StopError(Exception):
    """An interruption."""


def test_shards_without_positions_are_not_kept(tmp_path):
    data = build(tmp_path)
    data.write()
    expected = tree(Path(data.out))
    for name in shards(data.out):
        path = Path(data.out, name)
        path.write_bytes(bytes(path.stat().st_size))
    Path(data.out, "manifest.json").unlink()
    shutil.rmtree(Path(data.out, "positions"))
    data.write()
    assert tree(Path(data.out)) == expected


def test_an_unfinished_growth_with_another_selection(tmp_path, monkeypatch):
    data = build(tmp_path, (6, 5))
    data.write()
    grown = select_images(data.out, data.source, (6, 7), before=data)
    original = PreparedManifest.write
    monkeypatch.setattr(PreparedManifest, "write", lambda *_: (_ for _ in ()).throw(StopError))
    with pytest.raises(StopError):
        grown.write()
    monkeypatch.setattr(PreparedManifest, "write", original)
    finished = {name: content for name, content in shards(data.out).items() if "shard.00000" in name}
    del data.images[2:], data.generation_of[2:], data.tasks[1:]
    other = select_images(data.out, data.source, (6, 7), before=data, rejected=[12], identity="b")
    other.write()
    assert {name: content for name, content in shards(data.out).items() if "shard.00000" in name} == finished
    keys = [one["key"] for listed in read_samples(data.out).values() for one in listed]
    assert sorted(keys) == [data.key(number) for number in range(24) if number != 12]


def test_positions_find_each_sample(tmp_path):
    data = build(tmp_path)
    data.write()
    found = read_samples(data.out)
    starts = {}
    for index in Path(data.out).glob("*/*/index.json"):
        first = 0
        for entry in read_index(index.parent).shards:
            starts["/".join(index.parts[-3:-1]), entry.raw.name] = first
            first += entry.num_samples
    rows = [
        row for path in sorted(Path(data.out, "positions").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    assert len(rows) == sum(SIZES)
    for row in rows:
        place = f"{row['split']}/{row['bucket']}"
        assert found[place][starts[place, row["shard"]] + row["index"]]["key"] == row["key"]
        assert data.key(data.images[row["part"]][row["row"]]) == row["key"]


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_an_image_that_is_not_what_was_scanned(tmp_path, how):
    data = build(tmp_path)
    path = tmp_path / "images" / "0017.png"
    original = path.read_bytes()
    path.write_bytes(original + b"x") if how == "changed" else path.unlink()
    with pytest.raises(DataError, match=r"set/0017\.png"):
        data.write()
    assert not (tmp_path / "out" / "manifest.json").exists()
    path.write_bytes(original)
    data.write()
    fresh = select_images(str(tmp_path / "fresh"), data.source, SIZES)
    fresh.write()
    assert tree(Path(data.out)) == tree(tmp_path / "fresh")


@pytest.mark.parametrize("metadata", ["{'url': 'a'}", "[1]"])
def test_metadata_of_another_tool_that_are_no_json_object(tmp_path, metadata):
    data = build(tmp_path, (3,))
    path = tmp_path / "out" / "metadata" / "000000.parquet"
    table = pq.read_table(path)
    changed = pa.array([metadata, None, None], pa.string())
    pq.write_table(table.set_column(table.column_names.index("metadata"), "metadata", changed), path)
    with pytest.raises(DataError, match=r"set/0000\.png.*JSON"):
        data.write()


def test_a_scratch_folder_that_is_not_there(tmp_path):
    from diffusion.errors import MachineError

    with pytest.raises(MachineError, match="scratch"):
        build(tmp_path, (3,)).write(scratch=str(tmp_path / "nothing"))
