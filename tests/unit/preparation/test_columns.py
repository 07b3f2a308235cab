"""Columns of images and captions in each kind of source: names, types, and columns without values."""

import base64
import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from diffusion.errors import DataError
from diffusion.evaluation.prompts import write_listing
from tests.tools.image_files import noise, write_folder, write_mds, write_table, write_tar
from tests.tools.preparing import prepare, read_samples

NUM = 3
ROWS = [{"file": f"{i}.png", "text": f"short {i}", "recaption": f"long {i}", "photo": f"{i}.png"} for i in range(NUM)]


def write_images(folder: Path) -> None:
    folder.mkdir()
    for i in range(NUM):
        (folder / f"{i}.png").write_bytes(noise(20, 20, i))


def write_jsonl(folder: Path) -> None:
    write_images(folder)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def write_csv(folder: Path) -> None:
    write_images(folder)
    with (folder / "captions.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS[0])
        writer.writeheader()
        writer.writerows(ROWS)


def write_json_beside(folder: Path) -> None:
    write_images(folder)
    for i, row in enumerate(ROWS):
        (folder / f"{i}.txt").write_text(row["text"])
        (folder / f"{i}.json").write_text(json.dumps(row))


def write_tar_with_json(folder: Path) -> None:
    members = []
    for i, row in enumerate(ROWS):
        members += [(f"{i}.png", noise(20, 20, i)), (f"{i}.txt", b"a text"), (f"{i}.json", json.dumps(row).encode())]
    folder.mkdir()
    write_tar(folder / "a.tar", members)


def table() -> pa.Table:
    return pa.Table.from_pylist([{**row, "image": noise(20, 20, i)} for i, row in enumerate(ROWS)])


def write_parquet(folder: Path) -> None:
    write_table(folder / "a.parquet", table())


def write_arrow(folder: Path) -> None:
    write_table(folder / "a.arrow", table())


def write_shards(folder: Path) -> None:
    columns = {name: "bytes" if name == "image" else "str" for name in table().column_names}
    write_mds(folder, columns, table().to_pylist())


WITH_FILE_NAMES = [write_jsonl, write_csv]
KINDS = [*WITH_FILE_NAMES, write_json_beside, write_tar_with_json, write_parquet, write_arrow, write_shards]


def captions_of(out: Path, source: str = "") -> dict[bytes, list[str]]:
    """Captions by image, of all sources or one."""
    samples = (one for listed in read_samples(out).values() for one in listed)
    return {one["image"]: one["captions"] for one in samples if one["key"].startswith(source)}


@pytest.mark.parametrize("write", KINDS)
def test_the_named_column_holds_the_captions(tmp_path, write):
    write(tmp_path / "source")
    prepare([tmp_path / "source"], tmp_path / "out", edges=[16], caption_column="recaption")
    assert captions_of(tmp_path / "out") == {noise(20, 20, i): [f"long {i}"] for i in range(NUM)}


@pytest.mark.parametrize("column", ["caption_column", "image_column"])
@pytest.mark.parametrize(("write", "is_of_source"), [*((write, False) for write in KINDS), (write_parquet, True)])
def test_a_column_that_is_nowhere(tmp_path, write, column, is_of_source):
    write(tmp_path / "source")
    source = str(tmp_path / "source")
    settings: dict[str, Any] = {column: "nosuchcolumn"}
    with pytest.raises(DataError, match=r"source.*nosuchcolumn"):
        if is_of_source:
            prepare([{"path": source, **settings}], tmp_path / "out", edges=[16])
        else:
            prepare([source], tmp_path / "out", edges=[16], **settings)


@pytest.mark.parametrize("write", WITH_FILE_NAMES)
def test_the_named_column_holds_the_file_names(tmp_path, write):
    write(tmp_path / "source")
    prepare([tmp_path / "source"], tmp_path / "out", edges=[16], image_column="photo")
    assert captions_of(tmp_path / "out") == {noise(20, 20, i): [f"short {i}"] for i in range(NUM)}


def test_a_source_without_columns_beside_one_that_has_it(tmp_path):
    write_folder(tmp_path / "images", 2)
    write_tar(tmp_path / "b.tar", [("0.png", noise(20, 20, 9)), ("0.txt", b"in a tar")])
    write_parquet(tmp_path / "source")
    sources = [tmp_path / "images", tmp_path / "b.tar", tmp_path / "source"]
    manifest = prepare(sources, tmp_path / "out", edges=[16], caption_column="recaption")
    assert manifest.kept == 2 + 1 + NUM
    with pytest.raises(DataError, match="recaption"):
        prepare(sources[:2], tmp_path / "other", edges=[16], caption_column="recaption")


def test_images_without_the_named_key_have_their_text(tmp_path):
    write_json_beside(tmp_path / "source")
    (tmp_path / "source" / "0.json").write_text("{}")
    prepare([tmp_path / "source"], tmp_path / "out", edges=[16], caption_column="recaption")
    assert captions_of(tmp_path / "out")[noise(20, 20, 0)] == ["short 0"]


def test_generated_images_are_a_source(tmp_path):
    write_images(tmp_path / "generated")
    rows = [{"file_name": f"{i}.png", "prompt": f"prompt {i}", "category": "animals"} for i in range(NUM)]
    write_listing(tmp_path / "generated", rows)
    prepare([tmp_path / "generated"], tmp_path / "out", edges=[16])
    assert captions_of(tmp_path / "out") == {noise(20, 20, i): [f"prompt {i}"] for i in range(NUM)}


# Types and values

IMAGES = [noise(20, 20, i) for i in range(NUM)]
SIZE = max(map(len, IMAGES))
TEXTS = [f"short {i}" for i in range(NUM)]
BASE64 = [base64.b64encode(image).decode() for image in IMAGES]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_types_of_images(tmp_path, suffix):
    types = {
        "large": pa.array(IMAGES, pa.large_binary()),
        "view": pa.array(IMAGES, pa.binary_view()),
        "fixed": pa.array([image.ljust(SIZE, b"\0") for image in IMAGES], pa.binary(SIZE)),
        "dictionary": pa.array(IMAGES).dictionary_encode(),
        "struct": pa.array([{"bytes": image} for image in IMAGES], pa.struct([("bytes", pa.binary_view())])),
        "base64": pa.array(BASE64),
        "url": pa.array([f"data:image/png;base64,{text}" for text in BASE64], pa.string_view()),
    }
    for name, images in types.items():
        write_table(tmp_path / name / f"a{suffix}", {"image": images, "text": TEXTS})
    prepare([tmp_path / name for name in types], tmp_path / "out", edges=[16])
    for name in types:
        found = {image.rstrip(b"\0"): texts for image, texts in captions_of(tmp_path / "out", f"{name}/").items()}
        assert found == {image.rstrip(b"\0"): [text] for image, text in zip(IMAGES, TEXTS, strict=True)}, name


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_types_of_captions(tmp_path, suffix):
    types = {
        "view": pa.array(TEXTS, pa.string_view()),
        "dictionary": pa.array(TEXTS).dictionary_encode(),
        "fixed": pa.array([[text] for text in TEXTS], pa.list_(pa.string(), 1)),
        "list": pa.array([[text] for text in TEXTS], pa.list_(pa.string_view())),
    }
    if suffix == ".arrow":  # Pyarrow does not write lists as views to parquet.
        types["list-view"] = pa.array([[text] for text in TEXTS], pa.list_view(pa.string()))
        types["large-view"] = pa.array([[text] for text in TEXTS], pa.large_list_view(pa.string()))
    for name, captions in types.items():
        write_table(tmp_path / name / f"a{suffix}", {"image": IMAGES, "text": captions, "note": captions})
    prepare([tmp_path / name for name in types], tmp_path / "out", edges=[16])
    for name in types:
        expected = {image: [text] for image, text in zip(IMAGES, TEXTS, strict=True)}
        assert captions_of(tmp_path / "out", f"{name}/") == expected, name


@pytest.mark.parametrize(("name", "suffix"), [("a", ".parquet"), ("z", ".arrow")])
@pytest.mark.parametrize(
    ("columns", "num"),
    [
        ({"image": [noise(20, 20, 9)] * 2, "text": pa.nulls(2)}, 2),
        ({"image": [noise(20, 20, 9)] * 2, "text": [[], []]}, 2),
        ({"image": pa.nulls(2), "text": ["x", "y"]}, 2),
        ({"image": pa.array([{"bytes": None, "path": None}] * 2), "text": ["x", "y"]}, 2),
        ({"image": pa.nulls(0), "text": pa.nulls(0)}, 0),
    ],
)
def test_a_shard_without_values_beside_a_sound_one(tmp_path, columns, num, name, suffix):
    write_table(tmp_path / "source" / f"m{suffix}", {"image": IMAGES, "text": TEXTS})
    write_table(tmp_path / "source" / f"{name}{suffix}", columns)
    manifest = prepare([tmp_path / "source"], tmp_path / "out", edges=[16])
    assert (manifest.kept, manifest.seen) == (NUM, NUM + num)


@pytest.mark.parametrize("table", ["metadata.jsonl", "captions.csv", "metadata.csv"])
def test_an_empty_table_beside_images(tmp_path, table):
    write_folder(tmp_path / "source", NUM)
    (tmp_path / "source" / "sub").mkdir()
    (tmp_path / "source" / "sub" / table).write_bytes(b"")
    assert prepare([tmp_path / "source"], tmp_path / "out", edges=[16]).kept == NUM


def with_status(row: dict) -> dict:
    return row | {"status": "published"}


def with_empty_caption(row: dict) -> dict:
    return {"caption": "first" if row["file"] == "0.png" else "", **row}


@pytest.mark.parametrize("change", [with_status, with_empty_caption])
@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_json_beside, write_tar_with_json, write_parquet,
                                   write_arrow, write_shards])  # fmt: skip
def test_other_columns_of_usual_names(tmp_path, monkeypatch, write, change):
    monkeypatch.setitem(globals(), "ROWS", [change(row) for row in ROWS])
    write(tmp_path / "source")
    for path in (tmp_path / "source").glob("*.txt"):
        path.unlink()
    manifest = prepare([tmp_path / "source"], tmp_path / "out", edges=[16])
    assert (manifest.kept, manifest.seen) == (NUM, NUM)
    if write is not write_tar_with_json:
        texts = ["first", *TEXTS[1:]] if change is with_empty_caption else TEXTS
        assert sorted(captions_of(tmp_path / "out").values()) == sorted([text] for text in texts)
