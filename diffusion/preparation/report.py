"""The report of a preparation: what was kept and refused, as `report.json` and as a page.

It is counted from the facts of the partitions: parquet files with a row for each image. Their columns are `key`,
`source`, `split`, `bucket`, `width`, `height` (0 if undecodable), `bytes`, `reason` (empty if kept), `detail`,
`caption_length`, and measures and scores as numbers or texts. They are read in batches, twice: for counts and ranges,
then for histograms.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray
from PIL import Image

from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.errors import DataError
from diffusion.files import write_json
from diffusion.preparation.records import Reason
from diffusion.reports.figures import COLOURS, WIDTH, plain, subplots, svg_uri
from diffusion.reports.page import TEMPLATES, image_uri, write_page

logger = logging.getLogger(__name__)

PAGE, NUMBERS = "report.html", "report.json"

NUM_SHOWN = 12
"""Images of each bucket and of each reason on the page, and pairs of duplicates."""

NUM_BINS = 32
MAX_VALUES, VALUES_SHOWN = 1000, 20
"""Different texts that a column may have to be counted, and rows of its table."""

THUMBNAIL = 128
"""Longer side of an image on the page, in pixels."""

OF = "of "
"""Prefix of the detail of a duplicate; the key of the image that it duplicates follows."""

_COLUMNS = ("key", "source", "split", "bucket", "width", "height", "bytes", "reason", "detail", "caption_length")
_LOGARITHMIC = ("shorter_side", "aspect_ratio", "bytes")
_NOT_COUNTED = ("xxh128", "phash", "generated_captions", "index", "aspect_ratio")
_DUPLICATES = (Reason.DUPLICATE.value, Reason.NEAR_DUPLICATE.value)
_BATCH_ROWS = 65536
_TITLES = {"shorter_side": "shorter side (px)", "aspect_ratio": "width / height", "bytes": "bytes of the file",
           "caption_length": "characters of the caption (mean)"}  # fmt: skip

ReadImage = Callable[[str], bytes | None]
"""Content of the image of a key; None if it is gone."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """An image on the page."""

    key: str
    width: int
    height: int
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A duplicate and the image that it duplicates."""

    key: str
    of: str
    reason: str


@dataclass(kw_only=True)
class Histogram:
    """Numbers of one column."""

    edges: list[float]
    """Ascending; the last bin includes its upper edge."""

    kept: list[int]
    refused: list[int]
    missing: int = 0
    """Images without a number."""

    logarithmic: bool = False


@dataclass(kw_only=True)
class Counts:
    """Images and bytes."""

    images: int = 0
    bytes: int = 0


@dataclass(kw_only=True)
class Report:
    """The content of `report.json`."""

    kept: Counts
    refused: Counts
    reasons: dict[str, int]
    """Refused images, the most frequent reason first."""

    sources: dict[str, dict[str, int]]
    """Images by source and reason; the reason of kept images is empty."""

    buckets: dict[str, Counts]
    """Kept images by `<split>/<bucket>`."""

    histograms: dict[str, Histogram] = field(default_factory=dict)
    values: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """By column of texts and text: images `kept` and `refused`."""

    shown_kept: dict[str, list[Shown]] = field(default_factory=dict)
    """By `<split>/<bucket>`: the images with the smallest hashes of their keys."""

    shown_refused: dict[str, list[Shown]] = field(default_factory=dict)
    """By reason, likewise."""

    duplicates: list[Pair] = field(default_factory=list)
    """Likewise."""


def write_report(
    folder: Path,
    facts: Sequence[Path],
    read_image: ReadImage,
    *,
    readable: Collection[str] | None = None,
    title: str = "Prepared data",
) -> Report:
    """Write `report.html` and `report.json`.

    Args:
        folder: receives them.
        facts: parquet files.
        read_image: reads an image by its key.
        readable: keys of the refused images that can be read, which alone are shown; None: all.
        title: heading of the page.

    Raises:
        DataError: a file of facts is missing, damaged, or lacks a column.
        OSError: the disk is full, or the folder is not writable.
    """
    report = summarize(facts, readable)
    write_json(folder / NUMBERS, asdict(report))
    write_page(folder / PAGE, TEMPLATES / "preparation.html", {"title": title, **page_values(report, read_image)})
    logger.info("wrote %s and %s", folder / PAGE, NUMBERS)
    return report


