import itertools
import random
import shutil
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from streaming import StreamingDataset

from diffusion import storage
from diffusion.errors import ConfigurationError, DataError
from diffusion.formats.data_set import PreparedManifest
from diffusion.formats.shards import encode_shard, read_shards
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


def test_without_plugins_captions_and_metadata_are_those_of_the_source(tmp_path):
    data = build(tmp_path, (4,))
    data.write()
    for listed in read_samples(data.out).values():
        for one in listed:
            assert (one["captions"], one["metadata"]) == (
                [f"caption of {one['metadata']['number']}"],
                {"number": int(one["key"][4:8])},
            )


def test_a_stock_streaming_dataset_reads_it(tmp_path):
    plain, data = build(tmp_path, name="plain"), build(tmp_path, name="compressed")
    plain.write(), data.write(compression="zstd:3", hashes=["sha1", "xxh64"])
    for place, expected in read_samples(plain.out).items():
        stock = StreamingDataset(local=f"{data.out}/{place}", shuffle=False, batch_size=1)
        assert [one["key"] for one in stock] == [one["key"] for one in expected]


def test_shards_are_as_long_as_they_may_be(tmp_path):
    data = build(tmp_path)
    data.write()
    limit = 12_000
    for index in Path(data.out).glob("*/*/index.json"):
        for task, entries in itertools.groupby(read_shards(index.parent), lambda one: one.raw.name[:11]):
            listed = [entry.raw.num_bytes for entry in entries]
            assert all(size <= limit for size in listed)
            assert all(size + 3000 > limit for size in listed[:-1]), f"only the last of {task} may be shorter"


def test_a_sample_that_is_larger_than_a_shard(tmp_path):
    data = build(tmp_path, (6,))
    data.write(shard_mb=1000 / 2**20)
    assert {entry.num_samples for entry in read_shards(Path(data.out, "train", "24x32"))} == {1}


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
    sizes = [entry.num_samples for entry in read_shards(Path(data.out, "train", "24x32"))]
    assert len(sizes) > 3


@pytest.mark.parametrize("scratch", [False, True])
def test_a_large_partition_is_written_in_pieces(tmp_path, monkeypatch, scratch):
    """Of 40 images at most those of a window, and as much that is carried, are held at a time."""
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


@pytest.mark.parametrize("changes", [{"workers": 3}, {"scratch": "scratch"}])
def test_bytes_do_not_depend_on_who_writes(tmp_path, changes):
    data = build(tmp_path)
    data.write()
    expected = tree(Path(data.out))
    other = select_images(str(tmp_path / "other"), data.source, SIZES)
    (tmp_path / "scratch").mkdir()
    if "scratch" in changes:
        changes = {"scratch": str(tmp_path / "scratch")}
    other.write(**changes)
    assert tree(tmp_path / "other") == expected
    assert not list((tmp_path / "scratch").iterdir())


class StopError(Exception):
    """An interruption."""


@pytest.mark.parametrize("seed", range(8))
def test_stopped_at_any_write_and_continued(tmp_path, monkeypatch, seed):
    expected, data = build(tmp_path, name="undisturbed"), build(tmp_path, name="stopped")
    expected.write()
    draw, original, written = random.Random(seed), storage.write, []

    def stopping(uri, content, access=None):
        if draw.random() < 0.15:
            raise StopError
        written.append(uri)
        original(uri, content, access)

    monkeypatch.setattr(storage, "write", stopping)
    for _ in range(100):
        try:
            data.write()
            break
        except StopError:
            assert not Path(data.out, "manifest.json").exists()
    assert tree(Path(data.out)) == tree(Path(expected.out))
    repeated = [uri for uri, count in Counter(written).items() if count > 1 and "positions/0" in uri]
    assert not repeated, "a task is finished once"


def test_a_finished_data_set_is_left_alone(tmp_path, monkeypatch):
    data = build(tmp_path)
    manifest = data.write()
    before = tree(Path(data.out))
    monkeypatch.setattr(storage, "write", None)
    assert data.write() == manifest
    assert tree(Path(data.out)) == before


