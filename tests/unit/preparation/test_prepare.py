import io
import runpy
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from streaming import LocalDataset, MDSWriter

from diffusion.datasets.buckets import EdgeBuckets
from diffusion.datasets.images import decode_rgb
from diffusion.datasets.manifest import PreparedManifest
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import DuplicatesConfig
from diffusion.preparation.partitions.examine import Examination, examine_records
from diffusion.preparation.partitions.merge import cut_by_size
from diffusion.preparation.prepare import COLUMNS, is_held_out, order_of, prepare
from diffusion.preparation.sources.opening import open_sources
from tests.tools.image_files import encode, noise, sample, tree, write_folder, write_tar

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare.py"


def read_all(out):
    """Return the samples of all folders in order, by split and bucket."""
    manifest = PreparedManifest.read(Path(out))
    found = {}
    for split, buckets in manifest.splits.items():
        for bucket in buckets:
            dataset = LocalDataset(str(Path(out) / split / bucket))
            found[split, bucket] = [dataset[index] for index in range(len(dataset))]
    return found


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


def test_hostile_images(hostile, tmp_path):
    manifest = prepare([hostile], tmp_path / "out", edges=[16, 32], num_workers=1)
    counts = {reason: entry.count for reason, entry in manifest.refused.items()}
    assert counts == {
        "empty_caption": 1,
        "invalid_utf8": 1,
        "missing_caption": 1,
        "too_large": 1,
        "too_small": 1,
        "undecodable": 4,
    }
    assert manifest.seen == 17 - 1 == manifest.kept + sum(counts.values())
    assert [example.key for example in manifest.refused["undecodable"].examples] == [
        f"hostile/{name}" for name in ("text.jpg", "truncated.jpg", "truncated.png", "zero.png")
    ]
    samples = {one["key"]: one for one in read_all(tmp_path / "out")["train", "16-32"]}
    assert len(samples) == manifest.kept == 7
    for key, one in samples.items():
        assert one["image"] == (tmp_path / key).read_bytes()
        assert one["captions"] == [f"caption of {Path(key).name}"]
        assert decode_rgb(one["image"]).size == (one["width"], one["height"])
    assert (samples["hostile/rotated.jpg"]["width"], samples["hostile/rotated.jpg"]["height"]) == (20, 50)


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
    manifest = prepare(
        sources, out, edges=[16, 32, 64], validation_fraction=0.2, seed=3, num_workers=1, shard_bytes=9000
    )

    assert PreparedManifest.read(out) == manifest
    assert [(one.name, one.kind, one.seen, one.kept) for one in manifest.sources] == [
        ("folder", "folder", 12, 12),
        (tmp_path.name, "webdataset", 20, 20),
        ("x.parquet", "parquet", 10, 10),
    ]
    found = read_all(out)
    assert {place: len(samples) for place, samples in found.items()} == {
        (split, bucket): entry.num_samples
        for split, buckets in manifest.splits.items()
        for bucket, entry in buckets.items()
    }
    assert list(manifest.splits) == ["train", "validation"]
    assert list(manifest.splits["train"]) == ["16-32", "32-64", "64-up"]
    assert manifest.splits["train"]["32-64"].num_shards > 1
    assert sum(map(len, found.values())) == 42 == manifest.kept
    for (split, bucket), samples in found.items():
        keys = [one["key"] for one in samples]
        assert keys == sorted(keys, key=lambda key: order_of(key, 3)), "the order is that of the hash"
        assert {is_held_out(key, 0.2, 3) for key in keys} == {split == "validation"}
        for one in samples:
            low, _, high = bucket.partition("-")
            assert int(low) <= min(one["width"], one["height"]) < (10**9 if high == "up" else int(high))
    by_key = {one["key"]: one for samples in found.values() for one in samples}
    assert by_key[f"{tmp_path.name}/1.tar/004"]["metadata"] == {"status": "success", "number": 4}
    assert by_key["x.parquet#7"]["image"] == images[7]
    assert by_key["x.parquet#7"]["captions"] == ["a", "b"]
    assert sorted(path.name for path in out.iterdir()) == [
        "facts", "manifest.json", "partitions.json", "refused", "train", "validation",
    ]  # fmt: skip


