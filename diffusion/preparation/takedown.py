"""Takedown: images marked as removed, so that training skips them, or erased from every file of data sets.

Samples keep their positions: `withdrawn.json` lists them by index, and training uses a substitute. `removed.json` holds
hashes of the keys and of the bytes of all removed images: later scans and selections reject them and their copies.

Samples are found by keys without a look into a shard: those of prepared data by the metadata and the positions of write
tasks, those of encoded data by the hashes of the keys of each shard (`positions/<split>/<bucket>/SHARD.parquet`).

Erasing blanks the samples in their shards (a shard is written under a new name, then the index names it, then the old
file is deleted), the rows of the metadata, scores and positions, and what else names the keys. Stopped at any moment,
the data can be trained from, and the same command goes on. (Between an index and the manifest of prepared data, which
holds the hash of the index, `encode` rejects the data until then.)
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from diffusion import storage
from diffusion.errors import DataError, UserError
from diffusion.formats import data_set
from diffusion.formats.data_set import (
    PreparedManifest,
    add_marks,
    check_folder,
    delete_unnamed,
    read_kind,
    read_marks,
    read_splits,
)
from diffusion.formats.shards import (
    SampleDecoder,
    Shard,
    encode_sample,
    encode_shard,
    read_index,
    read_shard,
    shards_with_indices,
    write_index,
)
from diffusion.preparation.chat_captions import erase_answers
from diffusion.preparation.layout import file_numbers, part_name, positions_name, read_table, write_table
from diffusion.preparation.metadata import key_hash, removal_hash, removed_row
from diffusion.preparation.output import claim, clear_folders, clear_result
from diffusion.preparation.positions import (
    read_key_hashes,
    shard_stem,
    shards_as_metadata,
    shards_of_metadata,
    write_key_hashes,
)
from diffusion.preparation.records import Reason
from diffusion.preparation.removed import MAX_DISTANCE, Removed, add_removed
from diffusion.preparation.scan import Scan
from diffusion.preparation.select import read_selections
from diffusion.preparation.sources.folder import key_of_item
from diffusion.preparation.write import discard_growth, rejected_entries, write_indexes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Takedown:
    """Result of a takedown."""

    marks: dict[str, list[int]]
    """Indices of all removed samples, of this time and before, by `<split>/<bucket>` of the first data set."""

    absent: list[str]
    """Keys that no data set holds (any more), sorted."""

    copies: list[str]
    """Keys of samples that are copies of removed images, and were not removed, sorted."""

    num_rewritten: int
    """Shards that were rewritten."""


class _Sample(NamedTuple):
    """A sample that is to be removed."""

    key: str
    folder: str
    """`<split>/<bucket>`."""
    index: int
    """In the folder."""


class _Request:
    """Keys and hashes of images to remove. Prepared data adds what the data made from it does not show."""

    def __init__(self, keys: Iterable[str], *, erase: bool, copies: bool, near: bool) -> None:
        self.keys, self.erase, self.copies, self.near = set(keys), erase, copies, near
        self.hashes = Removed(map(removal_hash, self.keys))
        self.copied = set[str]()  # Keys of copies.
        self.earlier = dict[int, str]()  # Keys of images that were removed before, by their hashes.


_Rows = dict[tuple[int, int], dict[str, Any]]
"""Some columns of rows of the metadata, by partition and row."""


def reject_scanned(dataset: str, keys: Collection[str]) -> None:
    """Reject images of an unfinished data set, and erase what is known of them.

    If there are some, what was selected and written is removed.
    """
    rows, _ = _find_keys(dataset, set(keys))
    add_removed(dataset, [*map(removal_hash, keys), *_hashes_of(rows)])
    erase_answers(dataset)
    if rows:
        clear_result(dataset)
        _reject_rows(dataset, rows, erase=True)
        _erase_listings(dataset)


def take_down(
    dataset: str,
    keys: Iterable[str],
    *,
    derived: Iterable[str] = (),
    erase: bool = False,
    copies: bool = False,
    near: bool = False,
    is_claimed: bool = False,
) -> Takedown:
    """Remove samples of a finished data set and of those that were made from it; what was removed before stays so.

    Args:
        dataset: prepared or encoded data, a path or an s3:// URI.
        keys: keys of the samples.
        derived: encoded data that was made from it.
        erase: erase what is marked, at this time or before, from all files. Otherwise it is only marked.
        copies: remove the copies of removed images, too, which the metadata of prepared data show.
        near: also reject, and count as copies, images whose perceptual hash is near to that of one with these keys.
        is_claimed: the caller has claimed the data sets.

    Raises:
        DataError: one is no finished data set, or is damaged.
        MachineError: another process is writing there, or it cannot be written to.
    """
    kinds = {uri: _kind_of(uri) for uri in (dataset, *derived)}
    kinds = dict(sorted(kinds.items(), key=lambda one: one[1] == data_set.ENCODED))  # Prepared data shows copies.
    request, found = _Request(keys, erase=erase, copies=copies, near=near), set[str]()
    work: list[Callable[[], int]] = []
    with ExitStack() as claims:
        for uri, kind in () if is_claimed else kinds.items():  # All, before anything is written.
            claims.enter_context(claim(uri, kind))
        for uri, kind in kinds.items():
            if kind == data_set.ENCODED and (erase or not request.hashes <= Removed.read(uri)):
                clear_folders(uri, data_set.WORK)  # Shards of an unfinished growth predate the takedown.
            request.hashes = add_removed(uri, request.hashes)  # Each data set rejects what the ones before it reject.
            samples, change = (_Encoded if kind == data_set.ENCODED else _Prepared)(uri).mark(request)
            add_marks(uri, data_set.REMOVED_SAMPLES, ((sample.folder, [sample.index]) for sample in samples))
            found |= {sample.key for sample in samples}
            work.append(change)
        # Prepared data at the end: copies are found again by rows that are not rejected yet.
        num_rewritten = sum(change() for change in reversed(work))
    absent = sorted(request.keys - found)
    if absent:
        logger.warning(
            "%s does not hold %d of the keys (such as %s); later scans reject them",
            storage.shown(dataset), len(absent), ascii(absent[0]),
        )  # fmt: skip
    return Takedown(
        marks=read_marks(dataset),
        absent=absent,
        copies=sorted(request.copied - request.keys),
        num_rewritten=num_rewritten,
    )


def _kind_of(dataset: str) -> str:
    kind = read_kind(dataset)
    if kind not in (PreparedManifest.KIND, data_set.ENCODED):
        raise DataError(
            f"{storage.shown(dataset)} is no finished data set; give the folder that holds its {data_set.MANIFEST}"
        )
    return kind


# Prepared data: the metadata say which images it holds, the selection which task wrote them.


class _Prepared:
    """Prepared data from which images are removed."""

    def __init__(self, uri: str) -> None:
        self._uri, self._manifest = uri, PreparedManifest.read(uri)
        self._selections = read_selections(uri, len(self._manifest.generations))
        self._num_tasks = self._selections[-1].stop
        self._tasks = {
            partition: task
            for selection in self._selections
            for task, windows in enumerate(selection.tasks, start=selection.first_task)
            for window in windows
            for partition in window
        }

    def mark(self, request: _Request) -> tuple[list[_Sample], Callable[[], int]]:
        """Find the samples to mark; return them, and what changes the files and counts the shards it rewrites."""
        uri = self._uri
        rows, earlier = _find_keys(uri, request.keys, marked=request.erase)
        request.earlier |= earlier
        request.hashes = add_removed(uri, _hashes_of(rows, like=request.keys if request.near else ()))
        copies = _find_copies(uri, request.hashes, rows)
        samples, copied = self._find(rows), self._find(copies)
        request.copied = {sample.key for sample in copied}
        if request.copies:
            request.keys |= request.copied
            request.hashes = add_removed(uri, [removal_hash(row["key"]) for row in copies.values()])
            rows |= copies
            samples += copied
        return samples, partial(self.reject, rows, erase=request.erase)

    def reject(self, rows: _Rows, *, erase: bool) -> int:
        """Reject rows of the metadata, and erase what they hold; return how many shards were rewritten.

        A growth that has selected images, copies of them maybe, is begun again.
        """
        partitions = storage.read_json(storage.join(self._uri, data_set.SCAN))["partitions"]
        last, num_finished = max(one["generation"] for one in partitions), len(self._selections)
        new = {number: row for number, row in rows.items() if row["reason"] != Reason.REMOVED.value}
        if new and last >= num_finished:
            logger.info("%s: what was written of an unfinished growth is removed", storage.shown(self._uri))
            discard_growth(self._uri, num_finished, last + 1, self._num_tasks)
        _reject_rows(self._uri, new, erase=False)
        return self._erase(rows) if erase else 0

    def _find(self, rows: _Rows) -> list[_Sample]:
        """Find the samples of some rows by the positions of the tasks that wrote them."""
        tasks = self._tasks_of(rows)
        starts = {
            (folder, shard_stem(shard.raw.name)): first
            for folder in (self._manifest.folders if tasks else ())
            for first, shard, _ in shards_with_indices(read_index(storage.join(self._uri, folder)).shards)
        }
        samples = []
        for task, partitions in tasks.items():
            table = read_table(storage.join(self._uri, data_set.POSITIONS, positions_name(task)))
            for one in table.filter(pc.field("part").isin(list(partitions))).to_pylist():
                if row := rows.get((one["part"], one["row"])):
                    folder = f"{one['split']}/{one['bucket']}"
                    index = starts[folder, shard_stem(one["shard"])] + one["index"]
                    samples.append(_Sample(row["key"], folder, index))
        return samples

    def _erase(self, rows: _Rows) -> int:
        uri = self._uri
        _erase_examples(uri, rows)
        # Left by a killed comparison; and selections whose examples may name the images.
        clear_folders(uri, data_set.REREAD, data_set.PACKED)
        _erase_listings(uri)
        erase_answers(uri)
        has_report = storage.exists(storage.join(uri, data_set.REPORT_PAGE))
        storage.delete(storage.join(uri, name) for name in (data_set.REPORT_PAGE, data_set.REPORT_NUMBERS))
        count = sum(_erase_task(uri, task, rows) for task in self._tasks_of(rows))
        write_indexes(uri, self._num_tasks, kept=self._manifest.kept)
        rejected = rejected_entries(read_selections(uri, len(self._selections)))  # Without the erased examples.
        replace(self._manifest, rejected=rejected, splits=read_splits(uri, self._manifest.folders)).write(uri)
        _reject_rows(uri, rows, erase=True)  # At the end: a run that continues finds the keys there.
        if has_report:
            _write_report(uri)
        return count

    def _tasks_of(self, rows: _Rows) -> dict[int, set[int]]:
        """Return the partitions with some rows by the task that wrote them."""
        tasks: dict[int, set[int]] = {}
        for partition, _ in rows:
            if partition in self._tasks:
                tasks.setdefault(self._tasks[partition], set()).add(partition)
        return tasks


_KNOWN = ("key", "key_hash", "xxh128", "phash", "reason")


def _find_keys(dataset: str, keys: Collection[str], *, marked: bool = False) -> tuple[_Rows, dict[int, str]]:
    """Find images by their keys; with `marked`, also those that were removed before and are not erased yet.

    Returns:
        Their rows; and with `marked`, the key of each image that was removed before by its hash: empty if it is erased.
    """
    if not keys and not marked:
        return {}, {}
    hashes = np.array([key_hash(key) for key in keys], np.uint64)

    def matches(table: pa.Table) -> NDArray[np.bool_]:
        return np.isin(table["key_hash"], hashes) | (marked & _is_removed(table))

    found = _find_rows(dataset, ["key_hash", "reason"], matches)
    removed = {number: row for number, row in found.items() if marked and row["reason"] == Reason.REMOVED.value}
    rows = {number: row for number, row in found.items() if row["key"] in keys or (row["key"] and number in removed)}
    return rows, {row["key_hash"]: row["key"] for row in removed.values()}


def _is_removed(table: pa.Table) -> NDArray[np.bool_]:
    """Check which rows are of removed images."""
    return np.array(table["reason"]) == Reason.REMOVED.value


def _find_copies(dataset: str, removed: Removed, known: _Rows) -> _Rows:
    """Find images that are not removed, and not known, and have the bytes or the look of a removed one."""
    if not removed:
        return {}
    hashes = pa.array(sorted(removed), pa.string())

    def matches(table: pa.Table) -> NDArray[np.bool_]:
        is_copy = pc.is_in(table["xxh128"], hashes).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        is_like = removed.is_like(table["phash"].fill_null(0).to_numpy()) & table["phash"].is_valid().to_numpy()
        return (is_copy | is_like) & ~_is_removed(table)

    found = _find_rows(dataset, ["xxh128", "phash", "reason"], matches)
    return {number: row for number, row in found.items() if number not in known}


def _find_rows(dataset: str, columns: Sequence[str], matches: Callable[[pa.Table], NDArray[np.bool_]]) -> _Rows:
    """Find rows of the metadata by some columns, all of which are read."""

    def find(name: str) -> _Rows:
        with storage.open_file(storage.join(dataset, data_set.METADATA, name), buffer_bytes=0) as file:
            parquet = pq.ParquetFile(file)
            numbers = np.flatnonzero(matches(parquet.read(columns)))
            found = parquet.read(_KNOWN).take(numbers).to_pylist() if len(numbers) else []
        return {(int(Path(name).stem), row): values for row, values in zip(numbers.tolist(), found, strict=True)}

    names = [name for name in storage.list_files(storage.join(dataset, data_set.METADATA)) if name.endswith(".parquet")]
    return {number: row for rows in storage.concurrent_map(find, names) for number, row in rows.items()}


def _hashes_of(rows: _Rows, *, like: Collection[str] = ()) -> set[str]:
    """Return hashes of the bytes of images, and perceptual hashes of those with some keys; flat images have none."""
    phashes = [row["phash"] for row in rows.values() if row["key"] in like and row["phash"] is not None]
    found = {f"{phash:016x}" for phash in phashes if phash.bit_count() > MAX_DISTANCE}
    return found | {row["xxh128"] for row in rows.values() if row["xxh128"]}


def _reject_rows(dataset: str, rows: _Rows, *, erase: bool) -> None:
    """Reject rows of the metadata as removed; erase what they hold, and their scores before."""
    rows_of: dict[int, list[int]] = {}
    for partition, row in rows:
        rows_of.setdefault(partition, []).append(row)
    if rows:
        clear_folders(dataset, data_set.PACKED)
    # A column may be a link to its folder.
    scores = storage.join(dataset, data_set.SCORES)
    columns = {name.partition("/")[0] for name in storage.list_files(scores)} if erase else ()
    entries = storage.read_json(storage.join(dataset, data_set.SCAN))["partitions"] if rows else ()
    files = {entry["number"]: entry["file"] for entry in entries}

    def reject(partition: int) -> None:
        uri = storage.join(dataset, data_set.METADATA, part_name(partition))
        if not erase:
            _change_rows(uri, rows_of[partition], lambda row: {**row, "reason": Reason.REMOVED.value})
            return
        for column in columns:
            if storage.exists(of_column := storage.join(scores, column, part_name(partition))):
                _change_rows(of_column, rows_of[partition], dict.fromkeys)
        _change_rows(uri, rows_of[partition], lambda row: removed_row(row, files[partition]))

    for _ in storage.concurrent_map(reject, rows_of):
        pass


def _erase_listings(dataset: str) -> None:
    """Drop all removed images from the listings of a growth that is not scanned yet."""
    removed = Removed.read(dataset)
    scan = storage.read_json(storage.join(dataset, data_set.SCAN))
    names = {one["number"]: scan["sources"][one["source"]]["name"] for one in scan["partitions"]}
    for number in file_numbers(storage.join(dataset, data_set.LISTINGS)):
        uri = storage.join(dataset, data_set.LISTINGS, part_name(number))
        if number not in names:  # A growth stopped before scan.json named it; it is listed again.
            storage.delete([uri])
            continue
        items = read_table(uri)["item"].to_pylist()
        kept = [item for item in items if removal_hash(key_of_item(names[number], item)) not in removed]
        if len(kept) < len(items):
            write_table(uri, pa.table({"item": pa.array(kept, pa.string())}))


def _change_rows(uri: str, rows: Iterable[int], change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change rows of a parquet file."""
    table = read_table(uri)
    values = table.to_pylist()
    for row in rows:
        values[row] = change(values[row])
    changed = pa.Table.from_pylist(values, table.schema)
    if changed != table:
        write_table(uri, changed)


