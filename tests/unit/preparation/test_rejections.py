"""Rejections in each kind of source: they are counted, and the report is written."""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion.errors import MachineError
from diffusion.preparation.config import DuplicatesConfig, FiltersConfig
from diffusion.preparation.sources.caption_tables import TABLES
from tests.tools.image_files import noise, write_mds, write_table, write_tar
from tests.tools.preparing import prepare, read_samples


class Sample(NamedTuple):
    """An image with its caption and metadata; None for what it lacks."""

    image: bytes | None
    caption: bytes | None = b"a caption"
    metadata: bytes | None = None


BAD = {
    "missing_caption": Sample(noise(40, 40, 1), None),
    "empty_caption": Sample(noise(40, 40, 2), b" "),
    "invalid_utf8": Sample(noise(40, 40, 3), b"caf\xe9"),
    "missing_image": Sample(None),
    "undecodable": Sample(b"no image"),
    "too_large": Sample(noise(40, 40, 4), b"x" * 2000),
    "too_small": Sample(noise(8, 8, 5)),
    "not_successful": Sample(noise(40, 40, 6), metadata=b'{"status": "failed_to_download"}'),
    "invalid_json": Sample(noise(40, 40, 7), metadata=b"{"),
    "duplicate": Sample(noise(40, 40, 0)),
    "aspect_ratio": Sample(noise(320, 40, 8)),
}
"""Images that are rejected, by the reason."""

SAMPLES = {"good": Sample(noise(40, 40, 0)), **BAD}


def write_files(folder: Path) -> set[str]:
    folder.mkdir()
    for name, (image, caption, metadata) in SAMPLES.items():
        for suffix, content in ((".png", image), (".txt", caption), (".json", metadata)):
            if content is not None:
                (folder / f"{name}{suffix}").write_bytes(content)
    (folder / "missing_image.tga").write_bytes(b"an extension that is not read")
    (folder / "unreadable.png").symlink_to(Path(__file__))
    return {*BAD, "unreadable"}


def write_table_beside(folder: Path) -> set[str]:
    folder.mkdir()
    lines = []
    for name, (image, caption, _) in SAMPLES.items():
        if image is not None:
            (folder / f"{name}.png").write_bytes(image)
        text = None if caption is None else caption.decode(errors="surrogateescape")
        lines.append(json.dumps({"file_name": f"{name}.png", "text": text}, ensure_ascii=False))
    (folder / "metadata.jsonl").write_text("\n".join(lines), errors="surrogateescape")
    return BAD.keys() - {"not_successful", "invalid_json"}


def write_tars(folder: Path) -> set[str]:
    folder.mkdir()
    members = []
    for name, (image, caption, metadata) in SAMPLES.items():
        for suffix, content in ((".png", image), (".txt", caption), (".json", metadata)):
            if content is not None:
                members.append((f"{name}{suffix}", content))
    twice = [("good.jpg", SAMPLES["good"].image), ("two.png", noise(40, 40, 9)), ("two.jpg", b"another")]
    write_tar(folder / "a.tar", [*members, *twice])
    (folder / "b.tar").write_bytes((folder / "a.tar").read_bytes()[:3000])
    return {*BAD, "damaged_file", "duplicate_key"}


def columns() -> tuple[dict, set[str]]:
    """Return the columns of a table, and the reasons that occur in it."""
    samples = {name: one for name, one in SAMPLES.items() if name != "invalid_json"}
    images = [{"bytes": one.image, "path": None} for one in samples.values()]
    captions = [one.caption for one in samples.values()]
    status = [json.loads(one.metadata or b"{}").get("status") for one in samples.values()]
    images.append({"bytes": None, "path": "../unreadable.png"})
    return {
        "image": images,
        "text": pa.array([*captions, b"a caption"]).cast(pa.string(), safe=False),
        "status": pa.array([*status, None], pa.string()),
    }, (BAD.keys() - {"invalid_json"}) | {"unreadable", "damaged_file"}


def write_parquets(folder: Path) -> set[str]:
    table, reasons = columns()
    write_table(folder / "a.parquet", table)
    (folder / "b.parquet").write_bytes(b"PAR1 damaged")
    return reasons


