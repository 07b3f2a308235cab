"""The scan in one process: rows of the metadata, interruptions, growth, takedown."""

import functools
import io
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from PIL import Image

from diffusion import storage
from diffusion.config.loading import to_dict
from diffusion.datasets.images import decode_reduced
from diffusion.errors import ConfigurationError, DataError
from diffusion.formats.data_set import REMOVED
from diffusion.preparation import scan as scan_module
from diffusion.preparation.config import LimitsConfig, PrepareConfig
from diffusion.preparation.engine import Workers, run
from diffusion.preparation.layout import SCHEMA, part_name, write_table
from diffusion.preparation.measures import REDUCED_SIDE, perceptual_hash
from diffusion.preparation.metadata import removed_row
from diffusion.preparation.records import Location, Partition, Record
from diffusion.preparation.scan import Scan, scan_sources
from diffusion.preparation.sources.webdataset import WebDatasetSource
from tests.tools.image_files import encode, noise, sample, tree, write_folder, write_tar


def scan(sources, out, *, overwrite=False, **keys) -> Scan:
    config = PrepareConfig(sources=list(map(str, sources)), out=str(out), **keys)
    return scan_sources(config, workers=Workers(), overwrite=overwrite)


def rows_of(out: Path) -> list[dict]:
    """All rows, by partition."""
    paths = sorted((out / "metadata").iterdir())
    return [row for path in paths for row in pq.read_table(path, schema=SCHEMA).to_pylist()]


def by_key(out: Path) -> dict[str, dict]:
    return {row["key"]: row for row in rows_of(out)}


def stop(sources, out, monkeypatch, number=1, **keys) -> None:
    """End a scan before it writes the metadata of a partition."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        count, write = iter(range(100)), storage.write

        def fail(uri, content):
            if "metadata" in uri and next(count) == number:
                raise KeyboardInterrupt
            write(uri, content)

        patch.setattr(scan_module.storage, "write", fail)
        scan(sources, out, **keys)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Ten images, 0000 to 0009."""
    write_folder(tmp_path / "set", 10)
    return tmp_path / "set"


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def test_what_is_known_of_an_image(folder, out):
    turned = encode(
        Image.new("RGB", (40, 20), "red"), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0"
    )
    (folder / "turned.jpg").write_bytes(turned)
    (folder / "turned.json").write_text(json.dumps({"caption": "Grüße", "license": "cc0", "nested": {"a": [1, None]}}))
    (folder / "silent.png").write_bytes(noise(30, 20))
    (folder / "broken.png").write_bytes(noise(30, 20)[:200])
    (folder / "broken.txt").write_text("x")
    (folder / "both.png").write_bytes(b"no image")
    scan([folder], out)
    rows = by_key(out)
    assert len(rows) == 14
    row = rows["set/turned.jpg"]
    assert (row["width"], row["height"], row["format"], row["bytes"]) == (20, 40, "jpeg", len(turned))
    assert row["key_hash"] == xxhash.xxh3_64_intdigest(b"set/turned.jpg")
    assert row["xxh128"] == xxhash.xxh3_128_hexdigest(turned)
    assert row["phash"] == perceptual_hash(decode_reduced(turned, REDUCED_SIDE).image)
    assert row["captions"] == ["Grüße"]
    assert json.loads(row["metadata"]) == {"license": "cc0", "nested": {"a": [1, None]}}
    assert "Grüße" not in row["metadata"]
    assert (row["file"], row["reason"], row["detail"]) == ("turned.jpg", "", "")
    assert row["sharpness"] == 0 < rows["set/0003.png"]["sharpness"]
    silent, broken, both = (rows[f"set/{name}.png"] for name in ("silent", "broken", "both"))
    assert (silent["reason"], silent["captions"], silent["width"]) == ("missing_caption", [], 30)
    assert silent["phash"] is not None
    assert (broken["reason"], broken["captions"], broken["width"]) == ("undecodable", ["x"], None)
    assert broken["xxh128"] == xxhash.xxh3_128_hexdigest(noise(30, 20)[:200])
    assert both["reason"] == "undecodable"


