"""The write stage: the kept images, copied from the sources into shards, straight to where they belong.

A write task (eight windows of partitions) is done by one worker. The samples of a window are sorted by their order and
appended, per split and bucket, to those that were carried over from the window before; each time a bucket has enough
for a shard, it is written. What remains at the end of the task becomes smaller shards. The positions of the samples
are written last: where `positions/00003.parquet` exists, task 3 is done. When all tasks are done the driver writes the
indexes, and the manifest last.

A shard is one write, whole or absent. Its name (`shard.TASK.NUMBER.mds`) and bytes are a function of the selection, so
that a task that was interrupted, or runs twice, writes the same files again.

A worker holds a window, the rest of its last partition and the samples carried over, about `window_mb` each, and one
shard. With `scratch` the samples are in a file, and their positions in memory. A partition above `window_mb` is read in
pieces of that size. The driver holds an object per partition and the index entry of each shard.
"""

import functools
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from diffusion import storage
from diffusion.errors import DataError, MachineError, printable
from diffusion.formats.data_set import (
    IDENTITIES,
    METADATA,
    POSITIONS,
    SCORES,
    SELECTION,
    Example,
    Generation,
    PreparedManifest,
    RejectedEntry,
    SourceEntry,
    check_folder,
    delete_unnamed,
    folder_order,
    read_splits,
)
from diffusion.formats.shards import (
    ShardFormat,
    check_sizes,
    encode_sample,
    encode_shard,
    read_index,
    write_index,
)
from diffusion.preparation.engine import Workers, progress_bar, run
from diffusion.preparation.layout import (
    CAPTIONS,
    GENERATED_CAPTIONS,
    LOCATION,
    file_numbers,
    part_name,
    positions_name,
    read_table,
    write_table,
)
from diffusion.preparation.positions import POSITIONS_SCHEMA, TaskShard, read_task_shards, shards_as_metadata, task_of
from diffusion.preparation.records import (
    Location,
    NothingKeptError,
    Partition,
    Reason,
    clean_text,
    fit_for_json,
    parse_object,
)
from diffusion.preparation.scan import Scan, changed_settings
from diffusion.preparation.select import Selection, kept_rows, read_selection, read_selections, write_finished
from diffusion.preparation.sources import Source

logger = logging.getLogger(__name__)

COLUMNS = {
    "image": "bytes",
    "captions": "json",
    "width": "int32",
    "height": "int32",
    "key": "str",
    "metadata": "json",
}
"""MDS type of each column of a prepared sample."""

_NUM_EXAMPLES = 5
"""Rejected images of each reason that the manifest names."""


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """Some windows of partitions."""

    number: int
    """Over all generations."""
    generation: int
    windows: list[list[int]]
    """Partitions of each window, in order."""
    partitions: dict[int, tuple[Source, Partition]]