def test_order_is_shuffled_and_depends_on_the_seed():
    keys = [f"set/{index:05d}" for index in range(2000)]
    orders = [sorted(keys, key=lambda key, seed=seed: order_of(key, seed)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert abs(sum(int(key[4:]) for key in orders[0][:1000]) / 1000 - 1000) < 60
    held_out = {fraction: {key for key in keys if is_held_out(key, fraction, 1)} for fraction in (0, 0.1, 0.3)}
    assert not held_out[0]
    assert 150 < len(held_out[0.1]) < 250
    assert held_out[0.1] < held_out[0.3]


def test_workers_and_partitions_do_not_matter(hostile, tmp_path):
    write_folder(tmp_path / "set", 50)
    for workers, size in ((1, 7), (1, 1000), (2, 9)):
        prepare(
            [hostile, tmp_path / "set"], tmp_path / f"{workers} {size}", edges=[16, 33, 35], validation_fraction=0.2,
            num_workers=workers, partition_size=size, shard_bytes=20000, duplicates=DuplicatesConfig(),
        )  # fmt: skip
    trees = [shards(tree(tmp_path / name)) for name in ("1 7", "1 1000", "2 9")]
    assert trees[0] == trees[1] == trees[2]
    assert len(trees[0]) > 8


def shards(files):
    """Leave the files that training reads: without the tables of facts, which lie in a file per partition."""
    return {name: content for name, content in files.items() if name.startswith(("train/", "validation/"))}


def test_shards_are_those_of_streaming(tmp_path):
    """The bytes are those that Streaming's own writer makes of the samples in their order."""
    write_folder(tmp_path / "set", 40)
    options = {"edges": [16], "num_workers": 1, "shard_bytes": 9000}
    samples = []
    for compression in (None, "zstd:3"):
        out, again = tmp_path / f"out {compression}", tmp_path / f"again {compression}"
        prepare([tmp_path / "set"], out, compression=compression, hashes=["sha1", "xxh64"], **options)
        if compression is None:
            samples = read_all(out)["train", "16-up"]
        stock = {"columns": COLUMNS, "size_limit": 9000, "hashes": ["sha1", "xxh64"], "compression": compression}
        with MDSWriter(out=str(again), **stock) as writer:
            for one in samples:
                writer.write(one)
        written = tree(out / "train" / "16-up")
        assert {name: data for name, data in written.items() if compression is None or name in tree(again)} == tree(
            again
        )
        assert len(tree(again)) > 5


def test_a_sample_larger_than_a_shard(tmp_path):
    write_folder(tmp_path / "set", 3, side=60)
    manifest = prepare([tmp_path / "set"], tmp_path / "out", edges=[16], num_workers=1, shard_bytes=5000)
    assert manifest.splits["train"]["16-up"].num_shards == 3
    assert len(read_all(tmp_path / "out")["train", "16-up"]) == 3


def test_few_images_are_in_memory_at_a_time(tmp_path):
    write_folder(tmp_path / "set", 60)
    in_flight, most = 0, 0

    def counted(records):
        nonlocal in_flight, most
        for record in records:
            in_flight += 1
            most = max(most, in_flight)
            yield record

    source = open_sources([tmp_path / "set"])[0]
    for _ in examine_records(counted(source.read()), Examination(buckets=EdgeBuckets((16,)))):
        in_flight -= 1
    assert in_flight == 0
    assert most == 1


def test_cuts_are_those_of_a_writer():
    sizes = np.array([3, 3, 3, 9, 1, 12, 1, 1, 8])
    assert cut_by_size(sizes, 10) == [3, 5, 6, 9]
    assert cut_by_size(sizes[:1], 1) == [1]


def test_duplicates_are_left_out(tmp_path):
    write_folder(tmp_path / "a", 8)
    write_folder(tmp_path / "b", 10)
    (tmp_path / "b" / "near.png").write_bytes(encode(Image.open(tmp_path / "a" / "0003.png"), compress_level=1))
    (tmp_path / "b" / "near.txt").write_text("the same pixels in another file")
    options = {"edges": [16], "partition_size": 3, "num_workers": 1, "duplicates": DuplicatesConfig(max_distance=0)}
    manifest = prepare([tmp_path / "a", tmp_path / "b"], tmp_path / "out", **options)
    assert {reason: entry.count for reason, entry in manifest.refused.items()} == {"duplicate": 8, "near_duplicate": 1}
    assert (manifest.seen, manifest.kept) == (19, 10)
    samples = read_all(tmp_path / "out")["train", "16-up"]
    names = [Path(one["key"]).name for one in samples]
    assert sorted(set(names) - {"near.png", "0003.png"}) == [f"{i:04}.png" for i in range(10) if i != 3]
    for entry in manifest.refused.values():
        for example in entry.examples:
            kept = example.detail.removeprefix("of ")
            assert kept in {one["key"] for one in samples}
            assert order_of(kept, 17) < order_of(example.key, 17)
    facts = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "out" / "facts").glob("*"))])
    rows = {row["key"]: row for row in facts.to_pylist()}
    assert [rows[one["key"]]["index"] for one in samples] == list(range(10))
    assert sum(row["reason"] == "duplicate" for row in rows.values()) == 8