def test_each_image_is_decoded_once(folder, out, monkeypatch):
    decoded = Counter()

    def decode(data, *arguments):
        decoded[data] += 1
        return decode_reduced(data, *arguments)

    monkeypatch.setattr(scan_module, "decode_reduced", decode)
    scan([folder], out)
    scan([folder], out)
    assert sorted(decoded.values()) == [1] * 10


def test_limits_of_an_image(folder, out):
    image = Image.frombytes("RGB", (64, 64), os.urandom(64 * 64 * 3))
    (folder / "0000.png").write_bytes(encode(image, "JPEG", progressive=True))
    (folder / "0001.png").write_bytes(encode(image, "JPEG"))
    (folder / "0002.txt").write_text("word " * 100)
    (folder / "0003.txt").write_text("x" * 90)
    scan([folder], out, limits=LimitsConfig(max_jpeg_scans=4, max_caption_characters=300, max_word_characters=80))
    reasons = {key: row["reason"] for key, row in by_key(out).items() if row["reason"]}
    assert reasons == {f"set/000{number}.png": "too_large" for number in (0, 2, 3)}


def test_memory_of_a_decoded_image(folder, out):
    (folder / "0000.png").write_bytes(noise(600, 500))
    scan([folder], out, limits=LimitsConfig(max_decoded_mb=1))
    assert {key for key, row in by_key(out).items() if row["reason"] == "too_large"} == {"set/0000.png"}


