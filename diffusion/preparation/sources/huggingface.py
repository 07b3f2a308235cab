"""Source: data sets that the Hugging Face library `datasets` streams, from the hub or from a folder of data files.

It needs the extra `huggingface`. No code of a data set is ever run: `datasets` from version 4 on reads data files only.
The spelling is `hf-dataset:NAME[@REVISION][:SPLIT[:CONFIGURATION]]`; a token comes from HF_TOKEN or the library's
cache.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from diffusion.errors import DataError, MachineError, first_line, printable
from diffusion.preparation.records import Partition, Partitions
from diffusion.preparation.sources.base import Source, compare
from diffusion.preparation.sources.tables import BATCH_ROWS, Batch, TableSource, raise_if_not_damage

PREFIX = "hf-dataset:"
SPELLING = f"{PREFIX}NAME[@REVISION][:SPLIT[:CONFIGURATION]]"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(TableSource):
    """A split of a data set that `datasets` streams; each of its data files is a partition.

    The commit of the hub that the name stands for is found when the source is opened, so what is read does not change.
    Images are read undecoded; columns are as in parquet files. `root` is the folder of the data files. The rest of a
    key is the number of the data file, `#` and the number of the row in it.
    """

    dataset: str
    """Name on the hub, or a folder of data files."""
    revision: str | None
    """Commit; None for a folder."""
    split: str
    configuration: str | None = None

    kind: ClassVar[str] = "huggingface"

    @property
    def path(self) -> str:
        """`hf-dataset:NAME@REVISION:SPLIT:CONFIGURATION`, without what is not given."""
        name = f"{self.dataset}@{self.revision}" if self.revision else self.dataset
        return printable(PREFIX + ":".join(filter(None, [name, self.split, self.configuration])))

    def partitions(self, known: Sequence[str] = (), only: Mapping[str, str] | None = None) -> Partitions:
        """Return a partition per data file."""
        builder = self._builder()
        version = f"{builder.hash} {builder.config_id}"
        files = [f"{number:05d}" for number in range(builder.as_streaming_dataset(split=self.split).num_shards)]
        return compare([Partition(file=file, version=version) for file in files], known, only)

    def batches(self, partition: Partition, groups: Collection[int | None] | None = None) -> Iterator[Batch]:
        """Yield the rows of a data file, or their images."""
        stream, row = self._builder(partition.version).as_streaming_dataset(split=self.split).with_format("arrow"), 0
        try:
            for table in stream.shard(stream.num_shards, int(partition.file)).iter(batch_size=BATCH_ROWS):
                for batch in table.combine_chunks().to_batches():
                    if groups is not None:
                        batch = batch.select([self.find_columns(partition.file, batch.schema).image])
                    yield Batch(row, None, batch)
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            if not isinstance(error, pa.ArrowException):
                raise MachineError(f"{self.path}: {first_line(error)}; run the same command again") from error
            raise_if_not_damage(error)
            yield Batch(row, None, None, 1, f"{first_line(error)}; what came before was read")
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.path}: data file {partition.file} cannot be read ({first_line(error)}); where its "
                            "columns differ from the first, download the data set and name its parquet files"
                            ) from error  # fmt: skip

    def _builder(self, version: str = "") -> Any:
        version = self.revision or version
        load = _load_builder if version else _load_builder.__wrapped__  # A folder may have gained files.
        return load(self.dataset, self.configuration, self.revision, version)


@functools.lru_cache
def _load_builder(dataset: str, configuration: str | None, revision: str | None, version: str) -> Any:
    """Make the builder of a version of a data set once in a process: it lists all files."""
    from datasets import load_dataset_builder

    return load_dataset_builder(dataset, configuration, revision=revision)


def open_huggingface(text: str, settings: dict[str, Any]) -> HuggingFaceSource:
    """Open what `hf-dataset:NAME[@REVISION][:SPLIT[:CONFIGURATION]]` names; the split is `train` if none is given.

    Raises:
        DataError: there is no such data set or split, it needs code to be run, or a column is missing.
        MachineError: `datasets` is not installed, or the hub does not answer.
    """
    dataset, revision, split, configuration = _parse(text)
    try:
        from datasets.exceptions import DatasetNotFoundError
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise MachineError(f"{text} needs the package datasets; uv pip install -e '.[huggingface]'") from error
    try:
        is_folder = Path(dataset).exists()
        commit = None if is_folder else HfApi().dataset_info(dataset, revision=revision).sha  # Of a branch or tag, now.
        root = f"hf://datasets/{dataset}@{commit}" if commit else str(Path(dataset).absolute())
        source = HuggingFaceSource(
            name=dataset.rstrip("/").rpartition("/")[2], root=root, dataset=dataset, revision=commit, split=split,
            configuration=configuration, **settings,
        )  # fmt: skip
        if not any(next(source.scan(partition), None) for partition in source.partitions().new):
            raise DataError(f"{source.path} has no rows; correct the split or the configuration")
    except (DatasetNotFoundError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise DataError(f"{text}: there is no such data set or revision, or not without HF_TOKEN; write {SPELLING}"
                        ) from error  # fmt: skip
    except (ValueError, RuntimeError, FileNotFoundError) as error:
        raise DataError(f"{text}: {first_line(error)}; write {SPELLING}") from error
    except OSError as error:
        raise MachineError(f"{text}: the hub does not answer ({type(error).__name__}); try the same again") from error
    return source


def pinned(text: str, scanned: Source) -> str:
    """Add the commit of a scanned source to an entry of the same data that names no revision; return others as is."""
    if not (text.startswith(PREFIX) and isinstance(scanned, HuggingFaceSource) and scanned.revision):
        return text
    unpinned = (scanned.dataset, None, scanned.split, scanned.configuration)
    return scanned.path if _parse(text) == unpinned else text


def _parse(text: str) -> tuple[str, str | None, str, str | None]:
    """Return data set, revision, split and configuration of an entry."""
    parts = text.removeprefix(PREFIX).split(":")
    dataset, _, revision = parts[0].partition("@")
    if not dataset or len(parts) > 3:
        raise DataError(f"{text} does not name a data set; write {SPELLING}")
    split, configuration = [*parts[1:], "", ""][:2]
    return dataset, revision or None, split or "train", configuration or None
