"""Reading sources in tests."""

import json
import os
from typing import Any

from diffusion.preparation.records import Partition, Record, Rejected
from diffusion.preparation.sources import Source, from_description, open_sources


def open_source(path: Any, **options) -> Source:
    """Open one source."""
    entry = path if isinstance(path, dict) else os.fspath(path)
    (source,) = open_sources([entry], **options)
    return source


def partitions(source: Source, known: list[str] | tuple[str, ...] = ()) -> list[Partition]:
    """Return the new partitions of a source."""
    return list(source.partitions(known).checked().new)


def scan(source: Source) -> list[Any]:
    """Read a source that is made of its description, and check that `images` yields the same bytes."""
    described = json.loads(json.dumps(source.description()))
    assert from_description(described) == source
    items = []
    for partition in partitions(source):
        worker = from_description(described)
        found = list(worker.scan(partition))
        records = [item for item in found if isinstance(item, Record)]
        for some in filter(None, (records, records[1::3])):
            assert list(worker.images(partition, [one.location for one in some])) == [one.image for one in some]
        assert partition.num_records in (None, len(found))
        items += found
    return items


def read(path: Any, **options) -> list[Any]:
    """Open and read a source."""
    return scan(open_source(path, **options))


def reasons(items: list[Record | Rejected]) -> list[Any]:
    """Return the captions of records and the reasons of rejections."""
    return [item.reason.value if isinstance(item, Rejected) else item.captions for item in items]


def details(items: list[Record | Rejected]) -> list[str]:
    """Return the details of the rejections."""
    return [item.detail for item in items if isinstance(item, Rejected)]


def bare(items: list[Record | Rejected]) -> list[tuple[Any, ...]]:
    """Return what a source and a copy of it have in common: all but locations."""
    return [
        (item.key, item.image, item.captions, item.metadata)
        if isinstance(item, Record)
        else (item.key, item.reason, item.detail)
        for item in items
    ]


def write_known(path: Any, items: list[Record | Rejected]) -> list[str]:
    """Write metadata of a scan, as far as sources read them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "file": item.location.file,
            "version": item.location.version,
            "reason": item.reason.value if isinstance(item, Rejected) else "",
        }
        for item in items
    ]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([(name, pa.string()) for name in rows[0]])), path)
    return [os.fspath(path)]
