"""Named columns in each kind of source."""

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streaming import MDSWriter

from diffusion.errors import DataError
from diffusion.evaluation.prompts import write_listing
from tests.tools.image_files import noise, write_folder, write_tar
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
    folder.mkdir()
    pq.write_table(table(), folder / "a.parquet")


def write_arrow(folder: Path) -> None:
    folder.mkdir()
    with pa.ipc.new_file(folder / "a.arrow", table().schema) as writer:
        writer.write_table(table())


def write_mds(folder: Path) -> None:
    columns = {"image": "bytes", "text": "str", "recaption": "str"}
    with MDSWriter(out=str(folder), columns=columns) as writer:
        for row in table().to_pylist():
            writer.write({name: row[name] for name in columns})


WITH_FILE_NAMES = [write_jsonl, write_csv]
KINDS = [*WITH_FILE_NAMES, write_json_beside, write_tar_with_json, write_parquet, write_arrow, write_mds]


def captions_of(out: Path) -> dict[bytes, list[str]]:
    return {one["image"]: one["captions"] for listed in read_samples(out).values() for one in listed}


@pytest.mark.parametrize("write", KINDS)
def test_the_named_column_holds_the_captions(tmp_path, write):
    write(tmp_path / "source")
    prepare([tmp_path / "source"], tmp_path / "out", edges=[16], caption_column="recaption")
    assert captions_of(tmp_path / "out") == {noise(20, 20, i): [f"long {i}"] for i in range(NUM)}


@pytest.mark.parametrize("is_of_source", [False, True])
@pytest.mark.parametrize("column", ["caption_column", "image_column"])
@pytest.mark.parametrize("write", KINDS)
def test_a_column_that_is_nowhere(tmp_path, write, column, is_of_source):
    write(tmp_path / "source")
    source, settings = str(tmp_path / "source"), {column: "nosuchcolumn"}
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
