"""Report of a preparation: what was kept and rejected, as `report.json` and as a page.

All numbers are queries (DuckDB), however many images there are: metadata, scores and selection are joined some parts at
a time into one table of a temporary database, about 60 bytes for an image. Thumbnails are read where the images lie;
an image that is gone has none. Removed images are counted, and never shown.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import xxhash
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from diffusion import storage
from diffusion.config.fields import size_text
from diffusion.datasets.images import UndecodableImageError, decode_reduced
from diffusion.errors import DataError, MachineError
from diffusion.formats.data_set import REPORT_NUMBERS, REPORT_PAGE, SCORES, SELECTION, folder_order
from diffusion.preparation.chat_captions import COUNTS
from diffusion.preparation.layout import CAPTIONS, LOCATION
from diffusion.preparation.metadata import (
    MetadataDatabase,
    add_table,
    groups,
    identifier,
    literal,
    open_database,
    read_files,
)
from diffusion.preparation.records import Location, Reason
from diffusion.preparation.scan import Scan
from diffusion.preparation.select import Selection, read_selection
from diffusion.reports.figures import COLOURS, WIDTH, plain, subplots, svg_uri
from diffusion.reports.page import TEMPLATES, image_uri, render_page

if TYPE_CHECKING:
    import duckdb

logger = logging.getLogger(__name__)


NUM_SHOWN = 12
"""Images of each bucket and of each reason on the page."""

MAX_CAPTION = 120
"""Letters of an image's first caption."""

NUM_BINS = 32
MAX_VALUES, VALUES_SHOWN = 1000, 20
"""Different texts of a column that is counted, and rows of its table."""

THUMBNAIL = 128
"""Longer side of an image on the page, in pixels."""

_PARTS_PER_QUERY = 512
_NUMBERS = {  # SQL by column
    "shorter_side": "least(width, height)",
    "aspect_ratio": "aspect_ratio",
    "bytes": "bytes",
    "sharpness": "sharpness",
    "caption_length": "list_avg(list_transform(captions, lambda caption: length(caption)))",
}
_WORDS = {
    "shorter_side": "shorter side, px",
    "aspect_ratio": "width / height",
    "caption_length": "characters of captions",
}
_LOGARITHMIC = ("shorter_side", "aspect_ratio", "bytes")
_REMOVED = literal(Reason.REMOVED.value)

_SHOWN = ("key", "width", "height", "caption", "detail")

Row = dict[str, Any]


def write_report(out: str, scan: Scan, *, scratch: str | None = None) -> dict[str, Any]:
    """Write `report.html` and `report.json` of a data set (path or s3://), or renew them.

    Returns:
        The content of `report.json`. `kept`, `rejected`: images and bytes. `reasons`: images by reason, the most
        frequent first. `sources`: images by source and reason, which is empty for kept images. `buckets`: images and
        bytes by `SPLIT/BUCKET`. `histograms`: by column edges (a bin includes its upper edge), kept and rejected images
        by bin, and images without a number. `values`: by column and text, kept and rejected images. `shown_kept`: by
        bucket, the images with the smallest hashes of their keys. `shown_rejected`: by reason, the first images.
        `duplicates`: those of them that were rejected as such, and the images that they duplicate. `captions`: null, or
        what a server answered: images by outcome, numbers, dollars, captions of several images, examples by outcome.

    Raises:
        DataError: it was not selected, or metadata are missing or damaged.
        MachineError: the store cannot be read or written.
    """
    names = storage.list_files(storage.join(out, SELECTION))
    numbers = sorted(int(Path(name).stem) for name in names if name.endswith(".json"))
    if not numbers:
        raise DataError(f"{storage.shown(out)}: nothing was selected; run the stage select first")
    selections = [read_selection(out, number) for number in numbers]
    with open_database(out, scan, scratch=scratch) as database:
        numbers, texts = _load(out, database, selections)
        report = _count(database.connection)
        report["histograms"] = _histograms(database.connection, numbers)
        report["values"] = {name: found for name in texts if (found := _values(database.connection, name))}
        shown, pairs = _find_examples(database, selections)
        report["captions"], captioned = _read_answers(database)
    for name, order in (("kept", report["buckets"]), ("rejected", report["reasons"])):
        report[f"shown_{name}"] = {
            group: [{name: row[name] for name in _SHOWN} for row in shown[group]] for group in order if group in shown
        }
    report["duplicates"] = [{"key": row["key"], "of": of["key"], "reason": reason} for reason, row, of in pairs]
    rows = [row for group in [*shown.values(), captioned] for row in group]
    rows += [row for _, *pair in pairs for row in pair]
    values = {
        "title": f"Prepared data: {storage.shown(out).rstrip('/').rpartition('/')[2]}",
        "report": report,
        "facts": _facts(report),
        "tables": _tables(report),
        "histograms": _histograms_figure(report["histograms"]) if report["histograms"] else None,
        "thumbnails": _read_thumbnails(scan, rows),
    }
    storage.write_json(storage.join(out, REPORT_NUMBERS), report)
    storage.write(storage.join(out, REPORT_PAGE), render_page(TEMPLATES / "preparation.html", values).encode())
    logger.info("wrote %s and %s", storage.join(out, REPORT_PAGE), REPORT_NUMBERS)
    return report


