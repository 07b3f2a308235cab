"""Metadata of images: a parquet file per partition of the sources, with a row per image.

`scan` writes `metadata/NUMBER.parquet`, rows in the order of the source. `score` writes `scores/COLUMN/NUMBER.parquet`
with as many rows in the same order. These two are the contract for other tools: what reads and writes them can take
the place of a stage (Spark's `mapInPandas`, for example), and any SQL engine can query them.
"""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from diffusion import storage
from diffusion.errors import ConfigurationError, DataError, MachineError, explained_writes, first_line, similar_names
from diffusion.files import atomic_path
from diffusion.formats.data_set import ANSWERS, METADATA, PACKED, SCORES, SELECTION
from diffusion.preparation.layout import (
    CAPTIONS,
    GENERATED_CAPTIONS,
    RESERVED,
    SCHEMA,
    local_copies,
    part_name,
    read_schema,
)
from diffusion.preparation.records import WITHOUT_CAPTION, Reason

if TYPE_CHECKING:
    import duckdb

    from diffusion.preparation.scan import Scan


def removal_hash(key: str) -> str:
    """Return the hash of a key as `removed.json` holds it: xxh3_128, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(key.encode())


def key_hash(key: str) -> int:
    """Return the hash of a key as the column `key_hash` holds it: xxh3_64."""
    return xxhash.xxh3_64_intdigest(key.encode())


def removed_row(row: Mapping[str, Any], partition_file: str) -> dict[str, Any]:
    """Make the row of an image that was taken down: neither its key nor its content is left.

    Where the image is a file of its own (`partition_file`, that of its partition, is empty), a hash takes the place of
    the file's name: so it is known when the folder grows. A file that holds other images, too, is named.
    """
    if row["key"] == "":
        return dict(row)
    file, version = row["file"], row["version"]
    if not partition_file and file:  # A source that is a single file has no name for it.
        file, version = "~" + hashlib.md5(file.encode(), usedforsecurity=False).hexdigest(), ""
    kept = {"key": "", "key_hash": row["key_hash"], "file": file, "version": version}
    return dict.fromkeys(SCHEMA.names) | kept | {"reason": Reason.REMOVED.value, "detail": ""}


MEASURES = ("width", "height", "bytes", "format", "xxh128", "phash", "sharpness", "aspect_ratio")
"""Columns that filters know by these names; other names are those of scores, or keys of the source's metadata."""

ROWS_PER_GROUP = 131_072
"""Rows of a row group of the files that queries write."""

MEMORY = "40%"
"""Share of the memory of the machine or container for DuckDB; more goes to a temporary folder."""


