"""The numbers of a preparation's report, counted from the facts of its partitions.

The facts are parquet files with a row for each image: `key`, `source`, `split`, `bucket`, `width`, `height` (0 where
it could not be decoded), `bytes`, `reason` (empty if it was kept), `detail`, `caption_length`, and measures and scores
as columns of numbers or texts. They are read in batches, twice: ranges first, then the histograms.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from diffusion.errors import DataError
from diffusion.preparation.records import Reason

NUM_SHOWN = 12
"""Images of each bucket and of each reason on the page, and pairs of duplicates."""

NUM_BINS = 32
MAX_VALUES = 1000
"""A column of texts with more different ones is not counted."""

_COLUMNS = ("key", "source", "split", "bucket", "width", "height", "bytes", "reason", "detail", "caption_length")
_LOGARITHMIC = ("shorter_side", "aspect_ratio", "bytes")
_NOT_COUNTED = ("xxh128", "phash", "generated_captions", "index")
_DUPLICATES = (Reason.DUPLICATE.value, Reason.NEAR_DUPLICATE.value)
_BATCH_ROWS = 65536

OF = "of "
"""What the detail of a duplicate begins with; the key of the image that stands for it follows."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An image on the page."""

    key: str
    width: int
    height: int
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A duplicate and the image that stands for it."""

    key: str
    of: str
    reason: str


@dataclass(kw_only=True)
class Histogram:
    """Numbers of one column."""

    edges: list[float]
    """Ascending; the last bin holds its upper edge, too."""
    kept: list[int]
    refused: list[int]
    missing: int = 0
    """Images without a number."""
    logarithmic: bool = False


@dataclass(kw_only=True)
class Counts:
    """Images and bytes."""

    pictures: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class Report:
    """What is on the page; its fields are those of `report.json`."""

    kept: Counts = field(default_factory=Counts)
    refused: Counts = field(default_factory=Counts)
    reasons: dict[str, int] = field(default_factory=dict)
    """Refused images, the most frequent reason first."""
    sources: dict[str, dict[str, int]] = field(default_factory=dict)
    """For each source the images by reason; those that were kept by the empty text."""
    buckets: dict[str, Counts] = field(default_factory=dict)
    """Kept images by `<split>/<bucket>`."""
    histograms: dict[str, Histogram] = field(default_factory=dict)
    values: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """For each column of texts and each text the images `kept` and `refused`."""
    shown_kept: dict[str, list[Shown]] = field(default_factory=dict)
    """By `<split>/<bucket>`: those with the smallest hash of their key."""
    shown_refused: dict[str, list[Shown]] = field(default_factory=dict)
    """By reason, likewise."""
    duplicates: list[Pair] = field(default_factory=list)
    """Likewise."""


def summarize(facts: Sequence[Path], readable: Collection[str] | None = None) -> Report:
    """Count what is in the facts; the result does not depend on the order of the files.

    Args:
        facts: Parquet files.
        readable: Keys of the refused images that can be shown; None: all.

    Raises:
        DataError: A file is missing, damaged, or lacks a column.
    """
    tally = _Tally(readable)
    for batch in _batches(facts):
        tally.add(batch)
    report = tally.report()
    ranges = tally.ranges
    for name in sorted(ranges):
        report.histograms[name] = _empty_histogram(name, *ranges[name])
    total = report.kept.pictures + report.refused.pictures
    for batch in _batches(facts):
        is_kept = _texts(batch, "reason") == ""
        for name, numbers in _numbers(batch):
            _count(report.histograms[name], numbers, is_kept)
    for histogram in report.histograms.values():
        histogram.missing = total - sum(histogram.kept) - sum(histogram.refused)
    return report


class _Tally:
    """The first pass: everything but the histograms."""

    def __init__(self, readable: Collection[str] | None) -> None:
        self._readable = readable
        self._images: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[str] = Counter()
        self._buckets: dict[str, Counts] = {}
        self._values: dict[str, Counter[tuple[str, bool]]] = {}
        self._shown: dict[tuple[bool, str], list[tuple[int, str, Shown]]] = {}
        self._pairs: list[tuple[int, str, Pair]] = []
        self.ranges: dict[str, tuple[float, float]] = {}

    def add(self, batch: pa.Table) -> None:
        """Count a batch."""
        rows = {name: batch.column(name).to_pylist() for name in _COLUMNS}
        for i, (key, source, reason) in enumerate(zip(rows["key"], rows["source"], rows["reason"], strict=True)):
            num_bytes = rows["bytes"][i] or 0
            self._images[source, reason] += 1
            self._bytes[reason] += num_bytes
            group = reason
            if not reason:
                group = f"{rows['split'][i]}/{rows['bucket'][i]}"
                counts = self._buckets.setdefault(group, Counts())
                counts.pictures += 1
                counts.bytes += num_bytes
            rank = -xxhash.xxh3_64_intdigest(key)  # the heaps drop what is smallest
            if reason and self._readable is not None and key not in self._readable:
                continue
            detail = rows["detail"][i] or ""
            shown = Shown(key=key, width=rows["width"][i], height=rows["height"][i], detail=detail)
            _push(self._shown.setdefault((not reason, group), []), (rank, key, shown))
            if reason in _DUPLICATES:
                _push(self._pairs, (rank, key, Pair(key=key, of=detail.removeprefix(OF), reason=reason)))
        for name, numbers in _numbers(batch):
            found = numbers[np.isfinite(numbers)]
            if len(found):
                low, high = self.ranges.get(name, (np.inf, -np.inf))
                self.ranges[name] = min(low, float(found.min())), max(high, float(found.max()))
        self._count_texts(batch)

    def _count_texts(self, batch: pa.Table) -> None:
        is_kept = [not reason for reason in batch.column("reason").to_pylist()]
        for name in batch.column_names:
            if name in _COLUMNS or name in _NOT_COUNTED or not pa.types.is_string(batch.schema.field(name).type):
                continue
            counter = self._values.setdefault(name, Counter())
            if len(counter) <= 2 * MAX_VALUES:
                texts = batch.column(name).to_pylist()
                counter.update((text, kept) for text, kept in zip(texts, is_kept, strict=True) if text is not None)

    def report(self) -> Report:
        """Return the counts, sorted."""
        report = Report(buckets={name: self._buckets[name] for name in sorted(self._buckets, key=_bucket_order)})
        reasons: Counter[str] = Counter()
        for (source, reason), number in sorted(self._images.items()):
            report.sources.setdefault(source, {})[reason] = number
            reasons[reason] += number
        report.kept = Counts(pictures=reasons.pop("", 0), bytes=self._bytes.pop("", 0))
        report.refused = Counts(pictures=reasons.total(), bytes=self._bytes.total())
        report.reasons = dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
        for name in sorted(self._values):
            texts = {text for text, _ in self._values[name]}
            if len(texts) <= MAX_VALUES:
                counted = {text: (self._values[name][text, True], self._values[name][text, False]) for text in texts}
                report.values[name] = {
                    text: {"kept": counted[text][0], "refused": counted[text][1]}
                    for text in sorted(texts, key=lambda text: (-sum(counted[text]), text))
                }
        for (is_kept, group), found in self._shown.items():
            (report.shown_kept if is_kept else report.shown_refused)[group] = _sorted(found)
        report.shown_kept = {name: report.shown_kept[name] for name in report.buckets}
        report.shown_refused = {
            name: report.shown_refused[name] for name in report.reasons if name in report.shown_refused
        }
        report.duplicates = _sorted(self._pairs)
        return report


def _batches(facts: Sequence[Path]) -> Iterator[pa.Table]:
    """Read the facts, some rows at a time."""
    for path in facts:
        try:
            with pq.ParquetFile(path) as file:
                lacking = [name for name in _COLUMNS if name not in file.schema_arrow.names]
                if lacking:
                    raise DataError(f"{path} has no column {lacking[0]}; it is not a file of facts")
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {error}; prepare the data again") from error


def _numbers(batch: pa.Table) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield each column of numbers as float64, NaN where there is none."""
    width, height = (_floats(batch, name) for name in ("width", "height"))
    width[width <= 0] = np.nan
    height[height <= 0] = np.nan
    yield "shorter_side", np.minimum(width, height)
    yield "aspect_ratio", width / height
    captions = _floats(batch, "caption_length")
    captions[captions <= 0] = np.nan
    yield "caption_length", captions
    for name in batch.column_names:
        kind = batch.schema.field(name).type
        is_base = name in _COLUMNS and name != "bytes"
        if is_base or name in _NOT_COUNTED or name == "aspect_ratio":
            continue
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            numbers = _floats(batch, name)
            if name == "bytes":
                numbers[numbers <= 0] = np.nan
            yield name, numbers