# Numbers


def _load(out: str, database: MetadataDatabase, selections: Sequence[Selection]) -> tuple[list[str], list[str]]:
    """Make the table `rows` of all images; return its columns of numbers and of texts."""
    connection = database.connection
    parts = sorted(part for one in selections for part in database.parts(one.generation))
    kept, rejected = (
        read_files(out, [f"{SELECTION}/{one.generation}-{kind}.parquet" for one in selections], database.folder)
        for kind in ("kept", "rejected")
    )
    # Sorted, since the files are in the order of write tasks: each query below would read all of them.
    connection.execute(f"""CREATE TABLE decided AS
        SELECT part, "row" AS row_number, '' AS reason, split || '/' || bucket AS place
            FROM {kept} UNION ALL SELECT part, "row", reason, '' FROM {rejected} ORDER BY part""")
    types = {name: kind for name, kind, *_ in connection.execute(f"DESCRIBE {database.images(parts)}").fetchall()}
    scores = [name for name in database.scores if name != CAPTIONS]
    texts = ["format", *(name for name in scores if types[name] == "VARCHAR")]
    numbers = _NUMBERS | {name: identifier(name) for name in scores if name not in texts}
    finite = [f"if(isfinite(({sql})::DOUBLE), ({sql})::DOUBLE, NULL) AS {identifier(name)}"
              for name, sql in numbers.items()]  # fmt: skip
    for some in groups(parts, _PARTS_PER_QUERY):
        # A row that the selection does not know any more was removed.
        connection.execute(f"""{"CREATE TABLE rows AS" if some[0] == parts[0] else "INSERT INTO rows"}
            SELECT images.part, images.row_number, key_hash, source, coalesce(bytes, 0) AS num_bytes,
                if(images.reason = {_REMOVED}, {_REMOVED}, coalesce(decided.reason, {_REMOVED})) AS reason,
                coalesce(place, '') AS place, {", ".join([*finite, *map(identifier, texts)])}
            FROM {database.images(some)} images
            LEFT JOIN (FROM decided WHERE part BETWEEN {some[0]} AND {some[-1]}) decided USING (part, row_number)""")
    return sorted(numbers), sorted(texts)


def _count(connection: "duckdb.DuckDBPyConnection") -> dict[str, Any]:
    """Count images and bytes by source, reason and bucket."""
    frame = connection.execute("""SELECT source, reason, place, count(*) AS images, sum(num_bytes)::BIGINT AS bytes
        FROM rows GROUP BY ALL ORDER BY ALL""").df()
    kept, rejected, counted = frame[frame.reason == ""], frame[frame.reason != ""], ["images", "bytes"]
    buckets = kept.groupby("place")[counted].sum().to_dict("index")
    reasons = rejected.groupby("reason").images.sum().sort_values(ascending=False, kind="stable")
    return {
        "kept": kept[counted].sum().to_dict(),
        "rejected": rejected[counted].sum().to_dict(),
        "reasons": reasons.to_dict(),
        "sources": {name: rows.groupby("reason").images.sum().to_dict() for name, rows in frame.groupby("source")},
        "buckets": {place: buckets[place] for place in sorted(map(str, buckets), key=folder_order)},
    }


