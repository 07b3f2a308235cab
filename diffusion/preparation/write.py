"""The write stage: the kept images, copied from the sources into shards, straight to where they belong.

A write task (eight windows of partitions) is done by one worker. The samples of a window are sorted by their order and
appended, per split and bucket, to those that were carried over from the window before; each time a bucket has enough
for a shard, it is written. What remains at the end of the task becomes smaller shards. The positions of the samples
are written last: where `positions/00003.parquet` exists, task 3 is done. When all tasks are done the driver writes the
indexes, and the manifest last.

A shard is one write, whole or absent. Its name (`shard.TASK.NUMBER.mds`) and bytes are a function of the selection, so
that a task that was interrupted, or runs twice, writes the same files again.

Memory of a worker: a window and as much of its last partition (or their place in a file of `scratch`), as much that is
carried over, and a shard; of a larger partition, each `window_mb` are taken like a window. Memory of the driver: an
object per partition and the index entry of each shard.
"""

import functools
import json
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from diffusion import storage
from diffusion.datasets.manifest import (
    MANIFEST,
    BucketEntry,
    Example,
    Generation,
    PreparedManifest,
    RejectedEntry,
    SourceEntry,
)
from diffusion.datasets.mds import INDEX, ShardFormat, encode_sample, encode_shard, read_index, stored_file
from diffusion.errors import DataError, MachineError
from diffusion.files import PARTIAL
from diffusion.preparation.engine import Workers, progress_bar, run
from diffusion.preparation.layout import (
    CAPTIONS,
    GENERATED_CAPTIONS,
    METADATA,
    POSITIONS,
    SCORES,
    SPLITS,
    part_name,
    part_numbers,
    positions_name,
    read_schema,
    read_table,
    write_table,
)
from diffusion.preparation.records import Location, Partition, Reason, clean_text, fit_for_json
from diffusion.preparation.scan import Scan
from diffusion.preparation.select import Selection, kept_rows, read_selection
from diffusion.preparation.sources import Source
from diffusion.preparation.sources.reading import printable

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

POSITIONS_SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "part": pa.int32(),  # partition, and row in its metadata
        "row": pa.int32(),
        "split": pa.string(),
        "bucket": pa.string(),
        "shard": pa.string(),  # basename of the uncompressed shard, as it was first written
        "index": pa.int32(),  # in the shard
    }
)
"""Columns of `positions/TASK.parquet`, a row per sample in the order of writing. The file's `entries` are a JSON list
of {split, bucket, entry}: the index entries of the task's shards in order."""

_IDENTITIES = "_identities.json"
"""File beside the positions: for each generation, what its shards are made from."""

_NUM_EXAMPLES = 5
"""Rejected images of each reason that the manifest names."""

Place = tuple[str, str]
"""Split and bucket."""