def test_filters_and_the_dry_run(tmp_path):
    write_folder(tmp_path / "set", 20)
    config = tmp_path / "prepare.yaml"
    config.write_text(
        f"sources: [{tmp_path}/set]\nbuckets: {{edges: [16]}}\nworkers: 1\nfilters: {{keywords: ['1', '5']}}\n"
    )
    result = run_command("--config", config, f"out={tmp_path}/out", "--quiet")
    assert result.returncode == 0, result.stderr
    manifest = PreparedManifest.read(tmp_path / "out")
    assert (manifest.kept, manifest.refused["keyword"].count) == (18, 2)
    assert manifest.settings.filters["keywords"] == ["1", "5"]
    assert "keyword" in (tmp_path / "out" / "report.html").read_text()
    before = tree(tmp_path)
    result = run_command("--config", config, "--dry-run", "10")
    assert result.returncode == 0, result.stderr
    assert ["set", "10", "8", "keyword", "2"] in [line.split() for line in result.stdout.splitlines()]
    assert tree(tmp_path) == before
    result = run_command("--config", config)
    assert result.returncode == 2
    assert "out (Folder to write)" in result.stderr


def test_nothing_kept(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(b"")
    (tmp_path / "set" / "a.txt").write_text("x")
    with pytest.raises(
        DataError, match=r"no image was kept; 1 refused as undecodable \(as set/a.png: the file is empty\)"
    ):
        prepare([tmp_path / "set"], tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"validation_fraction": 1.0}, ConfigurationError, "validation fraction: 1.0"),
        ({"validation_fraction": float("nan")}, ConfigurationError, "validation fraction: nan"),
        ({"seed": -1}, ConfigurationError, "seed: -1"),
        ({"num_workers": 0}, ConfigurationError, "workers: 0"),
        ({"partition_size": 0}, ConfigurationError, "partition size: 0"),
        ({"engine": "threads"}, ConfigurationError, "engine: 'threads'; it is one of processes, ray"),
        ({"compression": "gz:1"}, ConfigurationError, "compression: 'gz:1'; it must be one of br,"),
        ({"hashes": ["xxh64", "sha1"]}, ConfigurationError, "they must be sorted"),
        ({"duplicates": DuplicatesConfig(max_distance=40)}, ConfigurationError, "max_distance is 40"),
        ({"shard_bytes": 2**32}, ConfigurationError, "shard size"),
        ({"edges": [5, 4]}, ConfigurationError, "ascend"),
        ({"out": "s3://bucket/set"}, ConfigurationError, "is a URL"),
        ({"sources": ["none"]}, DataError, "none: there is no such file or folder"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, options, error, message):
    write_folder(tmp_path / "set", 1)
    arguments = {"sources": [tmp_path / "set"], "out": tmp_path / "out", **options}
    with pytest.raises(error, match=message):
        prepare(**arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_output_in_a_source(tmp_path):
    write_folder(tmp_path / "out" / "set", 1)
    for source, out in (("out", "out"), ("out", "out/set/new"), ("out/set", "out")):
        with pytest.raises(DataError, match="lie in one another"):
            prepare([tmp_path / source], tmp_path / out, num_workers=1)


def run_command(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1])


def test_command(hostile, tmp_path):
    out = tmp_path / "out"
    result = run_command(hostile, out, "--edges", 16, 32, "--validation-fraction", 0.3, "--workers", 2, "--shard-mb", 1)
    assert result.returncode == 0, result.stderr
    manifest = PreparedManifest.read(out)
    assert manifest.settings.edges == [16, 32]
    assert manifest.settings.shard_bytes == 2**20
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["hostile", "16", "7", "9"] in lines
    assert ["undecodable", "4"] in lines
    train = manifest.splits["train"]["16-32"]
    assert ["train/16-32", str(train.num_samples), "1", f"{train.num_bytes / 2**20:.1f}"] in lines
    assert "hostile/zero.png (the file is empty)" in result.stdout
    assert "Warning" not in result.stderr
    assert "Traceback" not in result.stderr


def test_command_with_a_mistake(tmp_path):
    result = run_command(tmp_path / "none", tmp_path / "out")
    assert result.returncode == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"DataError: {tmp_path}/none: there is no such file or folder; a source is")


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
    assert f"{tmp_path / 'b'} is taken for OUT, which a dry run does not look at" in capsys.readouterr().out
    main([str(tmp_path / "a"), "--dry-run"])
    assert "OUT" not in capsys.readouterr().out


@pytest.mark.emoji
def test_real_images(data_folder, tmp_path):
    emoji = data_folder / "emoji"
    sources = [emoji / "folder_512", emoji / "webdataset_128", emoji / "parquet_72.parquet"]
    out = tmp_path / "out"
    manifest = prepare(sources, out, edges=[64, 128, 256, 512], validation_fraction=0.05, num_workers=2)
    assert (manifest.seen, manifest.kept, manifest.refused) == (1800, 1800, {})
    found = read_all(out)
    assert Counter(bucket for (_, bucket), samples in found.items() for _ in samples) == {
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
    held_out = sum(entry.num_samples for entry in manifest.splits["validation"].values())
    assert 60 < held_out < 120