def test_another_selection_starts_over(tmp_path, monkeypatch):
    data = build(tmp_path)
    original, count = storage.write, itertools.count()

    def stopping(uri, content, access=None):
        if uri.endswith(".mds") and next(count) == 6:
            raise StopError
        original(uri, content, access)

    monkeypatch.setattr(storage, "write", stopping)
    with pytest.raises(StopError):
        data.write()
    monkeypatch.setattr(storage, "write", original)
    (tmp_path / "out" / "train" / "24x32" / ".shard.00000.00000.mds.1-2.partial").write_bytes(b"rest")
    again = select_images(data.out, data.source, SIZES, rejected=range(0, 58, 3), identity="b")
    again.write()
    fresh = select_images(str(tmp_path / "fresh"), data.source, SIZES, rejected=range(0, 58, 3), identity="b")
    fresh.write()
    assert tree(Path(data.out)) == tree(tmp_path / "fresh")


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


def test_a_finished_data_set_of_another_selection_is_refused(tmp_path):
    data = build(tmp_path)
    data.write()
    before = tree(Path(data.out))
    select_images(data.out, data.source, SIZES, identity="b")
    before = tree(Path(data.out))
    with pytest.raises(DataError, match="--overwrite"):
        data.write()
    assert tree(Path(data.out)) == before
    (tmp_path / "out" / "manifest.json").unlink()
    data.write(shard_mb=1)
    fresh = select_images(str(tmp_path / "fresh"), data.source, SIZES, identity="b")
    fresh.write(shard_mb=1)
    assert tree(Path(data.out)) == tree(tmp_path / "fresh")


def test_growing_appends(tmp_path):
    data = build(tmp_path)
    first = data.write()
    before, keys = tree(Path(data.out)), read_samples(data.out)
    grown = select_images(data.out, data.source, (6, 7), before=data)
    second = grown.write()
    now = tree(Path(data.out))
    same = [name for name in before if name.endswith(".mds") or (name.startswith("positions") and ".parquet" in name)]
    assert {name: now[name] for name in same} == {name: before[name] for name in same}
    for place, listed in read_samples(data.out).items():
        old = [one["key"] for one in keys[place]]
        assert [one["key"] for one in listed][: len(old)] == old
    assert [one.kept for one in second.generations] == [58, 13]
    assert [one.partitions for one in second.generations] == [9, 2]
    assert (first.kept, second.kept, second.sources[0].seen) == (58, 71, 71)
    assert grown.write() == second


@pytest.mark.parametrize("seed", range(4))
def test_stopped_while_growing(tmp_path, monkeypatch, seed):
    def make(name):
        data = build(tmp_path, (6, 5), name)
        data.write()
        return select_images(data.out, data.source, (6, 7, 3), before=data)

    expected, data = make("undisturbed"), make("stopped")
    expected.write()
    draw, original = random.Random(seed), storage.write

    def stopping(uri, content, access=None):
        if draw.random() < 0.3:
            raise StopError
        original(uri, content, access)

    monkeypatch.setattr(storage, "write", stopping)
    for _ in range(100):
        try:
            data.write()
            break
        except StopError:
            assert PreparedManifest.read(data.out).kept == 11, "until the end it is what it was"
    assert tree(Path(data.out)) == tree(Path(expected.out))


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
        for entry in read_shards(index.parent):
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


def test_nothing_is_kept(tmp_path):
    data = build(tmp_path, (3,), rejected=[0, 1, 2])
    with pytest.raises(DataError, match=r"duplicate.*set/0000\.png"):
        data.write()


def test_a_shard_size_that_mds_does_not_know(tmp_path):
    with pytest.raises(ConfigurationError, match="shard size"):
        build(tmp_path, (3,)).write(shard_mb=4096)


def test_a_scratch_folder_that_is_not_there(tmp_path):
    from diffusion.errors import MachineError

    with pytest.raises(MachineError, match="scratch"):
        build(tmp_path, (3,)).write(scratch=str(tmp_path / "nothing"))