def test_truncated_jpegs_are_rejected(folder, out):
    whole = noise(200, 160, image_format="JPEG", quality=90)
    half = whole[: len(whole) // 2]
    turned = Image.open(io.BytesIO(whole)).getexif()
    turned[0x0112] = 6
    sideways = noise(200, 160, image_format="JPEG", quality=90, exif=turned)
    gradual = noise(200, 160, image_format="JPEG", quality=90, progressive=True)
    grey_gradual = encode(Image.open(io.BytesIO(whole)).convert("L"), "JPEG", progressive=True)
    backdrop = Image.new("RGB", (200, 160), (128,) * 3)
    backdrop.paste("red", (60, 40, 140, 120))
    asymmetric = Image.new("RGB", (200, 160), (128,) * 3)
    asymmetric.paste("red", (150, 0, 200, 100))
    holes = [one[:2000] + bytes(512) + one[2512:] for one in (whole, noise(200, 160, 1, "JPEG", optimize=True))]
    cmyk = encode(Image.open(io.BytesIO(whole)).convert("CMYK"), "JPEG", quality=90)
    white = encode(Image.new("RGB", (640, 640), "white"), "JPEG", optimize=True)
    assert bytes(64) in white
    flat = encode(Image.new("RGB", (64, 64), (128,) * 3), "JPEG")
    assert flat[:4] == b"\xff\xd8\xff\xe0" and flat[4:6] == b"\0\x10"  # Its first segment ends at byte 20.
    row = np.linspace(255, 0, 2048).astype(np.uint8)
    gradient = Image.fromarray(np.broadcast_to(row[None, :, None], (256, 2048, 3)).copy())
    for number, content in enumerate((
        half + b"\xff\xd9", half + bytes(len(half)), sideways[: len(sideways) // 2] + b"\xff\xd9",
        gradual[: len(gradual) // 2] + b"\xff\xd9", *holes, whole[:-1500] + whole[-2:],
        cmyk[: len(cmyk) // 2] + b"\xff\xd9",
        white, grey_gradual + b"<html>" + bytes(99), flat[:20] + b"\0" + flat[20:], whole + b"\xff\xda" + whole[20:900],
        whole[:-2] + bytes(999) + whole[-2:], encode(gradient, "JPEG", quality=75, subsampling=0, optimize=True),
        encode(Image.new("RGB", (64, 64), (128,) * 3), "JPEG"), encode(backdrop, "JPEG"), encode(asymmetric, "JPEG"),
        cmyk, encode(Image.new("CMYK", (64, 64), (127,) * 4), "JPEG"),
    )):  # fmt: skip
        (folder / f"{number:04}.png").write_bytes(content)
    scan([folder], out)
    rejected = {key for key, row in by_key(out).items() if row["reason"] == "undecodable"}
    assert rejected == {f"set/{number:04}.png" for number in range(8)}


def test_partitions_of_several_sources(folder, out, tmp_path):
    tar = write_tar(tmp_path / "x.tar", [member for i in range(5) for member in sample(str(i), noise(40, 40, i), b"x")])
    table = pa.table({"jpg": [noise(9, 9, i) for i in range(6)], "caption": [f"c{i}" for i in range(6)]})
    pq.write_table(table, tmp_path / "y.parquet", row_group_size=2)
    found = scan([folder, tar, tmp_path / "y.parquet"], out, partition_size=4)
    assert [one.number for one in found.partitions] == list(range(len(found.partitions)))
    assert {one.source for one in found.partitions} == {0, 1, 2}
    assert Scan.read(str(out)) == found
    assert len(list((out / "metadata").iterdir())) == len(found.partitions)
    assert not (out / "listings").exists()
    assert len(by_key(out)) == 21
    for one in found.partitions:
        table = pq.read_table(out / "metadata" / part_name(one.number))
        source, partition = found.find(one.number)
        locations = [
            Location(**{name: row[name] for name in ("file", "version", "offset", "length", "row_group", "row")})
            for row in table.to_pylist()
        ]
        hashes = [xxhash.xxh3_128_hexdigest(image) for image in source.images(partition, locations)]
        assert hashes == table["xxh128"].to_pylist()


def test_images_at_which_a_worker_dies_are_rejected(out, tmp_path):
    class Deadly(bytes):
        def __len__(self):
            os._exit(9)

    class Slow(bytes):
        def __getitem__(self, part):
            while part == slice(None, 2):  # The decoding begins.
                pass
            return super().__getitem__(part)

    class DeadlySource(WebDatasetSource):
        def scan(self, partition):
            for number, item in enumerate(super().scan(partition)):
                if number == 6:
                    os._exit(9)
                kind = {1: Deadly, 3: Slow}.get(number, bytes)
                assert isinstance(item, Record)
                yield replace(item, image=kind(item.image))

    class StuckSource(WebDatasetSource):
        def scan(self, partition):
            for number, item in enumerate(super().scan(partition)):
                while number == 2:
                    pass
                yield item

    for name in ("sound", "deadly", "stuck"):
        write_tar(tmp_path / f"{name}.tar", [one for i in range(8) for one in sample(f"{i}", noise(40, 35, i), b"x")])
    make = functools.partial(scan_module.Scanner, str(out), to_dict(LimitsConfig(max_decoding_seconds=1)))
    tasks = [
        scan_module.ScanTask(
            kind(name=name, root=str(tmp_path / f"{name}.tar"), is_file=True), Partition(number=number)
        )
        for number, (kind, name) in enumerate(
            [(DeadlySource, "deadly"), (StuckSource, "stuck"), (WebDatasetSource, "sound")]
        )
    ]
    retry = functools.partial(scan_module._after_death, str(tmp_path))  # pyright: ignore[reportPrivateUsage]
    results = list(run(Workers(number=2), make, tasks, on_death=retry))
    assert sorted(results) == [(3, 1), (7, 3), (8, 0)]
    reasons = ["", "undecodable", "", "undecodable", "", "", "damaged_file", "", "", "damaged_file"]
    assert [row["reason"] for row in rows_of(out)] == reasons + [""] * 8


@pytest.mark.parametrize("number", [0, 1, 2])
def test_interrupted_and_continued(folder, out, tmp_path, monkeypatch, number):
    """With the partitions that it began with; what the folder has gained comes behind them."""
    scan([folder], tmp_path / "undisturbed", partition_size=4)
    stop([folder], out, monkeypatch, number, partition_size=4)
    if number == 2:
        write_folder(folder, 2, start=20)
        scan([folder], tmp_path / "undisturbed", partition_size=4)
    continued = scan([folder], out, partition_size=4)
    assert tree(out) == tree(tmp_path / "undisturbed")
    assert len(continued.partitions) == (4 if number == 2 else 3)


def test_growth(folder, out):
    scan([folder], out, partition_size=4)
    first = tree(out / "metadata")
    write_folder(folder, 3, start=100)
    grown = scan([folder], out, partition_size=4)
    assert [one.generation for one in grown.partitions] == [0, 0, 0, 0]
    (out / "manifest.json").write_text('{"generations": [{}]}')
    write_folder(folder, 5, start=200)
    grown = scan([folder], out, partition_size=4)
    assert [one.generation for one in grown.partitions] == [0, 0, 0, 0, 1, 1]
    assert first.items() <= tree(out / "metadata").items()
    assert len(by_key(out)) == 18
    before = tree(out)
    assert scan([folder], out, partition_size=4) == grown
    assert tree(out) == before


def test_touched_files_are_the_same(folder, out):
    (folder / "0003.txt").write_bytes(b"\xff")
    scan([folder], out, partition_size=4)
    for path in (out / "metadata").iterdir():  # As earlier versions wrote it.
        table = pq.read_table(path)
        hashes = [None if row["reason"] == "invalid_utf8" else row["xxh128"] for row in table.to_pylist()]
        pq.write_table(table.set_column(table.column_names.index("xxh128"), "xxh128", [hashes]), path)
    before = tree(out)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    scan([folder], out, partition_size=4)
    assert tree(out) == before
    assert not (out / "reread").exists()


@pytest.mark.parametrize("change", ["image", "caption", "gone", "broken"])
def test_changed_image_is_named(folder, out, change):
    scan([folder], out, partition_size=4)
    before = tree(out)
    if change == "caption":
        (folder / "0006.txt").write_text("another")
    elif change == "gone":
        (folder / "0006.png").unlink()
        (folder / "0006.txt").unlink()
    else:
        (folder / "0006.png").write_bytes(noise(40, 40, 99) if change == "image" else b"x")
    write_folder(folder, 2, start=20)
    with pytest.raises(DataError, match=r"0006\.png"):
        scan([folder], out, partition_size=4)
    assert {name: content for name, content in tree(out).items() if name in before} == before
    (out / "train" / "16-up").mkdir(parents=True)
    (out / "train" / "16-up" / "shard.mds").write_bytes(b"old")
    scan([folder], out, partition_size=4, overwrite=True)
    assert len(by_key(out)) == 12 - (change == "gone")
    assert not (out / "train").exists()


def test_changed_sample_of_a_tar_is_named(out, tmp_path):
    images = [noise(40, 40, i) for i in range(8)]

    def write(images):
        members = [member for i, image in enumerate(images) for member in sample(f"{i}", image, b"x")]
        return write_tar(tmp_path / "x.tar", members)

    tar = write(images)
    scan([tar], out)
    write([*images[:5], noise(40, 40, 77), *images[6:]])
    with pytest.raises(DataError, match=r"x\.tar/5"):
        scan([tar], out)
    write([*images, noise(40, 40, 8)])
    with pytest.raises(DataError, match=r"x\.tar/8"):
        scan([tar], out)


def test_other_settings_and_sources_are_refused_or_replaced(folder, out, tmp_path):
    scan([folder], out)
    write_folder(tmp_path / "other", 3)
    before = tree(out)
    with pytest.raises(DataError, match="partition_size: None, not 5"):
        scan([folder], out, partition_size=5)
    with pytest.raises(DataError, match=r"limits\.max_image_mb: 512, not 3"):
        scan([folder], out, limits=LimitsConfig(max_image_mb=3))
    with pytest.raises(DataError, match="other sources"):
        scan([tmp_path / "other"], out)
    assert tree(out) == before
    scan([folder], out, overwrite=True)
    assert tree(out) == before
    scan([tmp_path / "other"], out, overwrite=True)
    assert len(by_key(out)) == 3


def test_a_place_that_cannot_be_written_to(folder, tmp_path):
    with pytest.raises(ConfigurationError, match="set"):
        scan([folder], folder / "out")
    with pytest.raises(ConfigurationError, match="set"):
        scan([folder], tmp_path)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "manifest.json").write_text('{"kind": "prepared", "version": 1}')
    with pytest.raises(DataError, match="earlier version"):
        scan([folder], tmp_path / "old", overwrite=True)


@pytest.mark.parametrize("content", ["{}", "[]", "no JSON", '{"version": 99}', '{"version": 2, "sources": [{}]}'])
def test_damaged_scan(out, content):
    with pytest.raises(DataError, match="run the stage scan"):
        Scan.read(str(out))
    out.mkdir()
    (out / "scan.json").write_text(content)
    with pytest.raises(DataError, match=r"scan\.json"):
        Scan.read(str(out))


def remove(out: Path, *keys: str) -> None:
    out.mkdir(exist_ok=True)
    (out / REMOVED).write_text(json.dumps([xxhash.xxh3_128_hexdigest(key.encode()) for key in keys]))


def test_removed_images_leave_no_trace(folder, out, tmp_path):
    (folder / "0004.txt").write_text("a secret caption")
    members = [member for i in range(3) for member in sample(f"{i}", noise(40, 40, i), b"x", place=f"here {i}")]
    tar = write_tar(tmp_path / "x.tar", members)
    remove(out, "set/0004.png", "x.tar/1")
    scan([folder, tar], out, partition_size=4)
    rows = [row for row in rows_of(out) if row["reason"] == "removed"]
    assert [row["key_hash"] for row in rows] == [
        xxhash.xxh3_64_intdigest(key.encode()) for key in ("set/0004.png", "x.tar/1")
    ]
    for row in rows:
        assert {name for name, value in row.items() if value} <= {"key_hash", "file", "version", "reason"}
    words = (b"0004.png", b"secret", b"here 1", b"x.tar/1", xxhash.xxh3_128_hexdigest(noise(40, 40, 1)).encode())
    for row in rows_of(out):
        assert not any(word in json.dumps(row).encode() for word in words)
    assert not (out / "listings").exists()


def test_what_was_taken_down_after_the_scan_is_not_new(folder, out):
    """As takedown leaves the metadata: neither new, nor gone, nor changed when the folder grows."""
    scan([folder], out, partition_size=4)
    path = out / "metadata" / part_name(1)
    rows = pq.read_table(path).to_pylist()
    rows[1] = removed_row(rows[1], "")
    write_table(str(path), pa.Table.from_pylist(rows, SCHEMA))
    remove(out, "set/0005.png")
    before = tree(out)
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    assert len(scan([folder], out, partition_size=4).partitions) == 3
    (folder / "0005.png").unlink()
    (folder / "0005.txt").unlink()
    assert len(scan([folder], out, partition_size=4).partitions) == 3
    assert tree(out) == before
    write_folder(folder, 1, start=30)
    assert len(scan([folder], out, partition_size=4).partitions) == 4


def test_a_source_that_is_added_to_an_interrupted_scan(folder, out, tmp_path, monkeypatch):
    stop([folder], out, monkeypatch, partition_size=4)
    write_folder(tmp_path / "more", 4)
    assert [one.source for one in scan([folder, tmp_path / "more"], out, partition_size=4).partitions] == [0, 0, 0, 1]
    assert len(by_key(out)) == 14


def test_sources_without_images(out, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metadata.jsonl").touch()
    with pytest.raises(DataError, match="empty"):
        scan([tmp_path / "empty"], out)


def test_what_a_killed_process_left_is_no_metadata(folder, out):
    scan([folder], out)
    before = Scan.read(str(out))
    (out / "metadata" / ".000000.parquet.123-x.partial").write_bytes(b"")
    assert scan([folder], out) == before


@pytest.mark.parametrize("gone", ["listing", "image"])
def test_what_an_interrupted_scan_lost(folder, out, monkeypatch, gone):
    """It is no partition without images, and no rejection."""
    stop([folder], out, monkeypatch, partition_size=4)
    path = out / "listings" / part_name(2) if gone == "listing" else folder / "0009.png"
    path.unlink()
    with pytest.raises(DataError, match=path.name):
        scan([folder], out, partition_size=4)
    scan([folder], out, partition_size=4, overwrite=True)
    assert len([row for row in rows_of(out) if not row["reason"]]) == 10 - (gone == "image")


def test_an_unclosed_quote_removes_nothing(folder, out):
    scan([folder], out)
    before = tree(out)
    (folder / "captions.csv").write_text('file_name,text\n0001.png,"open\n')
    with pytest.raises(DataError, match=r"captions\.csv"):
        scan([folder], out, overwrite=True)
    assert tree(out) == before
    with pytest.raises(DataError, match=r"captions\.csv"):
        scan([folder], out, overwrite=True, partition_size=3)
    assert tree(out) == before


def test_a_tar_without_samples_comes_once(out, tmp_path):
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", sample("0", noise(40, 40), b"x") if name == "a" else [])
    first = scan([tmp_path / "*.tar"], out)
    assert scan([tmp_path / "*.tar"], out) == first
