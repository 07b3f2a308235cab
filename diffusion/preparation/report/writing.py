"""The report of a preparation: what was kept and refused, as JSON and as a page that needs no other file."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from diffusion.files import write_json
from diffusion.preparation.report.numbers import Report, summarize
from diffusion.preparation.report.page import write_page

logger = logging.getLogger(__name__)

PAGE, NUMBERS = "report.html", "report.json"


def write_report(
    folder: Path,
    facts: Sequence[Path],
    read_image: Callable[[str], bytes | None],
    *,
    readable: Collection[str] | None = None,
    title: str = "Prepared data",
) -> Report:
    """Write `report.html`, which needs no other file and no network, and `report.json`.

    Args:
        folder: Where to write them.
        facts: Parquet files, as `diffusion.preparation.report.numbers` describes them.
        read_image: Returns the file of the image of a key, or None where it is not there any more.
        readable: Keys of the refused images that can be read; None: of any. Only those are shown.
        title: Heading of the page.

    Returns:
        The numbers.

    Raises:
        DataError: A file of facts is missing, damaged, or lacks a column.
        OSError: The disk is full, or the folder cannot be written to.
    """
    report = summarize(facts, readable)
    write_json(folder / NUMBERS, asdict(report))
    write_page(folder / PAGE, report, read_image, title)
    logger.info("wrote %s and %s", folder / PAGE, NUMBERS)
    return report
