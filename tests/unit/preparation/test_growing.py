"""Prepared data that grows: what is there stays to the byte, what is new comes behind it."""

import json
import os
import shutil
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion import storage
from diffusion.errors import DataError
from diffusion.formats.data_set import PreparedManifest
from diffusion.preparation.config import DuplicatesConfig
from diffusion.preparation.layout import SCHEMA
from diffusion.preparation.metadata import MetadataDatabase
from diffusion.preparation.takedown import take_down
from tests.tools.image_files import noise, sample, tree, write_folder, write_tar
from tests.tools.preparing import prepare, read_samples
from tests.unit.preparation.test_takedown import contents

OPTIONS = {"edges": [16, 34], "shard_bytes": 8000, "window_bytes": 20_000, "partition_size": 6,
           "validation_fraction": 0.2}  # fmt: skip


def grow(folder):
    """Add images before, between and behind those that are there."""
    write_folder(folder, 20, start=100)
    for number, name in ((200, "0000a"), (201, "0011b")):
        (folder / f"{name}.png").write_bytes(noise(37, 33, number))
        (folder / f"{name}.txt").write_text(f"image {number}")


def keys(out):
    """Keys of all samples by split and bucket, in their order."""
    return {folder: [one["key"] for one in listed] for folder, listed in read_samples(out).items()}


def test_what_a_source_gained_is_added_behind(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 30)
    first = prepare([source], out, **OPTIONS)
    before, old_keys = tree(out), keys(out)
    grow(source)
    second = prepare([source], out, **OPTIONS)
    assert [one.kept for one in second.generations] == [30, 22]
    assert (first.kept, second.kept, second.seen) == (30, 52, 52)
    now = tree(out)
    changing = ("index.json", "manifest.json", "scan.json", "_identities.json")
    same = {name: content for name, content in before.items() if not name.endswith(changing) and "packed/" not in name}
    assert {name: now[name] for name in same} == same
    new_keys = keys(out)
    for place, listed in old_keys.items():
        assert new_keys[place][: len(listed)] == listed
    alone = prepare([source], tmp_path / "at once", **OPTIONS)
    at_once = keys(tmp_path / "at once")
    assert {place: sorted(listed) for place, listed in new_keys.items()} == {
        place: sorted(listed) for place, listed in at_once.items()
    }, "split and bucket of an image do not depend on when it came"
    assert len(alone.generations) == 1
    assert prepare([source], out, **OPTIONS) == second
    assert tree(out) == now


def test_data_of_an_earlier_version_stays_without_profiles(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 8)
    assert prepare([source], out, **OPTIONS).convert_to_srgb
    for name in ("manifest.json", "scan.json"):
        values = json.loads((out / name).read_text())
        settings = values["settings"]
        settings.pop("convert_to_srgb", None)
        for limits in (settings["limits"], *(one["limits"] for one in values["sources"] if "limits" in one)):
            for added in ("max_decoded_mb", "max_decoding_seconds", "max_captions_kb"):
                del limits[added]
        (out / name).write_text(json.dumps(values))
    grow(source)
    grown = prepare([source], out, **OPTIONS)
    assert (grown.kept, grown.convert_to_srgb) == (30, False)
    assert prepare([source], out, **OPTIONS) == grown
    assert prepare([source], out, overwrite=True, **OPTIONS).convert_to_srgb


def test_a_limit_that_a_data_set_predates_is_compared_with_its_default(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 8)
    prepare([source], out, **OPTIONS)
    for name in ("manifest.json", "scan.json"):
        (out / name).write_text((out / name).read_text().replace('"max_decoded_mb": 640,', ""))
    assert "max_decoded_mb" not in (out / "manifest.json").read_text()
    with pytest.raises(DataError, match=r"limits\.max_decoded_mb: 640, not 1\)"):
        prepare([source], out, **OPTIONS, limits={"max_decoded_mb": 1})


def test_a_score_of_another_tool_that_changed(tmp_path):
    """What is written stays, and takedowns find it."""
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 30)
    prepare([source], out, **OPTIONS)
    before = keys(out)
    part = out / "scores" / "mine" / "000000.parquet"
    part.parent.mkdir(parents=True)
    pq.write_table(pa.table({"mine": range(6)}), part)
    grow(source)
    assert [one.kept for one in prepare([source], out, **OPTIONS).generations] == [30, 22]
    now = keys(out)
    assert all(now[place][: len(listed)] == listed for place, listed in before.items())
    assert take_down(str(out), {"set/0003.png", "set/0027.png", "set/0100.png"}, erase=True).absent == []


