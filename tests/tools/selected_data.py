"""Data sets as `scan`, `score` and `select` leave them, of a few numbered images: what `write` begins with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from diffusion import storage
from diffusion.errors import DataError
from diffusion.formats.data_set import METADATA, SCAN, SCORES, SELECTION, PreparedManifest
from diffusion.preparation.engine import Workers
from diffusion.preparation.layout import CAPTIONS, SCHEMA, part_name, write_table
from diffusion.preparation.records import Location, Partition
from diffusion.preparation.scan import Scan
from diffusion.preparation.write import write
from tests.tools.image_files import noise
from tests.tools.metadata_parts import image

KEPT = pa.schema(
    {
        "task": pa.int32(),
        "window": pa.int32(),
        "part": pa.int32(),
        "row": pa.int32(),
        "split": pa.string(),
        "bucket": pa.string(),
        "order": pa.uint64(),
    }
)
REJECTED = pa.schema(
    {"part": pa.int32(), "row": pa.int32(), "reason": pa.string(), "of_part": pa.int32(), "of_row": pa.int32()}
)

SETTINGS: dict[str, Any] = {
    "shard_mb": 12_000 / 2**20,
    "window_mb": 30_000 / 2**20,
    "compression": None,
    "hashes": ["xxh64"],
    "captioner": None,
    "scorers": [],
    "seed": 17,
}


@dataclass(frozen=True)
class NumberedSource:
    """Images `0003.png` of a folder."""

    path: str
    name: str = "set"
    kind: str = "folder"

    def description(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "path": self.path}

    def images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        for location in locations:
            path = Path(self.path, location.file)
            if not path.exists():
                raise DataError(f"{path} is not there any more")
            yield path.read_bytes()


@dataclass
class SelectedData:
    """A data set's folder, and what its parts are made of."""

    out: str
    source: Any
    tasks: list[list[list[list[int]]]]
    """Tasks of each generation: windows of partitions."""
    images: list[list[int]]
    """Numbers of the images of each partition."""
    generation_of: list[int]

    def write(self, *, workers: int = 1, scratch: str | None = None, **changes: Any) -> PreparedManifest:
        settings = SETTINGS | changes
        partitions = storage.read_json(storage.join(self.out, SCAN))["partitions"]
        scan = Scan([self.source], [Partition(**entry) for entry in partitions])
        return write(self.out, scan, settings, Workers(number=workers), scratch=scratch)

    def key(self, number: int) -> str:
        return f"{self.source.name}/{number:04}.png"