def _erase_examples(dataset: str, rows: _Rows) -> None:
    """Drop the examples of rejections that name removed images."""
    for name in storage.list_files(storage.join(dataset, data_set.SELECTION)):
        uri = storage.join(dataset, data_set.SELECTION, name)
        if name.endswith(".json"):
            values = storage.read_json(uri)
            for listed in values.get("examples", {}).values():
                named = [((one["part"], one["row"]), (one["of_part"], one["of_row"])) for one in listed]
                listed[:] = [one for one, pair in zip(listed, named, strict=True) if rows.keys().isdisjoint(pair)]
            storage.write_json(uri, values)


def _erase_task(dataset: str, task: int, rows: _Rows) -> int:
    """Rewrite the shards and the positions of a write task; return how many shards were rewritten."""
    uri = storage.join(dataset, data_set.POSITIONS, positions_name(task))
    table = read_table(uri)
    removed = [(one["part"], one["row"]) in rows for one in table.select(["part", "row"]).to_pylist()]
    indices: dict[tuple[str, str], list[int]] = {}
    for one in table.filter(removed).to_pylist():
        indices.setdefault((f"{one['split']}/{one['bucket']}", shard_stem(one["shard"])), []).append(one["index"])
    old = shards_of_metadata(table.schema.metadata)
    new = [
        (
            folder,
            _erase_shard(storage.join(dataset, folder), shard, indices.get((folder, shard_stem(shard.raw.name)), ())),
        )
        for folder, shard in old
    ]
    keys = pc.if_else(pa.array(removed), "", table["key"])  # pyright: ignore[reportAttributeAccessIssue]
    table = table.set_column(0, table.schema.field(0), keys)
    write_table(uri, table.replace_schema_metadata(shards_as_metadata(new)))
    return sum(a[1] is not b[1] for a, b in zip(old, new, strict=True))