def test_keys_of_where_keep_their_types(tmp_path):
    """A growth in which no image has the key, and one in which a text stands where there were numbers."""
    source = tmp_path / "set"

    def upload(number, **metadata):
        write_folder(source, 4, start=number)
        for i in range(number, number + 4):
            (source / f"{i:04d}.json").write_text(json.dumps(metadata))

    kept = []
    for number, metadata in ((0, {"rating": 5}), (10, {}), (20, {"rating": "unrated"}), (30, {"rating": 2})):
        upload(number, **metadata)
        kept.append(prepare([source], tmp_path / "out", edges=[16], where="coalesce(rating, 4) > 3").kept)
    assert kept == [4, 8, 12, 12]


def test_a_single_tar_of_which_an_image_was_taken_down(tmp_path):
    members = [one for i in range(4) for one in sample(f"{i}", noise(40, 35, i), b"x")]
    tar, out = write_tar(tmp_path / "one.tar", members), tmp_path / "out"
    assert prepare([tar], out, edges=[16]).kept == 4
    take_down(str(out), {"one.tar/2"}, erase=True)
    before = tree(out)
    manifest = prepare([tar], out, edges=[16])
    assert len(manifest.generations) == 1
    assert tree(out) == before
    removed = tmp_path / "removed.txt"
    removed.write_text("one.tar/1\n")
    for _ in range(2):
        assert prepare([tar], tmp_path / "other", edges=[16], removed=removed).kept == 3


def test_a_source_more(tmp_path):
    write_folder(tmp_path / "a", 10)
    members = [member for i in range(6) for member in sample(f"{i}", noise(40, 35, 50 + i), b"x")]
    write_tar(tmp_path / "b.tar", members)
    prepare([tmp_path / "a"], tmp_path / "out", **OPTIONS)
    manifest = prepare([tmp_path / "a", tmp_path / "b.tar"], tmp_path / "out", **OPTIONS)
    assert [(one.name, one.kept) for one in manifest.sources] == [("a", 10), ("b.tar", 6)]
    with pytest.raises(DataError, match="other sources"):
        prepare([tmp_path / "a"], tmp_path / "out", **OPTIONS)


@pytest.fixture(scope="module")
def growing(tmp_path_factory):
    """A source that has grown, set/; data of it before in out/, and grown in undisturbed/."""
    root = tmp_path_factory.mktemp("growing")
    write_folder(root / "set", 30)
    prepare([root / "set"], root / "out", **OPTIONS)
    shutil.copytree(root / "out", root / "undisturbed")
    grow(root / "set")
    prepare([root / "set"], root / "undisturbed", **OPTIONS)
    return root


@pytest.mark.parametrize(
    "moment", ["scan.json", "metadata/", "-rejected.parquet", "selection/1.json", ".mds", "positions/", "index.json"]
)
def test_stopped_while_growing(growing, tmp_path, monkeypatch, moment):
    """At the second write of a kind, or the first if there is one."""
    source = growing / "set"
    shutil.copytree(growing / "out", tmp_path / "out")
    write, count = storage.write, iter(range(100))

    def stop_once(uri, *arguments, **options):
        if moment in uri and next(count) == (1 if moment in ("metadata/", ".mds", "index.json") else 0):
            raise KeyboardInterrupt
        return write(uri, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", stop_once)
        if moment == "-rejected.parquet":
            patch.setattr(MetadataDatabase, "write", stop_at_rejected())
        with pytest.raises(KeyboardInterrupt):
            prepare([source], tmp_path / "out", **OPTIONS)
    assert PreparedManifest.read(tmp_path / "out").kept == 30, "until the end it is what it was"
    prepare([source], tmp_path / "out", **OPTIONS)
    assert tree(tmp_path / "out") == tree(growing / "undisturbed")


def test_images_that_come_after_an_interruption_belong_to_the_same_growth(tmp_path, monkeypatch):
    source, stopped, trees = tmp_path / "set", [tmp_path / "scored", tmp_path / "written"], []
    sources = [source, tmp_path / "other"]
    for folder in sources:
        write_folder(folder, 6)
    for out in stopped:
        prepare(sources, out, **OPTIONS)
    write_folder(source, 6, start=100)
    for out, moment in zip(stopped, ("prepare.select", "write.write_indexes"), strict=True):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"diffusion.preparation.{moment}", Mock(side_effect=KeyboardInterrupt))
            prepare(sources, out, **OPTIONS)
    for folder in sources:
        write_folder(folder, 6, start=50)
    for out in stopped:
        assert [one.kept for one in prepare(sources, out, **OPTIONS).generations] == [12, 18]
        trees.append(tree(out))
    assert trees[0] == trees[1]


