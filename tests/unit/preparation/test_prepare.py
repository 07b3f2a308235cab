"""The whole command in one process: sources in, shards and a manifest out."""

import errno
import io
import itertools
import os
import re
import runpy
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from streaming import MDSWriter

from diffusion import storage
from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.formats.data_set import PreparedManifest
from diffusion.preparation import output, scan
from diffusion.preparation.config import (
    STAGES,
    BucketsConfig,
    CaptionerConfig,
    DuplicatesConfig,
    FiltersConfig,
    PrepareConfig,
    ScorerConfig,
)
from diffusion.preparation.engine import run
from diffusion.preparation.prepare import _settings, explain_selection
from diffusion.preparation.prepare import prepare as prepare_from_config
from diffusion.preparation.records import NothingKeptError
from diffusion.preparation.takedown import reject_scanned, take_down
from diffusion.preparation.write import COLUMNS
from tests.tools.chat_server import MODEL, chat_server
from tests.tools.image_files import encode, noise, sample, tree, write_folder, write_tar
from tests.tools.preparing import prepare, read_samples
from tests.tools.scored_data import CALLS

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare.py"

FINE = {"edges": [16, 34], "shard_bytes": 8000, "window_bytes": 9000, "partition_size": 3, "validation_fraction": 0.2}
"""With 60 images of `write_folder`: about 20 windows in three write tasks, several shards each."""


def shards(files):
    """Leave the files that training reads."""
    return {name: content for name, content in files.items() if name.startswith(("train/", "validation/"))}


@pytest.fixture
def hostile(tmp_path):
    """A folder with an image of each kind that goes wrong, and some odd ones that do not."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    bomb = noise(2, 2).replace(b"IHDR\0\0\0\2\0\0\0\2", b"IHDR\0\1\0\0\0\1\0\0")
    header = bomb[12:29]
    bomb = bomb[:29] + struct.pack(">I", zlib.crc32(header)) + bomb[33:]
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    contents = {
        "animated.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "bomb.png": bomb,
        "cmyk.jpg": encode(Image.new("CMYK", (20, 20)), "JPEG"),
        "no caption.png": noise(20, 20),
        "odd 'name' \u00e9\u4e2d #%20.png": noise(20, 20),
        "one.png": noise(1, 1),
        "palette.png": encode(Image.new("P", (20, 20)), transparency=0),
        "rotated.jpg": encode(Image.new("RGB", (50, 20)), "JPEG", exif=exif),
        "sixteen.png": encode(Image.new("I;16", (20, 20))),
        "text.jpg": b"this is text",
        "truncated.jpg": noise(40, 40, image_format="JPEG")[:-300],
        "truncated.png": noise(40, 40)[:-300],
        "wrong extension.png": noise(20, 20, image_format="JPEG"),
        "zero.png": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        if name != "no caption.png":
            (folder / name).with_suffix(".txt").write_text(f"caption of {name}")
    for name, caption in (("blank", b" \n"), ("latin", b"caf\xe9")):
        (folder / f"{name}.png").write_bytes(noise(20, 20))
        (folder / f"{name}.txt").write_bytes(caption)
    return folder


def test_three_layouts(tmp_path):
    write_folder(tmp_path / "folder", 12, side=16)
    for part in range(2):
        members = [
            member
            for index in range(10)
            for member in sample(
                f"{index:03d}", noise(40, 33, part * 10 + index), b"tar", status="success", number=index
            )
        ]
        write_tar(tmp_path / f"{part}.tar", members)
    images = [noise(70, 64, index) for index in range(10)]
    pq.write_table(pa.table({"jpg": images, "captions": [["a", "b"]] * 10}), tmp_path / "x.parquet")
    sources = [tmp_path / "folder", tmp_path / "*.tar", tmp_path / "x.parquet"]
    out = tmp_path / "out"
    manifest = prepare(sources, out, edges=[16, 32, 64], validation_fraction=0.2, seed=3, shard_bytes=9000)

    assert PreparedManifest.read(out) == manifest
    assert [(one.name, one.kind, one.seen, one.kept) for one in manifest.sources] == [
        ("folder", "folder", 12, 12),
        (tmp_path.name, "webdataset", 20, 20),
        ("x.parquet", "parquet", 10, 10),
    ]
    found = read_samples(out)
    assert {folder: len(samples) for folder, samples in found.items()} == {
        f"{split}/{bucket}": entry.num_samples
        for split, buckets in manifest.splits.items()
        for bucket, entry in buckets.items()
    }
    assert list(manifest.splits) == ["train", "validation"]
    assert list(manifest.splits["train"]) == ["16-32", "32-64", "64-up"]
    assert manifest.splits["train"]["32-64"].num_shards > 1
    assert sum(map(len, found.values())) == 42 == manifest.kept
    for folder, samples in found.items():
        for one in samples:
            low, _, high = folder.partition("/")[2].partition("-")
            assert int(low) <= min(one["width"], one["height"]) < (10**9 if high == "up" else int(high))
    by_key = {one["key"]: one for samples in found.values() for one in samples}
    assert by_key[f"{tmp_path.name}/1.tar/004"]["metadata"] == {"status": "success", "number": 4}
    assert by_key["x.parquet#7"]["image"] == images[7]
    assert by_key["x.parquet#7"]["captions"] == ["a", "b"]
    assert {name.partition("/")[0] for name in tree(out)} == {
        "manifest.json", "metadata", "positions", "scan.json", "selection", "train", "validation",
    }  # fmt: skip


def test_order_is_shuffled_and_depends_on_the_seed(tmp_path):
    write_folder(tmp_path / "set", 120, side=16)
    listed, validation = [], []
    for name, seed, fraction in (("a", 1, 0.1), ("b", 1, 0.3), ("c", 2, 0.3)):
        prepare([tmp_path / "set"], tmp_path / name, edges=[16], seed=seed, validation_fraction=fraction)
        found = read_samples(tmp_path / name)
        listed.append([int(one["key"][4:8]) for one in found["train/16-up"]])
        validation.append({int(one["key"][4:8]) for one in found["validation/16-up"]})
    assert abs(sum(listed[0][:50]) / 50 - 60) < 20, "the first ones are of the whole source"
    assert [number for number in listed[0] if number in listed[1]] == listed[1], "a larger share takes more away"
    assert validation[0] < validation[1]
    assert listed[1] != listed[2]
    assert validation[1] != validation[2]
    assert 20 < len(validation[1]) < 52


def test_windows_determine_the_order_and_workers_never(hostile, tmp_path):
    write_folder(tmp_path / "set", 60)
    sources = [hostile, tmp_path / "set"]
    for workers in (1, 2):
        prepare(sources, tmp_path / f"{workers}", num_workers=workers, duplicates=DuplicatesConfig(), **FINE)
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    names = [name for name in tree(tmp_path / "1") if name.endswith(".mds")]
    assert len({Path(name).name.split(".")[1] for name in names}) > 2, "of several tasks"
    assert len(names) > 12
    one_window = {**FINE, "window_bytes": None}
    for size in (7, 1000):
        prepare(sources, tmp_path / f"in {size}", **{**one_window, "partition_size": size})
    assert shards(tree(tmp_path / "in 7")) == shards(tree(tmp_path / "in 1000")), "in one window all are mixed"


def test_shards_are_those_of_streaming(tmp_path):
    """The bytes are those that Streaming's own writer makes of the samples in their order."""
    write_folder(tmp_path / "set", 40)
    samples = []
    for compression in (None, "zstd:3"):
        out, again = tmp_path / f"out {compression}", tmp_path / f"again {compression}"
        hashes = ["sha1", "xxh64"]
        prepare([tmp_path / "set"], out, edges=[16], shard_bytes=9000, compression=compression, hashes=hashes)
        samples = samples or read_samples(out)["train/16-up"]
        stock = {"columns": COLUMNS, "size_limit": 9000, "hashes": hashes, "compression": compression}
        with MDSWriter(out=str(again), **stock) as writer:
            for one in samples:
                writer.write(one)
        ours, theirs = (
            [content for name, content in sorted(tree(folder).items()) if ".mds" in name]
            for folder in (out / "train" / "16-up", again)
        )
        assert ours == theirs
        assert len(ours) > 5


