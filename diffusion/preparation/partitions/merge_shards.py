"""Work items of the second pass: one output shard, or the final facts of one partition; run by any worker."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diffusion.datasets.mds import Layout, SampleDecoder, ShardFormat, write_shard
from diffusion.files import atomic_path, read_json, unique_partial, write_json
from diffusion.preparation.output_folder import FACTS, REFUSED, writing
from diffusion.preparation.partitions.merge import LeftOut
from diffusion.preparation.partitions.output import FACTS as FACTS_TABLE
from diffusion.preparation.partitions.output import (
    INDEX,
    INDEX_TYPE,
    MAX_REFUSED_BYTES,
    NUM_REFUSED,
    read_samples,
    refused_table,
    write_table,
)
from diffusion.preparation.partitions.output import REFUSED as REFUSED_TABLE
from diffusion.preparation.partitions.work import COLUMNS

_NO_ROWS = np.empty(0, INDEX_TYPE)


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """One shard of an MDS folder.

    Attributes:
        out: The data set, for messages.
        folder: The MDS folder; it exists.
        number: Number of the shard in it.
        partitions: Folders of the partitions that samples come from.
        sources: int64 [n], for each sample the number of its partition among them.
        rows: INDEX_TYPE [n], where each sample lies there.
        shards: Their format.
        mark: File that is written when the shard is on the disk, with its entry for the index.
    """

    out: Path
    folder: Path
    number: int
    partitions: list[Path]
    sources: NDArray[np.int64]
    rows: NDArray[np.void]
    shards: ShardFormat
    mark: Path


@dataclass(frozen=True, kw_only=True)
class FactsTask:
    """The final facts of one partition.

    Attributes:
        out: The data set.
        name: Name of the partition's files.
        partition: Folder of the partition.
        numbers: int64 [n], for each of its kept samples the number in the MDS folder, -1 for those that are left out.
        buckets: [n], the bucket of each.
        left_out: Its samples that are left out.
    """

    out: Path
    name: str
    partition: Path
    numbers: NDArray[np.int64]
    buckets: list[str]
    left_out: list[LeftOut]


def write_one_shard(task: ShardTask) -> int:
    """Write a shard unless that was done before; return how many samples it holds.

    Memory holds the samples of the shard, twice.

    Raises:
        MachineError: The disk is full.
    """
    if not task.mark.is_file():
        with writing(task.out):
            entry = write_shard(
                task.folder, task.number, _samples(task), task.shards, partial=unique_partial(task.mark)
            )
            write_json(task.mark, entry)
    return len(task.rows)


def read_entry(mark: Path) -> dict[str, Any]:
    """Read the entry of a written shard."""
    return read_json(mark)


def write_facts(task: FactsTask) -> tuple[str, list[tuple[str, str, str]]]:
    """Write the facts and the refused images of a partition beside the data.

    Returns:
        Name of the partition; reason, key and detail of each of its samples that are left out.

    Raises:
        MachineError: The disk is full.
    """
    with writing(task.out):
        table = pq.read_table(task.partition / FACTS_TABLE)
        columns = {name: table[name].to_pylist() for name in ("index", "split", "bucket", "reason", "detail")}
        rows = [row for row, reason in enumerate(columns["reason"]) if not reason]
        keys, left_out = table["key"], []
        for row, number, bucket in zip(rows, task.numbers.tolist(), task.buckets, strict=True):
            columns["index"][row], columns["bucket"][row] = number, bucket
        for one in task.left_out:
            row = rows[one.sample]
            columns["reason"][row], columns["detail"][row] = one.reason.value, one.detail
            left_out.append((columns["reason"][row], keys[row].as_py(), columns["detail"][row]))
        for name, values in columns.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(name), pa.array(values, table.schema.field(name).type))
        _publish(task.out / FACTS / f"{task.name}.parquet", table)
        shown = pa.concat_tables([pq.read_table(task.partition / REFUSED_TABLE), _shown(task)])
        _publish(task.out / REFUSED / f"{task.name}.parquet", shown)
    return task.name, left_out


def _samples(task: ShardTask) -> list[bytes]:
    """Return the samples of a shard in their order; each partition is read once, from front to back."""
    samples = [b""] * len(task.rows)
    in_files = np.lexsort((task.rows["offset"], task.sources)).tolist()
    for source, group in itertools.groupby(in_files, key=lambda i: int(task.sources[i])):
        places = list(group)
        for place, sample in zip(places, read_samples(task.partitions[source], task.rows[places]), strict=True):
            samples[place] = sample
    return samples


def _shown(task: FactsTask) -> pa.Table:
    """Return the first samples that are left out for each reason as refused images."""
    chosen: list[LeftOut] = []
    for reason in sorted({one.reason for one in task.left_out}):
        chosen += [one for one in task.left_out if one.reason is reason][:NUM_REFUSED]
    rows = np.load(task.partition / INDEX)[[one.sample for one in chosen]] if chosen else _NO_ROWS
    decode = SampleDecoder(Layout.of(COLUMNS))
    samples = [decode(data) for data in read_samples(task.partition, rows)]
    return refused_table(
        [
            (sample["key"], one.reason.value, sample["image"])
            for one, sample in zip(chosen, samples, strict=True)
            if len(sample["image"]) <= MAX_REFUSED_BYTES
        ]
    )


def _publish(path: Path, table: pa.Table) -> None:
    """Write a table that appears under its name only when it is whole."""
    with atomic_path(path, partial=unique_partial(path)) as partial:
        write_table(partial, table)


def remove_facts_beyond(out: Path, number: int) -> None:
    """Remove facts of partitions with this number or a higher one, which an abandoned run left."""
    for folder in (out / FACTS, out / REFUSED):
        for path in folder.glob("*"):
            if not path.stem.isdigit() or int(path.stem) >= number:
                path.unlink()


def shard_tasks_of(
    order: NDArray[np.int64], cuts: Sequence[int], first: int
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield number and samples of each shard, counting from `first`."""
    for number, (start, end) in enumerate(itertools.pairwise([0, *cuts]), start=first):
        yield number, order[start:end]