def summarize(facts: Sequence[Path], readable: Collection[str] | None = None) -> Report:
    """Count facts; the result does not depend on the order of the files.

    Args:
        facts: parquet files.
        readable: keys of the refused images that can be shown; None: all.

    Raises:
        DataError: a file is missing, damaged, or lacks a column.
    """
    counts, samples, pairs = pd.DataFrame(), pd.DataFrame(), pd.DataFrame()
    texts: dict[str, pd.Series] = {}
    ranges: dict[str, tuple[float, float]] = {}
    for batch in _batches(facts):
        batch["hash"] = [xxhash.xxh3_64_intdigest(key) for key in batch["key"]]
        batch["bucket"] = (batch["split"] + "/" + batch["bucket"]).where(batch["reason"] == "", "")
        of_batch = batch.groupby(["source", "reason", "bucket"])["bytes"].agg(images="size", bytes="sum")
        counts = counts.add(of_batch, fill_value=0) if len(counts) else of_batch
        candidates = batch if readable is None else batch[(batch["reason"] == "") | batch["key"].isin(readable)]
        samples = _smallest_hashes([samples, candidates], ["reason", "bucket"])
        pairs = _smallest_hashes([pairs, candidates[candidates["reason"].isin(_DUPLICATES)]], [])
        _count_texts(batch, texts)
        for name, numbers in _numbers(batch):
            if len(found := numbers[np.isfinite(numbers)]):
                low, high = ranges.get(name, (np.inf, -np.inf))
                ranges[name] = min(low, float(found.min())), max(high, float(found.max()))
    report = _counted(pd.DataFrame(counts))
    _add_values(report, texts)
    _add_samples(report, samples, pairs)
    _add_histograms(report, facts, ranges)
    return report


def _batches(facts: Sequence[Path]) -> Iterator[pd.DataFrame]:
    """Read facts, some rows at a time."""
    for path in facts:
        try:
            with pq.ParquetFile(path) as file:
                lacking = [name for name in _COLUMNS if name not in file.schema_arrow.names]
                if lacking:
                    raise DataError(f"{path} has no column {lacking[0]}; it is not a file of facts")
                for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                    frame = batch.to_pandas()
                    frame["bytes"] = frame["bytes"].fillna(0).astype(np.int64)
                    frame["detail"] = frame["detail"].fillna("")
                    yield frame
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {error}; prepare the data again") from error


def _smallest_hashes(frames: Sequence[pd.DataFrame], groups: list[str]) -> pd.DataFrame:
    """The rows with the smallest hashes of their keys, of each group."""
    columns = ["key", "width", "height", "detail", "reason", "bucket", "hash"]
    rows = pd.concat([frame[columns] for frame in frames if len(frame)] or [pd.DataFrame(columns=columns)])
    rows = rows.sort_values(["hash", "key"])
    return rows.groupby(groups).head(NUM_SHOWN) if groups else rows.head(NUM_SHOWN)


def _count_texts(batch: pd.DataFrame, texts: dict[str, pd.Series]) -> None:
    """Add images by text and `is_kept` to the counts of each column of texts."""
    is_kept = (batch["reason"] == "").rename("is_kept")
    for name in batch.columns.difference([*_COLUMNS, *_NOT_COUNTED]):
        if pd.api.types.infer_dtype(batch[name], skipna=True) != "string":
            continue
        counted = texts.get(name, pd.Series(dtype=np.int64))
        if len(counted) <= 2 * MAX_VALUES:
            of_batch = batch.groupby([batch[name].rename("text"), is_kept]).size()
            texts[name] = counted.add(of_batch, fill_value=0) if len(counted) else of_batch


def _counted(counts: pd.DataFrame) -> Report:
    """A report of counts: images and bytes by source, reason and bucket."""
    if not len(counts):
        return Report(kept=Counts(), refused=Counts(), reasons={}, sources={}, buckets={})
    counts = counts.astype(np.int64)
    by_reason = counts["images"].groupby("reason").sum()
    by_source = counts["images"].groupby(["source", "reason"]).sum().reset_index()
    is_kept = counts.index.get_level_values("reason") == ""
    by_bucket = counts[is_kept].groupby("bucket").sum()
    refused = by_reason.drop("", errors="ignore")
    sources: dict[str, dict[str, int]] = {}
    for row in by_source.to_dict("records"):
        sources.setdefault(row["source"], {})[row["reason"]] = int(row["images"])
    return Report(
        kept=_sum(counts[is_kept]),
        refused=_sum(counts[~is_kept]),
        reasons={reason: int(refused[reason]) for reason in sorted(refused.index, key=lambda r: (-refused[r], r))},
        sources=sources,
        buckets={name: _sum(by_bucket.loc[[name]]) for name in sorted(by_bucket.index, key=_bucket_order)},
    )