def test_a_sample_larger_than_a_shard(tmp_path):
    write_folder(tmp_path / "set", 3, side=60)
    manifest = prepare([tmp_path / "set"], tmp_path / "out", edges=[16], shard_bytes=5000)
    assert manifest.splits["train"]["16-up"].num_shards == 3
    assert len(read_samples(tmp_path / "out")["train/16-up"]) == 3


def test_upscaling_is_named_where_images_are_too_small(tmp_path, caplog):
    write_folder(tmp_path / "set", 4)
    caplog.set_level("INFO")
    with pytest.raises(DataError, match=r"too_small.*set/0000\.png"):
        prepare([tmp_path / "set"], tmp_path / "out", buckets=BucketsConfig(sizes=["64x64"]))
    assert "buckets.upscale" in caplog.text
    buckets = BucketsConfig(sizes=["64x64"], upscale=True)
    assert prepare([tmp_path / "set"], tmp_path / "out", buckets=buckets).kept == 4


def test_duplicates_are_dropped(tmp_path):
    write_folder(tmp_path / "a", 8)
    write_folder(tmp_path / "b", 10)
    (tmp_path / "b" / "near.png").write_bytes(encode(Image.open(tmp_path / "a" / "0003.png"), compress_level=1))
    (tmp_path / "b" / "near.txt").write_text("the same pixels in another file")
    options = {"edges": [16], "partition_size": 3, "duplicates": DuplicatesConfig(max_distance=0)}
    manifest = prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "out", **options)
    assert {reason: entry.count for reason, entry in manifest.rejected.items()} == {"duplicate": 8, "near_duplicate": 1}
    assert (manifest.seen, manifest.kept) == (19, 10)
    samples = read_samples(tmp_path / "out")["train/16-up"]
    names = [Path(one["key"]).name for one in samples]
    assert sorted(set(names) - {"near.png", "0003.png"}) == [f"{i:04}.png" for i in range(10) if i != 3]
    for entry in manifest.rejected.values():
        for example in entry.examples:
            assert example.detail.removeprefix("of ") in {one["key"] for one in samples}


# Stages


