"""Source: data sets that the Hugging Face library `datasets` streams, from the hub or from a folder of data files.

It needs the extra `huggingface`. No code of a data set is ever run: `datasets` from version 4 on reads data files only.
The spelling is `hf-dataset:NAME[@REVISION][:SPLIT[:CONFIGURATION]]`; a token comes from HF_TOKEN or the library's
cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from diffusion.errors import DataError, MachineError
from diffusion.preparation.records import Partition, Reason, Record, Refused, fingerprint_of
from diffusion.preparation.sources.columns import Row, find_columns, first_line, record_of_row

PREFIX = "hf-dataset:"
SPELLING = f"{PREFIX}NAME[@REVISION][:SPLIT[:CONFIGURATION]]"

_BATCH_ROWS = 32


@dataclass(frozen=True)
class HuggingFaceSource:
    """A split of a data set that `datasets` streams; each of its data files is a partition.

    The commit of the hub that the name stands for is found when the source is opened and is part of `path`, so what is
    read does not change. Images are read undecoded; columns are as in parquet files.

    Attributes:
        name: First part of the keys; the rest is the number of the data file, `#` and the number of the row in it.
        path: `hf-dataset:NAME@REVISION:SPLIT:CONFIGURATION`, what is not given left out.
        dataset: Name on the hub, or a folder of data files.
        revision: Commit; None for a folder.
        split: Name of the split.
        configuration: Name of the configuration; None for the default.
        image_column: Column of the images; None for the usual names.
        caption_column: Column of the captions; None for the usual names.
    """

    name: str
    path: str
    dataset: str
    revision: str | None
    split: str
    configuration: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    num_records: int | None = None
    kind: str = "huggingface-streaming"

    def partitions(self, size: int, known: Sequence[Partition] = ()) -> list[Partition]:
        """Return one partition per data file, whatever the size."""
        builder = self._builder
        state = fingerprint_of(builder.hash, builder.config_id)
        num_files = self._stream.num_shards
        there = {partition.items: partition for partition in known}
        found: dict[tuple[str, ...], Partition] = {
            (str(file),): Partition(f"{file:05d}", (str(file),), state) for file in range(num_files)
        }
        kept = [found[items] for items in there if items in found]
        return [*kept, *(partition for items, partition in found.items() if items not in there)]

    def only(self, partition: Partition) -> "HuggingFaceSource":
        """Return the source itself."""
        return self

    def read(self, partition: Partition | None = None) -> Iterator[Record | Refused]:
        """Yield the rows in the order of the data files."""
        for one in self.partitions(0) if partition is None else [partition]:
            prefix = f"{self.name}/{int(one.items[0]):05d}"
            stream = self._stream
            row = 0
            try:
                for table in stream.shard(stream.num_shards, int(one.items[0])).iter(batch_size=_BATCH_ROWS):
                    for batch in table.combine_chunks().to_batches():
                        image, caption = find_columns(self.path, batch.schema, self.image_column, self.caption_column)
                        for at in range(batch.num_rows):
                            yield record_of_row(f"{prefix}#{row}", Row(batch, at, image, caption), self.dataset)
                            row += 1
            except pa.ArrowException as error:
                detail = f"{first_line(error)}; what came before was read"
                yield Refused(f"{prefix}#{row}", Reason.DAMAGED_FILE, detail)
            except OSError as error:
                raise MachineError(f"{self.path}: {first_line(error)}; run the same command again") from error

    def check(self) -> None:
        """Read the first rows.

        Raises:
            DataError: There is no row, or a column is missing.
            MachineError: The hub does not answer.
        """
        if next(iter(self.read(None)), None) is None:
            raise DataError(f"{self.path} has no rows; correct the split or the configuration")

    @cached_property
    def _builder(self) -> Any:
        from datasets import load_dataset_builder

        return load_dataset_builder(self.dataset, self.configuration, revision=self.revision)

    @cached_property
    def _stream(self) -> Any:
        return self._builder.as_streaming_dataset(split=self.split).with_format("arrow")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was opened."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def open_huggingface(text: str, image_column: str | None, caption_column: str | None) -> HuggingFaceSource:
    """Open what `hf-dataset:NAME[@REVISION][:SPLIT[:CONFIGURATION]]` names; the split is `train` if none is given.

    Raises:
        DataError: There is no such data set or split, it needs code to be run, or a column is missing.
        MachineError: `datasets` is not installed, or the hub does not answer.
    """
    parts = text.removeprefix(PREFIX).split(":")
    dataset, _, revision = parts[0].partition("@")
    if not dataset or len(parts) > 3:
        raise DataError(f"{text} does not name a data set; write {SPELLING}")
    split, configuration = parts[1] if parts[1:] and parts[1] else "train", parts[2] if parts[2:] else None
    try:
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError as error:
        raise MachineError(f"{text} needs the package datasets; pip install -e '.[huggingface]'") from error
    try:
        commit = revision or _commit_of(dataset)
        source = HuggingFaceSource(
            name=dataset.rstrip("/").rpartition("/")[2], path=_spelled(dataset, commit, split, configuration),
            dataset=dataset, revision=commit, split=split, configuration=configuration, image_column=image_column,
            caption_column=caption_column,
        )  # fmt: skip
        source.check()
    except (DatasetNotFoundError, RepositoryNotFoundError) as error:
        raise DataError(f"{text}: there is no such data set, or not without HF_TOKEN; write {SPELLING}") from error
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        raise DataError(f"{text}: {first_line(error)}; write {SPELLING}") from error
    except OSError as error:
        raise MachineError(f"{text}: the hub does not answer ({type(error).__name__}); try the same again") from error
    return source


def _spelled(dataset: str, commit: str | None, split: str, configuration: str | None) -> str:
    """Return how a data set is named in full."""
    place = f"{dataset}@{commit}" if commit else dataset
    return PREFIX + ":".join([place, split, *([configuration] if configuration else [])])


def _commit_of(dataset: str) -> str | None:
    """Return the commit that a name on the hub stands for now; None for a folder of this machine."""
    if Path(dataset).exists():
        return None
    from huggingface_hub import HfApi

    return HfApi().dataset_info(dataset).sha