@pytest.mark.parametrize("moment", ["scan.run", "scan.Scan.write"])
def test_a_takedown_reaches_the_listing_of_a_growth(tmp_path, monkeypatch, moment):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 6)
    prepare([source], out, **OPTIONS)
    write_folder(source, 6, start=100)

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"diffusion.preparation.{moment}", stop)
        prepare([source], out, **OPTIONS)
    assert any(b"0102" in content for _, content in contents(out / "listings"))
    take_down(str(out), ["set/0102.png"], erase=True)
    assert not any(b"0102" in content for _, content in contents(out))
    manifest = prepare([source], out, **OPTIONS)
    assert (manifest.kept, manifest.seen, manifest.rejected["removed"].count) == (11, 12, 1)
    (source / "0102.png").unlink()
    assert prepare([source], out, **OPTIONS).kept == 11


def stop_at_rejected():
    write = MetadataDatabase.write

    def stopping(database, query, name):
        if name.endswith("-rejected.parquet"):
            raise KeyboardInterrupt
        write(database, query, name)

    return stopping


def test_duplicates_of_earlier_images_are_dropped(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 12)
    options = {**OPTIONS, "duplicates": DuplicatesConfig(max_distance=0)}
    prepare([source], out, **options)
    for i in range(4):
        shutil.copy(source / f"{i:04}.png", source / f"copy{i}.png")
        (source / f"copy{i}.txt").write_text("again")
    write_folder(source, 2, start=50)
    manifest = prepare([source], out, **options)
    assert manifest.kept == 14
    assert manifest.rejected["duplicate"].count == 4
    assert {one.key: one.detail for one in manifest.rejected["duplicate"].examples} == {
        f"set/copy{i}.png": f"of set/{i:04}.png" for i in range(4)
    }


def test_a_growth_does_not_read_all_that_was_there(tmp_path, monkeypatch):
    """As many files as the number of growths before has digits; takedowns reach what it reads instead."""
    source, out = tmp_path / "set", tmp_path / "out"
    options = {"edges": [16], "duplicates": DuplicatesConfig()}
    counts = []
    for number in range(13):
        write_folder(source, 1, start=number)
        for copy in range(number == 12):
            (source / f"copy{copy}.png").write_bytes((source / "0003.png").read_bytes())
            (source / f"copy{copy}.txt").write_text("a copy")
        with monkeypatch.context() as patch:
            patch.setattr(storage, "read", reading := Mock(side_effect=storage.read))
            patch.setattr(storage, "open_file", opening := Mock(side_effect=storage.open_file))
            manifest = prepare([source], out, **options)
        counts.append(reading.call_count + opening.call_count)
    assert max(counts[9:]) <= counts[2] + 8
    assert len(list((out / "packed").rglob("*.parquet"))) <= 8
    assert (manifest.kept, manifest.rejected["duplicate"].count) == (13, 1)
    take_down(str(out), {"set/0003.png"}, erase=True)
    assert not [name for name, content in contents(out) if b"set/0003" in content or b"0003.png" in content]
    write_folder(source, 1, start=13)
    (source / "0003.png").unlink()
    assert prepare([source], out, **options).kept == 14
    assert prepare([source], out, **options).kept == 14


@pytest.mark.parametrize("erase", [False, True])
def test_a_removed_image_may_be_gone(tmp_path, erase):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 6)
    prepare([source], out, **OPTIONS)
    take_down(str(out), {"set/0001.png"}, erase=erase)
    (source / "0001.png").unlink()
    write_folder(source, 2, start=50)
    assert prepare([source], out, **OPTIONS).kept == 8


@pytest.mark.parametrize("erased_before", [False, True])
def test_data_of_prepared_data_from_which_samples_are_erased_grows(tmp_path, erased_before):
    source, first, second = tmp_path / "set", tmp_path / "first", tmp_path / "second"
    write_folder(source, 6)
    prepare([source], first, edges=[16])
    if erased_before:
        take_down(str(first), {"set/0000.png"}, erase=True)
    before = prepare([first], second, edges=[16]).kept
    if erased_before:  # Earlier versions have stored the name of the rewritten shard.
        old, new = "shard.00000.00000.mds", "shard.00000.00000.r1.mds"
        (second / "scan.json").write_text((second / "scan.json").read_text().replace(old, new))
        for path in (second / "metadata").iterdir():
            rows = [row | {"file": row["file"].replace(old, new)} for row in pq.read_table(path).to_pylist()]
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    take_down(str(first), {"set/0001.png", "set/0002.png"}, erase=True)
    write_folder(source, 2, start=50)
    prepare([source], first, edges=[16])
    grown = prepare([first], second, edges=[16])
    assert [one.kept for one in grown.generations] == [before, 2]
    assert prepare([first], second, edges=[16]) == grown


