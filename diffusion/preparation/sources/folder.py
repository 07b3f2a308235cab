"""Source: a folder of image files with captions beside them or in tables."""

import json
import logging
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple

from diffusion.datasets.images import EXTENSIONS
from diffusion.errors import DataError, MachineError, first_line, printable
from diffusion.preparation.records import (
    Location,
    NoColumnsError,
    Partition,
    Partitions,
    Problem,
    Reason,
    Record,
    Rejected,
    bare_record,
    decode_text,
    has_text,
    key_of,
    make_record,
    record_of_files,
)
from diffusion.preparation.sources.base import LOOKED_AT, MANY, NUM_CHECKED, Source, size_of_partitions
from diffusion.preparation.sources.caption_tables import TABLES, read_lines
from diffusion.preparation.sources.reading import (
    LEADS_OUT,
    UnfitFileError,
    file_of,
    leads_out,
    list_folder,
    name_of,
    read_below,
    read_file,
)

logger = logging.getLogger(__name__)

_ROWS = 50_000
"""Rows that are written to the database at once."""

_NAMED_GONE = 1_000
"""Most files that are named as gone."""

_SCHEMA = """
CREATE TABLE files (file VARCHAR, stem VARCHAR, kind VARCHAR, extension VARCHAR, size BIGINT, version VARCHAR,
    problem VARCHAR);
CREATE TABLE lines (file VARCHAR, number BIGINT, captions VARCHAR, metadata VARCHAR, has_caption BOOLEAN,
    problem VARCHAR);
"""

_ITEMS = """
CREATE TABLE entries AS
    SELECT file, list(captions ORDER BY number) AS captions, arg_min(metadata, number) AS metadata,
        bool_or(has_caption) AS has_caption, any_value(problem) AS problem
    FROM lines GROUP BY file;
CREATE TABLE beside AS
    SELECT stem, kind, min(file) AS file, arg_min(version, file) AS version,
        CASE WHEN count(*) > 1 THEN 'several, in upper and lower case' ELSE min(problem) END AS problem
    FROM files WHERE kind IN ('text', 'json') GROUP BY stem, kind;
CREATE TABLE images AS
    SELECT files.*, entries.captions, entries.metadata, entries.has_caption
    FROM files LEFT JOIN entries USING (file)
    WHERE kind = 'image' OR entries.file IS NOT NULL;
CREATE TABLE items AS
    SELECT i.file, i.size, i.captions, i.metadata, t.file AS text, j.file AS json,
        substr(md5(concat_ws(' ', i.version, t.version, j.version, i.captions::VARCHAR, i.metadata)), 1, 16) AS version,
        CASE WHEN i.problem <> '' THEN i.problem WHEN t.problem <> '' THEN '.txt: ' || t.problem
            WHEN j.problem <> '' THEN '.json: ' || j.problem END AS unreadable
    FROM images i
    LEFT JOIN beside t ON t.kind = 'text' AND t.stem = i.stem AND NOT coalesce(i.has_caption, FALSE)
    LEFT JOIN beside j ON j.kind = 'json' AND j.stem = i.stem AND i.captions IS NULL
    UNION ALL BY NAME
    SELECT file, 0 AS size, '' AS version, problem AS unreadable,
        CASE WHEN problem IS NULL THEN 'the table names it, there is no such file' END AS missing_image
    FROM entries ANTI JOIN files USING (file)
    UNION ALL BY NAME
    SELECT file, 0 AS size, '' AS version,
        CASE extension WHEN '' THEN 'it has no extension' ELSE 'extension ' || extension || ' is not read' END
            AS missing_image
    FROM files SEMI JOIN beside USING (stem) ANTI JOIN images USING (stem)
    WHERE files.kind = 'other';
"""
"""A row per image. A file without an image, which may get one later, has no version."""

_UNCAPTIONED = "captions IS NULL AND text IS NULL AND json IS NULL"
"""Images that wait for a table below whose folder they lie."""