def test_stages_one_by_one_are_all_at_once(hostile, tmp_path):
    config = PrepareConfig(sources=[str(hostile)], out=str(tmp_path / "stages"), workers=1)
    config.buckets.edges = [16]
    for stage in STAGES:
        manifest = prepare_from_config(config, stages=(stage,), report=False)
        assert (manifest is not None) == (stage == "write")
        assert (tmp_path / "stages" / "manifest.json").exists() == (stage == "write")
    prepare([hostile], tmp_path / "once", edges=[16])
    assert tree(tmp_path / "stages") == tree(tmp_path / "once")


def test_what_was_selected_with_other_settings_is_not_written(tmp_path):
    write_folder(tmp_path / "set", 6)
    config = PrepareConfig(sources=[str(tmp_path / "set")], out=str(tmp_path / "out"), workers=1, seed=1)
    config.buckets.edges = [16]
    prepare_from_config(config, stages=STAGES[:3])
    before = tree(tmp_path)
    scorers = [ScorerConfig(path=f"{__name__}.Keyed", column="x")]
    for changes in ({"seed": 2}, {"where": "width > 36"}, {"shard_mb": 9.0}, {"scorers": scorers}):
        with pytest.raises(DataError, match=next(iter(changes))):
            prepare_from_config(replace(config, **changes), stages=("write",))
    assert tree(tmp_path) == before
    manifest = prepare_from_config(config, stages=("write",), report=False)
    assert manifest is not None and (manifest.kept, manifest.settings["seed"]) == (6, 1)


def test_explain_writes_nothing(hostile, tmp_path, capsys):
    out = tmp_path / "out"
    prepare([hostile], out, edges=[16])
    before = tree(tmp_path)
    config = PrepareConfig(sources=[str(hostile)], out=str(out), where="width > 30", workers=1)
    config.filters, config.buckets.edges = FiltersConfig(keywords=["palette"]), [16]
    rows = [line.split() for line in explain_selection(config).splitlines()]
    assert rows[1:] == [
        ["scan", "8", "8", "8"],
        ["too_small", "1", "1", "7"],
        ["keyword", "1", "1", "6"],
        ["where", "8", "6", "0"],
    ]
    assert tree(tmp_path) == before
    yaml = tmp_path / "prepare.yaml"
    yaml.write_text(f"sources: [{hostile}]\nout: {out}\nwhere: width > 30\nbuckets: {{edges: [16]}}\n")
    before = tree(tmp_path)
    main = runpy.run_path(str(SCRIPT))["main"]
    main(["select", "--explain", "--config", str(yaml)])
    assert ["where", "8", "7", "0"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert tree(tmp_path) == before
    for wrong in (["--explain"], ["select", "--explain", "--dry-run"]):
        with pytest.raises(ConfigurationError, match="--explain"):
            main([*wrong, "--config", str(yaml)])


def test_gpus_do_not_determine_the_data():
    values = {"path": "x.y", "column": "a"}
    one, other = (
        from_dict(PrepareConfig, {"sources": ["s"], "out": "o", "scorers": [{**values, "num_gpus": gpus}]}, "test")
        for gpus in (0.0, 1.0)
    )
    assert _settings(one) == _settings(other)


def test_another_filter_decodes_no_image(tmp_path, monkeypatch):
    """Scan and scores stay; selection and shards are those of a preparation from nothing."""
    write_folder(tmp_path / "set", 40)
    prepare([tmp_path / "set"], tmp_path / "out", **FINE)
    metadata = tree(tmp_path / "out" / "metadata")
    count, decode = itertools.count(), scan.decode_reduced
    monkeypatch.setattr(scan, "decode_reduced", lambda *a: (next(count), decode(*a))[1])
    keys = {**FINE, "where": "width > 36", "filters": FiltersConfig(keywords=["7"])}
    with pytest.raises(DataError, match="--overwrite"):
        prepare([tmp_path / "set"], tmp_path / "out", **keys)
    manifest = prepare([tmp_path / "set"], tmp_path / "out", overwrite=True, **keys)
    assert next(count) == 0
    assert tree(tmp_path / "out" / "metadata") == metadata
    prepare([tmp_path / "set"], tmp_path / "fresh", **keys)
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")
    assert manifest.rejected["keyword"].count == 1


def test_removed_keys_never_enter(tmp_path):
    write_folder(tmp_path / "set", 12)
    removed = tmp_path / "removed.txt"
    removed.write_text("set/0003.png\nset/0007.png\n")
    manifest = prepare([tmp_path / "set"], tmp_path / "out", edges=[16], removed=removed)
    assert (manifest.kept, manifest.rejected["removed"].count) == (10, 2)
    image = (tmp_path / "set" / "0003.png").read_bytes()
    for name, content in tree(tmp_path / "out").items():
        assert b"0003.png" not in content, name
        assert image not in content, name
    assert len(prepare([tmp_path / "set"], tmp_path / "out", edges=[16]).generations) == 1, "without the file, too"
    for overwrite in (False, True):
        write_folder(tmp_path / "set", 3, start=20)
        grown = prepare([tmp_path / "set"], tmp_path / "out", edges=[16], removed=removed, overwrite=overwrite)
        assert (grown.kept, grown.rejected["removed"].count) == (13, 2)


def test_copies_of_removed_keys_are_named(tmp_path, caplog):
    write_folder(tmp_path / "set", 4)
    shutil.copy(tmp_path / "set" / "0001.png", tmp_path / "set" / "copy.png")
    (tmp_path / "set" / "copy.txt").write_text("a copy")
    removed = tmp_path / "removed.txt"
    removed.write_text("set/0001.png\n")
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16], removed=removed)
    assert "set/copy.png" in caplog.text


