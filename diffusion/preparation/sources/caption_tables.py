"""Tables of captions in folders of images: metadata.jsonl, captions.csv, metadata.csv."""

import csv
import io
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from diffusion.errors import DataError, printable
from diffusion.preparation.records import has_text, parse_object
from diffusion.preparation.sources.reading import UnfitFileError, open_file
from diffusion.storage import shown

TABLES = ("metadata.jsonl", "captions.csv", "metadata.csv")
"""Names of a table; at most one of them in a folder."""

FILE_COLUMNS = ("file_name", "file")
CAPTION_COLUMNS = ("captions", "caption", "text", "prompt")

_LOOKED_AT = 1_000
"""Lines of a .jsonl by which its columns are found."""


class Line(NamedTuple):
    """Captions and metadata of a file in a table."""

    file: str
    captions: list[Any]
    metadata: dict[str, Any]


def read_lines(
    uri: str, root: str, limit: int, file_column: str | None = None, caption_column: str | None = None
) -> Iterator[Line]:
    """Yield the lines, of at most `limit` bytes, of a table in the folder `root`; None stands for the usual columns.

    Raises:
        DataError: it cannot be read, is damaged, lacks a column, has one twice, or a line is longer.
    """
    file_columns = (file_column,) if file_column else FILE_COLUMNS
    caption_columns = (caption_column,) if caption_column else CAPTION_COLUMNS
    try:
        with open_file(uri, root) as file:
            text = _Text(file, uri, limit, file_columns, caption_columns)
            if not uri.endswith(".jsonl"):
                yield from _csv(text)
                return
            lines, seen = _jsonl(text), dict[str, None]()
            for line in islice(lines, _LOOKED_AT):
                seen |= dict.fromkeys(line)
                yield _split(line, text, "keys")
            if caption_column and seen and caption_column not in seen:
                raise text.error(f"no key {caption_column!a} up to this line; there is {_listed(seen)}; correct "
                                 "caption_column")  # fmt: skip
            for line in lines:
                yield _split(line, text, "keys")
    except UnfitFileError as error:
        raise DataError(f"{printable(shown(uri))} cannot be read: {error}; fix it or take it out") from error


class _Text:
    """The lines of a table as text; bytes that are not UTF-8 become surrogates."""

    def __init__(
        self, file: Any, uri: str, limit: int, file_columns: tuple[str, ...], caption_columns: tuple[str, ...]
    ) -> None:
        self._file, self._shown, self.limit = io.BufferedReader(file), printable(shown(uri)), limit
        self.file_columns, self.caption_columns = file_columns, caption_columns
        self.number = 0

    def error(self, what: str, number: int | None = None) -> DataError:
        return DataError(f"{self._shown}, line {number or self.number}: {what}")

    def __iter__(self) -> Iterator[str]:
        while line := self._file.readline(self.limit + 1):
            self.number += 1
            if self.number == 1 and (b"\0" in line or b"\r" in line.rstrip(b"\r\n")):
                raise self.error("not UTF-8 with line ends LF or CR LF; save it so")
            if len(line) > self.limit:
                raise self.error(f"longer than {self.limit} bytes (limits.max_metadata_kb)")
            yield line.decode("utf-8-sig" if self.number == 1 else "utf-8", errors="surrogateescape")


def _jsonl(text: _Text) -> Iterator[dict[str, Any]]:
    for line in text:
        if not line.strip():
            continue
        try:
            yield parse_object(line)
        except ValueError as error:
            raise text.error(f"{error}; each line must be a JSON object with file_name and text") from error


def _csv(text: _Text) -> Iterator[Line]:
    csv.field_size_limit(max(csv.field_size_limit(), text.limit))
    rows, start = csv.DictReader(text, strict=True), 1
    try:
        if rows.fieldnames is None:
            return  # Nothing is in the file.
        columns = list(rows.fieldnames)
        for wanted in (text.file_columns, text.caption_columns):
            if not set(wanted) & set(columns):
                raise text.error(f"no column {' or '.join(wanted)} in its first line; there is {_listed(columns)}", 1)
        if twice := [name for name in dict.fromkeys(columns) if name and columns.count(name) > 1]:
            raise text.error(f"several columns named {_listed(twice)}; rename them", 1)
        start = rows.line_num + 1
        for row in rows:
            if more := row.pop(None, None):
                raise text.error(f"{len(columns) + len(more)} values for {len(columns)} columns; put captions that "
                                 "hold commas in quotes")  # fmt: skip
            yield _split({name: value for name, value in row.items() if name}, text, "columns")
            start = rows.line_num + 1
    except csv.Error as error:
        raise text.error(f"{error}; is a quote not closed? It must be comma-separated", start) from error


def _split(line: dict[str, Any], text: _Text, columns: str) -> Line:
    file_column = next((name for name in text.file_columns if isinstance(line.get(name), str) and line[name]), None)
    if file_column is None:
        raise text.error(f"no file name; one of the {columns} must be {' or '.join(text.file_columns)}; there is "
                         f"{_listed(line)}")  # fmt: skip
    there = [name for name in text.caption_columns if name in line]
    caption_column = next((name for name in there if has_text(line[name])), there[0] if there else "")
    captions = line.get(caption_column)
    metadata = {name: line[name] for name in line if name not in (file_column, caption_column)}
    return Line(line[file_column], captions if isinstance(captions, list) else [captions], metadata)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(ascii, names)) or "none"
