"""Source: parquet files with an image, as bytes or as the path of a file, and its captions in each row."""

import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion import storage
from diffusion.errors import DataError, first_line
from diffusion.preparation.records import Partition, Partitions, Problem, Reason
from diffusion.preparation.sources.base import compare, size_of_partitions
from diffusion.preparation.sources.folder import is_image_name
from diffusion.preparation.sources.reading import Entry, UnfitFileError
from diffusion.preparation.sources.tables import (
    BATCH_BYTES,
    BATCH_ROWS,
    Batch,
    Columns,
    TableSource,
    raise_if_not_damage,
)
from diffusion.storage import is_url

logger = logging.getLogger(__name__)

_LOCAL_BUFFER = 2**20
_WHOLE_GROUP = 32 * 2**20
"""Largest row group of a remote file that is fetched whole, in bytes. Of a larger one each column is a stream."""

_CHUNK_BYTES, _CHUNK_RATIO = 2**29, 100
"""Bytes of a column of a row group, decompressed, up to which it is read whatever it has in the file, and how many
times those it may have beyond that: a page is decompressed whole."""


@dataclass(frozen=True, kw_only=True)
class ParquetSource(TableSource):
    """One parquet file or several, streamed a few rows at a time, and cut between row groups.

    Texts in the image column, and `path` of an image struct without `bytes`, are paths, relative to the folder of
    the parquet file or absolute; URLs and paths that lead out of that folder are rejected. The path comes into the
    metadata as `image_path`, unless a column is named so. Columns of text, lists of texts, numbers, truth values and
    times are metadata. Rows whose `status` is a failure of img2dataset are rejected, and so is each row of a row group
    that is damaged or takes far more memory than it has bytes in the file, and a file without a sound footer. The rest
    of a key is the path, `#` and the number of the row.
    """

    kind: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def takes(self, names: Sequence[str]) -> list[str]:
        """Choose the parquet files, without img2dataset's logs beside a tar or a folder of images of the same name."""
        taken = super().takes(names)
        if self.pattern is not None or not taken:
            return taken
        beside = {name.rpartition(".")[0] for name in names if name.lower().endswith(".tar")}
        for name in filter(is_image_name, names):
            parts = name.split("/")
            beside |= {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        kept = [name for name in taken if name.rpartition(".")[0] not in beside]
        if len(kept) < len(taken):
            _log_logs(self.path, len(taken) - len(kept))
        return kept

    def check(self) -> None:
        """Check the columns of the first readable file; a DataError if they are not there."""
        next(filter(None, map(self._rows_of_groups, self.files())), None)

    def partitions(self, known: Sequence[str] = (), only: Mapping[str, str] | None = None) -> Partitions:
        """Cut the files between their row groups; one that lacks a column, or has it twice, is a problem.

        Only new and changed files are opened: an ingestion looks again and again.
        """
        files = self.files()
        whole = compare([Partition(file=name, version=one.version) for name, one in files.items()], known, only)
        unread = [one.file for one in (*whole.new, *whole.changed)]
        rows = dict(zip(unread, self.map(self._rows_or_problem, unread), strict=True))
        problems = [
            Problem(file, files[file].version, found) for file, found in rows.items() if isinstance(found, DataError)
        ]
        fit = {file: found for file, found in rows.items() if not isinstance(found, DataError)}
        size = size_of_partitions(self.partition_size, sum(map(sum, filter(None, fit.values()))))
        cut = {file: _cut(file, files[file], found, size) for file, found in fit.items()}
        new, changed = ([part for one in some for part in cut.get(one.file, ())] for some in (whole.new, whole.changed))
        return replace(whole, new=new, changed=changed, problems=problems)

    def _rows_or_problem(self, file: str) -> list[int] | DataError | None:
        try:
            return self._rows_of_groups(file)
        except DataError as error:
            return error

    def _rows_of_groups(self, file: str) -> list[int] | None:
        """Return the number of rows of each row group; None if the file cannot be read."""
        try:
            with self._opened(file) as (opened, _):
                return _num_rows(opened)
        except (UnfitFileError, pa.ArrowException) as error:
            raise_if_not_damage(error)
            return None

    @contextmanager
    def _opened(self, file: str) -> Iterator[tuple[pq.ParquetFile, Columns]]:
        """Open a file; of a remote one the ranges are read that are asked for.

        Raises:
            UnfitFileError: it is no regular file, or damaged.
        """
        with self.open(file) as ahead_file, self.open(file, buffer_bytes=0) as exact_file:
            try:
                opened = pq.ParquetFile(exact_file, buffer_size=_LOCAL_BUFFER, page_checksum_verification=True)
                if is_url(self.root):
                    opened = _remote(opened.metadata, ahead_file, exact_file)
                schema = opened.schema_arrow
            except (pa.ArrowException, OSError) as error:
                raise_if_not_damage(error)
                raise UnfitFileError(Reason.DAMAGED_FILE, f"not parquet: {first_line(error)}") from error
            yield opened, self.find_columns(file, schema)

    def batches(self, partition: Partition, groups: Collection[int | None] | None = None) -> Iterator[Batch]:
        """Yield the rows of a partition, or the images of some row groups; of others nothing is read."""
        with self._opened(partition.file) as (opened, columns):
            names = [columns.image]
            if groups is None:
                names = list(dict.fromkeys([columns.image, *columns.captions, *columns.metadata]))
            start = 0
            for group, num_rows in enumerate(_num_rows(opened)):
                is_of_partition = partition.start <= start and (partition.stop is None or start < partition.stop)
                if is_of_partition and (groups is None or group in groups):
                    yield from _batches(opened, group, start, names, partition.num_bytes)
                start += num_rows


@functools.lru_cache
def _log_logs(path: str, number: int) -> None:
    logger.info("%s: %d parquet files beside a tar or a folder of images of the same name are not read, since "
                "img2dataset writes such logs; a pattern takes them", path, number)  # fmt: skip


def _num_rows(opened: pq.ParquetFile) -> list[int]:
    return [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]


def _remote(metadata: pq.FileMetaData, ahead_file: BinaryIO, exact_file: BinaryIO) -> pq.ParquetFile:
    """Open a remote file so that few requests are made: small row groups whole, several with one request."""
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    is_small = max(sizes, default=0) <= _WHOLE_GROUP
    return pq.ParquetFile(
        ahead_file if is_small else exact_file,
        metadata=metadata,
        buffer_size=0 if is_small else storage.BLOCK_BYTES,
        pre_buffer=is_small,
        page_checksum_verification=True,
    )


def _cut(file: str, entry: Entry, rows: list[int] | None, size: int) -> list[Partition]:
    """Cut a file into partitions of at least `size` rows that end with a row group."""
    if rows is None:
        return [Partition(file=file, version=entry.version, num_bytes=entry.size)]
    ranges, start, stop = [], 0, 0
    for num_rows in rows:
        stop += num_rows
        if stop - start >= size:
            ranges.append((start, stop))
            start = stop
    if stop > start:
        ranges.append((start, stop))
    return [
        Partition(file=file, start=start, stop=stop, version=entry.version,
                  num_bytes=entry.size * (stop - start) // sum(rows), num_records=stop - start)
        for start, stop in ranges
    ]  # fmt: skip


def _batches(opened: pq.ParquetFile, group: int, start: int, names: list[str], num_bytes: int) -> Iterator[Batch]:
    """Yield the rows of a row group, as many at once as memory allows; those after damage are lost."""
    stop = start + opened.metadata.row_group(group).num_rows
    max_lost = max(num_bytes, 1)  # A damaged footer can claim any number of rows.
    if detail := _excess(opened, group, names):
        yield Batch(start, group, None, min(stop - start, max_lost), detail, Reason.TOO_LARGE)
        return
    # One by one, since a few bytes of a file can be many large rows.
    rows = opened.iter_batches(batch_size=1, row_groups=[group], columns=names, use_threads=False)
    waiting: list[pa.RecordBatch] = []
    size, damage = 0, ""
    while True:
        try:
            row = next(rows, None)
        except (pa.ArrowException, OSError) as error:
            raise_if_not_damage(error)
            row, damage = None, first_line(error)
        if waiting and (row is None or len(waiting) == BATCH_ROWS or size + row.nbytes > BATCH_BYTES):
            yield Batch(start, group, waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting))
            start += len(waiting)
            waiting, size = [], 0
        if row is None:
            break
        waiting.append(row)
        size += row.nbytes
    if damage:
        yield Batch(start, group, None, min(stop - start, max_lost), f"row group {group}: {damage}")


def _excess(opened: pq.ParquetFile, group: int, names: list[str]) -> str:
    """Return why a row group takes too much memory, by what the footer says of its columns; empty if it does not."""
    columns = opened.metadata.row_group(group)
    for chunk in map(columns.column, range(columns.num_columns)):
        size, stored = chunk.total_uncompressed_size, chunk.total_compressed_size
        is_read = any(f"{chunk.path_in_schema}.".startswith(f"{name}.") for name in names)
        if is_read and size > max(_CHUNK_BYTES, _CHUNK_RATIO * stored):
            return f"row group {group}: {size} bytes, of which the file holds {stored}; write smaller row groups"
    return ""