@dataclass(frozen=True, kw_only=True)
class WriteTask:
    """Some windows of partitions."""

    number: int
    """Over all generations."""
    generation: int
    windows: list[list[int]]
    """Partitions of each window, in order."""
    parts: dict[int, tuple[Source, Partition]]
    present: dict[str, int]
    """Shards of this task that an earlier run left: `split/bucket/name` and bytes."""


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

    Args:
        out: the data set's folder, a path or an s3:// URI.
        scan: sources and partitions of the data set.
        settings: the keys of the configuration that determine the data; they become those of the manifest.
        workers: who does the tasks.
        scratch: folder for the images of a window; None keeps them in memory.
        progress: show a bar on stderr.

    Returns:
        The manifest; that of the finished data set, if nothing is to be added.

    Raises:
        ConfigurationError: shards cannot be written so.
        DataError: no image was selected; an image has changed since the scan, or is gone; what is finished was written
            from another selection.
        MachineError: a source cannot be read, `out` cannot be written to, or a worker died.
    """
    shard_format(settings).check()
    num_generations = max((one.generation for one in scan.partitions), default=0) + 1
    selections = [read_selection(out, number) for number in range(num_generations)]
    finished = PreparedManifest.read(out) if storage.exists(storage.join(out, MANIFEST)) else None
    if not any(selection.kept for selection in selections):
        raise _nothing_kept(out, selections)
    done = _begin(out, selections, finished)
    if finished is not None and len(finished.generations) == len(selections):
        return finished
    tasks = _tasks(out, scan, selections, done)
    total = sum(selection.kept for selection in selections)
    written = sum(one["entry"]["samples"] for entries in read_entries(out, sorted(done)) for one in entries)
    with progress_bar("writing", total, initial=written, shown=progress) as bar:
        for num_samples in run(workers, functools.partial(_Writer, out, dict(settings), scratch), tasks):
            bar.update(num_samples)
    places = write_indexes(out, selections[-1].first_task + len(selections[-1].tasks))
    _delete_others(out, places)
    manifest = _manifest(out, scan, selections, settings, sorted(places, key=_ascending))
    manifest.write(out)
    return manifest


def shard_format(settings: Mapping[str, Any]) -> ShardFormat:
    """Return the format of the shards."""
    return ShardFormat(
        columns=COLUMNS,
        shard_bytes=round(settings["shard_mb"] * 2**20),
        hashes=tuple(settings["hashes"]),
        compression=settings["compression"],
    )


def _nothing_kept(out: str, selections: Sequence[Selection]) -> DataError:
    reasons = [
        f"{entry.count} rejected as {reason}"
        + "".join(f" (such as {one.key!a}: {printable(one.detail) or reason})" for one in entry.examples[:1])
        for reason, entry in _rejected(selections).items()
    ]
    return DataError(f"{storage.shown(out)}: no image is kept: {'; '.join(reasons) or 'the sources hold none'}")


# What is there, and what is to be done.


def _begin(out: str, selections: Sequence[Selection], finished: PreparedManifest | None) -> set[int]:
    """Remove what was written from another selection; return the tasks that are done."""
    uri = storage.join(out, POSITIONS, _IDENTITIES)
    known = storage.read_json(uri) if storage.exists(uri) else []
    wanted = [selection.identity for selection in selections]
    same = next((i for i, one in enumerate(wanted) if known[i : i + 1] != [one]), len(wanted))
    if finished is not None and same < len(finished.generations):
        raise DataError(
            f"{storage.shown(out)} was written from another selection; choose another folder, or replace it with "
            "--overwrite"
        )
    if known[same:]:
        logger.info("%s: what was written from another selection is removed", storage.shown(out))
    if known[same:] or not known:  # Without positions nobody knows what the shards are made from.
        discard_generations(out, same, sum(len(selection.tasks) for selection in selections[:same]))
    if known != wanted:
        storage.write_json(uri, wanted)
    return part_numbers(storage.join(out, POSITIONS))


def discard_generations(out: str, generation: int, first_task: int) -> None:
    """Remove what was written of a generation, and of those behind it; earlier ones stay to the byte.

    Args:
        out: the data set.
        generation: number of the generation.
        first_task: number of its first write task.
    """
    places = write_indexes(out, first_task)
    later = [number for number in part_numbers(storage.join(out, POSITIONS)) if number >= first_task]
    storage.delete(storage.join(out, POSITIONS, positions_name(number)) for number in later)
    _delete_others(out, places)
    uri = storage.join(out, POSITIONS, _IDENTITIES)
    if storage.exists(uri):
        storage.write_json(uri, storage.read_json(uri)[:generation])


def _tasks(out: str, scan: Scan, selections: Sequence[Selection], done: set[int]) -> Iterator[WriteTask]:
    """Yield the tasks that are not done."""
    present: dict[int, dict[str, int]] = {}
    for split in SPLITS:
        for name, file in storage.list_files(storage.join(out, split)).items():
            found = re.search(r"/shard\.(\d+)\.", name)
            if found is not None and int(found[1]) not in done:
                present.setdefault(int(found[1]), {})[f"{split}/{name}"] = file.size
    for selection in selections:
        for number, windows in enumerate(selection.tasks, start=selection.first_task):
            if number not in done:
                yield WriteTask(
                    number=number,
                    generation=selection.generation,
                    windows=windows,
                    parts={part: scan.find(part) for window in windows for part in window},
                    present=present.get(number, {}),
                )


# The work on a task.


class _Sample(NamedTuple):
    """An encoded sample that is not in a shard yet."""

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
        self._scratch, self._end = scratch, 0
        with self._errors():
            self._file = tempfile.TemporaryFile(dir=scratch) if scratch is not None else None  # noqa: SIM115 closed with self

    def put(self, sample: bytes) -> bytes | int:
        """Store a sample; return what `get` finds it by."""
        if self._file is None:
            return sample
        with self._errors():
            self._file.seek(self._end)
            self._file.write(sample)
        self._end += len(sample)
        return self._end - len(sample)

    def get(self, sample: _Sample) -> bytes:
        """Return a sample."""
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

    def __init__(self, out: str, settings: Mapping[str, Any], scratch: str | None) -> None:
        self._out, self._scratch, self._format = out, scratch, shard_format(settings)
        self._window_bytes = round(settings["window_mb"] * 2**20)
        self._scores = [scorer["column"] for scorer in settings["scorers"]]
        self._is_captioned = settings["captioner"] is not None

    def __call__(self, task: WriteTask) -> int:
        """Write the shards and the positions of a task; return how many samples they hold."""
        shards = _Shards(self._out, task, self._format, _Pool(self._scratch))
        table = kept_rows(self._out, task.generation, task.number)
        for number, window in enumerate(task.windows):
            of_window = table.filter(pc.equal(table["window"], number))  # pyright: ignore[reportAttributeAccessIssue]
            kept: dict[int, list[dict[str, Any]]] = {}
            for row in of_window.to_pylist():
                kept.setdefault(row["part"], []).append(row)
            samples: list[tuple[Place, _Sample]] = []
            for part in window:
                num_bytes = 0
                for place, sample in self._read(task, part, kept.get(part, ()), shards):
                    samples.append((place, sample))
                    num_bytes += sample.size
                    if num_bytes >= self._window_bytes:
                        self._add(shards, samples)
                        num_bytes = 0
            self._add(shards, samples)
        return shards.finish()

    def _add(self, shards: "_Shards", samples: list[tuple[Place, _Sample]]) -> None:
        """Put the samples of a window (or of as much of a large partition) into shards, and clear their list."""
        for place, sample in sorted(samples, key=lambda one: (one[0], one[1].order)):
            shards.add(place, sample)
        samples.clear()
        shards.limit(self._window_bytes)
        shards.move_to(_Pool(self._scratch))

    def _read(
        self, task: WriteTask, part: int, kept: Sequence[Mapping[str, Any]], shards: "_Shards"
    ) -> Iterator[tuple[Place, _Sample]]:
        """Read the kept images of a partition."""
        if not kept:
            return
        source, partition = task.parts[part]
        rows = self._metadata(part, [one["row"] for one in kept])
        if any(row["reason"] == Reason.REMOVED.value for row in rows):
            raise DataError(f"{METADATA}/{part_name(part)}: a selected image was removed since; run the stage select")
        locations = [Location(**{field.name: row[field.name] for field in fields(Location)}) for row in rows]
        images = source.images(partition, locations)
        for one, row in zip(kept, rows, strict=True):
            sample = encode_sample(self._columns(row, _next_image(images, row)), COLUMNS)
            stored = _Sample(one["order"], row["key"], part, one["row"], len(sample), shards.pool.put(sample))
            yield (one["split"], one["bucket"]), stored

    def _metadata(self, part: int, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Metadata and scores of some rows of a partition."""
        name = part_name(part)
        columns = dict(_columns_of(read_table(storage.join(self._out, METADATA, name))))
        if self._is_captioned:
            columns |= _columns_of(read_table(storage.join(self._out, SCORES, CAPTIONS, name)))
        scores = {column: read_table(storage.join(self._out, SCORES, column, name))[column] for column in self._scores}
        table = pa.table(columns).take(rows)
        values = pa.table(scores).take(rows).to_pylist() if scores else [{}] * len(rows)
        return [row | {"scores": score} for row, score in zip(table.to_pylist(), values, strict=True)]

    def _columns(self, row: Mapping[str, Any], image: bytes) -> dict[str, Any]:
        """Columns of a sample."""
        generated = row.get(GENERATED_CAPTIONS)
        metadata = json.loads(row["metadata"] or "{}")
        metadata |= {GENERATED_CAPTIONS: generated} if generated else {}
        return {
            "image": image,
            "captions": row["captions"],
            "width": row["width"],
            "height": row["height"],
            "key": row["key"],
            "metadata": metadata | {name: fit_for_json(value) for name, value in row["scores"].items()},
        }


