"""Source: a folder of image files with captions beside them or in one table."""

import csv
import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import (
    Reason,
    Record,
    Refused,
    decode_text,
    key_of,
    make_record,
    parse_object,
    read_image,
)

TABLES = ("metadata.jsonl", "captions.csv", "metadata.csv")
"""Names of a table of captions in the root of the folder; one of them at most."""

FILE_COLUMNS = ("file_name", "file")
CAPTION_COLUMNS = ("captions", "caption", "text")


@dataclass
class TableEntry:
    """What a table says about one file: its captions, in the order of the lines, and the rest of its first line."""

    captions: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FolderSource:
    """Image files below a folder; hidden ones are passed over.

    The caption of a picture is what the table in the root says; for pictures that it does not name, the whole text of
    the .txt file of the same name. Pictures that the table names and that do not exist are refused.

    Attributes:
        name: First part of the keys; the rest is the path below the folder.
        path: The folder.
        num_records: Pictures with a known extension below the folder.
    """

    name: str
    path: str
    num_records: int | None = None
    kind: str = "folder"

    def read(self) -> Iterator[Record | Refused]:
        """Yield the pictures, folder by folder, sorted by name; then the missing ones that the table names."""
        root = Path(self.path)
        table = read_table(root)
        for file in walk_files(root):
            entry = table.pop(file, None)
            if entry is None and not is_image_name(file):
                continue
            yield self._record(root, file, entry)
        for file in sorted(table):
            yield Refused(
                f"{self.name}/{key_of(file)}", Reason.MISSING_IMAGE, "the table names it, there is no such file"
            )

    def _record(self, root: Path, file: str, entry: TableEntry | None) -> Record | Refused:
        """Read one picture and its caption."""
        key = f"{self.name}/{key_of(file)}"
        image = read_image(root / file, key)
        if isinstance(image, Refused):
            return image
        if entry is not None:
            return make_record(key, image, entry.captions, entry.metadata)
        try:
            caption = decode_text((root / file).with_suffix(".txt").read_bytes())
        except FileNotFoundError:
            return Refused(key, Reason.MISSING_CAPTION, "no .txt file of that name, no line in a table")
        except (PermissionError, IsADirectoryError) as error:
            return Refused(key, Reason.UNREADABLE, f"caption: {error.strerror}")
        return make_record(key, image, caption, {})


def walk_files(root: Path) -> Iterator[str]:
    """Yield the paths of the files below a folder, with forward slashes, sorted within each folder.

    Hidden files and folders are left out. Links to folders are followed; a folder that is reached twice is read once.
    """
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, onerror=_cannot_list, followlinks=True):
        status = os.stat(folder)  # noqa: PTH116
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in sorted(files):
            if not name.startswith("."):
                yield name if below == "." else f"{below}/{name}"


def _cannot_list(error: OSError) -> None:
    """Refuse to pass over a folder that cannot be listed."""
    raise MachineError(f"cannot read the folder {error.filename}: {error.strerror}; mend that or take the folder out")


def is_image_name(file: str) -> bool:
    """Return whether the file's extension is that of a picture."""
    return posixpath.splitext(file)[1].lower() in EXTENSIONS


def read_table(root: Path) -> dict[str, TableEntry]:
    """Read the table of captions in the root of a folder.

    Several lines of one file give it several captions.

    Returns:
        For each path below the folder what the table says; empty if there is no table.

    Raises:
        DataError: There are two tables, or the one cannot be read, is damaged or lacks a column.
    """
    found = [root / name for name in TABLES if (root / name).is_file()]
    if not found:
        return {}
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(f"{root} holds {names}; keep the one whose captions are meant")
    lines = _read_jsonl(found[0]) if found[0].suffix == ".jsonl" else _read_csv(found[0])
    table: dict[str, TableEntry] = {}
    try:
        for file, captions, metadata in lines:
            entry = table.setdefault(posixpath.normpath(file), TableEntry(metadata=metadata))
            entry.captions.extend(captions if isinstance(captions, list) else [captions])
    except OSError as error:
        raise DataError(f"{found[0]} cannot be read: {error.strerror}") from error
    return table


def _split(line: dict[str, Any], where: str, columns: str) -> tuple[str, Any, dict[str, Any]]:
    """Split a line of a table into the file's name, its captions and the rest."""
    file_column = next((name for name in FILE_COLUMNS if isinstance(line.get(name), str) and line[name]), None)
    if file_column is None:
        raise DataError(f"{where}: no file name; one of the {columns} must be {' or '.join(FILE_COLUMNS)}; there is "
                        f"{_listed(line)}")  # fmt: skip
    caption_column = next((name for name in CAPTION_COLUMNS if name in line), None)
    metadata = {name: line[name] for name in line if name not in (file_column, caption_column)}
    return line[file_column], None if caption_column is None else line[caption_column], metadata


def _listed(names: Any) -> str:
    """Return names for a message."""
    return ", ".join(map(ascii, names)) or "none"


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the file name, captions and metadata of each line of a metadata.jsonl."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="\n") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            where = f"{path}, line {number}"
            try:
                line = parse_object(text)
            except ValueError as error:
                raise DataError(f"{where}: {error}; each line must be a JSON object with file_name and text") from error
            yield _split(line, where, "keys")


def _read_csv(path: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the file name, captions and metadata of each row of a table in CSV."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        rows = csv.DictReader(lines, restkey="", restval=None)
        try:
            columns = list(rows.fieldnames or [])
            for wanted in (FILE_COLUMNS, CAPTION_COLUMNS):
                if not set(wanted) & set(columns):
                    raise DataError(f"{path}: no column {' or '.join(wanted)} in its first line; there is "
                                    f"{_listed(columns)}")  # fmt: skip
            for row in rows:
                row.pop("", None)
                yield _split(row, f"{path}, line {rows.line_num}", "columns")
        except csv.Error as error:
            raise DataError(f"{path}, line {rows.line_num}: {error}; it must be comma-separated") from error