_NEW = "FROM items ANTI JOIN known ON items.file = known.file AND (known.version <> '' OR items.version = '')"
_CHANGED = "FROM items JOIN known USING (file) WHERE known.version NOT IN ('', items.version)"
_GONE = "FROM known ANTI JOIN items USING (file) WHERE known.version <> '' AND NOT known.removed"
_CAPTIONLESS = "(SELECT file, stem FROM images ANTI JOIN beside USING (stem) WHERE captions IS NULL) AS i"
_SUSPECT = {
    "images have a .txt and a caption in a table; that of the table is taken": """
        SELECT file FROM images SEMI JOIN beside t ON images.stem = t.stem AND t.kind = 'text' WHERE has_caption""",
    "images without captions have a file beside them that is not read; name it as the image, with .txt for its "
    "extension": f"""SELECT f.file FROM {_CAPTIONLESS} JOIN files f ON f.stem = i.stem WHERE f.kind = 'other' UNION ALL
        SELECT f.file FROM {_CAPTIONLESS} JOIN files f ON f.stem = i.file WHERE f.kind IN ('text', 'json')""",
    f"tables are not read, and there are images without captions; a table is named {', '.join(TABLES)}": f"""
        SELECT file FROM files WHERE kind = 'other' AND lower(extension) IN ('.jsonl', '.csv', '.tsv', '.xlsx')
            AND EXISTS (FROM {_CAPTIONLESS})""",
    "names in tables, or of captions, differ from files by backslashes or the Unicode form; write both alike": f"""
        SELECT e.file FROM (SELECT file FROM entries ANTI JOIN files USING (file)) AS e
            JOIN files f ON nfc_normalize(replace(e.file, '\\', '/')) = nfc_normalize(f.file) UNION ALL
        SELECT f.file FROM {_CAPTIONLESS} JOIN files f ON nfc_normalize(f.stem) = nfc_normalize(i.stem)
            WHERE f.kind IN ('text', 'json')""",
}
"""Likely mistakes in the names of files, and the queries for these files."""

_COLUMNS = "items.file, items.size, items.version, captions, metadata, text, json, unreadable, missing_image"


