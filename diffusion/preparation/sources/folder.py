"""Source: a folder of image files with captions beside them or in one table."""

import csv
import functools
import io
import logging
import os
import posixpath
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import (
    Partition,
    Reason,
    Record,
    Refused,
    decode_text,
    fingerprint_of,
    key_of,
    make_record,
    parse_object,
    unfit_file,
)
from diffusion.preparation.sources.remote_files import (
    join,
    list_files,
    open_file,
    read_file,
    read_remote_image,
    state_of,
)
from diffusion.preparation.sources.webdataset import Sample, record_of
from diffusion.storage import is_url, shown

logger = logging.getLogger(__name__)

TABLES = ("metadata.jsonl", "captions.csv", "metadata.csv")
"""Names of a table of captions in the root of the folder; one of them at most."""

FILE_COLUMNS = ("file_name", "file")
CAPTION_COLUMNS = ("captions", "caption", "text")

_PRESENT, _MISSING, _UNKNOWN = "+", "-", "?"
"""First letter of a partition's item: a file that is there, one that the table names and that is not, or one that has
captions but is no image by its extension."""

_SUFFIXES = (".txt", ".json")
_REQUESTS = 16
"""Images of a remote folder that are fetched at the same time."""


@dataclass
class TableEntry:
    """What a table says about one file: its captions, in the order of the lines, and the rest of its first line."""

    captions: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def has_caption(self) -> bool:
        """Whether there is a text that is not blank."""
        return any(isinstance(caption, str) and caption.strip() for caption in self.captions)


@dataclass(frozen=True)
class FolderSource:
    """Image files below a folder; hidden ones are passed over.

    The caption of an image is what the table in the root says: several lines of a file, or a list in `captions`, give
    it several. Where the table names it without a caption, that is in the .txt of the same name. An image that the
    table does not name has the files of the same name: .txt, whose whole text is one caption, and .json, as img2dataset
    writes it, which is read as in a tar. Refused are images that the table names and that do not exist, and files
    that have a .txt or .json but neither a known extension nor an image of the same name beside them.

    Attributes:
        name: First part of the keys; the rest is the path below the folder.
        path: The folder, a path or a URL.
        num_records: Images with a known extension below the folder.
    """

    name: str
    path: str
    num_records: int | None = None
    kind: str = "folder"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Cut the files, in the order in which they are read, into partitions of `size`."""
        table = read_table(self.path)
        files, state = _listing(self.path)
        unknown = _unknown_files(files, table)
        items = [
            (_UNKNOWN if file in unknown else _PRESENT) + file
            for file in files
            if file in table or is_image_name(file) or file in unknown
        ]
        items += [_MISSING + file for file in sorted(set(table).difference(files))]
        there = {item for partition in known for item in partition.items}
        new = [item for item in items if item not in there]
        chunks = [*(one.items for one in known), *(tuple(new[at : at + size]) for at in range(0, len(new), size))]
        present = set(items)
        return [
            Partition(_partition_id(chunk[0]), chunk, _fingerprint(chunk, table, present, state), len(chunk))
            for chunk in chunks
        ]

    def only(self, partition: Partition) -> "FolderSource":
        """Return the source itself."""
        return self

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the images, folder by folder, sorted by name; then the missing ones that the table names."""
        table = read_table(self.path)
        for one in self.partitions(sys.maxsize) if partition is None else [partition]:
            if is_url(self.path):
                yield from _ahead(lambda item: self._record(item, table), one.items)
            else:
                yield from (self._record(item, table) for item in one.items)

    def _record(self, item: str, table: Mapping[str, TableEntry]) -> Record | Refused:
        """Read one image and its captions."""
        sign, file = item[0], item[1:]
        key = f"{self.name}/{key_of(file)}"
        if sign == _MISSING:
            return Refused(key, Reason.MISSING_IMAGE, "the table names it, there is no such file")
        if sign == _UNKNOWN:
            extension = posixpath.splitext(file)[1]
            detail = f"extension {ascii(extension)[1:-1]} is not read" if extension else "it has no extension"
            return Refused(key, Reason.MISSING_IMAGE, detail)
        place, entry = join(self.path, file), table.get(file)
        image = read_remote_image(place, key)
        if isinstance(image, Refused):
            return image
        if entry is not None and entry.has_caption:
            return make_record(key, image, entry.captions, entry.metadata)
        text = _read_beside(place, ".txt", key)
        if isinstance(text, Refused):
            return text
        if entry is not None:
            captions = entry.captions if text is None else decode_text(text)
            return make_record(key, image, captions, entry.metadata)
        json = _read_beside(place, ".json", key)
        if isinstance(json, Refused):
            return json
        if text is None and json is None:
            detail = "no .txt or .json of that name, no line in a table"
            return Refused(key, Reason.MISSING_CAPTION, detail, Record(key, image, []))
        return record_of(key, Sample(file, image, text, json))


