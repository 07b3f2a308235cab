"""The images of a folder and their prompts: `metadata.jsonl`, a line for each image."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diffusion.errors import DataError
from diffusion.files import write_atomically

LISTING = "metadata.jsonl"
"""Lines of `file_name`, `prompt`, and whatever else is known of an image."""

OLD_LISTING, OLD_KEY = "images.jsonl", "file"
"""As generate.py of version 0.1 wrote it."""


class ListedImage(NamedTuple):
    """One image of a folder."""

    path: Path
    prompt: str


def write_listing(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the listing of a folder, whole or not at all.

    Args:
        folder: of the images.
        rows: `file_name`, `prompt` and more of each image.
    """
    write_atomically(folder / LISTING, "".join(json.dumps(row) + "\n" for row in rows))


def read_listing(folder: Path) -> list[ListedImage] | None:
    """Read the listing of a folder; None if it has none.

    Raises:
        DataError: a line is wrong, or its image is missing.
    """
    for name, key in ((LISTING, "file_name"), (OLD_LISTING, OLD_KEY)):
        if (path := folder / name).is_file():
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
            return [_read_line(line, key, f"{path}, line {number}", folder) for number, line in lines if line.strip()]
    return None


def _read_line(line: str, key: str, where: str, folder: Path) -> ListedImage:
    try:
        row = json.loads(line)
        image = ListedImage(folder / row[key], str(row["prompt"]).strip())
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is not a JSON object with {key} and prompt: {error!r}") from error
    if not image.path.is_file():
        raise DataError(f"{where}: {image.path} is missing")
    return image
