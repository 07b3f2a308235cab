"""What the work on one partition leaves: a folder that is there whole or not at all.

samples.bin: the samples that are kept as they will be in a shard, one after the other, in the order of the source.
index.npy: for each of them where it lies, and its place in the order of the data set.
facts.parquet: a row per image, kept or refused.
refused.parquet: the first refused images of each reason.
summary.json: counts.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diffusion.files import atomic_path, read_json, unique_partial, write_json
from diffusion.preparation.records import Refused, clean_text, fit_for_json, reason_text

SAMPLES, INDEX, FACTS, REFUSED, SUMMARY = "samples.bin", "index.npy", "facts.parquet", "refused.parquet", "summary.json"

INDEX_TYPE = np.dtype([("order", "<u8"), ("offset", "<u8"), ("size", "<u4"), ("place", "<u2")])
"""Of each kept sample: place in the shuffled order; where it begins in samples.bin; its bytes; number of its split and
bucket."""

NUM_EXAMPLES = 5
"""Refused images of each reason that the manifest names."""

NUM_REFUSED = 12
"""Refused images of each reason and partition that are kept to be looked at."""

MAX_REFUSED_BYTES = 4 * 2**20
"""Larger refused images are not kept."""

COLUMNS: dict[str, pa.DataType] = {
    "key": pa.string(),
    "source": pa.string(),
    "split": pa.string(),
    "bucket": pa.string(),
    "index": pa.int64(),
    "width": pa.int32(),
    "height": pa.int32(),
    "bytes": pa.int64(),
    "reason": pa.string(),
    "detail": pa.string(),
    "caption_length": pa.int32(),
}
"""Type of each column that the facts of all partitions have. `index` is the sample's number in its MDS folder, -1 for
refused images; `reason` is empty for those that are kept; `caption_length` is the mean number of characters. Measures
and scores are columns behind these."""

_BUFFER_BYTES = 2**20


@dataclass
class Facts:
    """What is known of one image; a row of facts.parquet."""

    key: str
    width: int = 0
    height: int = 0
    num_bytes: int = 0
    split: str = ""
    bucket: str = ""
    reason: str = ""
    detail: str = ""
    caption_length: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    """Measures and scores."""


@dataclass(frozen=True)
class Summary:
    """Counts of a partition.

    Attributes:
        seen: Images, kept and refused.
        kept: Images that are kept.
        refused: Number by reason.
        examples: Keys and details of the first few of each reason.
        content: Hash of all that the source yielded: keys, images, captions, metadata, refusals.
    """

    seen: int
    kept: int
    refused: dict[str, int]
    examples: dict[str, list[tuple[str, str]]]
    content: str


class PartitionWriter:
    """Writes the folder of a partition; use `writing_partition`.

    Memory holds the facts of the images, not the images.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self._folder = folder
        self._source = source
        self._samples = (folder / SAMPLES).open("wb", buffering=_BUFFER_BYTES)
        self._end = 0
        self._index: list[tuple[int, int, int, int]] = []
        self._facts: list[Facts] = []
        self._shown: list[tuple[str, str, bytes]] = []
        self._refused: Counter[str] = Counter()
        self._examples: dict[str, list[tuple[str, str]]] = {}

    def keep(self, facts: Facts, sample: bytes, *, order: int, place: int) -> None:
        """Append a sample.

        Args:
            facts: Its row.
            sample: Its bytes in a shard.
            order: Place in the shuffled order, 0 <= order < 2^64.
            place: Number of its split and bucket.

        Raises:
            OSError: The disk is full.
        """
        self._samples.write(sample)
        self._index.append((order, self._end, len(sample), place))
        self._end += len(sample)
        self._facts.append(facts)

    def refuse(self, refused: Refused, facts: Facts | None = None, image: bytes = b"") -> None:
        """Count a refused image.

        Args:
            refused: Why.
            facts: What is known of it.
            image: Its file, if there is one.
        """
        facts = facts or Facts(refused.key)
        facts.reason, facts.detail = reason_text(refused.reason), clean_text(refused.detail)
        self._facts.append(facts)
        self._refused[facts.reason] += 1
        examples = self._examples.setdefault(facts.reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append((facts.key, facts.detail))
        if 0 < len(image) <= MAX_REFUSED_BYTES and self._refused[facts.reason] <= NUM_REFUSED:
            self._shown.append((facts.key, facts.reason, image))

    def finish(self, content: str) -> Summary:
        """Write what is left.

        Args:
            content: Hash of what the source yielded.

        Raises:
            OSError: The disk is full.
        """
        self._samples.close()
        np.save(self._folder / INDEX, np.array(self._index, INDEX_TYPE))
        write_table(self._folder / FACTS, facts_table(self._facts, self._source))
        write_table(self._folder / REFUSED, refused_table(self._shown))
        summary = Summary(len(self._facts), len(self._index), dict(self._refused), self._examples, content)
        write_json(self._folder / SUMMARY, vars(summary))
        return summary

    def abandon(self) -> None:
        """Close the file after a failure, when what is buffered may not fit on the disk."""
        with contextlib.suppress(OSError):
            self._samples.close()


@contextmanager
def writing_partition(folder: Path, source: str) -> Iterator[PartitionWriter]:
    """Write a partition's folder, which gets its name when all of it is on the disk.

    Whoever comes second, after a worker that outlived the run that started it, drops its own: both are equal.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    with atomic_path(folder, partial=unique_partial(folder), exist_ok=False) as partial:
        partial.mkdir(parents=True)
        writer = PartitionWriter(partial, source)
        try:
            yield writer
        except BaseException:
            writer.abandon()
            raise


def read_summary(folder: Path) -> Summary:
    """Read the counts of a finished partition."""
    values = read_json(folder / SUMMARY)
    values["examples"] = {
        reason: [(key, detail) for key, detail in found] for reason, found in values["examples"].items()
    }
    return Summary(**values)


def read_samples(folder: Path, rows: NDArray[np.void]) -> Iterator[bytes]:
    """Yield the bytes of some samples of a partition, INDEX_TYPE [n], in that order."""
    with (folder / SAMPLES).open("rb") as file:
        for offset, size in zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True):
            file.seek(offset)
            yield file.read(size)


def facts_table(facts: Sequence[Facts], source: str) -> pa.Table:
    """Make a table of facts. Columns of measures and scores that hold no value have Arrow's null type."""
    columns: dict[str, pa.Array] = {}
    rows = {
        "key": [one.key for one in facts],
        "source": [source] * len(facts),
        "split": [one.split for one in facts],
        "bucket": [one.bucket for one in facts],
        "index": [-1] * len(facts),
        "width": [one.width for one in facts],
        "height": [one.height for one in facts],
        "bytes": [one.num_bytes for one in facts],
        "reason": [one.reason for one in facts],
        "detail": [one.detail for one in facts],
        "caption_length": [one.caption_length for one in facts],
    }
    for name, values in rows.items():
        columns[name] = pa.array(values, COLUMNS[name])
    for name in dict.fromkeys(name for one in facts for name in one.values):
        if name not in columns:
            columns[name] = _values_column([one.values.get(name) for one in facts])
    return pa.table(columns)


def refused_table(images: Sequence[tuple[str, str, bytes]]) -> pa.Table:
    """Make a table of refused images: key, reason, image."""
    kinds = {"key": pa.string(), "reason": pa.string(), "image": pa.binary()}
    return pa.table({name: pa.array([row[i] for row in images], kind) for i, (name, kind) in enumerate(kinds.items())})


def write_table(path: Path, table: pa.Table) -> None:
    """Write a parquet file.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    pq.write_table(table, path, compression="zstd")


def _values_column(values: list[Any]) -> pa.Array:
    """Return numbers as float64, anything else as text (JSON where it is neither)."""
    present = [value for value in values if value is not None]
    if not present:
        return pa.nulls(len(values))
    if all(isinstance(value, int | float) for value in present):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(fit_for_json(value)) for value in values]
    return pa.array(texts, pa.string())
