"""Source: Arrow files, as `Dataset.save_to_disk` of the Hugging Face library `datasets` writes them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from diffusion.errors import DataError
from diffusion.preparation.records import Partition, Record, Refused
from diffusion.preparation.sources.columns import Row, find_columns, first_line, records_of_rows
from diffusion.preparation.sources.files import FileSource, whole_files
from diffusion.preparation.sources.remote_files import join, open_file, read_file
from diffusion.storage import is_url, shown

STATE = "state.json"


@dataclass(frozen=True)
class ArrowSource(FileSource):
    """Arrow files, such as `Dataset.save_to_disk` writes; each file is a partition.

    Images are read undecoded; columns are as in parquet files (`diffusion.preparation.sources.columns`), so a column of
    lists gives an image several captions. A local file is mapped into memory, of a remote one a batch of rows (1,000
    by default of `datasets`) is held. A file that is damaged counts as one refusal more.

    The rest of a key is the file's path below `path`, `#` and the number of the row.

    Attributes:
        image_column: Column of the images; None for the usual names.
        caption_column: Column of the captions; None for the usual names.
    """

    image_column: str | None = None
    caption_column: str | None = None
    num_records: int | None = None
    kind: str = "huggingface"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Return one partition per file, whatever the size."""
        return whole_files(self, known, "rows")

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the rows in the order of the files."""
        for below, file in (self if partition is None else self.only(partition)).files:
            rows = _rows(file, self.image_column, self.caption_column)
            yield from records_of_rows(file, self.prefix(below), 0, rows)


def arrow_files(folder: str, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the Arrow files of a folder in the order of their rows: where a `state.json` lists them, those only.

    Args:
        folder: Path or URL.
        names: Files below it.

    Raises:
        DataError: A `state.json` is damaged.
    """
    listed: list[str] = []
    states = [name for name in names if name.rpartition("/")[2] == STATE]
    for state in sorted(states):
        try:
            files = [entry["filename"] for entry in json.loads(read_file(join(folder, state)))["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            place = shown(join(folder, state))
            raise DataError(f"{place} does not list the files of a data set; save the data set again") from error
        listed += [state.removesuffix(STATE) + file for file in files]
    if not states:
        listed = sorted(name for name in names if name.endswith(".arrow"))
    return tuple((name, join(folder, name)) for name in listed)


def check_arrow(place: str, image_column: str | None, caption_column: str | None) -> None:
    """Check that a file is Arrow and has the columns.

    Raises:
        DataError: It is damaged, or lacks a column or has it with another type.
    """
    try:
        with _source(place) as source:
            find_columns(shown(place), _reader(source).schema, image_column, caption_column)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{shown(place)} cannot be read as Arrow: {first_line(error)}; save it again") from error


def _rows(place: str, image: str | None, caption: str | None) -> Iterator[Row]:
    """Yield the rows of a file."""
    with _source(place) as source:
        for batch in _reader(source):
            columns = find_columns(shown(place), batch.schema, image, caption)
            yield from (Row(batch, at, *columns) for at in range(batch.num_rows))


def _source(place: str) -> Any:
    """Open a file for Arrow: a local one in memory, a remote one as a stream."""
    return open_file(place) if is_url(place) else pa.memory_map(place)


def _reader(source: Any) -> Any:
    """Return an iterator over the batches of a file of either format."""
    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        file = pa.ipc.open_file(source)
        return pa.RecordBatchReader.from_batches(file.schema, map(file.get_batch, range(file.num_record_batches)))