def _write_report(dataset: str) -> None:
    from diffusion.preparation.report import write_report  # Plotting takes a second to import.

    try:
        write_report(dataset, Scan.read(dataset))
    except UserError as error:
        logger.warning("the report was deleted and cannot be written again: %s", error)


# Encoded data: beside each shard, the hashes of its keys.


class _Encoded:
    """Encoded data from which images are removed."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        counts = storage.read_json(storage.join(uri, data_set.MANIFEST))["counts"]
        folders = [check_folder(f"{split}/{bucket}") for split, buckets in counts.items() for bucket in buckets]
        self._shards = {folder: read_index(storage.join(uri, folder)).shards for folder in folders}

    def mark(self, request: _Request) -> tuple[list[_Sample], Callable[[], int]]:
        """Find the samples to mark by the hashes of their keys; return as `_Prepared.mark` does."""
        keys = request.earlier | {key_hash(key): key for key in request.keys}
        wanted = pa.array(list(keys), pa.uint64())
        samples = []
        for folder, shards in self._shards.items() if keys else ():
            found = storage.concurrent_map(partial(read_key_hashes, self._uri, folder), shards)
            for (first, *_), known in zip(shards_with_indices(shards), found, strict=True):
                numbers = np.flatnonzero(pc.is_in(known, wanted))  # pyright: ignore[reportAttributeAccessIssue]
                samples += [_Sample(keys[known[number].as_py()], folder, first + int(number)) for number in numbers]
        return samples, self.erase if request.erase else lambda: 0

    def erase(self) -> int:
        """Erase the marked samples whose keys are there; return how many shards were rewritten."""
        count, kept, erased, marks = 0, {}, [], read_marks(self._uri)
        for folder, shards in self._shards.items():
            new = kept[folder] = []
            for _, shard, inside in shards_with_indices(shards, marks.get(folder, [])):
                known = read_key_hashes(self._uri, folder, shard).to_pylist() if inside else []
                left = [index for index in inside if known[index] is not None]
                new.append(_erase_shard(storage.join(self._uri, folder), shard, left))
                if left:
                    hashes = [None if i in left else one for i, one in enumerate(known)]
                    erased.append((folder, shard, hashes))
            if new != shards:
                write_index(storage.join(self._uri, folder), new)
            count += sum(a is not b for a, b in zip(shards, new, strict=True))
        delete_unnamed(self._uri, kept)
        for of_shard in erased:  # At the end: a run that continues finds the keys.
            write_key_hashes(self._uri, *of_shard)
        return count


# Shards.


def _erase_shard(folder: str, shard: Shard, indices: Sequence[int]) -> Shard:
    """Write a shard with some samples blank under a new name; return it, or the old one if they are blank."""
    if not indices:
        return shard
    samples = read_shard(folder, shard)
    decode, old = SampleDecoder(shard.format), list(samples)
    for i in indices:
        samples[i] = encode_sample(blanked(decode(samples[i])), shard.format.columns)
    if samples == old:
        return shard
    revision = int(found[1]) if (found := re.search(r"\.r(\d+)\.mds$", shard.raw.name)) else 0
    content, new = encode_shard(samples, f"{shard_stem(shard.raw.name)}.r{revision + 1}.mds", shard.format)
    storage.write(storage.join(folder, new.stored.name), content)
    return new


def blanked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of which only the size of the image is left."""
    blank: dict[str, Any] = {"image": b"", "captions": ["removed"], "metadata": {}, "key": ""}
    return {
        name: np.zeros_like(value) if isinstance(value, np.ndarray) else blank.get(name, value)
        for name, value in sample.items()
    }