@pytest.mark.parametrize("before", [STAGES[:1], STAGES[:3], STAGES])
def test_keys_that_are_removed_after_the_scan(tmp_path, before):
    """In an unfinished data set, and in one that is replaced."""
    write_folder(tmp_path / "set", 12)
    removed = tmp_path / "removed.txt"
    removed.write_text("set/0003.png\n")
    for name in ("out", "fresh"):
        config = PrepareConfig(sources=[str(tmp_path / "set")], out=str(tmp_path / name), workers=1)
        config.buckets.edges = [16]
        if name == "out":
            prepare_from_config(config, stages=before, report=False)
        prepare_from_config(config, removed=removed, overwrite=before == STAGES, report=False)
    assert shards(tree(tmp_path / "out")) == shards(tree(tmp_path / "fresh"))
    metadata = pq.read_table(tmp_path / "out" / "metadata").to_pylist()
    assert [row["key"] for row in metadata if row["reason"]] == [""]
    assert b"0003" not in (tmp_path / "out" / "manifest.json").read_bytes()


def test_a_mistake_in_a_condition_removes_nothing(tmp_path):
    write_folder(tmp_path / "set", 4)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
    before = tree(tmp_path / "out")
    for where, error in (("widht > 5", ConfigurationError), ("sharpness > 1e9", NothingKeptError)):
        with pytest.raises(error):
            prepare([tmp_path / "set"], tmp_path / "out", edges=[16], where=where, overwrite=True)
    few = BucketsConfig(sizes=["32x32"], min_samples=1000)
    with pytest.raises(NothingKeptError, match="min_samples"):
        prepare([tmp_path / "set"], tmp_path / "out", buckets=few, overwrite=True)
    scorers = [ScorerConfig(path=f"{__name__}.Keyed", column="x")]
    with pytest.raises(DataError, match="scores/x"):
        prepare([tmp_path / "set"], tmp_path / "out", edges=[16], scorers=scorers, stages=("select",), overwrite=True)
    assert tree(tmp_path / "out") == before


def test_a_mistake_beside_removed_keys_removes_nothing_else(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    (tmp_path / "removed.txt").write_text("set/0001.png\n")
    prepare([source], out, edges=[16])
    before = shards(tree(out)) | {"manifest.json": (out / "manifest.json").read_bytes()}
    options = {"removed": tmp_path / "removed.txt", "overwrite": True}
    with pytest.raises(DataError, match="no such file"):
        prepare([tmp_path / "nowhere"], out, edges=[16], **options)
    with pytest.raises(NothingKeptError):
        prepare([source], out, edges=[16], where="sharpness > 1e9", **options)
    prepare_from_config(PrepareConfig(sources=[str(source)], out=str(out), workers=1), stages=STAGES[:1], **options)
    assert {name: content for name, content in tree(out).items() if name in before} == before
    assert (out / "withdrawn.json").exists()
    assert prepare([source], out, edges=[16], **options).kept == 3
    assert not (out / "withdrawn.json").exists()


@pytest.mark.parametrize("stage", ["scan", "score", "write"])
def test_a_stage_without_a_selection_replaces_nothing(tmp_path, stage):
    write_folder(tmp_path / "set", 4)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16])
    before = tree(tmp_path / "out")
    config = PrepareConfig(sources=[str(tmp_path / "set")], out=str(tmp_path / "out"), workers=1)
    config.buckets.edges = [16]
    prepare_from_config(config, stages=(stage,), overwrite=True, report=False)
    assert tree(tmp_path / "out") == before
    if stage == "write":
        with pytest.raises(DataError, match="seed"):
            prepare_from_config(replace(config, seed=1), stages=(stage,), overwrite=True, report=False)
        shutil.rmtree(tmp_path / "out" / "selection")
        with pytest.raises(DataError, match="stage select"):
            prepare_from_config(config, stages=(stage,), overwrite=True, report=False)


def test_scores_survive_an_overwrite(tmp_path):
    CALLS.clear()
    write_folder(tmp_path / "set", 4)
    scorers = [ScorerConfig(path="tests.tools.scored_data.Redness", column="redness")]
    for edge in (16, 34):
        prepare([tmp_path / "set"], tmp_path / "out", edges=[edge], scorers=scorers, overwrite=True)
    assert sum(map(len, CALLS)) == 4


def captioner_of(server) -> CaptionerConfig:
    chat = {"model": MODEL, "server": {"url": server.url, "concurrency": 1}}
    return from_dict(CaptionerConfig, {"chat": chat}, "test")


def test_answers_survive_a_removal_of_other_images(tmp_path):
    write_folder(tmp_path / "set", 8)
    removed = tmp_path / "removed.txt"
    removed.write_text("set/0001.png\n")
    with chat_server() as server:
        server.behaviour = lambda image, number: "403" if len(server.requests) > 5 else ""
        options: dict[str, Any] = {"edges": [16], "captioner": captioner_of(server)}
        with pytest.raises(ConfigurationError, match="403"):
            prepare([tmp_path / "set"], tmp_path / "out", **options)
        journal, server.behaviour = tmp_path / "out" / "answers" / "000000.jsonl", lambda image, number: ""
        for keys in (set(), {"set/0001.png"}):
            reject_scanned(str(tmp_path / "out"), keys)
            assert len(journal.read_text().splitlines()) == 5 - len(keys)
        assert prepare([tmp_path / "set"], tmp_path / "out", removed=removed, **options).kept == 7
    assert len(server.requests) == 8 + 1, "the sixth answer was 403"


