"""The page of a preparation's report: tables, histograms, sheets of images."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.preparation.report.numbers import Histogram, Report

THUMBNAIL = 128
"""Longer side of a small image, in pixels."""

COLUMNS = 6
"""Small images in a row."""

VALUES_SHOWN = 20
_GAP, _LABEL = 6, 14
_KEPT, _REFUSED = "#2f6fb2", "#d98a29"
_UNITS = {"shorter_side": "shorter side (px)", "aspect_ratio": "width / height", "bytes": "bytes of the file",
          "caption_length": "characters of the caption (mean)"}  # fmt: skip

ReadImage = Callable[[str], bytes | None]


def write_page(path: Path, report: Report, read_image: ReadImage, title: str) -> None:
    """Write the page.

    Args:
        path: The HTML file.
        report: The numbers.
        read_image: Returns the file of the image of a key, or None.
        title: Heading.

    Raises:
        OSError: The disk is full, or the place cannot be written to.
    """
    page = Page(title)
    seen = report.kept.pictures + report.refused.pictures
    page.text(
        f"Kept {report.kept.pictures:,} of {seen:,} images ({_share(report.kept.pictures, seen)}), "
        f"{_size(report.kept.bytes)} of {_size(report.kept.bytes + report.refused.bytes)}."
    )
    _counts(page, report, seen)
    if report.histograms:
        page.heading("Distributions")
        page.image(histograms(report.histograms), "Blue: kept. Orange: refused, on top of it.")
    for column, texts in report.values.items():
        rows = [(text, f"{n['kept']:,}", f"{n['refused']:,}") for text, n in list(texts.items())[:VALUES_SHOWN]]
        more = f", the {VALUES_SHOWN} most frequent of {len(texts)}" if len(texts) > VALUES_SHOWN else ""
        page.table(f"{column}{more}", [column, "kept", "refused"], rows)
    _sheets(page, report, read_image)
    page.write(path)


def histograms(columns: dict[str, Histogram]) -> Image.Image:
    """Draw histograms, three in a row."""
    num_rows = math.ceil(len(columns) / 3)
    figure = Figure(figsize=(12, 2.8 * num_rows), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for i, (name, histogram) in enumerate(columns.items()):
        axes = figure.add_subplot(num_rows, 3, i + 1)
        widths = [high - low for low, high in zip(histogram.edges, histogram.edges[1:], strict=False)]
        axes.bar(histogram.edges[:-1], histogram.kept, widths, align="edge", color=_KEPT)
        axes.bar(histogram.edges[:-1], histogram.refused, widths, align="edge", bottom=histogram.kept, color=_REFUSED)
        if histogram.logarithmic:
            axes.set_xscale("log")
        missing = f" ({histogram.missing:,} without)" if histogram.missing else ""
        # a dollar sign begins mathematics in matplotlib, and column names are the user's
        axes.set_title((_UNITS.get(name, name) + missing).replace("$", r"\$"), fontsize=10)
        axes.tick_params(labelsize=8)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def sheet(pictures: Sequence[Image.Image | None]) -> Image.Image:
    """Lay small images out in rows, each above its number; a grey square stands for one that is not there."""
    cell_width, cell_height = THUMBNAIL + _GAP, THUMBNAIL + _LABEL + _GAP
    num_rows = math.ceil(len(pictures) / COLUMNS)
    result = Image.new("RGB", (cell_width * min(COLUMNS, len(pictures)), cell_height * num_rows), "white")
    pen = ImageDraw.Draw(result)
    for i, image in enumerate(pictures):
        left, top = i % COLUMNS * cell_width, i // COLUMNS * cell_height
        if image is None:
            pen.rectangle((left, top, left + THUMBNAIL - 1, top + THUMBNAIL - 1), fill="#d0d7de")
            pen.text((left + 8, top + THUMBNAIL // 2 - 6), "no image", fill="#57606a")
        else:
            result.paste(image, (left + (THUMBNAIL - image.width) // 2, top + (THUMBNAIL - image.height) // 2))
        pen.text((left + 2, top + THUMBNAIL + 1), str(i + 1), fill="black")
    return result


def thumbnail(data: bytes | None) -> Image.Image | None:
    """Decode an image and reduce it; None where there is none or it cannot be decoded."""
    if data is None:
        return None
    try:
        image = decode_rgb(data)
    except UndecodableImageError:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return image


def _counts(page: Page, report: Report, seen: int) -> None:
    """Add the tables of reasons, sources and buckets."""
    page.heading("What was kept")
    rows = [(name, f"{c.pictures:,}", _size(c.bytes)) for name, c in report.buckets.items()]
    page.table("Kept, by split and bucket", ["split / bucket", "images", "bytes"], rows)
    rows = [(reason, f"{n:,}", _share(n, seen)) for reason, n in report.reasons.items()]
    page.table("Refused, by reason", ["reason", "images", "of all"], rows)
    reasons = list(report.reasons)
    rows = [
        (source, f"{counts.get('', 0):,}", *(f"{counts.get(reason, 0):,}" for reason in reasons))
        for source, counts in report.sources.items()
    ]
    page.table("By source", ["source", "kept", *reasons], rows)


def _sheets(page: Page, report: Report, read_image: ReadImage) -> None:
    """Add sheets of kept and refused images, and pairs of duplicates."""
    for heading, groups in (("Kept images", report.shown_kept), ("Refused images", report.shown_refused)):
        if groups:
            page.heading(heading)
        for group, shown in groups.items():
            pictures = [thumbnail(read_image(one.key)) for one in shown]
            if any(pictures):
                page.image(_lossy(sheet(pictures)), f"{group}: a sample", width=COLUMNS * (THUMBNAIL + _GAP))
            rows = [
                (i, one.key, f"{one.width} x {one.height}" if one.width else "", one.detail)
                for i, one in enumerate(shown, start=1)
            ]
            page.table(f"{group}: a sample", ["", "key", "width x height", "detail"], rows)
    if report.duplicates:
        page.heading("Duplicates")
        pairs = [(pair.key, pair.of) for pair in report.duplicates]
        pictures = [thumbnail(read_image(key)) for pair in pairs for key in pair]
        page.image(
            _lossy(sheet(pictures)), "Pairs: odd numbers were refused, the even ones after them stand for them",
            width=COLUMNS * (THUMBNAIL + _GAP),
        )  # fmt: skip
        rows = [
            (f"{2 * i + 1}, {2 * i + 2}", pair.reason, pair.key, pair.of) for i, pair in enumerate(report.duplicates)
        ]
        page.table("Duplicates: a sample", ["", "reason", "refused", "stands for it"], rows)


def _lossy(image: Image.Image) -> Image.Image:
    """Reduce a sheet to 256 colours, for a third of the bytes."""
    return image.quantize(256, dither=Image.Dither.NONE)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _size(num_bytes: float) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