def _floats(batch: pa.Table, name: str) -> NDArray[np.float64]:
    """A column of numbers, NaN where there is none."""
    numbers = pc.fill_null(pc.cast(batch.column(name), pa.float64()), np.nan).to_numpy()
    return np.where(np.isfinite(numbers), numbers, np.nan)


def _texts(batch: pa.Table, name: str) -> NDArray[Any]:
    return np.array(batch.column(name).to_pylist(), dtype=object)


def _empty_histogram(name: str, low: float, high: float) -> Histogram:
    """Choose the bins of a column."""
    logarithmic = name in _LOGARITHMIC
    if low == high:
        low, high = (low / 1.5, high * 1.5) if logarithmic else (low - 0.5, high + 0.5)
    edges = np.geomspace(low, high, NUM_BINS + 1) if logarithmic else np.linspace(low, high, NUM_BINS + 1)
    edges[0], edges[-1] = low, high
    return Histogram(edges=edges.tolist(), kept=[0] * NUM_BINS, refused=[0] * NUM_BINS, logarithmic=logarithmic)


def _count(histogram: Histogram, numbers: NDArray[np.float64], is_kept: NDArray[np.bool_]) -> None:
    """Add a batch to a histogram."""
    for counts, chosen in ((histogram.kept, is_kept), (histogram.refused, ~is_kept)):
        present = numbers[chosen & np.isfinite(numbers)]
        counts[:] = (np.array(counts) + np.histogram(present, histogram.edges)[0]).tolist()


def _push(heap: list[Any], entry: tuple[int, str, Any]) -> None:
    """Keep the entries with the smallest hashes."""
    if len(heap) < NUM_SHOWN:
        heapq.heappush(heap, entry)
    elif entry[:2] > heap[0][:2]:
        heapq.heapreplace(heap, entry)


def _sorted(heap: list[tuple[int, str, Any]]) -> list[Any]:
    return [entry for _, _, entry in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]


def _bucket_order(name: str) -> tuple[str, list[tuple[int, int | str]]]:
    """Sort `train/256-512` before `train/1024-up`: numbers by their value."""
    split, _, bucket = name.partition("/")
    parts = bucket.replace("x", "-").split("-")
    return split, [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