def test_answers_survive_a_change_of_other_images(tmp_path):
    write_folder(tmp_path / "set", 5)
    with chat_server() as server:
        options: dict[str, Any] = {"edges": [16], "partition_size": 3, "captioner": captioner_of(server)}
        prepare([tmp_path / "set"], tmp_path / "out", **options)
        (tmp_path / "set" / "0001.png").write_bytes(noise(40, 35, 99))
        (tmp_path / "set" / "0002.png").unlink()
        with pytest.raises(DataError, match="--overwrite"):
            prepare([tmp_path / "set"], tmp_path / "out", **options)
        assert prepare([tmp_path / "set"], tmp_path / "out", overwrite=True, **options).kept == 4
        assert len(server.requests) == 5 + 1
        with pytest.raises(DataError, match="captions of toy/describer"):
            prepare([tmp_path / "set"], tmp_path / "out", overwrite=True, **{**options, "partition_size": 2})


def test_a_server_is_asked_once_for_equal_images(tmp_path):
    for name in "abc":
        write_folder(tmp_path / "set" / name, 2)
    with chat_server() as server:
        prepare([tmp_path / "set"], tmp_path / "out", edges=[16], captioner=captioner_of(server))
    assert len(server.requests) == 2
    rows = pq.read_table(tmp_path / "out" / "scores" / "captions").to_pylist()
    assert Counter(row["captions"][-1] for row in rows).most_common(2)[1][1] == 3
    assert sum(row["answers"]["requests"] for row in rows) == 2


def test_scorers_that_change_while_shards_are_written(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 60)
    scorers = [ScorerConfig(path=f"{__name__}.Keyed", column=column) for column in "ab"]
    write, count = storage.write, itertools.count()

    def stop(uri, *arguments):
        if "positions/0" in uri and next(count) == 1:
            raise KeyboardInterrupt
        write(uri, *arguments)

    for name, later in (("swapped", scorers[::-1]), ("fewer", scorers[:1])):
        count = itertools.count()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(storage, "write", stop)
            prepare([tmp_path / "set"], tmp_path / name, scorers=scorers, **FINE)
        prepare([tmp_path / "set"], tmp_path / name, scorers=later, **FINE)
        prepare([tmp_path / "set"], tmp_path / f"fresh {name}", scorers=later, **FINE)
        assert shards(tree(tmp_path / name)) == shards(tree(tmp_path / f"fresh {name}"))


class Keyed:
    def __init__(self, api_key: str = "") -> None: ...

    def __call__(self, images, captions):
        return [1.0] * len(images)


def test_a_secret_of_a_plugin_is_neither_stored_nor_shown(tmp_path):
    write_folder(tmp_path / "set", 4)
    path, secret = f"{__name__}.Keyed", {"api_key": "hidden-0123"}
    for plugins in (
        {"scorers": [ScorerConfig(path=path, column="x", arguments=secret)]},
        {"captioner": CaptionerConfig(path=path, arguments={"nested": [secret]})},
    ):
        with pytest.raises(ConfigurationError, match="secret") as raised:
            prepare([tmp_path / "set"], tmp_path / "out", edges=[16], **plugins)
        assert "hidden" not in str(raised.value)
    assert not tree(tmp_path / "out")
    plain = {"edges": [16], "scorers": [ScorerConfig(path=path, column="x")]}
    prepare([tmp_path / "set"], tmp_path / "out", **plain)
    manifest = PreparedManifest.read(tmp_path / "out")
    manifest.settings["scorers"][0]["arguments"] = secret  # By an earlier version.
    manifest.write(tmp_path / "out")
    with pytest.raises(DataError, match="arguments") as raised:
        prepare([tmp_path / "set"], tmp_path / "out", **plain)
    assert "hidden" not in str(raised.value)


def test_the_report_of_a_run_that_was_stopped_before_it(tmp_path):
    write_folder(tmp_path / "set", 4)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16], report=False)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16], report=True)
    assert (tmp_path / "out" / "report.html").exists()


def test_a_relative_folder_is_one_place_for_all_workers(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 4)
    seen = []

    def note(workers, make, tasks, **options):
        seen.append(make.args[0])
        return run(workers, make, tasks, **options)

    monkeypatch.setattr(scan, "run", note)
    monkeypatch.chdir(tmp_path)
    prepare(["set"], "out", edges=[16])
    assert seen == [str(tmp_path / "out")]


def test_paths_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "scratch/x"):
        write_folder(tmp_path / name, 2)
    prepare(["~/a", {"path": "~/b"}], "~/out", edges=[16], scratch="~/scratch")
    assert PreparedManifest.read(tmp_path / "out").kept == 4
    assert not (tmp_path / "~").exists()


