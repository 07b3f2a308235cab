"""Source: Arrow files, as `Dataset.save_to_disk` of the Hugging Face library `datasets` writes them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Partition, Reason, Record, Refused, fingerprint_of, key_of
from diffusion.preparation.sources.columns import find_columns, first_line, record_of_row
from diffusion.preparation.sources.remote_files import (
    each,
    is_url,
    join,
    open_file,
    parent_of,
    read_file,
    shown,
    state_of,
)

STATE = "state.json"


@dataclass(frozen=True)
class ArrowSource:
    """Arrow files, such as `Dataset.save_to_disk` writes; each file is a partition.

    Images are read undecoded; columns are as in parquet files (`diffusion.preparation.sources.columns`), so a column of
    lists gives a picture several captions. A local file is mapped into memory, of a remote one a batch of rows (1,000
    by default of `datasets`) is held. A file that is damaged counts as one refusal more.

    Attributes:
        name: First part of the keys; the rest is the file's path below `path`, `#` and the number of the row.
        path: The folder as it was given.
        files: For each file its name in the keys and where it is, a path or a URL.
        image_column: Column of the images; None for the usual names.
        caption_column: Column of the captions; None for the usual names.
    """

    name: str
    path: str
    files: tuple[tuple[str, str], ...]
    image_column: str | None = None
    caption_column: str | None = None
    num_records: int | None = None
    kind: str = "huggingface"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Return one partition per file, whatever the size."""
        files, there = dict(self.files), {partition.items[0] for partition in known}
        kept = [partition for partition in known if partition.items[0] in files]
        new = [Partition(key_of(below) or "rows", (below,), "") for below, _ in self.files if below not in there]
        states = each(state_of, [files[partition.items[0]] for partition in (*kept, *new)])
        return [
            replace(partition, fingerprint=fingerprint_of(state))
            for partition, state in zip((*kept, *new), states, strict=True)
        ]

    def only(self, partition: Partition) -> "ArrowSource":
        """Return the source with the partition's file alone."""
        return replace(self, files=tuple(file for file in self.files if file[0] == partition.items[0]))

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the rows in the order of the files."""
        for below, file in (self if partition is None else self.only(partition)).files:
            prefix = f"{self.name}/{key_of(below)}" if below else self.name
            row = 0
            try:
                for batch in _batches(file):
                    image, caption = find_columns(shown(file), batch.schema, self.image_column, self.caption_column)
                    for at in range(batch.num_rows):
                        yield record_of_row(f"{prefix}#{row}", batch, at, image, caption, parent_of(file))
                        row += 1
            except (pa.ArrowException, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise MachineError(f"cannot read {shown(file)}: {error.strerror or error}") from error
                detail = f"{first_line(error)}; what came before was read"
                yield Refused(f"{prefix}#{row}", Reason.DAMAGED_FILE, detail)


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


def _batches(place: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file."""
    with _source(place) as source:
        yield from _reader(source)


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