def _columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


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
    """The shards of a task: samples come in, whole shards are written, the rest is carried."""

    def __init__(self, out: str, task: WriteTask, shards: ShardFormat, pool: _Pool) -> None:
        self.pool = pool
        self._out, self._task, self._format = out, task, shards
        self._rests: dict[Place, list[_Sample]] = {}
        self._sizes: Counter[Place] = Counter()
        self._numbers: Counter[Place] = Counter()
        self._entries: list[dict[str, Any]] = []
        self._positions: list[tuple[Any, ...]] = []

    def move_to(self, pool: _Pool) -> None:
        """Carry the rests over to the pool of the next window."""
        for samples in self._rests.values():
            samples[:] = [sample._replace(stored=pool.put(self.pool.get(sample))) for sample in samples]
        self.pool = pool

    def add(self, place: Place, sample: _Sample) -> None:
        """Append a sample; if it does not fit, the shard is written before."""
        rest = self._rests.setdefault(place, [])
        if rest and self._format.num_bytes(len(rest) + 1) + self._sizes[place] + sample.size > self._format.shard_bytes:
            self._write(place)
        self._rests.setdefault(place, []).append(sample)
        self._sizes[place] += sample.size

    def limit(self, num_bytes: int) -> None:
        """Write the largest rests until all together have at most a number of bytes."""
        while self._sizes.total() > num_bytes:
            self._write(max(sorted(self._sizes), key=self._sizes.__getitem__))

    def finish(self) -> int:
        """Write the rests and the positions; return the number of samples."""
        for place in sorted(self._rests):
            self._write(place)
        table = pa.Table.from_arrays(
            [pa.array([row[i] for row in self._positions], kind) for i, kind in enumerate(POSITIONS_SCHEMA.types)],
            schema=POSITIONS_SCHEMA.with_metadata({"entries": json.dumps(self._entries)}),
        )
        write_table(storage.join(self._out, POSITIONS, positions_name(self._task.number)), table)
        return table.num_rows

    def _write(self, place: Place) -> None:
        samples, number = self._rests.pop(place), self._numbers[place]
        del self._sizes[place]
        self._numbers[place] += 1
        name = f"shard.{self._task.number:05}.{number:05}.mds"
        content, entry = encode_shard([self.pool.get(sample) for sample in samples], name, self._format)
        path = "/".join([*place, stored_file(entry)["basename"]])
        if self._task.present.get(path) != len(content):
            storage.write(storage.join(self._out, path), content)
        self._entries.append({"split": place[0], "bucket": place[1], "entry": entry})
        for index, sample in enumerate(samples):
            self._positions.append((sample.key, sample.part, sample.row, *place, name, index))