def test_a_clearing_that_was_stopped(tmp_path, monkeypatch):
    for name in ("a", "b"):
        write_folder(tmp_path / name, 4)
    out = tmp_path / "out"
    prepare([tmp_path / "a"], out, edges=[16])

    def stop(out, *names):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output, "clear_folders", stop)
        prepare([tmp_path / "b"], out, edges=[16], overwrite=True)
    assert [one.name for one in prepare([tmp_path / "b"], out, edges=[16], overwrite=True).sources] == ["b"]


def test_no_mark_outlives_its_sample(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 4)
    out = tmp_path / "out"
    prepare([tmp_path / "set"], out, edges=[16])
    take_down(str(out), {"set/0001.png"})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output, "clear_folders", Mock(side_effect=KeyboardInterrupt))
        prepare([tmp_path / "set"], out, edges=[16], overwrite=True)
    assert prepare([tmp_path / "set"], out, edges=[16]).kept == 3
    assert not (out / "withdrawn.json").exists()


def test_data_that_another_process_finishes_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 4)
    out = tmp_path / "out"

    def wait(*arguments):
        monkeypatch.undo()
        prepare([tmp_path / "set"], out, edges=[16], seed=1)
        return output.claim(*arguments)

    monkeypatch.setattr("diffusion.preparation.prepare.claim", wait)
    with pytest.raises(DataError, match="seed"):
        prepare([tmp_path / "set"], out, edges=[16], seed=2)
    assert PreparedManifest.read(out).settings["seed"] == 1


def test_a_folder_whose_listing_fails(tmp_path, monkeypatch):
    """Each second time while the data is prepared, and for good in a takedown."""
    write_folder(tmp_path / "set", 6)
    source, out, undisturbed = tmp_path / "set", tmp_path / "out", tmp_path / "undisturbed"
    prepare([source], undisturbed, edges=[16])
    scandir, calls = os.scandir, Counter()

    def failing(path="."):
        calls[path] += 1
        if str(path) == f"{out}/positions" and calls[path] % 2:
            raise OSError(errno.ESTALE, "stale file handle")
        if str(path) == f"{out}/metadata" and (out / "manifest.json").exists():
            raise PermissionError(errno.EACCES, "denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr("random.random", lambda: 0.0)
    prepare([source], out, edges=[16])
    assert tree(out) == tree(undisturbed)
    with pytest.raises(MachineError, match="metadata"):
        take_down(str(out), {"set/0001.png"})


def test_shards_that_no_position_names_are_not_left_out(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 6)
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PreparedManifest, "write", Mock(side_effect=KeyboardInterrupt))
        prepare([tmp_path / "set"], out, edges=[16])
    before = tree(out)
    with monkeypatch.context() as patch, pytest.raises(DataError, match="0 samples instead of 6"):
        patch.setattr("diffusion.preparation.write.file_numbers", Mock(side_effect=[set(range(1)), set(), set()]))
        prepare([tmp_path / "set"], out, edges=[16])
    assert shards(tree(out)) == shards(before)
    assert prepare([tmp_path / "set"], out, edges=[16]).kept == 6


def test_no_position_outlives_its_shard(tmp_path, monkeypatch):
    """A clearing that is stopped between the folders: the next run must not take what is left for finished."""
    write_folder(tmp_path / "set", 4)
    prepare([tmp_path / "set"], tmp_path / "out", edges=[16])

    def stop(path, **_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(output.shutil, "rmtree", stop)
        output.clear_result(str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out" / "positions").iterdir()] == []
    assert list((tmp_path / "out" / "train").rglob("*.mds"))


def test_positions_of_an_unknown_selection_are_not_taken_for_finished(tmp_path):
    """What a store leaves of a data set that it deleted in part."""
    write_folder(tmp_path / "set", 6)
    out = tmp_path / "out"
    prepare([tmp_path / "set"], out, edges=[16])
    (out / "manifest.json").unlink()
    (out / "positions" / "_identities.json").unlink()
    for path in (out / "selection").iterdir():
        path.unlink()
    where = "key like '%0000.png'"
    assert prepare([tmp_path / "set"], out, edges=[16], where=where).kept == 1
    assert [len(samples) for samples in read_samples(out).values()] == [1]


def test_a_column_of_another_tool(tmp_path):
    """Its values determine the selection, its name must be its own, and so is any folder's name in the path."""
    write_folder(tmp_path / "set", 4)
    out = tmp_path / "version=3" / "source=x" / "out"
    options = {"edges": [16], "stages": ("scan", "score", "select", "write"), "duplicates": DuplicatesConfig()}
    prepare([tmp_path / "set"], out, **options)
    part = out / "scores" / "mine" / "000000.parquet"
    for values, kept in (([1, 1, 9, 9], 2), ([9, 9, 9, 1], 1)):
        part.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"mine": values}), part)
        chosen = prepare([tmp_path / "set"], out, where="mine < 5 and source = 'set'", overwrite=True, **options)
        assert chosen.kept == kept
    part.parent.rename(out / "scores" / "row_number")
    with pytest.raises(DataError, match="row_number"):
        prepare([tmp_path / "set"], out, overwrite=True, **options)