def _sum(counts: pd.DataFrame) -> Counts:
    return Counts(images=int(counts["images"].sum()), bytes=int(counts["bytes"].sum()))


def _bucket_order(name: str) -> tuple[str, list[tuple[int, int | str]]]:
    """Sort `train/256-512` before `train/1024-up`: numbers by their value."""
    split, _, bucket = name.partition("/")
    parts = bucket.replace("x", "-").split("-")
    return split, [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _add_values(report: Report, texts: dict[str, pd.Series]) -> None:
    for name in sorted(texts):
        table = texts[name].unstack(fill_value=0).reindex(columns=[True, False], fill_value=0).astype(np.int64)
        if len(table) > MAX_VALUES:
            continue
        rows = [(str(text), counts[True], counts[False]) for text, counts in table.to_dict("index").items()]
        rows.sort(key=lambda row: (-row[1] - row[2], row[0]))
        report.values[name] = {text: {"kept": kept, "refused": refused} for text, kept, refused in rows}


def _add_samples(report: Report, samples: pd.DataFrame, pairs: pd.DataFrame) -> None:
    def shown(rows: pd.DataFrame) -> list[Shown]:
        return [
            Shown(key=row["key"], width=int(row["width"]), height=int(row["height"]), detail=row["detail"])
            for row in rows.to_dict("records")
        ]

    if not len(samples):
        return
    report.shown_kept = {name: shown(samples[samples["bucket"] == name]) for name in report.buckets}
    by_reason = {reason: shown(samples[samples["reason"] == reason]) for reason in report.reasons}
    report.shown_refused = {reason: rows for reason, rows in by_reason.items() if rows}
    report.duplicates = [
        Pair(key=row["key"], of=row["detail"].removeprefix(OF), reason=row["reason"])
        for row in pairs.to_dict("records")
    ]


def _add_histograms(report: Report, facts: Sequence[Path], ranges: dict[str, tuple[float, float]]) -> None:
    """Choose the bins of each column and count, in a second pass over the facts."""
    report.histograms = {name: _empty_histogram(name, *ranges[name]) for name in sorted(ranges)}
    for batch in _batches(facts):
        is_kept = (batch["reason"] == "").to_numpy()
        for name, numbers in _numbers(batch):
            if (histogram := report.histograms.get(name)) is None:
                continue
            for counts, chosen in ((histogram.kept, is_kept), (histogram.refused, ~is_kept)):
                present = numbers[chosen & np.isfinite(numbers)]
                counts[:] = (np.array(counts) + np.histogram(present, histogram.edges)[0]).tolist()
    total = report.kept.images + report.refused.images
    for histogram in report.histograms.values():
        histogram.missing = total - sum(histogram.kept) - sum(histogram.refused)


def _numbers(batch: pd.DataFrame) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield each column of numbers, NaN where there is none."""
    sizes = batch[["width", "height", "caption_length", "bytes"]].astype(np.float64)
    sizes = sizes.where(sizes > 0)
    yield "shorter_side", sizes[["width", "height"]].min(axis=1, skipna=False).to_numpy()
    yield "aspect_ratio", (sizes["width"] / sizes["height"]).to_numpy()
    yield "caption_length", sizes["caption_length"].to_numpy()
    yield "bytes", sizes["bytes"].to_numpy()
    for name in batch.select_dtypes("number").columns.difference([*_COLUMNS, *_NOT_COUNTED, "hash"]):
        numbers = np.asarray(batch[name], np.float64)
        yield name, np.where(np.isfinite(numbers), numbers, np.nan)


def _empty_histogram(name: str, low: float, high: float) -> Histogram:
    logarithmic = name in _LOGARITHMIC
    if low == high:
        low, high = (low / 1.5, high * 1.5) if logarithmic else (low - 0.5, high + 0.5)
    edges = np.geomspace(low, high, NUM_BINS + 1) if logarithmic else np.linspace(low, high, NUM_BINS + 1)
    edges[0], edges[-1] = low, high
    return Histogram(edges=edges.tolist(), kept=[0] * NUM_BINS, refused=[0] * NUM_BINS, logarithmic=logarithmic)


def page_values(report: Report, read_image: ReadImage) -> dict[str, Any]:
    """Values of the template `preparation.html`."""
    seen = report.kept.images + report.refused.images
    buckets = [(name, f"{counts.images:,}", _size(counts.bytes)) for name, counts in report.buckets.items()]
    reasons = [(reason, f"{number:,}", _share(number, seen)) for reason, number in report.reasons.items()]
    sources = [
        (source, *(f"{counts.get(reason, 0):,}" for reason in ("", *report.reasons)))
        for source, counts in report.sources.items()
    ]
    return {
        "facts": [
            ("Kept", f"{report.kept.images:,}", f"{_share(report.kept.images, seen)} of {seen:,} images"),
            ("Refused", f"{report.refused.images:,}", f"{_share(report.refused.images, seen)} of the images"),
            ("Bytes kept", _size(report.kept.bytes), f"of {_size(report.kept.bytes + report.refused.bytes)}"),
        ],
        "buckets": pd.DataFrame(buckets, columns=["split / bucket", "images", "bytes"]),
        "reasons": pd.DataFrame(reasons, columns=["reason", "images", "share of all"]),
        "sources": pd.DataFrame(sources, columns=["source", "kept", *report.reasons]),
        "histograms": histograms_figure(report.histograms) if report.histograms else None,
        "values": {name: _values_table(name, texts) for name, texts in report.values.items()},
        "galleries": {
            "Kept images": {name: _gallery(shown, read_image) for name, shown in report.shown_kept.items()},
            "Refused images": {name: _gallery(shown, read_image) for name, shown in report.shown_refused.items()},
        },
        "pairs": [
            (pair, thumbnail(read_image(pair.key)), thumbnail(read_image(pair.of))) for pair in report.duplicates
        ],
    }


def _values_table(name: str, texts: dict[str, dict[str, int]]) -> pd.DataFrame:
    rows = [(text, f"{number['kept']:,}", f"{number['refused']:,}") for text, number in texts.items()]
    if len(rows) > VALUES_SHOWN:
        rows = [*rows[:VALUES_SHOWN], (f"and {len(rows) - VALUES_SHOWN} others", "", "")]
    return pd.DataFrame(rows, columns=[name, "kept", "refused"])


def _gallery(shown: Sequence[Shown], read_image: ReadImage) -> list[tuple[Shown, str | None]]:
    return [(one, thumbnail(read_image(one.key))) for one in shown]


def thumbnail(content: bytes | None) -> str | None:
    """Small image as a data URI; None where there is none or it cannot be decoded."""
    if content is None:
        return None
    try:
        image = decode_rgb(content)
    except UndecodableImageError:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return image_uri(image, jpeg_quality=88)


def histograms_figure(columns: dict[str, Histogram]) -> str:
    """Draw histograms, three in a row."""
    num_rows = math.ceil(len(columns) / 3)
    figure, all_axes = subplots(num_rows, 3, width=WIDTH, height=2.2 * num_rows)
    every: list[Axes] = np.ravel(all_axes).tolist()
    for axes, (name, histogram) in zip(every, columns.items(), strict=False):
        starts, widths = histogram.edges[:-1], np.diff(histogram.edges)
        axes.bar(starts, histogram.kept, widths, align="edge", color=COLOURS[0])
        axes.bar(starts, histogram.refused, widths, align="edge", bottom=histogram.kept, color=COLOURS[1])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if histogram.logarithmic:
            axes.set_xscale("log")
            is_wide = histogram.edges[-1] > 20 * histogram.edges[0]
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6) if is_wide else MaxNLocator(4))
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        missing = f" ({histogram.missing:,} without)" if histogram.missing else ""
        axes.set_title(plain(_TITLES.get(name, name) + missing), fontsize=9.5)
    for axes in every[len(columns) :]:
        axes.set_axis_off()
    return svg_uri(figure)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