# The end: indexes and the manifest.


def read_entries(out: str, tasks: Iterable[int]) -> Iterator[list[dict[str, Any]]]:
    """Read the index entries of the shards of each task: lists of {split, bucket, entry}."""

    def read(task: int) -> list[dict[str, Any]]:
        return json.loads(read_schema(storage.join(out, POSITIONS, positions_name(task))).metadata[b"entries"])

    return storage.concurrent_map(read, tasks)


def write_indexes(out: str, num_tasks: int) -> dict[Place, set[str]]:
    """Write the index of each split and bucket over the first tasks; return the names of the files of each folder."""
    entries: dict[Place, list[str]] = {}
    names: dict[Place, set[str]] = {}
    for listed in read_entries(out, range(num_tasks)):
        for one in listed:
            place = (one["split"], one["bucket"])
            entries.setdefault(place, []).append(json.dumps(one["entry"], sort_keys=True))  # A fifth of the dictionary.
            names.setdefault(place, {INDEX}).add(stored_file(one["entry"])["basename"])
    for place, texts in entries.items():
        content = f'{{"shards": [{", ".join(texts)}], "version": 2}}'  # As `mds.write_index` writes it.
        storage.write(storage.join(out, *place, INDEX), content.encode())
    return names


def _delete_others(out: str, places: Mapping[Place, set[str]]) -> None:
    """Delete what killed runs left: unfinished files, and in the folders of shards what no index names."""

    def is_left(name: str) -> bool:
        folder, _, base = name.rpartition("/")
        split, _, bucket = folder.partition("/")
        return base.endswith(PARTIAL) or (split in SPLITS and base not in places.get((split, bucket), ()))

    left = filter(is_left, storage.list_files(out))
    indexes_first = sorted(left, key=lambda name: not name.endswith(INDEX))  # So that no rest looks whole.
    storage.delete(storage.join(out, name) for name in indexes_first)


def _ascending(place: Place) -> tuple[int, list[int]]:
    """Sort key of places: training first, buckets by the numbers in their names."""
    return SPLITS.index(place[0]), [int(number) for number in re.findall(r"\d+", place[1])]


def _manifest(
    out: str, scan: Scan, selections: Sequence[Selection], settings: Mapping[str, Any], places: Iterable[Place]
) -> PreparedManifest:
    """Return the manifest of the data set as it is now."""
    sizes = Counter(one.generation for one in scan.partitions)
    splits: dict[str, dict[str, BucketEntry]] = {}
    for split, bucket in places:
        splits.setdefault(split, {})[bucket] = read_index(storage.join(out, split, bucket))
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
        rejected=_rejected(selections),
        splits=splits,
        generations=[Generation(partitions=sizes[one.generation], seen=one.seen, kept=one.kept) for one in selections],
    )


def _rejected(selections: Sequence[Selection]) -> dict[str, RejectedEntry]:
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