def test_captions_of_another_tool(tmp_path):
    """They are written as they are selected: where one is null, the source's stays."""
    write_folder(tmp_path / "set", 4)
    for number in (0, 1):
        (tmp_path / "set" / f"{number:04}.txt").unlink()
    out = tmp_path / "out"
    captions = {"captions": [["a", "b"], None, ["c"], None], "generated_captions": [[1], None, None, None]}
    kinds = {"captions": pa.list_(pa.string()), "generated_captions": pa.list_(pa.int32())}
    config = PrepareConfig(sources=[str(tmp_path / "set")], out=str(out), workers=1)
    config.buckets.edges = [16]
    prepare_from_config(config, stages=("scan",))
    (out / "scores" / "captions").mkdir(parents=True)
    pq.write_table(pa.table(captions, schema=pa.schema(kinds)), out / "scores" / "captions" / "000000.parquet")
    prepare_from_config(config, stages=("score", "select", "write"), report=False)
    found = {one["key"]: (one["captions"], one["metadata"]) for one in read_samples(out)["train/16-up"]}
    assert found == {
        "set/0000.png": (["a", "b"], {"generated_captions": [1]}),
        "set/0002.png": (["c"], {}),
        "set/0003.png": (["image 3"], {}),
    }


@pytest.mark.parametrize("stages", [STAGES, ("scan",)])
def test_a_scratch_folder_that_does_not_exist(tmp_path, stages):
    write_folder(tmp_path / "set", 4)
    with pytest.raises(ConfigurationError, match="scratch"):
        prepare([tmp_path / "set"], tmp_path / "out", scratch=str(tmp_path / "none"), stages=stages)


# The command


@pytest.fixture
def run_command(python):
    def run(*arguments):
        command = [python, str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1])

    return run


def test_filters_and_the_dry_run(tmp_path, capsys):
    write_folder(tmp_path / "set", 20)
    config = tmp_path / "prepare.yaml"
    config.write_text(
        f"sources: [{tmp_path}/set]\nbuckets: {{edges: [16]}}\nworkers: 1\nfilters: {{keywords: ['1', '5']}}\n"
    )
    main = runpy.run_path(str(SCRIPT))["main"]
    main(["--config", str(config), f"out={tmp_path}/out", "--quiet"])
    capsys.readouterr()
    manifest = PreparedManifest.read(tmp_path / "out")
    assert (manifest.kept, manifest.rejected["keyword"].count) == (18, 2)
    assert manifest.settings["filters"]["keywords"] == ["1", "5"]
    assert "keyword" in (tmp_path / "out" / "report.html").read_text()
    before = tree(tmp_path)
    main(["--config", str(config), "--dry-run", "8"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["set", "8", "7"] in lines
    assert ["keyword", "1"] in lines
    assert tree(tmp_path) == before
    with pytest.raises(ConfigurationError, match=r"out \(Folder to write"):
        main(["--config", str(config)])


def test_images_that_were_removed_are_counted_apart_from_the_kept_ones(tmp_path, capsys):
    write_folder(tmp_path / "set", 3)
    command = [str(tmp_path / "set"), str(tmp_path / "out"), "--edges", "16", "--quiet", "--no-report"]
    main = runpy.run_path(str(SCRIPT))["main"]
    main(command)
    assert "takedown" not in capsys.readouterr().out
    take_down(str(tmp_path / "out"), {"set/0001.png"}, erase=True)
    write_folder(tmp_path / "set", 1, start=3)
    main(command)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all", "4", "4", "0"] in lines
    assert [line[-1] for line in lines if "takedowns" in line] == ["1"]


def test_nothing_kept(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(b"")
    (tmp_path / "set" / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"undecodable.*set/a\.png"):
        prepare([tmp_path / "set"], tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()
    (tmp_path / "set" / "b.png").write_bytes(noise(20, 20))
    (tmp_path / "set" / "b.txt").write_text("x")
    assert prepare([tmp_path / "set"], tmp_path / "out", edges=[16]).kept == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"validation_fraction": 1.0}, ConfigurationError, "validation_fraction"),
        ({"validation_fraction": float("nan")}, ConfigurationError, "validation_fraction"),
        ({"seed": -1}, ConfigurationError, "seed"),
        ({"num_workers": 0}, ConfigurationError, "workers"),
        ({"partition_size": 0}, ConfigurationError, "partition_size"),
        ({"compression": "gz:1"}, ConfigurationError, "compression"),
        ({"hashes": ["xxh64", "sha1"]}, ConfigurationError, "hashes"),
        ({"duplicates": DuplicatesConfig(max_distance=40)}, ConfigurationError, "max_distance"),
        ({"shard_bytes": 2**32}, ConfigurationError, "shard_mb"),
        ({"edges": [5, 4]}, ConfigurationError, "edges"),
        ({"out": "~no-such-user/out"}, ConfigurationError, "out is ~no-such-user/out, but there is no such user"),
        ({"where": "width >"}, ConfigurationError, "where"),
        ({"sources": ["none"]}, DataError, "none"),
        ({"sources": [""]}, ConfigurationError, "sources"),
        ({"sources": [{"path": " "}]}, ConfigurationError, "sources"),
        ({"scratch": ""}, ConfigurationError, "scratch"),
        ({"out": ""}, ConfigurationError, "out"),
        ({"buckets": BucketsConfig(sizes=["32x32"], min_samples=-5)}, ConfigurationError, "min_samples"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, monkeypatch, options, error, message):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "set", 1)
    arguments = {"sources": [tmp_path / "set"], "out": tmp_path / "out", **options}
    with pytest.raises(error, match=message):
        prepare(**arguments)
    assert not tree(tmp_path / "out")


def test_output_in_a_source(tmp_path):
    write_folder(tmp_path / "out" / "set", 1)
    before = tree(tmp_path)
    for source, out in (("out", "out"), ("out", "out/set/new"), ("out/set", "out")):
        with pytest.raises((DataError, ConfigurationError), match="out"):
            prepare([tmp_path / source], tmp_path / out)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("pattern", "is_apart"),
    [("**/*.parquet", False), ("*/*/*.parquet", False), ("[os]*/**/0*.parquet", False), ("**", False),
     ("*/*.parquet", True), ("**/part-*.parquet", True), ("set/**/*.parquet", True)],
)  # fmt: skip
def test_a_pattern_that_matches_the_output(tmp_path, pattern, is_apart):
    table = pa.table({"image": [noise(20, 20)], "caption": ["a"]})
    for name in ("set/part-0.parquet", "set/more/part-1.parquet", "set/more/0.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, tmp_path / name)
    if is_apart:
        first = prepare([tmp_path / pattern], tmp_path / "out", edges=[16])
        assert prepare([tmp_path / pattern], tmp_path / "out", edges=[16]) == first
    else:
        with pytest.raises(ConfigurationError, match="out"):
            prepare([tmp_path / pattern], tmp_path / "out", edges=[16])
        assert not tree(tmp_path / "out")


def test_command(run_command, hostile, tmp_path):
    out = tmp_path / "out"
    result = run_command(hostile, out, "--edges", 16, 32, "--validation-fraction", 0.3, "--workers", 2, "--shard-mb", 1)
    assert result.returncode == 0, result.stderr
    manifest = PreparedManifest.read(out)
    assert manifest.settings["buckets"]["edges"] == [16, 32]
    assert manifest.settings["shard_mb"] == 1
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["hostile", "16", "7", "9"] in lines
    assert ["undecodable", "4"] in lines
    train = manifest.splits["train"]["16-32"]
    assert ["train/16-32", str(train.num_samples), "1", f"{train.num_bytes / 2**20:.1f}"] in lines
    assert "hostile/zero.png (the file is empty)" in result.stdout
    assert "Warning" not in result.stderr
    assert "Traceback" not in result.stderr


def test_command_with_a_mistake(run_command, tmp_path):
    result = run_command(tmp_path / "none", tmp_path / "out")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"DataError: {tmp_path}/none")


