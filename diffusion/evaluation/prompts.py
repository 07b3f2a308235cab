"""Prompts of files and data sets, and the listing of a folder of images with their prompts (`metadata.jsonl`)."""

import csv
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.images import LISTING, UNFINISHED, PreparedSamples, by_hash, list_images, smallest_hashes
from diffusion.files import write_atomically

PROMPT_COLUMNS = ("prompt", "prompts", "caption", "text")
"""Default names of the column of prompts, in lower case and in the order of preference."""

CATEGORY_COLUMNS = ("category",)


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
        path: a .tsv or .csv with a column of prompts (PartiPrompts, DrawBench), a .jsonl or a .json with a list, of
            objects with such a key (GenEval) or of texts, another text file with one prompt a line, or the folder of a
            prepared data set, whose first captions are read.
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
        if path.suffix.lower() in (".tsv", ".csv"):
            rows, names = _table_rows(path)
            prompts = _prompts_of_rows(path, rows, names, column, category_column)
        elif path.suffix.lower() in (".jsonl", ".json"):
            rows = _json_rows(path)
            names = list(dict.fromkeys(name for row in rows for name in row))
            prompts = _prompts_of_rows(path, rows, names, column, category_column)
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


def _table_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Read a table; return its rows and columns."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        # Prompts of PartiPrompts have unbalanced quotation marks, so a .tsv has no quoting.
        dialect = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.suffix.lower() == ".tsv" else {}
        reader = csv.DictReader(file, **dialect)
        rows = list(reader)
        names: list[str] = list(reader.fieldnames or ())
    for number, row in enumerate(rows, start=1):
        if any(row.get(None) or ()):  # Empty cells do no harm.
            raise ConfigurationError(f"{path}: row {number} has more cells than columns; quote commas, remove tabs")
    return rows, names


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a .jsonl, or of the list in a .json; a text is an object that has only a prompt."""
    content = path.read_text(encoding="utf-8-sig")
    lines = content.split("\n") if path.suffix.lower() == ".jsonl" else [content]
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line) if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}, line {number}: no JSON ({error}); correct it") from error
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str | dict) for one in values):
            raise ConfigurationError(f"{path}, line {number}: give objects with a key prompt, or texts")
        rows += [{PROMPT_COLUMNS[0]: one} if isinstance(one, str) else one for one in values]
    return rows


def _prompts_of_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str], column: str | None, category_column: str | None
) -> list[Prompt]:
    """Return the prompts of rows with named columns, and their categories."""
    if not rows:
        return []
    text = _find_column(column, PROMPT_COLUMNS, names)
    if text is None:
        raise ConfigurationError(f"{path} has no column {column or 'Prompt'}: its columns are {', '.join(names)}")
    category = _find_column(category_column, CATEGORY_COLUMNS, names)
    if category_column is not None and category is None:
        raise ConfigurationError(f"{path} has no column {category_column}: its columns are {', '.join(names)}")
    prompts = []
    for number, row in enumerate(rows, start=1):
        cells = [row.get(name) or "" for name in (text, category) if name is not None]
        try:
            "".join(cells).encode()
        except (TypeError, UnicodeEncodeError) as error:  # No text, or half a surrogate pair.
            reason = f"row {number} has no text as its prompt or category, but {cells!a}"
            raise ConfigurationError(f"{path}: {reason}") from error
        prompts.append(Prompt(text=cells[0].strip(), category="".join(cells[1:]).strip()))
    return prompts


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
    """An image of a folder, its prompt (empty without a listing), and the category of the prompt."""

    path: Path
    prompt: str
    category: str = ""


def write_listing(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the listing of a folder atomically: `file_name`, `prompt` and further metadata of each image."""
    write_atomically(folder / LISTING, "".join(json.dumps(row) + "\n" for row in rows))


def read_listing(folder: Path) -> list[ListedImage] | None:
    """Read the listing of a folder, None without one.

    Raises:
        DataError: a line is invalid, an image is missing, or the images are not all generated.
    """
    path = folder / LISTING
    if not path.is_file():
        return None
    try:
        lines = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    images = [_read_line(line, f"{path}, line {number}", folder) for number, line in lines if line.strip()]
    if not images:
        raise DataError(UNFINISHED.format(path))
    return images


def open_images(folder: Path) -> list[ListedImage]:
    """List the images of a folder: those of its listing with their prompts, or all without a listing.

    Raises:
        ConfigurationError: there are none.
        DataError: the listing is invalid.
    """
    listed = read_listing(folder)
    if listed is None:
        listed = [ListedImage(path, "") for path in list_images(folder)]
    if not listed:
        raise ConfigurationError(f"{folder} has no images: give a folder as scripts/generate.py writes it")
    return listed


def _read_line(line: str, where: str, folder: Path) -> ListedImage:
    try:
        row = json.loads(line)
        image = ListedImage(folder / row["file_name"], row["prompt"].strip(), row.get("category") or "")
        "".join(image[1:]).encode()  # Both are texts without half a surrogate pair.
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where} is not a JSON object with texts as file_name and prompt: {error!r}") from error
    if not Path(os.path.abspath(image.path)).is_relative_to(os.path.abspath(folder)):  # noqa: PTH100 links stay
        raise DataError(f"{where}: {image.path} is outside of {folder}: copy it into the folder")
    if not image.path.is_file():
        raise DataError(f"{where}: {image.path} is missing")
    return image