def test_a_table_that_was_touched_after_a_copy_was_taken_down(tmp_path):
    images = [noise(40, 40, i % 4) for i in range(5)]  # The last one is a copy of the first.
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": images, "caption": ["x"] * 5}), path)
    assert prepare([path], tmp_path / "out", edges=[16]).kept == 5
    (key, *_) = [one["key"] for one in read_samples(tmp_path / "out")["train/16-up"] if one["key"].endswith("#0")]
    take_down(str(tmp_path / "out"), {key})
    os.utime(path, ns=(0, 0))
    assert prepare([path], tmp_path / "out", edges=[16]).kept == 5


def test_a_rejected_image_that_is_mended(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    caption = (source / "0001.txt").read_text()
    (source / "0001.txt").unlink()
    assert prepare([source], out, **OPTIONS).kept == 3
    (source / "0001.txt").write_text(caption)
    with pytest.raises(DataError, match=r"set/0001\.png"):
        prepare([source], out, **OPTIONS)
    (source / "0001.txt").rename(source / "0001 mended.txt")
    shutil.copy(source / "0001.png", source / "0001 mended.png")
    grown = prepare([source], out, **OPTIONS)
    assert ([one.kept for one in grown.generations], grown.rejected["missing_caption"].count) == ([3, 1], 1)


def test_a_tar_that_is_gone_is_refused(tmp_path):
    for part in range(2):
        members = [member for i in range(4) for member in sample(f"{i}", noise(40, 35, part * 10 + i), b"x")]
        write_tar(tmp_path / f"{part}.tar", members)
    prepare([tmp_path / "*.tar"], tmp_path / "out", **OPTIONS)
    (tmp_path / "1.tar").unlink()
    with pytest.raises(DataError, match=r"1\.tar.*--overwrite"):
        prepare([tmp_path / "*.tar"], tmp_path / "out", **OPTIONS)


def test_growth_that_adds_nothing_but_rejections(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 5)
    prepare([source], out, **OPTIONS)
    (source / "bad.png").write_bytes(b"x")
    (source / "bad.txt").write_text("x")
    grown = prepare([source], out, **OPTIONS)
    assert ([one.kept for one in grown.generations], grown.seen) == ([5, 0], 6)
    assert prepare([source], out, **OPTIONS) == grown
    write_folder(source, 2, start=50)
    assert [one.kept for one in prepare([source], out, **OPTIONS).generations] == [5, 0, 2]


def test_an_image_that_a_table_named_before_it_came(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    (source / "metadata.jsonl").write_text('{"file_name": "late.png", "text": "late"}\n')
    assert prepare([source], out, **OPTIONS).rejected["missing_image"].count == 1
    (source / "late.png").write_bytes(noise(40, 35, 99))
    grown = prepare([source], out, **OPTIONS)
    assert [one.kept for one in grown.generations] == [4, 1]
    assert prepare([source], out, **OPTIONS) == grown
    os.utime(source / "late.png", ns=(0, 0))
    assert prepare([source], out, **OPTIONS) == grown


def test_second_images_of_one_key_are_no_change_of_a_tar_that_was_touched(tmp_path):
    names = ("s.jpg", "s.txt", "s.jpeg", "s.JPEG", "s.v1.png", "s.v1.jpg", "t.jpg", "t.txt")
    members = [(name, b"text" if name.endswith("txt") else noise(40, 35, i)) for i, name in enumerate(names)]
    tar = write_tar(tmp_path / "one.tar", members)
    first = prepare([tar], tmp_path / "out", edges=[16])
    os.utime(tar, (1, 1))
    assert prepare([tar], tmp_path / "out", edges=[16]) == first


def test_a_sample_is_kept_after_second_images_of_its_name(tmp_path):
    names = ("c.jpg", "c.txt", "c.v1.png", "c.v1.jpg", "a.jpg", "a.txt", "c.v1.jpg", "c.v1.txt")
    members = [(name, b"text" if name.endswith("txt") else noise(40, 35, i)) for i, name in enumerate(names)]
    prepare([write_tar(tmp_path / "k.tar", members)], tmp_path / "out", edges=[16])
    assert sorted(one for listed in keys(tmp_path / "out").values() for one in listed) == [
        "k.tar/a", "k.tar/c", "k.tar/c.v1",
    ]  # fmt: skip