@dataclass(frozen=True, kw_only=True)
class FolderSource(Source):
    """Image files below a folder, sorted by path; hidden ones are skipped.

    The captions of an image are what a table of its folder or one above says: several lines of a file, or a list in
    `captions`, give it several. Where the table has none for it, the .txt of the same name does. An image that no table
    names has the files of the same name: .txt, whose whole text is one caption, and .json, as img2dataset writes it.
    Rejected are images that a table names and that do not exist or lie out of its folder, links that lead out of the
    source's folder, images with several .txt or .json (in upper and lower case), and files that have a .txt or .json
    but neither a known extension nor an image of the same name beside them.
    """

    kind: ClassVar[str] = "folder"
    suffixes: ClassVar[tuple[str, ...]] = tuple(sorted(EXTENSIONS))

    def check(self) -> None:
        """Check that a named column is that of a table or a key of a .json; a DataError if it is neither."""
        if not (self.image_column or self.caption_column):
            return
        names = sorted(entry.name for entry in islice(list_folder(self.root), LOOKED_AT))
        if any(posixpath.basename(name) in TABLES for name in names):
            return  # The listing reads all of them.
        if self.image_column:
            raise NoColumnsError(f"{self.path} has no table that could have a column {self.image_column}; leave "
                                 "image_column out, or give it to the sources that have it")  # fmt: skip
        self.check_json(self._json(name for name in names if name.lower().endswith(".json")))

    def _json(self, names: Iterable[str]) -> Iterator[bytes]:
        """Yield the first .json, as far as they can be read."""
        for name in islice(names, NUM_CHECKED):
            with suppress(UnfitFileError):
                yield read_file(self.uri(file_of(name)), self.row_limit(), self.root)

    def partitions(self, known: Sequence[str] = (), only: Mapping[str, str] | None = None) -> Partitions:
        """List the folder and cut the images, sorted by path, into partitions.

        The listing is sorted and joined with the tables in a database in a temporary folder, so that memory is bounded.
        """
        import duckdb

        scratch = TemporaryDirectory(prefix="listing-")
        settings: dict[str, Any] = {"memory_limit": "2GB", "threads": "2", "temp_directory": scratch.name}
        database = duckdb.connect(str(Path(scratch.name) / "listing.duckdb"), config=settings)
        with _database_errors(self.path):
            database.execute(_SCHEMA)
            _insert(database, "files", self._listing())
            tables = database.execute("SELECT file, version FROM files WHERE kind = 'table'").fetchall()
            unfit: list[_UnfitTable] = []
            _insert(database, "lines", self._lines(sorted(name_of(file) for file, _ in tables), unfit))
            for one in unfit:
                database.execute("DELETE FROM lines WHERE number >= ? AND number < ?", [one.start, one.stop])
            database.execute(_ITEMS)
            for one in unfit:
                folder = f"{posixpath.dirname(one.table)}/".lstrip("/")
                database.execute(f"DELETE FROM items WHERE {_UNCAPTIONED} AND starts_with(file, ?)", [folder])
            self._report_suspect(database)
            database.execute("CREATE TABLE known (file VARCHAR, version VARCHAR, removed BOOLEAN)")
            if known:
                seen = f"""SELECT file, max(version), bool_and(reason = '{Reason.REMOVED.value}')
                    FROM read_parquet(?, hive_partitioning = false) GROUP BY file"""
                database.execute(f"INSERT INTO known {seen}", [list(known)])
            database.execute("DELETE FROM items WHERE '~' || md5(file) IN (SELECT file FROM known)")  # Taken down.
            if only is not None:
                database.execute("CREATE TABLE wanted (file VARCHAR, version VARCHAR)")
                _insert(database, "wanted", only.items())
                database.execute("DELETE FROM items WHERE (file, version) NOT IN (SELECT (file, version) FROM wanted)")
            gone = database.execute(f"SELECT file {_GONE} ORDER BY file LIMIT {_NAMED_GONE}").fetchall()
            (num_new,) = database.execute(f"SELECT count(*) {_NEW}").fetchone() or (0,)
            size = size_of_partitions(self.partition_size, num_new)
            result = database.execute(f"SELECT {_COLUMNS} {_CHANGED} ORDER BY items.file")
            changed = list(_cut(result, self.partition_size or MANY))

        def new() -> Iterator[Partition]:
            with scratch, database, _database_errors(self.path):
                yield from _cut(database.execute(f"SELECT {_COLUMNS} {_NEW} ORDER BY items.file"), size)

        versions = dict(tables)
        problems = [Problem(file_of(one.table), versions[file_of(one.table)], one.error) for one in unfit]
        return Partitions(new=new(), gone=[file for (file,) in gone], changed=changed, problems=problems)

    def _listing(self) -> Iterator[tuple[Any, ...]]:
        """Yield rows of `files`."""
        for name, size, version, problem in list_folder(self.root):
            stem, suffix = posixpath.splitext(name)
            yield file_of(name), file_of(stem), _kind_of(name, suffix), ascii(suffix)[1:-1], size, version, problem

    def _lines(self, tables: Sequence[str], unfit: "list[_UnfitTable]") -> Iterator[tuple[Any, ...]]:
        """Yield rows of `lines`: what the tables of captions say, in their order; list those that cannot be used."""
        folders: dict[str, str] = {}
        number = 0
        for table in tables:
            start, folder = number, posixpath.dirname(table)
            try:
                if (other := folders.setdefault(folder, table)) != table:
                    both = printable(f"{other} and {table}")
                    raise DataError(f"{self.path} holds {both}; keep the one whose captions are meant")
                columns = self.image_column, self.caption_column
                for line in read_lines(self.uri(file_of(table)), self.root, self.row_limit(), *columns):
                    # A path that leads out stays as it is written, so that it is no other file's.
                    problem = LEADS_OUT if leads_out(line.file) else None
                    file = posixpath.join(folder, line.file)
                    file = file if problem else posixpath.normpath(file)
                    values = json.dumps(line.captions), json.dumps(line.metadata), has_text(line.captions), problem
                    yield file_of(file), number, *values
                    number += 1
            except DataError as error:
                unfit.append(_UnfitTable(table, start, number, error))

    def _report_suspect(self, database: Any) -> None:
        for problem, query in _SUSPECT.items():
            (number, file) = database.execute(f"SELECT count(*), min(file) FROM ({query})").fetchone()
            if number:
                logger.warning("%s: %d %s (%s)", self.path, number, problem, printable(name_of(file)))

    def _scan(self, partition: Partition) -> Iterator[Record | Rejected]:
        yield from self.map(self._record, partition.items)

    def _record(self, text: str) -> Record | Rejected:
        item, key = json.loads(text), key_of_item(self.name, text)
        location = Location(file=item["file"], version=item["version"])
        for problem in (Reason.UNREADABLE, Reason.MISSING_IMAGE):
            if problem.value in item:
                return Rejected(key, problem, location, item[problem.value])
        contents: list[bytes | None] = []
        for what, prefix, limit in (
            ("file", "", self.image_limit()),
            ("text", ".txt: ", self.text_limit()),
            ("json", ".json: ", self.row_limit()),
        ):
            try:
                contents.append(read_file(self.uri(item[what]), limit, self.root) if item.get(what) else None)
            except UnfitFileError as error:
                if error.reason is Reason.MISSING_IMAGE:
                    raise self.gone_error(item[what]) from error
                bare = bare_record(key, contents[0] if contents else None, location)
                return Rejected(key, error.reason, location, prefix + error.detail, bare)
        image, caption, values = contents
        assert image is not None
        if "captions" in item:
            captions = [one for line in item["captions"] for one in json.loads(line)]
            captions = captions if caption is None else decode_text(caption)
            return make_record(key, image, captions, json.loads(item["metadata"]), location)
        if caption is None and values is None:
            detail = "no .txt or .json of that name, no line in a table"
            return Rejected(key, Reason.MISSING_CAPTION, location, detail, bare_record(key, image, location))
        return record_of_files(key, image, caption, values, location, caption_column=self.caption_column)

    def _images(self, partition: Partition, locations: Sequence[Location]) -> Iterator[bytes]:
        yield from self.map(self._image, locations)

    def _image(self, location: Location) -> bytes:
        if not location.version:
            raise UnfitFileError(Reason.MISSING_IMAGE, f"{location.file!a}: a rejection without an image")
        try:
            return read_below(self.root, name_of(location.file), self.image_limit())
        except UnfitFileError as error:
            raise UnfitFileError(error.reason, f"{location.file!a}: {error}") from error