def make_images(folder: Path, numbers: Sequence[int]) -> NumberedSource:
    """Write noise of about 2,500 bytes, every third image higher than wide."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        size = (24, 32) if number % 3 == 0 else (32, 24)
        (folder / f"{number:04}.png").write_bytes(noise(*size, number))
    return NumberedSource(str(folder))


def select_images(
    out: str,
    source: NumberedSource,
    sizes: Sequence[int],
    *,
    tasks: list[list[list[int]]] | None = None,
    rejected: Sequence[int] = (),
    original: int = 0,
    identity: str = "a",
    before: SelectedData | None = None,
    scored: bool = False,
) -> SelectedData:
    """Write metadata, `scan.json` and a selection for partitions of some sizes, as a generation of its own.

    Args:
        out: the data set.
        source: the source; images are numbered on over the partitions.
        sizes: images of each partition.
        tasks: windows of partitions of each task; None: two partitions a window, two windows a task.
        rejected: numbers of images that are rejected as `duplicate`, of the image `original`.
        original: number of an image.
        identity: of the selection.
        before: the generations before.
        scored: with a scorer's column `score` and captions of a captioner.
    """
    data = before or SelectedData(out, source, [], [], [])
    first_part, generation = len(data.images), len(data.tasks)
    first = sum(map(len, data.images))
    for size in sizes:
        data.images.append(list(range(first, first + size)))
        data.generation_of.append(generation)
        first += size
    parts = list(range(first_part, len(data.images)))
    if tasks is None:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        tasks = [pairs[i : i + 2] for i in range(0, len(pairs), 2)]
    data.tasks.append(tasks)
    kept_rows, rejected_rows = [], []
    [(of_part, of_row)] = [(i, one.index(original)) for i, one in enumerate(data.images) if original in one]
    for part in parts:
        rows = [_metadata(data, number) for number in data.images[part]]
        write_table(storage.join(out, METADATA, part_name(part)), pa.Table.from_pylist(rows, SCHEMA))
        if scored:
            _write_scores(out, part, data.images[part])
        rejected_rows += [
            {"part": part, "row": row, "reason": "duplicate", "of_part": of_part, "of_row": of_row}
            for row, number in enumerate(data.images[part])
            if number in rejected
        ]
    first_task = sum(map(len, data.tasks[:-1]))
    for task, windows in enumerate(tasks, start=first_task):
        for window, listed in enumerate(windows):
            for part in sorted(listed):
                kept_rows += [
                    {"task": task, "window": window, "part": part, "row": row, **_place(number)}
                    for row, number in enumerate(data.images[part])
                    if number not in rejected
                ]
    folder = storage.join(out, SELECTION)
    write_table(storage.join(folder, f"{generation}-kept.parquet"), pa.Table.from_pylist(kept_rows, KEPT))
    write_table(storage.join(folder, f"{generation}-rejected.parquet"), pa.Table.from_pylist(rejected_rows, REJECTED))
    seen, kept = sum(sizes), len(kept_rows)
    reasons = {"": kept} | ({"duplicate": seen - kept} if seen > kept else {})
    selection = {
        "generation": generation,
        "identity": identity,
        "settings": {},
        "sources": {source.name: reasons},
        "places": {},
        "first_task": first_task,
        "tasks": tasks,
        "examples": {"duplicate": [_example(data, **row) for row in rejected_rows]} if rejected_rows else {},
    }
    storage.write_json(storage.join(folder, f"{generation}.json"), selection)
    partitions = [
        Partition(number=part, num_records=len(numbers), generation=data.generation_of[part])
        for part, numbers in enumerate(data.images)
    ]
    Scan([data.source], partitions).write(out)
    return data


def _example(data: SelectedData, part: int, row: int, of_part: int, of_row: int, **_: str) -> dict[str, Any]:
    key, original = data.key(data.images[part][row]), data.key(data.images[of_part][of_row])
    place = {"part": part, "row": row, "of_part": of_part, "of_row": of_row}
    return place | {"key": key, "width": 32, "height": 24, "detail": f"of {original}"}


def _metadata(data: SelectedData, number: int) -> dict[str, Any]:
    content = Path(data.source.path, f"{number:04}.png").read_bytes()
    width, height = (24, 32) if number % 3 == 0 else (32, 24)
    measured = {"bytes": len(content), "width": width, "height": height, "xxh128": xxhash.xxh3_128_hexdigest(content)}
    file, captions = f"{number:04}.png", [f"caption of {number}"]
    return image(number, key=data.key(number), file=file, captions=captions, metadata={"number": number}, **measured)


def _place(number: int) -> dict[str, Any]:
    order = xxhash.xxh3_64_intdigest(f"order {number}")
    split = "validation" if number % 7 == 0 else "train"
    return {"split": split, "bucket": "32x24" if number % 3 == 0 else "24x32", "order": order}


def _write_scores(out: str, part: int, numbers: Sequence[int]) -> None:
    scores = pa.table({"score": pa.array([float(number) for number in numbers])})
    write_table(storage.join(out, SCORES, "score", part_name(part)), scores)
    captions = {
        "captions": [[f"caption of {number}", f"generated for {number}"] for number in numbers],
        "generated_captions": [[1] for _ in numbers],
    }
    write_table(storage.join(out, SCORES, CAPTIONS, part_name(part)), pa.table(captions))