def write(
    out: str,
    scan: Scan,
    settings: Mapping[str, Any],
    workers: Workers,
    *,
    scratch: str | None = None,
    progress: bool = False,
) -> PreparedManifest:
    """Write the selected images of all generations that are not written yet, then the indexes and the manifest.

    `settings` are the keys of the configuration that determine the data, for the manifest, which is returned. Without
    a folder `scratch` the images of a window are held in memory.

    Raises:
        ConfigurationError: shards cannot be written so.
        DataError: no image was selected, or with other settings; an image has changed since the scan, or is gone; what
            is finished was written from another selection.
        MachineError: a source cannot be read, `out` cannot be written to, or a worker died.
    """
    shard_format(settings).check()
    num_generations = max((one.generation for one in scan.partitions), default=0) + 1
    finished = PreparedManifest.find(out)
    num_finished = len(finished.generations) if finished else 0
    selections = read_selections(out, num_finished)
    selections += map(functools.partial(read_selection, out), range(num_finished, num_generations))
    made_with = finished.settings if finished else selections[-1].settings
    given = {name: value for name, value in settings.items() if name in made_with}
    if differences := changed_settings(made_with, given):
        raise DataError(
            f"{storage.shown(out)} was selected with other settings ({', '.join(differences)}); run the stage select"
        )
    if not any(selection.kept for selection in selections):
        raise _nothing_kept(out, selections)
    _discard_other_selections(out, selections, finished)
    if finished is not None and len(finished.generations) == len(selections):
        return finished
    first_task = selections[num_finished].first_task
    done = {task for task in file_numbers(storage.join(out, POSITIONS)) if task >= first_task}
    tasks = (
        WriteTask(
            number=number,
            generation=selection.generation,
            windows=windows,
            partitions={partition: scan.find(partition) for window in windows for partition in window},
        )
        for selection in selections[num_finished:]
        for number, windows in enumerate(selection.tasks, start=selection.first_task)
        if number not in done
    )
    total = sum(selection.kept for selection in selections)
    written = sum(selection.kept for selection in selections[:num_finished])
    written += sum(shard.num_samples for listed in read_task_shards(out, sorted(done)) for _, shard in listed)
    captioned = file_numbers(storage.join(out, SCORES, CAPTIONS))  # By the captioner, or by another tool.
    make = functools.partial(_Writer, out, dict(settings), captioned, scratch)
    with progress_bar("writing", total, initial=written, shown=progress) as bar:
        for num_samples in run(workers, make, tasks, describe=_describe):
            bar.update(num_samples)
    folders = write_indexes(out, selections[-1].stop, finished, first_task, kept=total)
    manifest = _manifest(out, scan, selections, settings, folders)
    if len(selections) > 1:
        write_finished(out, selections)
    manifest.write(out)
    return manifest


def _describe(task: WriteTask) -> str:
    names = [source.describe(partition) for source, partition in task.partitions.values()]
    return " or ".join(names[:2]) + (f" or {len(names) - 2} more" if len(names) > 2 else "")


def shard_format(settings: Mapping[str, Any]) -> ShardFormat:
    """Return the format of the shards."""
    return ShardFormat.of(
        COLUMNS,
        shard_bytes=round(settings["shard_mb"] * 2**20),
        hashes=tuple(settings["hashes"]),
        compression=settings["compression"],
    )


def _nothing_kept(out: str, selections: Sequence[Selection]) -> NothingKeptError:
    reasons = [
        f"{entry.count} rejected as {reason}"
        + "".join(f" (such as {one.key!a}: {printable(one.detail) or reason})" for one in entry.examples[:1])
        for reason, entry in rejected_entries(selections).items()
    ]
    return NothingKeptError(f"{storage.shown(out)}: no image is kept: {'; '.join(reasons) or 'the sources hold none'}")


def _discard_other_selections(out: str, selections: Sequence[Selection], finished: PreparedManifest | None) -> None:
    """Remove what was written from another selection."""
    uri = storage.join(out, IDENTITIES)
    known = storage.read_json(uri, [])
    wanted = [selection.identity for selection in selections]
    same = next((i for i, one in enumerate(wanted) if known[i : i + 1] != [one]), len(wanted))
    if finished is not None and same < len(finished.generations):
        raise DataError(
            f"{storage.shown(out)} was written from another selection; choose another folder, or replace it with "
            "--overwrite"
        )
    if known[same:]:
        logger.info("%s: what was written from another selection is removed", storage.shown(out))
    if known[same:] or not known:  # Without identities it is unknown what positions belong to.
        _discard_written(out, same, selections[same - 1].stop if same else 0)
    if known != wanted:
        storage.write_json(uri, wanted)


def discard_growth(out: str, start: int, stop: int, first_task: int) -> None:
    """Remove what was selected and written of the generations from `start` to before `stop`, the newest ones."""
    storage.delete(storage.join(out, SELECTION, f"{generation}.json") for generation in range(start, stop))
    _discard_written(out, start, first_task)


def _discard_written(out: str, generation: int, first_task: int) -> None:
    """Remove what was written of a generation and of those after it, from its first task on; earlier ones stay."""
    tasks = file_numbers(storage.join(out, POSITIONS))
    storage.delete(storage.join(out, POSITIONS, positions_name(task)) for task in tasks if task >= first_task)
    write_indexes(out, first_task)
    uri = storage.join(out, IDENTITIES)
    if known := storage.read_json(uri, []):
        storage.write_json(uri, known[:generation])