def _histograms(connection: "duckdb.DuckDBPyConnection", numbers: Sequence[str]) -> dict[str, Any]:
    """Count numbers by column and bin: one query for the ranges, one for the bins."""
    # Zeros (an empty file, a ratio that is rounded to 0) are in the first bin of a logarithmic histogram.
    nothing = {name: "0" if name in _LOGARITHMIC else "NULL" for name in numbers}
    limits = ", ".join(
        f"[min(nullif({identifier(name)}, {nothing[name]})), max({identifier(name)})]" for name in numbers
    )
    [(total, *ranges)] = connection.execute(f"SELECT count(*), {limits} FROM rows").fetchall()
    edges = {name: _edges(name, *limits) for name, limits in zip(numbers, ranges, strict=True) if limits[0] is not None}
    bins = "".join(f", map_values(histogram({identifier(name)}, ?::DOUBLE[]))" for name in edges)
    uppers = [one[1:] for one in edges.values()]
    rows = connection.execute(f"SELECT reason = '' {bins} FROM rows GROUP BY ALL", uppers).fetchall()
    counts = {is_kept: dict(zip(edges, columns, strict=True)) for is_kept, *columns in rows}
    result = {}
    for name in edges:
        kept, rejected = (counts.get(is_kept, {}).get(name) or [0] * NUM_BINS for is_kept in (True, False))
        missing = total - sum(kept) - sum(rejected)
        result[name] = {"edges": edges[name], "kept": kept, "rejected": rejected, "missing": missing}
    return result


def _edges(name: str, low: float, high: float) -> list[float]:
    if low == high:
        low, high = (low / 1.5, high * 1.5) if name in _LOGARITHMIC else (low - 0.5, high + 0.5)
    return (np.geomspace if name in _LOGARITHMIC else np.linspace)(low, high, NUM_BINS + 1).tolist()


def _values(connection: "duckdb.DuckDBPyConnection", name: str) -> dict[str, dict[str, int]]:
    """Count the texts of a column; nothing if there are too many different ones."""
    column = identifier(name)
    [(distinct,)] = connection.execute(f"SELECT approx_count_distinct({column}) FROM rows").fetchall()
    if distinct > 2 * MAX_VALUES:
        return {}
    rows = connection.execute(
        f"SELECT {column}, count(*) FILTER (reason = ''), count(*) FILTER (reason != '') FROM rows "
        f"WHERE {column} IS NOT NULL GROUP BY ALL ORDER BY count(*) DESC, {column}"
    ).fetchall()
    return {text: {"kept": kept, "rejected": rejected} for text, kept, rejected in rows if len(rows) <= MAX_VALUES}


# Examples