def write_arrows(folder: Path) -> set[str]:
    table, reasons = columns()
    write_table(folder / "a.arrow", table)
    (folder / "b.arrow").write_bytes(b"damaged")
    return reasons


def write_shards(folder: Path) -> set[str]:
    kept = {name: one for name, one in SAMPLES.items() if one.image and one.caption and one.metadata is None}
    samples = [one._asdict() for one in [*kept.values(), Sample(noise(100, 100))]]
    write_mds(folder, {"image": "bytes", "caption": "bytes"}, samples, size_limit=30_000)
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        shard["column_encodings"] = ["str", "bytes"]
    (folder / "index.json").write_text(json.dumps(index))
    os.truncate(folder / index["shards"][-1]["raw_data"]["basename"], 1)
    return (kept.keys() - {"good"}) | {"damaged_file"}


@pytest.mark.parametrize(
    "write", [write_files, write_table_beside, write_tars, write_parquets, write_arrows, write_shards]
)
def test_every_reason_is_counted_and_reported(tmp_path: Path, write: Callable[[Path], set[str]]):
    expected = write(tmp_path / "source")
    filters, duplicates = FiltersConfig(max_aspect_ratio=4), DuplicatesConfig(near=False)
    out = tmp_path / "out"
    manifest = prepare([tmp_path / "source"], out, edges=[16], filters=filters, duplicates=duplicates, report=True)
    report = json.loads((out / "report.json").read_text())
    assert set(report["reasons"]) == expected == set(report["shown_rejected"])
    assert manifest.seen == report["kept"]["images"] + report["rejected"]["images"]
    assert (out / "report.html").stat().st_size > 0


# Tables that name images of others


def write_licences(path: Path, files: list[str]) -> None:
    """Write a table that gives each file a caption and a licence."""
    rows = [{"file_name": file, "text": "stolen", "license": "CC0"} for file in files]
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        write_table(path, pa.Table.from_pylist(rows))


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "captions.csv", "table.parquet", "table.arrow"])
def test_a_table_names_images_of_its_own_folder_only(tmp_path: Path, name: str):
    root = tmp_path / "uploads"
    for number, (folder, file) in enumerate([("alice", "1.png"), ("mallory", "2.png"), ("mallory/sub", "3.png")]):
        (root / folder).mkdir(parents=True)
        (root / folder / file).write_bytes(noise(40, 40, number))
    (root / "alice" / "1.txt").write_text("a dog in the park")
    (root / "mallory" / "peer").symlink_to(root / "alice")
    (tmp_path / "secret.png").write_bytes(noise(40, 40, 9))
    others = ["../alice/1.png", "sub/../../alice/1.png", "../../secret.png", str(root / "alice" / "1.png")]
    others += [str(root / "mallory" / ".." / "alice" / "1.png"), "peer/1.png"]
    write_licences(root / "mallory" / name, ["2.png", "sub/../sub/3.png", *others])
    sources = [root if name in TABLES else root / "*" / name]
    manifest = prepare(sources, tmp_path / "out", edges=[16], report=True)
    samples = [one for listed in read_samples(tmp_path / "out").values() for one in listed]
    found = {one["image"]: (one["captions"], one["metadata"].get("license")) for one in samples}
    stolen = ["stolen"], "CC0"
    expected: dict[bytes, tuple[list[str], str | None]] = {noise(40, 40, 1): stolen, noise(40, 40, 2): stolen}
    if name in TABLES:
        expected[noise(40, 40, 0)] = ["a dog in the park"], None
    assert found == expected
    assert manifest.seen - manifest.kept == len(others)
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/") - page.count("data:image/svg") == len(expected), "thumbnails"


# Images in tars whose names have dots