# The work on a task.


class _Sample(NamedTuple):
    """An encoded sample that is not in a shard yet."""

    folder: str
    """`<split>/<bucket>`."""
    order: int
    key: str
    part: int
    row: int
    size: int
    stored: bytes | int
    """Itself, or where it begins in the file of the pool."""


class _Pool:
    """Encoded samples, in memory or in an unnamed file of a folder."""

    def __init__(self, scratch: str | None) -> None:
        self._scratch = scratch
        with self._errors():
            self._file = tempfile.TemporaryFile(dir=scratch) if scratch is not None else None  # noqa: SIM115 closed with self

    def put(self, sample: bytes) -> bytes | int:
        """Store a sample; return what `get` finds it by."""
        if self._file is None:
            return sample
        with self._errors():
            start = self._file.seek(0, os.SEEK_END)
            self._file.write(sample)
        return start

    def get(self, sample: _Sample) -> bytes:
        if isinstance(sample.stored, bytes):
            return sample.stored
        assert self._file is not None
        with self._errors():
            self._file.seek(sample.stored)
            return self._file.read(sample.size)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"scratch: cannot write to {self._scratch}: {error.strerror or error}; free space there, choose "
                "another folder, or lower window_mb"
            ) from error


class _Writer:
    """Does write tasks, one after the other."""

    def __init__(self, out: str, settings: Mapping[str, Any], captioned: set[int], scratch: str | None) -> None:
        self._out, self._scratch, self._format = out, scratch, shard_format(settings)
        self._captioned = captioned
        self._window_bytes = round(settings["window_mb"] * 2**20)
        self._scores = [scorer["column"] for scorer in settings["scorers"]]

    def __call__(self, task: WriteTask) -> int:
        """Write the shards and the positions of a task; return how many samples they hold."""
        self._partitions, self._shards = task.partitions, _Shards(self._out, task.number, self._format, self._scratch)
        kept = kept_rows(self._out, task.generation, task.number)
        for window in task.windows:
            samples: list[_Sample] = []
            for part in window:
                num_bytes = 0
                for sample in self._read(part, kept.filter(pc.field("part") == part).to_pylist()):
                    samples.append(sample)
                    num_bytes += sample.size
                    if num_bytes >= self._window_bytes:
                        self._add(samples)
                        num_bytes = 0
            self._add(samples)
        return self._shards.finish()

    def _add(self, samples: list[_Sample]) -> None:
        """Put the samples of a window (or of as much of a large partition) into shards, and clear their list."""
        for sample in sorted(samples, key=lambda one: (one.folder, one.order)):
            self._shards.add(sample)
        samples.clear()
        self._shards.carry_over(self._window_bytes)

    def _read(self, part: int, kept: Sequence[Mapping[str, Any]]) -> Iterator[_Sample]:
        """Read the kept images of a partition."""
        if not kept:
            return
        source, partition = self._partitions[part]
        rows = self._metadata(part, [one["row"] for one in kept])
        if any(row["reason"] == Reason.REMOVED.value for row in rows):
            raise DataError(f"{METADATA}/{part_name(part)}: a selected image was removed since; run the stage select")
        images = source.images(partition, [Location(**{name: row[name] for name in LOCATION}) for row in rows])
        for one, row in zip(kept, rows, strict=True):
            sample = encode_sample(self._columns(row, _next_image(images, row)), COLUMNS)
            folder = check_folder(f"{one['split']}/{one['bucket']}")
            yield _Sample(
                folder, one["order"], row["key"], part, one["row"], len(sample), self._shards.pool.put(sample)
            )

    def _metadata(self, part: int, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Metadata and scores of some rows of a partition."""
        name = part_name(part)
        values = read_table(storage.join(self._out, METADATA, name)).take(rows).to_pylist()
        if part in self._captioned:
            captions = read_table(storage.join(self._out, SCORES, CAPTIONS, name)).take(rows).to_pylist()
            for row, caption in zip(values, captions, strict=True):
                row.update({name: value for name, value in caption.items() if value is not None})
        scores = {column: read_table(storage.join(self._out, SCORES, column, name))[column] for column in self._scores}
        of_rows = pa.table(scores).take(rows).to_pylist() if scores else [{}] * len(rows)
        return [row | {"scores": score} for row, score in zip(values, of_rows, strict=True)]

    def _columns(self, row: Mapping[str, Any], image: bytes) -> dict[str, Any]:
        """Columns of a sample."""
        generated = row.get(GENERATED_CAPTIONS)
        try:
            metadata = parse_object(row["metadata"] or "{}")
        except ValueError as error:
            raise DataError(f"{row['key']!a}: its `metadata` in {METADATA} are no JSON object: {error}") from error
        metadata |= {GENERATED_CAPTIONS: generated} if generated else {}
        return {
            "image": image,
            "captions": row["captions"],
            "width": row["width"],
            "height": row["height"],
            "key": row["key"],
            "metadata": metadata | {name: fit_for_json(value) for name, value in row["scores"].items()},
        }


def _next_image(images: Iterator[bytes], row: Mapping[str, Any]) -> bytes:
    """Take the next image, and check that it is the one that was scanned."""
    try:
        image = next(images)
    except DataError as error:
        raise DataError(f"{row['key']!a} cannot be read again: {error}") from error
    if xxhash.xxh3_128_hexdigest(image) != row["xxh128"]:
        raise DataError(
            f"{row['key']!a} has changed since the scan; put the former image back, or prepare another folder"
        )
    return image


class _Shards:
    """The shards of a task: samples come in, full shards are written, pending samples are carried over."""

    def __init__(self, out: str, task: int, shards: ShardFormat, scratch: str | None) -> None:
        self._scratch, self.pool = scratch, _Pool(scratch)
        assert shards.shard_bytes is not None, "checked"
        self._out, self._task, self._format, self._max_bytes = out, task, shards, shards.shard_bytes
        self._pending: dict[str, list[_Sample]] = {}
        self._sizes: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._shards: list[TaskShard] = []
        self._positions: list[tuple[Any, ...]] = []

    def add(self, sample: _Sample) -> None:
        """Append a sample; if it does not fit, the shard is written before."""
        folder, num_pending = sample.folder, len(self._pending.get(sample.folder, ()))
        num_bytes = self._format.num_bytes(num_pending + 1) + self._sizes[folder] + sample.size
        if num_pending and num_bytes > self._max_bytes:
            self._write(folder)
        self._pending.setdefault(folder, []).append(sample)
        self._sizes[folder] += sample.size

    def carry_over(self, num_bytes: int) -> None:
        """Write the largest pending shards until a number of bytes is left; move it to the pool of the next window."""
        while self._sizes.total() > num_bytes:
            self._write(max(sorted(self._sizes), key=self._sizes.__getitem__))
        pool = _Pool(self._scratch)
        for samples in self._pending.values():
            samples[:] = [sample._replace(stored=pool.put(self.pool.get(sample))) for sample in samples]
        self.pool = pool

    def finish(self) -> int:
        """Write the pending samples and the positions; return the number of samples."""
        for folder in sorted(self._pending):
            self._write(folder)
        table = pa.Table.from_arrays(
            [pa.array([row[i] for row in self._positions], kind) for i, kind in enumerate(POSITIONS_SCHEMA.types)],
            schema=POSITIONS_SCHEMA.with_metadata(shards_as_metadata(self._shards)),
        )
        write_table(storage.join(self._out, POSITIONS, positions_name(self._task)), table)
        return table.num_rows

    def _write(self, folder: str) -> None:
        samples, number = self._pending.pop(folder), self._numbers[folder]
        del self._sizes[folder]
        self._numbers[folder] += 1
        name = f"shard.{self._task:05}.{number:05}.mds"
        content, shard = encode_shard([self.pool.get(sample) for sample in samples], name, self._format)
        storage.write(storage.join(self._out, folder, shard.stored.name), content)
        split, bucket = folder.split("/")
        self._shards.append((folder, shard))
        for index, sample in enumerate(samples):
            self._positions.append((sample.key, sample.part, sample.row, split, bucket, name, index))


# The end: indexes and the manifest.


def write_indexes(
    out: str,
    num_tasks: int,
    finished: PreparedManifest | None = None,
    first_task: int = 0,
    *,
    kept: int | None = None,
) -> list[str]:
    """Write the index of each split and bucket over the first tasks; delete shards that no finished task names.

    Of a `finished` data set that has grown, the indexes name the shards of the tasks before `first_task`. Returned are
    the folders with an index: training first, buckets by the numbers in their names. The shards must hold `kept`
    samples, unless tasks may be missing (None).

    Raises:
        DataError: the shards hold another number of samples (nothing was changed then), or one is missing or damaged.
    """
    folders = finished.folders if finished else []
    indexes = storage.concurrent_map(lambda folder: read_index(storage.join(out, folder)), folders)
    shards = {
        folder: [shard for shard in index.shards if task_of(shard.raw.name) < first_task]
        for folder, index in zip(folders, indexes, strict=True)
    }
    later = set[str]()
    tasks = sorted(task for task in file_numbers(storage.join(out, POSITIONS)) if task >= first_task)
    for task, listed in zip(tasks, read_task_shards(out, tasks), strict=True):
        for folder, shard in listed:
            if task < num_tasks:
                shards.setdefault(folder, []).append(shard)
            else:
                later.add(f"{folder}/{shard.stored.name}")
    found = sum(shard.num_samples for listed in shards.values() for shard in listed)
    if kept not in (None, found):
        raise DataError(
            f"{storage.shown(out)}: {POSITIONS} name {found} samples instead of {kept}; run the command again, or "
            "replace the data set with --overwrite"
        )
    for folder, of_folder in shards.items():
        write_index(storage.join(out, folder), of_folder)
    # A takedown may be under way.
    files = delete_unnamed(out, shards, lambda name: name in later or task_of(name) < first_task)
    if kept is not None:
        for folder, of_folder in shards.items():
            check_sizes(storage.join(out, folder), of_folder, files[folder])
    return sorted(shards, key=folder_order)


def _manifest(
    out: str, scan: Scan, selections: Sequence[Selection], settings: Mapping[str, Any], folders: Iterable[str]
) -> PreparedManifest:
    """Return the manifest of the data set as it is now."""
    sizes = Counter(one.generation for one in scan.partitions)
    counts = {source.name: [one.sources.get(source.name, {}) for one in selections] for source in scan.sources}
    return PreparedManifest(
        sources=[
            SourceEntry(
                name=source.name,
                kind=source.kind,
                path=clean_text(source.path),
                seen=sum(sum(reasons.values()) for reasons in counts[source.name]),
                kept=sum(reasons.get("", 0) for reasons in counts[source.name]),
            )
            for source in scan.sources
        ],
        settings=dict(settings),
        columns=COLUMNS,
        seen=sum(one.seen for one in selections),
        kept=sum(one.kept for one in selections),
        rejected=rejected_entries(selections),
        splits=read_splits(out, folders),
        generations=[Generation(partitions=sizes[one.generation], seen=one.seen, kept=one.kept) for one in selections],
    )


def rejected_entries(selections: Sequence[Selection]) -> dict[str, RejectedEntry]:
    """Rejected images by reason, with the first few of each."""
    counts: Counter[str] = Counter()
    shown: dict[str, list[Example]] = {}
    for selection in selections:
        counts.update(selection.reasons)
        for reason, examples in selection.examples.items():
            shown.setdefault(reason, []).extend(Example(key=one.key, detail=one.detail) for one in examples)
    return {
        reason: RejectedEntry(count=counts[reason], examples=shown.get(reason, [])[:_NUM_EXAMPLES])
        for reason in sorted(counts)
    }
