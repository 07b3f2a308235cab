"""Source: Arrow files, as `Dataset.save_to_disk` of the Hugging Face library `datasets` writes them."""

import json
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import pyarrow as pa

from diffusion.errors import DataError, first_line, printable
from diffusion.preparation.records import Partition, Reason
from diffusion.preparation.sources.reading import UnfitFileError, file_of, read_file
from diffusion.preparation.sources.tables import Batch, TableSource, raise_if_not_damage
from diffusion.storage import is_url, shown

logger = logging.getLogger(__name__)

_STATE = "state.json"
_STATE_BYTES = 2**26
_SCHEMA_BYTES = 2**16
"""Bytes of a remote file that are read at once for its columns."""


@dataclass(frozen=True, kw_only=True)
class ArrowSource(TableSource):
    """Arrow files, such as `Dataset.save_to_disk` writes; each is a partition.

    Where a `state.json` lists the files, only those are read; all splits of a saved DatasetDict are. Columns are as in
    parquet files. A local file is mapped into memory, of a remote one a batch of rows (1,000 by default of `datasets`)
    is held. Each row of a damaged batch is a rejection, and so is what lies after damage of the file itself. The rest
    of a key is the file's path, `#` and the number of the row.
    """

    kind: ClassVar[str] = "arrow"
    suffixes: ClassVar[tuple[str, ...]] = (".arrow",)

    def takes(self, names: Sequence[str]) -> list[str]:
        """Choose the Arrow files; where there is a `state.json`, those that it lists."""
        states = sorted(name for name in names if name.rpartition("/")[2] == _STATE)
        taken = super().takes(names)
        if self.pattern is not None or not states or not taken:
            return taken
        listed = []
        for state in states:
            uri = self.uri(file_of(state))
            try:
                content = json.loads(read_file(uri, _STATE_BYTES, self.root))
                files = [entry["filename"] for entry in content["_data_files"]]
                listed += [state.removesuffix(_STATE) + file for file in files]
            except (UnfitFileError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(f"{printable(shown(uri))} does not list the files of a data set ({first_line(error)}); "
                                "save the data set again") from error  # fmt: skip
        there = set(taken)
        if missing := [name for name in listed if name not in there]:
            raise DataError(f"{self.path} lacks {printable(missing[0])}, which a {_STATE} lists; save it again")
        return listed

    def check(self) -> None:
        """Check the columns of the readable files; a DataError if they are not there."""
        files = self.files()
        list(self.map(self._check_columns, files))
        splits = {file.rpartition("/")[0] for file in files}
        if len(splits) > 1:
            logger.warning("%s: the files of all folders are read: %s", self.path, printable(", ".join(sorted(splits))))

    def _check_columns(self, file: str) -> None:
        with suppress(UnfitFileError), self._opened(file, _SCHEMA_BYTES) as (opened, _):  # Its scan yields a rejection.
            self.find_columns(file, opened.schema)

    @contextmanager
    def _opened(self, file: str, buffer_bytes: int | None = None) -> Iterator[tuple[Any, bool]]:
        """Open a file of either format: a reader, and whether its batches can be read one without another."""
        with self.open(file, buffer_bytes=buffer_bytes) as opened:
            source: Any = opened if is_url(self.root) else pa.memory_map(os.fsencode(self.uri(file)))
            is_random = opened.read(6) == b"ARROW1"
            opened.seek(0)
            try:
                reader = pa.ipc.open_file(source) if is_random else pa.ipc.open_stream(source)
            except (pa.ArrowException, OSError) as error:
                raise_if_not_damage(error)
                raise UnfitFileError(Reason.DAMAGED_FILE, f"not Arrow: {first_line(error)}") from error
            yield reader, is_random

    def batches(self, partition: Partition, groups: Collection[int | None] | None = None) -> Iterator[Batch]:
        """Yield the batches of a file, or their column of images."""
        start = 0
        with self._opened(partition.file) as (opened, is_random):
            image = self.find_columns(partition.file, opened.schema).image
            for number in range(opened.num_record_batches) if is_random else count():
                try:
                    batch = opened.get_batch(number) if is_random else opened.read_next_batch()
                    batch = batch if groups is None else batch.select([image])
                except StopIteration:
                    return
                except (pa.ArrowException, OSError) as error:
                    raise_if_not_damage(error)
                    yield Batch(start, number, None, 1, f"batch {number}: {first_line(error)}")
                    if not is_random:
                        return  # Where the next one begins is not known.
                    start += 1
                    continue
                yield from _sound(batch, start, number, partition.num_bytes)
                start += batch.num_rows


def _sound(batch: pa.RecordBatch, start: int, number: int, num_bytes: int) -> Iterator[Batch]:
    """Yield a batch, or where it is not sound, its sound rows: reading others could crash the process."""
    try:
        batch.validate(full=True)
        yield Batch(start, number, batch)
        return
    except pa.ArrowException as error:
        raise_if_not_damage(error)
    for row in range(min(batch.num_rows, num_bytes)):  # A damaged batch can claim any number of rows.
        one = batch.slice(row, 1)
        try:
            one.validate(full=True)
            yield Batch(start + row, number, one)
        except pa.ArrowException as error:
            raise_if_not_damage(error)
            reason = Reason.INVALID_UTF8 if "UTF8" in str(error) else Reason.DAMAGED_FILE
            yield Batch(start + row, number, None, 1, f"batch {number}: {first_line(error)}", reason)
