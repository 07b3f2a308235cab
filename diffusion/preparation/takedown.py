"""Takedown: images marked as removed, so that training skips them, or erased from every file of a data set.

Samples keep their positions: `withdrawn.json` lists them by index, and training uses a substitute. `removed.json` holds
the hashes of all removed keys: later scans reject them.

Erasing blanks the samples in their shards (a shard is written under a new name, then the index names it, then the old
file is deleted), the rows of the metadata, scores and positions, and what else names the keys. Stopped at any moment,
the data can be trained from, and the same command goes on. (Between an index and the manifest of prepared data, which
holds the hash of the index, `encode` rejects the data until then.)
"""

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from diffusion import storage
from diffusion.datasets.manifest import MANIFEST, REMOVED_SAMPLES, SCAN, WORK, PreparedManifest
from diffusion.datasets.mds import (
    INDEX,
    SampleDecoder,
    Shard,
    delete_unnamed,
    encode_sample,
    encode_shard,
    read_index,
    read_shard,
    read_shards,
    write_index,
)
from diffusion.errors import DataError, UserError
from diffusion.preparation.layout import (
    LISTINGS,
    METADATA,
    POSITIONS,
    REPORT_NUMBERS,
    REPORT_PAGE,
    REREAD,
    SCORES,
    SELECTION,
    SPLITS,
    part_name,
    part_numbers,
    positions_name,
    read_table,
    write_table,
)
from diffusion.preparation.metadata import hash_key, removed_row
from diffusion.preparation.output import claim, clear_folders, clear_result
from diffusion.preparation.records import Reason
from diffusion.preparation.removed import add_removed, read_marks, read_removed
from diffusion.preparation.scan import Scan
from diffusion.preparation.select import read_selection
from diffusion.preparation.sources.folder import key_of_item
from diffusion.preparation.write import (
    discard_generations,
    rejected_entries,
    shards_as_metadata,
    shards_of_metadata,
    write_indexes,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Takedown:
    """Result of a takedown."""

    marks: dict[str, list[int]]
    """Indices of all removed samples, of this time and before, by `<split>/<bucket>`."""

    absent: list[str]
    """Keys that the data set does not hold (any more), sorted."""

    num_rewritten: int
    """Shards that were rewritten."""


class _Sample(NamedTuple):
    """A sample that is to be removed."""

    key: str
    folder: str
    """`<split>/<bucket>`."""
    index: int
    """In the folder."""


def reject_scanned(dataset: str, keys: Collection[str]) -> None:
    """Reject images of an unfinished data set, or of one that is replaced, and erase what is known of them.

    If there are some, what was selected and written is removed.
    """
    rows = _find_rows(dataset, keys)
    if rows:
        clear_result(dataset)
        _reject_rows(dataset, rows, erase=True)
        _erase_listings(dataset)


def take_down(dataset: str, keys: Iterable[str], *, erase: bool = False) -> Takedown:
    """Remove samples of a finished data set; what was removed before stays so.

    Args:
        dataset: prepared or encoded data, a path or an s3:// URI.
        keys: keys of the samples.
        erase: erase what is marked, at this time or before, from all files. Otherwise it is only marked.

    Raises:
        DataError: it is not a finished data set, or is damaged.
        MachineError: another process is writing there, or it cannot be written to.
    """
    uri = storage.join(dataset, MANIFEST)
    manifest = storage.read_json(uri) if storage.exists(uri) else None
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if kind not in ("prepared", "encoded"):
        raise DataError(f"{storage.shown(dataset)} is no finished data set; give the folder that holds its {MANIFEST}")
    asked = set(keys)
    with claim(dataset, kind):
        add_removed(dataset, asked)
        if kind == "prepared":
            found, count = _take_down_prepared(dataset, asked, erase)
        else:
            found, count = _take_down_encoded(dataset, asked, erase)
    absent = sorted(asked.difference(one.key for one in found))
    if absent:
        logger.warning(
            "%s does not hold %d of the keys (such as %s); later scans reject them",
            storage.shown(dataset), len(absent), ascii(absent[0]),
        )  # fmt: skip
    return Takedown(marks=read_marks(dataset), absent=absent, num_rewritten=count)


def _mark(dataset: str, samples: Iterable[_Sample]) -> dict[str, list[int]]:
    """Add samples to those that training does not use; return all of these."""
    marks = {folder: set(indices) for folder, indices in read_marks(dataset).items()}
    for sample in samples:
        marks.setdefault(sample.folder, set()).add(sample.index)
    listed = {folder: sorted(marks[folder]) for folder in sorted(marks)}
    if listed != read_marks(dataset):
        storage.write_json(storage.join(dataset, REMOVED_SAMPLES), listed)
    return listed


# Prepared data: the metadata say which images it holds, the selection which task wrote them.


def _take_down_prepared(dataset: str, asked: set[str], erase: bool) -> tuple[list[_Sample], int]:
    manifest = PreparedManifest.read(dataset)
    selections = [read_selection(dataset, generation) for generation in range(len(manifest.generations))]
    tasks = {
        part: task
        for selection in selections
        for task, windows in enumerate(selection.tasks, start=selection.first_task)
        for window in windows
        for part in window
    }
    num_tasks = selections[-1].first_task + len(selections[-1].tasks)
    rows = _find_rows(dataset, asked, marked=erase)
    partitions = storage.read_json(storage.join(dataset, SCAN))["partitions"]
    generations = {one["number"]: one["generation"] for one in partitions}
    if any(generations[part] >= len(selections) for part in rows):
        logger.info("%s: what was written of an unfinished growth is removed", storage.shown(dataset))
        later = range(len(selections), max(generations.values()) + 1)
        storage.delete(storage.join(dataset, SELECTION, f"{generation}.json") for generation in later)
        discard_generations(dataset, len(selections), num_tasks)
    parts: dict[int, list[int]] = {}
    for part in rows:
        if part in tasks:
            parts.setdefault(tasks[part], []).append(part)
    samples = list(_find_samples(dataset, manifest, parts, rows))
    _reject_rows(dataset, rows, erase=False)
    _mark(dataset, samples)
    if not erase:
        return samples, 0
    _erase_examples(dataset, rows)
    clear_folders(dataset, REREAD)  # Of a comparison that was killed.
    _erase_listings(dataset)
    has_report = storage.exists(storage.join(dataset, REPORT_PAGE))
    storage.delete(storage.join(dataset, name) for name in (REPORT_PAGE, REPORT_NUMBERS))
    count = sum(_erase_task(dataset, task, rows) for task in parts)
    write_indexes(dataset, num_tasks)
    splits = {
        split: {bucket: read_index(storage.join(dataset, split, bucket)) for bucket in buckets}
        for split, buckets in manifest.splits.items()
    }
    selections = [read_selection(dataset, one.generation) for one in selections]  # Without the erased examples.
    replace(manifest, rejected=rejected_entries(selections), splits=splits).write(dataset)
    _reject_rows(dataset, rows, erase=True)  # At the end: a run that continues finds the keys there.
    if has_report:
        _write_report(dataset)
    return samples, count


def _find_rows(dataset: str, keys: Collection[str], *, marked: bool = False) -> dict[int, dict[int, str]]:
    """Find images by their keys, and those that are marked and not erased yet: key by partition and row."""
    if not keys and not marked:
        return {}
    hashes = np.array([xxhash.xxh3_64_intdigest(key.encode()) for key in keys], np.uint64)

    def find(name: str) -> dict[int, str]:
        with storage.open_file(storage.join(dataset, METADATA, name), buffer_bytes=0) as file:
            parquet = pq.ParquetFile(file)
            table = parquet.read(["key_hash", "reason"])
            is_marked = marked & (np.array(table["reason"]) == Reason.REMOVED.value)
            rows = np.flatnonzero(np.isin(table["key_hash"], hashes) | is_marked)
            found = parquet.read(["key"])["key"].take(rows).to_pylist() if len(rows) else []
        return {
            row: key
            for row, key, of_row in zip(rows.tolist(), found, is_marked[rows], strict=True)
            if key in keys or (key and of_row)
        }

    names = [name for name in storage.list_files(storage.join(dataset, METADATA)) if name.endswith(".parquet")]
    parts = zip(names, storage.concurrent_map(find, names), strict=True)
    return {int(Path(name).stem): rows for name, rows in parts if rows}


def _find_samples(
    dataset: str, manifest: PreparedManifest, tasks: Mapping[int, list[int]], rows: Mapping[int, Mapping[int, str]]
) -> Iterator[_Sample]:
    """Find the samples of some rows in the positions of the tasks that wrote them."""
    starts: dict[tuple[str, str], int] = {}
    folders = [f"{split}/{bucket}" for split, buckets in manifest.splits.items() for bucket in buckets]
    for folder in folders if tasks else ():
        first = 0
        for shard in read_shards(storage.join(dataset, folder)):
            starts[folder, _stem(shard.raw.name)] = first
            first += shard.num_samples
    for task, parts in tasks.items():
        table = read_table(storage.join(dataset, POSITIONS, positions_name(task)))
        for one in table.filter(pc.field("part").isin(parts)).to_pylist():
            if one["row"] in rows[one["part"]]:
                folder = f"{one['split']}/{one['bucket']}"
                index = starts[folder, _stem(one["shard"])] + one["index"]
                yield _Sample(rows[one["part"]][one["row"]], folder, index)


def _reject_rows(dataset: str, rows: Mapping[int, Collection[int]], *, erase: bool) -> None:
    """Reject rows of the metadata as removed; erase what they hold, and their scores before."""
    scores = storage.list_files(storage.join(dataset, SCORES)) if erase else {}
    columns = {name.rpartition("/")[0] for name in scores}
    entries = storage.read_json(storage.join(dataset, SCAN))["partitions"] if rows else ()
    files = {entry["number"]: entry["file"] for entry in entries}

    def reject(part: int) -> None:
        uri = storage.join(dataset, METADATA, part_name(part))
        if not erase:
            _change_rows(uri, rows[part], lambda row: {**row, "reason": Reason.REMOVED.value})
            return
        for column in columns:
            if f"{column}/{part_name(part)}" in scores:
                _change_rows(storage.join(dataset, SCORES, column, part_name(part)), rows[part], dict.fromkeys)
        _change_rows(uri, rows[part], lambda row: removed_row(row, files[part]))

    for _ in storage.concurrent_map(reject, rows):
        pass


def _erase_listings(dataset: str) -> None:
    """Drop all removed images from the listings of a growth that is not scanned yet."""
    removed = read_removed(dataset)
    scan = storage.read_json(storage.join(dataset, SCAN))
    names = {one["number"]: scan["sources"][one["source"]]["name"] for one in scan["partitions"]}
    for number in part_numbers(storage.join(dataset, LISTINGS)):
        uri = storage.join(dataset, LISTINGS, part_name(number))
        if number not in names:  # Of a growth that was stopped before scan.json named it; it is listed again.
            storage.delete([uri])
            continue
        items = read_table(uri)["item"].to_pylist()
        kept = [item for item in items if hash_key(key_of_item(names[number], item)) not in removed]
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


def _erase_examples(dataset: str, rows: Mapping[int, Collection[int]]) -> None:
    """Drop the examples of rejections that name removed images."""
    removed = {(part, row) for part, of_part in rows.items() for row in of_part}
    for name in storage.list_files(storage.join(dataset, SELECTION)):
        uri = storage.join(dataset, SELECTION, name)
        if name.endswith(".json"):
            values = storage.read_json(uri)
            for listed in values.get("examples", {}).values():
                places = [{(one["part"], one["row"]), (one["of_part"], one["of_row"])} for one in listed]
                listed[:] = [one for one, named in zip(listed, places, strict=True) if named.isdisjoint(removed)]
            storage.write_json(uri, values)


def _erase_task(dataset: str, task: int, rows: Mapping[int, Collection[int]]) -> int:
    """Rewrite the shards and the positions of a write task; return how many shards were rewritten."""
    uri = storage.join(dataset, POSITIONS, positions_name(task))
    table = read_table(uri)
    removed = [one["row"] in rows.get(one["part"], ()) for one in table.select(["part", "row"]).to_pylist()]
    indices: dict[tuple[str, str], list[int]] = {}
    for one in table.filter(removed).to_pylist():
        indices.setdefault((f"{one['split']}/{one['bucket']}", _stem(one["shard"])), []).append(one["index"])
    old = shards_of_metadata(table.schema.metadata)
    new = [
        (folder, _erase_shard(storage.join(dataset, folder), shard, indices.get((folder, _stem(shard.raw.name)), ())))
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


# Encoded data.


def _take_down_encoded(dataset: str, asked: set[str], erase: bool) -> tuple[list[_Sample], int]:
    clear_folders(dataset, WORK)  # Of a growth, whose shards were encoded before the takedown.
    indexes = sorted(name for name in storage.list_files(dataset) if name.endswith(f"/{INDEX}"))
    folders = [name.removesuffix(f"/{INDEX}") for name in indexes if name.split("/")[0] in SPLITS]
    samples = list(_find_in_shards(dataset, folders, asked)) if asked else []
    marks = _mark(dataset, samples)
    if not erase:
        return samples, 0
    count, named = 0, {}
    for folder in folders:
        old = read_shards(storage.join(dataset, folder))
        new = _erase_shards(storage.join(dataset, folder), old, marks.get(folder, []))
        count += sum(a is not b for a, b in zip(old, new, strict=True))
        named[folder] = {INDEX, *(shard.stored.name for shard in new)}
    delete_unnamed(dataset, named)
    return samples, count


def _find_in_shards(dataset: str, folders: Iterable[str], keys: set[str]) -> Iterator[_Sample]:
    """Find samples by their keys in the shards, all of which are read."""
    for folder in folders:
        first = 0
        for shard in read_shards(storage.join(dataset, folder)):
            decode = SampleDecoder(shard.format, ["key"])
            for i, sample in enumerate(read_shard(storage.join(dataset, folder), shard)):
                if (key := decode(sample)["key"]) in keys:
                    yield _Sample(key, folder, first + i)
            first += shard.num_samples


def _erase_shards(folder: str, shards: list[Shard], indices: Sequence[int]) -> list[Shard]:
    """Erase samples of an MDS folder; return its shards."""
    new, first = [], 0
    for shard in shards:
        stop = first + shard.num_samples
        of_shard = indices[bisect_left(indices, first) : bisect_left(indices, stop)]
        new.append(_erase_shard(folder, shard, [index - first for index in of_shard]))
        first = stop
    if new != shards:
        write_index(folder, new)
    return new


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
    content, new = encode_shard(samples, f"{_stem(shard.raw.name)}.r{revision + 1}.mds", shard.format)
    storage.write(storage.join(folder, new.stored.name), content)
    return new


def blanked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample of which only the size of the image is left."""
    blank: dict[str, Any] = {"image": b"", "captions": ["removed"], "metadata": {}, "key": ""}
    return {
        name: np.zeros_like(value) if isinstance(value, np.ndarray) else blank.get(name, value)
        for name, value in sample.items()
    }


def _stem(name: str) -> str:
    """Name of a shard without revision and endings: `shard.00003.00001`."""
    return re.sub(r"(\.r\d+)?\.mds.*$", "", name)