def _read_beside(place: str, suffix: str, key: str) -> bytes | Refused | None:
    """Return the content of the file with another suffix; None if there is none, a refusal if it cannot be read."""
    beside = _beside(place, suffix)
    try:
        refused = None if is_url(beside) else unfit_file(beside, key)
        return read_file(beside) if refused is None else replace(refused, detail=f"{suffix}: {refused.detail}")
    except FileNotFoundError:
        return None
    except (PermissionError, IsADirectoryError) as error:
        return Refused(key, Reason.UNREADABLE, f"{suffix}: {error.strerror}")


def _beside(place: str, suffix: str) -> str:
    """Return the name of a file with another suffix."""
    return _stem(place) + suffix


def _stem(place: str) -> str:
    """Return the name of a file without its suffix."""
    return posixpath.splitext(place)[0]


def _unknown_files(files: Sequence[str], table: Container[str]) -> set[str]:
    """Return the files that have captions of their name, but neither they nor others of that name are images."""
    others = [
        file
        for file in files
        if not (is_image_name(file) or file in table or file in TABLES)
        and posixpath.splitext(file)[1].lower() not in _SUFFIXES
    ]
    if not others:
        return set()
    everything = set(files)
    pictures = {_stem(file) for file in files if is_image_name(file) or file in table}
    return {
        file
        for file in others
        if _stem(file) not in pictures and any(_beside(file, suffix) in everything for suffix in _SUFFIXES)
    }


def _partition_id(first: str) -> str:
    """Return the id of a partition with this first item; of an unknown file, which may become known, with its sign."""
    return key_of(first if first[0] == _UNKNOWN else first[1:])


def _ahead(read: Callable[[str], Record | Refused], items: Sequence[str]) -> Iterator[Record | Refused]:
    """Yield what `read` returns for each item, in order, while a few threads read ahead."""
    waiting, rest = [], iter(items)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        try:
            waiting = [pool.submit(read, item) for item in islice(rest, _REQUESTS)]
            while waiting:
                record = waiting.pop(0).result()
                waiting += [pool.submit(read, item) for item in islice(rest, 1)]
                yield record
        finally:
            pool.shutdown(cancel_futures=True)


def _listing(root: str) -> tuple[list[str], Callable[[str], str]]:
    """Return the files below a folder, in order, and what tells the state of one of them."""
    if not is_url(root):
        return list(walk_files(Path(root))), lambda file: state_of(join(root, file))
    found = list_files(root)
    states = {file: f"{remote.size} {remote.version}" for file, remote in found.items()}
    return list(found), lambda file: states.get(file, "gone")


def _fingerprint(
    items: Sequence[str], table: Mapping[str, TableEntry], present: Container[str], state: Callable[[str], str]
) -> str:
    """Return the fingerprint of files and their captions."""
    parts = []
    for item in items:
        file, entry = item[1:], table.get(item[1:])
        captions = [] if entry is None else [repr(entry)]
        if entry is None or not entry.has_caption:
            captions += [state(_beside(file, suffix)) for suffix in _SUFFIXES]
        parts += [item, str(item in present), state(file), *captions]
    return fingerprint_of(*parts)


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
    """Return whether the file's extension is that of an image."""
    return posixpath.splitext(file)[1].lower() in EXTENSIONS