@pytest.mark.parametrize(
    ("names", "captions", "reasons"),
    [
        (
            ["cat.jpg", "cat.txt", "cat.v2.jpg", "cat.v2.txt", "cat.v3.jpg", "cat.v3.txt", "dog.jpg", "dog.txt"],
            {"cat.jpg": "cat.txt", "cat.v2.jpg": "cat.v2.txt", "cat.v3.jpg": "cat.v3.txt", "dog.jpg": "dog.txt"},
            {},
        ),
        (["IMG.2023.01.JPG", "IMG.2023.01.TXT"], {"IMG.2023.01.JPG": "IMG.2023.01.TXT"}, {}),
        (["IMG.2023.jpg", "IMG.txt"], {"IMG.2023.jpg": "IMG.txt"}, {}),
        (["0.a.txt", "0.b.jpg", "0.c.jpg", "0.c.txt", "0.b.txt", "0.a.jpg"],
         {"0.a.jpg": "0.a.txt", "0.b.jpg": "0.b.txt", "0.c.jpg": "0.c.txt"}, {}),
        (["0.depth.png", "0.jpg", "0.seg.png", "0.txt"], {"0.jpg": "0.txt"}, {"duplicate_key": 2}),
        (["0.txt", "0.left.png", "0.right.png"], {"0.left.png": "0.txt"}, {"duplicate_key": 1}),
        (["0.txt", "0.jpg", "0.caption.txt"], {"0.jpg": "0.txt"}, {}),
        ([f"frame.{number:03}.jpg" for number in range(40)], {}, {"missing_caption": 40}),
        (["a.jpg", "a.txt", "b.jpg", "b.txt", "a.v2.png", "a.png"], {"a.jpg": "a.txt", "b.jpg": "b.txt"},
         {"duplicate_key": 2}),
    ],
)  # fmt: skip
def test_every_image_of_a_tar_is_kept_or_counted(tmp_path, names, captions, reasons):
    content = [(name, name.encode() if name.lower().endswith("txt") else noise(20, 20, name)) for name in names]
    content += [("zebra.jpg", noise(20, 20, 1)), ("zebra.txt", b"a zebra")]
    manifest = prepare([write_tar(tmp_path / "a.tar", content)], tmp_path / "out", edges=[16])
    samples = [one for listed in read_samples(tmp_path / "out").values() for one in listed]
    found = {one["image"]: one["captions"] for one in samples}
    assert found == {noise(20, 20, 1): ["a zebra"], **{noise(20, 20, name): [captions[name]] for name in captions}}
    rows = [row for path in (tmp_path / "out" / "metadata").iterdir() for row in pq.read_table(path).to_pylist()]
    assert Counter(row["reason"] for row in rows if row["reason"]) == reasons
    assert len({row["key"] for row in rows}) == manifest.seen


# Lack of memory


def fail(*args, **keys):
    raise pa.ArrowMemoryError("malloc of size 209715264 failed")


def open_without_memory(method: str):
    """Return a function that opens an Arrow file, a method of which lacks memory."""

    def open_file(source):
        reader = pa.ipc.RecordBatchFileReader(source)
        batch = Mock(validate=fail, num_rows=reader.get_batch(0).num_rows, schema=reader.schema)
        get_batch = fail if method == "get_batch" else lambda number: batch
        return Mock(schema=reader.schema, num_record_batches=reader.num_record_batches, get_batch=get_batch)

    return open_file


@pytest.mark.parametrize(
    ("suffix", "owner", "name", "replacement"),
    [
        ("parquet", pq.ParquetFile, "__init__", fail),
        ("parquet", pq.ParquetFile, "iter_batches", fail),
        ("arrow", pa.ipc, "open_file", fail),
        ("arrow", pa.ipc, "open_file", open_without_memory("get_batch")),
        ("arrow", pa.ipc, "open_file", open_without_memory("validate")),
    ],
)
def test_a_lack_of_memory_is_no_rejection(tmp_path, monkeypatch, suffix, owner, name, replacement):
    columns = {"image": [noise(20, 20, i) for i in range(3)], "text": ["a", "b", "c"]}
    path = write_table(tmp_path / "source" / f"table.{suffix}", columns)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, replacement)
        with pytest.raises(MachineError, match="memory"):
            prepare([path.parent], tmp_path / "out", edges=[16])
    manifest = prepare([path.parent], tmp_path / "out", edges=[16])
    assert (manifest.kept, manifest.seen) == (3, 3)
