"""Source: parquet files with an image, as bytes or as the path of a file, and its captions in each row."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Partition, Record, Refused, fingerprint_of, key_of
from diffusion.preparation.sources.columns import Row, find_columns, first_line, metadata_columns, records_of_rows
from diffusion.preparation.sources.files import FileSource
from diffusion.preparation.sources.remote_files import each, open_file, state_of
from diffusion.storage import BLOCK_BYTES, is_url, shown

_BATCH_ROWS = 32
_BUFFER_BYTES = 2**20


@dataclass(frozen=True)
class ParquetSource(FileSource):
    """One parquet file or several, streamed a few rows at a time.

    A column of text as image column holds paths, relative to the folder of the parquet file or absolute, or URLs; so
    does the `path` of an image struct without `bytes`. Images of the web are read once more in each preparation, and
    whatever the server then gives: fetch them with img2dataset first where a run is to be repeated. The path comes into
    the metadata as `image_path`. Other columns of text, lists of texts, numbers, truth values and times are metadata.
    Rows whose `status` is other than `success` are refused. A file that is damaged counts as one refusal more.
    Remote files are read by ranges. The rest of a key is the file's path below `path`, `#` and the number of the row.

    Attributes:
        image_column: Column of the images; None for the first of IMAGE_COLUMNS that is there.
        caption_column: Column of the caption or list of captions; None for the first of CAPTION_COLUMNS that is there.
        num_records: Rows of all files.
    """

    image_column: str | None = None
    caption_column: str | None = None
    num_records: int | None = None
    kind: str = "parquet"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Cut the files between their row groups into partitions of at least `size` rows, or what is left of a file."""
        files = dict(self.files)
        read_up_to: dict[str, int] = {}
        for below, _, stop in (partition.items for partition in known):
            read_up_to[below] = max(read_up_to.get(below, 0), int(stop))
        partitions = [partition for partition in known if partition.items[0] in files]
        starts = {file: read_up_to.get(below, 0) for below, file in self.files}
        ranges = each(lambda file: list(_row_ranges(file, size, starts[file])), list(starts))
        for (below, _), rows in zip(self.files, ranges, strict=True):
            for start, stop in rows:
                name = f"{key_of(below) or 'rows'}#{start}"
                partitions.append(Partition(name, (below, str(start), str(stop)), "", stop - start))
        states = dict(zip(files, map(fingerprint_of, each(state_of, list(starts))), strict=True))
        return [replace(partition, fingerprint=states[partition.items[0]]) for partition in partitions]

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the rows in the order of the files."""
        for one in self.partitions(sys.maxsize) if partition is None else [partition]:
            below, start, stop = one.items
            file = dict(self.files)[below]
            rows = _rows(file, self.image_column, self.caption_column, int(start), int(stop))
            yield from records_of_rows(file, self.prefix(below), int(start), rows)


def _row_ranges(place: str, size: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of a file from `first` on as ranges that end with a row group; none for an empty file.

    Raises:
        MachineError: The file cannot be read, and could be when the source was opened.
    """
    try:
        with _opened(place) as file:
            metadata = file.metadata
    except (pa.ArrowException, OSError) as error:
        raise MachineError(f"cannot read {shown(place)}: {first_line(error)}") from error
    start, end = first, 0
    for group in range(metadata.num_row_groups):
        end += metadata.row_group(group).num_rows
        if end - start >= size:
            yield start, end
            start = end
    if end > start:
        yield start, end


def check_parquet(place: str, image_column: str | None, caption_column: str | None) -> int:
    """Check that a file is parquet and has the columns; return how many rows it has.

    Raises:
        DataError: It is damaged, or lacks a column or has it with another type; the message names those that it has.
    """
    try:
        with _opened(place) as file:
            find_columns(shown(place), file.schema_arrow, image_column, caption_column)
            return file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{shown(place)} cannot be read as parquet: {first_line(error)}; fetch it again or take it out"
        ) from error


def _opened(place: str) -> pq.ParquetFile:
    """Open a local or remote file; of a remote one the ranges are read that are asked for."""
    source = open_file(place, buffer_bytes=0) if is_url(place) else place
    return pq.ParquetFile(source, buffer_size=BLOCK_BYTES if is_url(place) else _BUFFER_BYTES, pre_buffer=False)


def _rows(place: str, image: str | None, caption: str | None, start: int, stop: int) -> Iterator[Row]:
    """Yield the rows from `start` up to `stop`."""
    with _opened(place) as file:
        image, caption = find_columns(shown(place), file.schema_arrow, image, caption)
        columns = [image, caption, *metadata_columns(file.schema_arrow, image, caption)]
        groups, number = _row_groups(file.metadata, start, stop)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=groups, columns=columns, use_threads=False):
            for row in range(batch.num_rows):
                number += 1
                if start < number <= stop:
                    yield Row(batch, row, image, caption)


def _row_groups(metadata: pq.FileMetaData, start: int, stop: int) -> tuple[list[int], int]:
    """Return the row groups that hold some of the rows, and the number of the first of their rows."""
    groups, end, first = [], 0, start
    for group in range(metadata.num_row_groups):
        begin, end = end, end + metadata.row_group(group).num_rows
        if end > start and begin < stop:
            first = first if groups else begin
            groups.append(group)
    return groups, first