def _find_examples(
    database: MetadataDatabase, selections: Sequence[Selection]
) -> tuple[dict[str, list[Row]], list[tuple[str, Row, Row]]]:
    """Find some images by bucket or reason, and pairs of duplicates among them with their reason."""
    connection = database.connection
    kept = connection.execute(f"""SELECT place, arg_min((part, row_number), key_hash, {NUM_SHOWN})
        FROM rows WHERE reason = '' GROUP BY ALL ORDER BY ALL""").fetchall()
    rejected = [(reason, one) for each in selections for reason, some in each.examples.items() for one in some]
    wanted = {image for _, images in kept for image in images} | {(one.part, one.row) for _, one in rejected}
    wanted |= {(one.of_part, one.of_row) for _, one in rejected if one.of_part is not None}
    if not wanted:
        return {}, []
    parts, numbers = zip(*sorted(wanted), strict=True)
    add_table(connection, "wanted", pa.table({"part": parts, "row_number": numbers}))
    columns = ("part", "row_number", "key", "width", "height", "xxh128", *LOCATION)
    first_caption = f"coalesce(captions[1][:{MAX_CAPTION}], '')"
    found = connection.sql(f"""SELECT {", ".join(map(identifier, columns))}, '' AS detail, {first_caption} AS caption
        FROM {database.metadata(sorted({*parts}))} SEMI JOIN wanted USING (part, row_number)
        WHERE reason <> {_REMOVED}""")
    by_place = {(row["part"], row["row_number"]): row for row in found.to_arrow_table().to_pylist()}
    if scored := sorted({*parts}.intersection(database.scores.get(CAPTIONS, ()))):
        given = connection.execute(f"""SELECT part, row_number, {first_caption}
            FROM {database.read(f"{SCORES}/{CAPTIONS}", scored)} SEMI JOIN wanted USING (part, row_number)""")
        for part, number, caption in given.fetchall():
            if caption and (part, number) in by_place:
                by_place[part, number]["caption"] = caption
    shown = {place: [by_place[image] for image in images] for place, images in kept}
    pairs = []
    for reason, one in rejected:
        row, original = by_place.get((one.part, one.row)), by_place.get((one.of_part, one.of_row))
        if row is None or (one.of_part is not None and original is None):
            continue  # One of them was removed.
        if len(of_reason := shown.setdefault(reason, [])) < NUM_SHOWN:
            of_reason.append(row | {"detail": one.detail})
            if original is not None:
                pairs.append((reason, row, original))
    return shown, pairs


def _read_answers(database: MetadataDatabase) -> tuple[dict[str, Any] | None, list[Row]]:
    """Count the answers of a server for captions, and find examples; nothing if no server wrote them."""
    if not database.has_answers:
        return None, []
    parts = sorted(database.scores[CAPTIONS])
    connection, folder = database.connection, f"{SCORES}/{CAPTIONS}"
    names = (*COUNTS, "dollars")
    sums, outcomes = Counter[str](), Counter[str]()
    for some in groups(parts, _PARTS_PER_QUERY):
        counts = connection.execute(f"""SELECT answers.outcome, count(*),
            {", ".join(f"coalesce(sum(answers.{name}), 0)" for name in names)}
            FROM {database.read(folder, some)} WHERE answers IS NOT NULL GROUP BY ALL""").fetchall()
        outcomes.update({outcome: count for outcome, count, *_ in counts})
        for _, _, *values in counts:
            sums.update(dict(zip(names, values, strict=True)))
    first = parts[:_PARTS_PER_QUERY]
    columns = ", ".join(f"m.{name}" for name in ("part", "row_number", "key", "width", "xxh128", *LOCATION))
    found = connection.sql(f"""SELECT {columns}, answers.outcome AS outcome, answers.detail AS detail,
            coalesce(list_select(c.captions, list_transform(generated_captions, lambda i: i + 1)), []) AS captions
        FROM {database.read(folder, first)} c JOIN {database.metadata(first)} m USING (part, row_number)
        WHERE answers IS NOT NULL AND m.reason <> {_REMOVED}
        QUALIFY row_number() OVER (PARTITION BY answers.outcome ORDER BY key_hash) <= {NUM_SHOWN}
        ORDER BY answers.outcome, key_hash""")
    rows = found.to_arrow_table().to_pylist()
    report = {
        "outcomes": dict(outcomes.most_common()),
        **{name: sums[name] for name in names},
        "dollars_per_1000_images": 1000 * sums["dollars"] / max(outcomes.total(), 1),
        "examples": [{name: row[name] for name in ("key", "outcome", "captions", "detail")} for row in rows],
    }
    return report, rows


def _read_thumbnails(scan: Scan, rows: Sequence[Row]) -> dict[str, str | None]:
    """Make data URIs of images by key; None for one that the scan did not decode, or that is gone or has changed."""

    def read(row: Row) -> bytes | None:
        if row["width"] is None:  # It may take more memory or time than the limits allow.
            return None
        source, partition = scan.find(row["part"])
        location = Location(**{name: row[name] for name in LOCATION})
        try:
            [content] = source.images(partition, [location])
        except (DataError, MachineError):
            return None
        return content if row["xxh128"] == xxhash.xxh3_128_hexdigest(content) else None

    by_key = {row["key"]: row for row in rows}
    contents = storage.concurrent_map(read, by_key.values())
    # One at a time, for the memory of large ones.
    return {key: _thumbnail(content) if content else None for key, content in zip(by_key, contents, strict=True)}