@dataclass(frozen=True)
class MetadataDatabase:
    """The metadata of a data set within DuckDB.

    The connection has a table `parts`: part, source (its name) and generation.
    """

    connection: "duckdb.DuckDBPyConnection"

    folder: Path
    """Folder of the parquet files, on this machine."""

    scores: Mapping[str, Collection[int]]
    """Parts that have scores, by folder below `scores`."""

    out: str
    """Folder of the data set, path or s3://; from there, files are copied when a query names them."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns of `images`, but for `_keys`."""
        scores = [GENERATED_CAPTIONS if name == CAPTIONS else name for name in self.scores]
        return [*SCHEMA.names, "part", "row_number", "source", "generation", "aspect_ratio", *scores]

    @cached_property
    def has_answers(self) -> bool:
        """Check whether a server wrote the captions: `answers` beside them say how."""
        parts = self.scores.get(CAPTIONS)
        return bool(parts) and (
            ANSWERS in read_schema(storage.join(self.out, SCORES, CAPTIONS, part_name(min(parts)))).names
        )

    def metadata(self, parts: Sequence[int]) -> str:
        """Write a query of the metadata of some parts without scores."""
        return self.read(METADATA, parts)

    def read(self, folder: str, parts: Sequence[int]) -> str:
        """Write a query of a folder's files of some parts, with part and row number."""
        names = [storage.join(folder, part_name(part)) for part in parts]
        return f"""(
            SELECT * EXCLUDE (filename, file_row_number), parse_filename(filename, true)::INTEGER AS part,
                file_row_number::INTEGER AS row_number
            FROM {read_files(self.out, names, self.folder, ", filename = true, file_row_number = true")}
        )"""

    def write(self, query: str, name: str) -> None:
        """Write the result of an ordered query as a parquet file of the data set; threads do not change its bytes."""
        path, uri = self.folder / name, storage.join(self.out, name)
        options = f"FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROWS_PER_GROUP}"
        with explained_writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as partial:
                self.connection.execute(f"COPY ({query}) TO {literal(str(partial))} ({options})").fetchall()
        if storage.is_url(uri):
            storage.upload(path, uri)

    def images(self, parts: Sequence[int], keys: Sequence[str] = (), types: Mapping[str, str] | None = None) -> str:
        """Write a query of the images of some parts.

        The reason of one for which a server was asked for captions and gave none is `caption_OUTCOME`.

        Args:
            parts: numbers of the parts.
            keys: keys of the sources' metadata whose texts are the column `_keys`, a list.
            types: keys of the sources' metadata that are columns, with their SQL types.
        """
        joins, columns, replaced = [], [], {"captions": "m.captions"}
        for name, scored in self.scores.items():
            alias = f"s{len(joins)}"
            # With the files of no part there would be no column.
            files = [part for part in parts if part in scored] or [min(scored)]
            table = self.read(storage.join(SCORES, name), files)
            joins.append(f"LEFT JOIN {table} {alias} ON {alias}.part = m.part AND {alias}.row_number = m.row_number")
            if name == CAPTIONS:
                replaced["captions"] = captions = f"coalesce({alias}.captions, m.captions)"
                if self.has_answers:
                    answer, reasons = f"{alias}.{ANSWERS}", ", ".join(literal(one.value) for one in WITHOUT_CAPTION)
                    was_asked = f"len({captions}) = 0 AND m.reason IN ({reasons}) AND {answer} IS NOT NULL"
                    replaced["reason"] = f"if({was_asked}, concat('caption_', {answer}.outcome), m.reason)"
                    replaced["detail"] = f"if({was_asked}, {answer}.detail, m.detail)"
                name = GENERATED_CAPTIONS
            columns.append(f"{alias}.{identifier(name)}")
        types = types or {}
        pointers = ", ".join(map(_pointer, [*keys, *types]))
        columns.append(f"json_extract_string(m.metadata, [{pointers}]::VARCHAR[]) AS _keys")
        typed = [
            f"TRY_CAST(_keys[{number}] AS {kind}) AS {identifier(name)}"
            for number, (name, kind) in enumerate(types.items(), start=len(keys) + 1)
        ]
        replacements = ", ".join(f"{sql} AS {name}" for name, sql in replaced.items())
        return f"""(SELECT {", ".join(["* EXCLUDE (_keys)" if not keys else "*", *typed])} FROM (
            SELECT m.* REPLACE ({replacements}), parts.source, parts.generation,
                round(m.width / m.height, 4) AS aspect_ratio, {", ".join(columns)}
            FROM {self.metadata(parts)} m JOIN parts ON parts.part = m.part {" ".join(joins)}
        ))"""

    def parts(self, generation: int | None = None) -> list[int]:
        """List the parts of all generations, or of one."""
        where = "" if generation is None else f"WHERE generation = {generation}"
        return [part for (part,) in self.connection.execute(f"SELECT part FROM parts {where} ORDER BY part").fetchall()]

    def key_types(self, keys: Sequence[str], parts: Sequence[int]) -> dict[str, str]:
        """Find the keys of the sources' metadata that an image has, and their types.

        BIGINT or DOUBLE if all values are numbers, else VARCHAR. A text such as 007 is no number.
        """
        types = {}
        for key in keys:
            values = f"SELECT json_extract_string(metadata, {_pointer(key)}) AS value FROM {self.metadata(parts)}"
            query = f"""SELECT
                bool_and(TRY_CAST(value AS DOUBLE) IS NOT NULL AND NOT regexp_matches(value, '^[-+]?0[0-9]')),
                bool_and(TRY_CAST(value AS BIGINT) IS NOT NULL AND regexp_matches(value, '^-?[0-9]+$'))
                FROM ({values}) WHERE value IS NOT NULL"""
            [(are_numbers, are_integers)] = self.connection.execute(query).fetchall()
            if are_numbers is not None:
                types[key] = "VARCHAR" if not are_numbers else "BIGINT" if are_integers else "DOUBLE"
        return types


@contextlib.contextmanager
def open_metadata(
    out: str, scan: "Scan", *, columns: Sequence[str] = (), scratch: str | None = None
) -> "Iterator[duckdb.DuckDBPyConnection]":
    """Open the metadata of a data set for queries with DuckDB.

        with open_metadata(out, Scan.read(out), columns=["license"]) as connection:
            connection.sql("SELECT license, count(*) FROM images WHERE reason = '' GROUP BY license").show()

    The view `images` has a row for each image of all generations: the columns of `SCHEMA` (captions are those of the
    captioner, if there was one), `part` and `row_number` (of the metadata file, and of the row in it), `source` (its
    name), `generation`, `aspect_ratio` (width over height), a column of each scorer, and the keys of the sources'
    metadata that were asked for (types: `MetadataDatabase.key_types`). Files of `selection` have the same numbers as
    `part` and `row`. No file outside the data set can be read.

    Args:
        out: folder of the data set, path or s3://; from there the metadata are copied to a temporary folder.
        scan: partitions and sources of the data set.
        columns: keys of the sources' metadata.
        scratch: folder for the temporary folder; None is the system's.

    Raises:
        ConfigurationError: no image has a key.
        DataError: a partition has not been scanned.
    """
    with open_database(out, scan, scratch=scratch) as database:
        parts = database.parts()
        types = database.key_types(columns, parts)
        if unknown := [name for name in columns if name not in types]:
            raise ConfigurationError(unknown_column(database, unknown[0]))
        database.connection.execute(f"CREATE VIEW images AS FROM {database.images(parts, types=types)}")
        yield database.connection