@pytest.mark.parametrize("word", ["seed=5", "buckets.edges=[16]"])
def test_a_key_without_a_configuration_is_no_folder(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "set", 1)
    main = runpy.run_path(str(SCRIPT))["main"]
    for edges in ([], ["--edges", "16"]):
        with pytest.raises(ConfigurationError, match=f"{re.escape(word)}.*--config FILE"):
            main(["set", "out", *edges, word])
    assert not Path(word).exists()
    write_folder(tmp_path / word, 1)
    main([word, "set", "--edges", "16", "--dry-run"])


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_dry_run_of_no_image(tmp_path, number):
    write_folder(tmp_path / "set", 1)
    with pytest.raises(ConfigurationError, match="--dry-run"):
        runpy.run_path(str(SCRIPT))["main"]([str(tmp_path / "set"), "--dry-run", number])


def test_a_dry_run_names_the_folder_that_it_does_not_look_at(tmp_path, capsys):
    for name in "ab":
        write_folder(tmp_path / name, 1)
    main = runpy.run_path(str(SCRIPT))["main"]
    main([str(tmp_path / "a"), str(tmp_path / "b"), "--edges", "16", "--dry-run"])
    assert str(tmp_path / "b") in capsys.readouterr().out
    main([str(tmp_path / "a"), "--dry-run"])
    assert "OUT" not in capsys.readouterr().out


@pytest.mark.emoji
def test_real_images(data_folder, tmp_path):
    emoji = data_folder / "emoji"
    sources = [emoji / "folder_512", emoji / "webdataset_128", emoji / "parquet_72.parquet"]
    out = tmp_path / "out"
    manifest = prepare(sources, out, edges=[64, 128, 256, 512], validation_fraction=0.05, num_workers=2)
    assert (manifest.seen, manifest.kept, manifest.rejected) == (1800, 1800, {})
    found = read_samples(out)
    assert Counter(folder.partition("/")[2] for folder, samples in found.items() for _ in samples) == {
        "512-up": 400,
        "128-256": 1000,
        "64-128": 400,
    }
    by_key = {one["key"]: one for samples in found.values() for one in samples}
    assert len(by_key) == 1800
    for path in sorted(sources[0].glob("*.png")):
        one = by_key[f"folder_512/{path.name}"]
        assert one["image"] == path.read_bytes()
        assert one["captions"] == [path.with_suffix(".txt").read_text().strip()]
    rows = pq.read_table(sources[2]).to_pylist()
    for number, row in enumerate(rows):
        one = by_key[f"parquet_72.parquet#{number}"]
        assert (one["image"], one["captions"]) == (row["image"]["bytes"], [row["caption"]])
        assert Image.open(io.BytesIO(one["image"])).size == (one["width"], one["height"])
    assert sum(key.startswith("webdataset_128/") for key in by_key) == 1000
    validation = sum(entry.num_samples for entry in manifest.splits["validation"].values())
    assert 60 < validation < 120