def read_table(root: str) -> dict[str, TableEntry]:
    """Read the table of captions in the root of a folder.

    Several lines of one file give it several captions.

    Args:
        root: Path or URL of the folder.

    Returns:
        For each path below the folder what the table says; empty if there is no table.

    Raises:
        DataError: There are two tables, or the one cannot be read, is damaged or lacks a column.
    """
    states = {name: state_of(join(root, name)) for name in TABLES}
    found = [name for name in TABLES if states[name] != "gone"]
    if not found:
        return {}
    if len(found) > 1:
        raise DataError(f"{shown(root)} holds {' and '.join(found)}; keep the one whose captions are meant")
    return _parse_table(join(root, found[0]), states[found[0]])


@functools.lru_cache(maxsize=2)
def _parse_table(place: str, _state: str) -> dict[str, TableEntry]:
    """Parse a table; a worker that reads many partitions does so once while the file stays as it is."""
    lines = _read_jsonl(place) if place.endswith(".jsonl") else _read_csv(place)
    table: dict[str, TableEntry] = {}
    try:
        for file, captions, metadata in lines:
            entry = table.setdefault(posixpath.normpath(file), TableEntry(metadata=metadata))
            entry.captions.extend(captions if isinstance(captions, list) else [captions])
    except OSError as error:
        raise DataError(f"{shown(place)} cannot be read: {error.strerror}") from error
    return table


def tell_overruled(root: str, names: Sequence[str], table: Mapping[str, TableEntry]) -> None:
    """Say of how many images the .txt is passed over because the table has a caption.

    Args:
        root: Path or URL of the folder.
        names: Files below it.
        table: From `read_table`.
    """
    texts = {name for name in names if name.endswith(".txt")}
    number = sum(entry.has_caption and _beside(file, ".txt") in texts for file, entry in table.items())
    if number:
        name = next(name for name in TABLES if name in names)
        logger.warning(
            "%s: %d images have a .txt and a caption in %s; that of %s is taken", shown(root), number, name, name
        )


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


def _text_lines(place: str, newline: str) -> io.TextIOWrapper:
    """Open a table as text; bytes that are not UTF-8 become surrogates."""
    return io.TextIOWrapper(open_file(place), encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _read_jsonl(place: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the file name, captions and metadata of each line of a metadata.jsonl."""
    with _text_lines(place, "\n") as lines:
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            where = f"{shown(place)}, line {number}"
            try:
                line = parse_object(text)
            except ValueError as error:
                raise DataError(f"{where}: {error}; each line must be a JSON object with file_name and text") from error
            yield _split(line, where, "keys")


def _read_csv(place: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield the file name, captions and metadata of each row of a table in CSV."""
    with _text_lines(place, "") as lines:
        rows = csv.DictReader(lines)
        try:
            columns = list(rows.fieldnames or [])
            for wanted in (FILE_COLUMNS, CAPTION_COLUMNS):
                if not set(wanted) & set(columns):
                    raise DataError(f"{shown(place)}: no column {' or '.join(wanted)} in its first line; there is "
                                    f"{_listed(columns)}")  # fmt: skip
            for row in rows:
                where, rest = f"{shown(place)}, line {rows.line_num}", row.pop(None, [])  # pyright: ignore
                if rest:
                    raise DataError(f"{where}: {len(columns) + len(rest)} values for {len(columns)} columns; put "
                                    "captions that hold commas in quotes")  # fmt: skip
                row.pop("", None)
                yield _split(row, where, "columns")
        except csv.Error as error:
            raise DataError(f"{shown(place)}, line {rows.line_num}: {error}; it must be comma-separated") from error
