"""Prompts of files and data sets, and the listing of a folder of images with their prompts (`metadata.jsonl`)."""

import csv
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.images import PreparedSamples, by_hash, smallest_hashes
from diffusion.files import write_atomically

PROMPT_COLUMNS = ("prompt", "prompts", "caption", "text")
"""Default names of the column of prompts, in lower case and in the order of preference."""

CATEGORY_COLUMNS = ("category",)

LISTING = "metadata.jsonl"
"""Lines of `file_name`, `prompt` and further metadata of an image."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Prompt of an image."""

    text: str
    category: str = ""


def read_prompts(
    path: str | Path, *, column: str | None = None, category_column: str | None = None, num: int | None = None
) -> list[Prompt]:
    """Read prompts in the order of their file, without empty ones.

    Args:
        path: a .tsv or .csv with a column of prompts (PartiPrompts, DrawBench), another text file with one prompt a
            line, or the folder of a prepared data set, whose first captions are read.
        column: column of the prompts; one of `PROMPT_COLUMNS` by default.
        category_column: column of the categories; `CATEGORY_COLUMNS` by default, if there is one.
        num: number of prompts, chosen by the hash of position and text; all by default.

    Raises:
        ConfigurationError: the file or a column is missing, or there are too few prompts.
        DataError: a data set is damaged.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return _data_set_prompts(path, num)
    try:
        if path.suffix in (".tsv", ".csv"):
            prompts = _table_prompts(path, column, category_column)
        else:
            prompts = [Prompt(text=line.strip()) for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Give a text file, a table or a data set") from error
    prompts = [prompt for prompt in prompts if prompt.text]
    if not prompts:
        raise ConfigurationError(f"{path} has no prompts")
    chosen = smallest_hashes([f"{i} {prompt.text}" for i, prompt in enumerate(prompts)], num)
    return [prompts[i] for i in chosen]


def categories(prompts: Iterable[Prompt]) -> list[str]:
    """Categories of prompts in the order of their first prompts, without the empty one."""
    return list(dict.fromkeys(prompt.category for prompt in prompts if prompt.category))


def _table_prompts(path: Path, column: str | None, category_column: str | None) -> list[Prompt]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Prompts of PartiPrompts have unbalanced quotation marks, so a .tsv has no quoting.
        dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix == ".tsv" else {}
        reader = csv.DictReader(file, **dialect)
        rows, names = list(reader), list(reader.fieldnames or ())
    for number, row in enumerate(rows, start=1):
        if any(row.get(None) or ()):  # Empty cells do no harm.
            raise ConfigurationError(f"{path}: row {number} has more cells than columns; quote commas, remove tabs")
    text = _find_column(column, PROMPT_COLUMNS, names)
    if text is None:
        raise ConfigurationError(f"{path} has no column {column or 'Prompt'}: its columns are {', '.join(names)}")
    category = _find_column(category_column, CATEGORY_COLUMNS, names)
    if category_column is not None and category is None:
        raise ConfigurationError(f"{path} has no column {category_column}: its columns are {', '.join(names)}")
    return [
        Prompt(text=(row[text] or "").strip(), category=(row[category] or "").strip() if category else "")
        for row in rows
    ]


def _find_column(requested: str | None, defaults: Sequence[str], names: Sequence[str]) -> str | None:
    if requested is not None:
        return requested if requested in names else None
    by_lower = {name.strip().lower(): name for name in reversed(names)}
    return next((by_lower[name] for name in defaults if name in by_lower), None)


def _data_set_prompts(root: Path, num: int | None) -> list[Prompt]:
    """First captions of a prepared data set; with `num`, of the samples whose names have the smallest hashes."""
    samples = PreparedSamples(root)
    limit = len(samples) if num is None else 2 * num  # Samples without a caption are not counted.
    while True:
        order = range(limit) if num is None else by_hash(samples.names(), limit)
        captioned = ((i, text) for i in order if (text := _first_caption(samples, i, root)))
        found = dict(itertools.islice(captioned, num))
        if len(found) == num or limit >= len(samples):
            break
        limit *= 2
    if len(found) < (num or 1):
        raise ConfigurationError(f"{root} has {len(found)} captions, {num or 1} are needed")
    return [Prompt(text=text) for _, text in sorted(found.items())]


def _first_caption(samples: PreparedSamples, index: int, root: Path) -> str:
    if (captions := samples.captions(index)) is None:
        raise ConfigurationError(f"{root} has no captions: give a prepared data set")
    return captions[0].strip()


class ListedImage(NamedTuple):
    """An image of a folder, its prompt, and the category of the prompt."""

    path: Path
    prompt: str
    category: str = ""


def write_listing(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the listing of a folder atomically.

    Args:
        folder: folder of the images.
        rows: `file_name`, `prompt` and further metadata of each image.
    """
    write_atomically(folder / LISTING, "".join(json.dumps(row) + "\n" for row in rows))


def read_listing(folder: Path) -> list[ListedImage] | None:
    """Read the listing of a folder, or return None if there is none.

    Raises:
        DataError: a line is invalid, or its image is missing.
    """
    path = folder / LISTING
    if not path.is_file():
        return None
    try:
        lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    return [_read_line(line, f"{path}, line {number}", folder) for number, line in lines if line.strip()]


def _read_line(line: str, where: str, folder: Path) -> ListedImage:
    try:
        row = json.loads(line)
        image = ListedImage(folder / row["file_name"], str(row["prompt"]).strip(), row.get("category", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is not a JSON object with file_name and prompt: {error!r}") from error
    if not image.path.is_file():
        raise DataError(f"{where}: {image.path} is missing")
    return image