class _UnfitTable(NamedTuple):
    """A table of captions that cannot be used, and the numbers of its lines before the mistake."""

    table: str
    start: int
    stop: int
    error: DataError


@contextmanager
def _database_errors(path: str) -> Iterator[None]:
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        what = first_line(error)
        raise MachineError(f"{path}: its files cannot be sorted in a temporary folder ({what}); set TMPDIR to a folder "
                           "of a larger disk") from error  # fmt: skip


def key_of_item(source: str, item: str) -> str:
    """Key of the image of an item of a partition."""
    return f"{source}/{key_of(name_of(json.loads(item)['file']))}"


def is_image_name(name: str) -> bool:
    """Return whether the extension of a file is that of an image."""
    return posixpath.splitext(name)[1].lower() in EXTENSIONS


def _kind_of(name: str, suffix: str) -> str:
    if posixpath.basename(name) in TABLES:
        return "table"
    suffix = suffix.lower()
    return "image" if suffix in EXTENSIONS else {".txt": "text", ".json": "json"}.get(suffix, "other")


def _insert(database: Any, table: str, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows into a table of the database, many at a time."""
    import pyarrow as pa

    rows = iter(rows)
    while chunk := list(islice(rows, _ROWS)):
        columns = [pa.array(column) for column in zip(*chunk, strict=True)]
        database.register("chunk", pa.table(columns, names=list(map(str, range(len(columns))))))
        database.execute(f"INSERT INTO {table} SELECT * FROM chunk")
        database.unregister("chunk")


def _cut(result: Any, size: int) -> Iterator[Partition]:
    """Cut rows of items into partitions."""
    names = _COLUMNS.replace("items.", "").split(", ")
    while rows := result.fetchmany(size):
        items = [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows]
        yield Partition(
            num_bytes=sum(item["size"] for item in items),
            num_records=len(items),
            items=tuple(map(json.dumps, items)),
        )