def _thumbnail(content: bytes) -> str | None:
    try:
        image = decode_reduced(content, THUMBNAIL).image
    except UndecodableImageError:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return image_uri(image, jpeg_quality=88)


# The page


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    kept, rejected = report["kept"], report["rejected"]
    seen = kept["images"] + rejected["images"]
    return [
        ("Kept", f"{kept['images']:,}", f"{_share(kept['images'], seen)} of {seen:,} images"),
        ("Rejected", f"{rejected['images']:,}", f"{_share(rejected['images'], seen)} of the images"),
        ("Bytes kept", size_text(kept["bytes"]), f"of {size_text(kept['bytes'] + rejected['bytes'])}"),
    ]


def _tables(report: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """Tables of counts by caption."""

    def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> pd.DataFrame:
        cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
        return pd.DataFrame(cells, columns=list(columns))

    reasons, buckets, sources = report["reasons"], report["buckets"].items(), report["sources"].items()
    seen = report["kept"]["images"] + report["rejected"]["images"]
    tables = {
        "Kept, by split and bucket": table(
            ("split / bucket", "images", "bytes"),
            ((name, one["images"], size_text(one["bytes"])) for name, one in buckets),
        ),
        "Rejected, by reason": table(
            ("reason", "images", "share of all"), ((name, num, _share(num, seen)) for name, num in reasons.items())
        ),
        "By source": table(
            ("source", "kept", *reasons),
            ((name, *(counts.get(reason, 0) for reason in ("", *reasons))) for name, counts in sources),
        ),
    }
    if (captions := report["captions"]) is not None:
        rows = [(name, count, _share(count, sum(captions["outcomes"].values())))
                for name, count in captions["outcomes"].items()]  # fmt: skip
        tables["Captions by a server"] = table(("outcome", "images", "share"), rows)
        rows = [(name.replace("_", " "), captions[name]) for name in COUNTS]
        if captions["dollars"]:
            rows.append(("dollars per 1,000 images", f"{captions['dollars_per_1000_images']:.3f}"))
        tables["What they took"] = table(("", "number"), rows)
    for name, texts in report["values"].items():
        rows = [(text, one["kept"], one["rejected"]) for text, one in texts.items()]
        more = f", the {VALUES_SHOWN} most frequent of {len(rows)}" if len(rows) > VALUES_SHOWN else ""
        tables[f"By {name}{more}"] = table((name, "kept", "rejected"), rows[:VALUES_SHOWN])
    return {caption: frame for caption, frame in tables.items() if not frame.empty}


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _histograms_figure(columns: dict[str, Any]) -> str:
    """Draw histograms, three in a row."""
    num_rows = math.ceil(len(columns) / 3)
    figure, all_axes = subplots(num_rows, 3, width=WIDTH, height=2.2 * num_rows)
    every: list[Axes] = np.ravel(all_axes).tolist()
    for axes, (name, one) in zip(every, columns.items(), strict=False):
        edges, widths = one["edges"], np.diff(one["edges"])
        axes.bar(edges[:-1], one["kept"], widths, align="edge", color=COLOURS[0])
        axes.bar(edges[:-1], one["rejected"], widths, align="edge", bottom=one["kept"], color=COLOURS[1])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        if name in _LOGARITHMIC:
            axes.set_xscale("log")
            is_wide = edges[-1] > 20 * edges[0]
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=6) if is_wide else MaxNLocator(4))
            axes.xaxis.set_minor_locator(NullLocator())
        numbers = EngFormatter(sep="") if name == "bytes" else FuncFormatter(lambda value, _: f"{value:,.10g}")
        axes.xaxis.set_major_formatter(numbers)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        missing = f" ({one['missing']:,} without)" if one["missing"] else ""
        axes.set_title(plain(_WORDS.get(name, name) + missing), fontsize=9.5)
    for axes in every[::3]:
        axes.set_ylabel("images")
    for axes in every[len(columns) :]:
        axes.set_axis_off()
    return svg_uri(figure)