@contextlib.contextmanager
def open_database(out: str, scan: "Scan", *, scratch: str | None = None) -> Iterator[MetadataDatabase]:
    """Open a database in a temporary folder, with a table of the parts of a data set.

    Raises:
        DataError: a partition has not been scanned.
        MachineError: memory and disk do not suffice.
    """
    import duckdb

    wanted = {part_name(one.number) for one in scan.partitions}
    metadata, scored = (
        [name for name in storage.list_files(storage.join(out, kind)) if name.rpartition("/")[2] in wanted]
        for kind in (METADATA, SCORES)
    )
    if missing := wanted.difference(metadata):
        raise DataError(f"{out}: {METADATA}/{min(missing)} does not exist; run the stage scan to its end first")
    scores: dict[str, set[int]] = {}
    for column, _, name in sorted(name.rpartition("/") for name in scored):
        scores.setdefault(column, set()).add(int(Path(name).stem))
    if reserved := sorted(name for name in scores if name != CAPTIONS and name.lower() in RESERVED):
        raise DataError(f"{out}: {SCORES}/{reserved[0]} has the name of another column; rename it")
    values = [{"part": one.number, "source": scan.sources[one.source].name, "generation": one.generation}
              for one in scan.partitions]  # fmt: skip
    schema = pa.schema({"part": pa.int32(), "source": pa.string(), "generation": pa.int32()})
    with tempfile.TemporaryDirectory(prefix="select-", dir=scratch) as temporary:
        folder = Path(temporary) if storage.is_url(out) else Path(out).absolute()
        settings: dict[str, Any] = {"memory_limit": MEMORY, "temp_directory": f"{temporary}/spill"}
        with duckdb.connect(f"{temporary}/tables.duckdb", config=settings) as connection:
            allowed = [str(folder / kind) + "/" for kind in (METADATA, SCORES, SELECTION, PACKED)]
            texts = ", ".join(map(literal, [*allowed, *map(as_pattern, allowed)]))
            connection.execute(f"SET allowed_directories = [{texts}]")
            connection.execute("SET enable_external_access = false")
            add_table(connection, "parts", pa.Table.from_pylist(values, schema=schema))
            try:
                yield MetadataDatabase(connection, folder, scores, out)
            except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
                message = first_line(error)
                raise MachineError(f"DuckDB: {message}; free memory or disk, or name another disk (scratch)") from error


def add_table(connection: "duckdb.DuckDBPyConnection", name: str, table: pa.Table) -> None:
    """Copy an Arrow table into the database, in place of one of that name."""
    connection.register("_added", table)
    connection.execute(f"CREATE OR REPLACE TABLE {name} AS FROM _added").fetchall()
    connection.unregister("_added")


def fetch_arrays(connection: "duckdb.DuckDBPyConnection", query: str) -> dict[str, NDArray[Any]]:
    """Return the columns of a query's result, which holds no null."""
    return connection.execute(query).fetchnumpy()  # pyright: ignore[reportReturnType]


def groups(parts: Sequence[int], size: int = 64) -> Iterator[Sequence[int]]:
    """Cut parts into groups: scores are joined group by group, so that the join fits into memory."""
    return (parts[start : start + size] for start in range(0, len(parts), size))


def unknown_column(database: MetadataDatabase, name: str) -> str:
    """Write the message about a column that does not exist, with similar names."""
    some = f"SELECT metadata FROM {database.metadata(database.parts()[:8])} LIMIT 10000"
    keys = database.connection.execute(f"SELECT DISTINCT unnest(json_keys(metadata)) FROM ({some})").fetchall()
    known = [*database.columns, *(key for (key,) in keys)]
    similar = similar_names(name, known)
    return f"no column and no key of the metadata is named '{name}'" + (
        f"; did you mean {' or '.join(similar)}?" if similar else f"; there are {', '.join(sorted(set(known)))}"
    )


def literal(text: str) -> str:
    """Write a text for SQL."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Write the name of a column for SQL."""
    return '"' + name.replace('"', '""') + '"'


def _pointer(key: str) -> str:
    """Write the JSON pointer of a key for SQL."""
    return literal("/" + key.replace("~", "~0").replace("/", "~1"))


def read_files(out: str, names: Collection[str], target: Path, options: str = "") -> str:
    """Write a query of parquet files of a data set; `target` holds copies of those that had to be downloaded."""
    folder = local_copies(out, names, target)
    paths = ", ".join(literal(as_pattern(str(folder / name))) for name in names)
    return f"read_parquet([{paths}], hive_partitioning = false{options})"


def as_pattern(path: str) -> str:
    """Escape a path where DuckDB takes patterns."""
    return re.sub(r"([*?\[])", r"[\1]", path)
