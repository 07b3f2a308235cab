"""Metadata of images that do not exist, as `scan` and `score` write them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from diffusion import storage
from diffusion.formats.data_set import METADATA, SCORES
from diffusion.preparation.layout import SCHEMA, part_name
from diffusion.preparation.records import Partition
from diffusion.preparation.scan import Scan


@dataclass(frozen=True)
class ToySource:
    """Partition `p` has the image files `p/0.png`, `p/1.png` ... below a folder."""

    folder: str
    name: str = "toy"
    kind: str = "toy"
    read: list[str] = field(default_factory=list, compare=False)

    def images(self, partition, locations):
        for location in locations:
            self.read.append(location.file)
            yield storage.read(str(Path(self.folder, location.file)))


def image(number: int, **given: Any) -> dict[str, Any]:
    """Metadata of an image that passes every filter, and looks like no other."""
    key = given.get("key", f"s/{number}")
    hashed = xxhash.xxh3_64_intdigest(key)
    row = {
        "key": key,
        "key_hash": hashed,
        "file": f"{number}.jpg",
        "version": "1",
        "bytes": 1000,
        "format": "jpeg",
        "width": 640,
        "height": 480,
        "xxh128": xxhash.xxh3_128_hexdigest(key),
        "phash": hashed ^ 2**64 - 1,
        "sharpness": 10.0,
        "captions": ["a red dog"],
        "metadata": {},
        "reason": "",
        "detail": "",
    } | given
    return row | {"metadata": json.dumps(row["metadata"])}


def write_part(out: str | Path, number: int, rows: Sequence[Mapping[str, Any]], **scores: Sequence[Any]) -> None:
    """Write the metadata of a partition, and scores by column."""
    path = Path(out, METADATA, part_name(number))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), path)
    for column, values in scores.items():
        path = Path(out, SCORES, column, part_name(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = pa.list_(pa.string()) if column == "captions" else None
        columns = {column: pa.array(values, kind)}
        if column == "captions":
            columns["generated_captions"] = pa.array([[0]] * len(rows), pa.list_(pa.int32()))
        pq.write_table(pa.table(columns), path)


def scan_of(*generations: int, sources: Sequence[int] | None = None) -> Scan:
    """A scan with partitions 0, 1, ... of some generations, and of some sources: s, s1, s2, ..."""
    of = sources or [0] * len(generations)
    named: list[Any] = [ToySource("", f"s{i or ''}") for i in range(max(of, default=0) + 1)]
    partitions = [
        Partition(number=i, source=source, generation=generation)
        for i, (generation, source) in enumerate(zip(generations, of, strict=True))
    ]
    return Scan(named, partitions)
