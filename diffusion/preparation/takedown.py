"""Takedown: images marked as removed, so that training skips them, or erased from every file of a data set.

Samples keep their positions: `withdrawn.json` lists them by index, and training uses a substitute. `removed.json` holds
the hashes of all removed keys: later scans reject them.

Erasing blanks the samples in their shards (a shard is written under a new name, then the index names it, then the old
file is deleted), the rows of the metadata, scores and positions, and what else names the keys. Stopped at any moment,
the data can be trained from, and the same command goes on. (Between an index and the manifest of prepared data, which
holds the hash of the index, `encode` rejects the data until then.)
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from diffusion import storage
from diffusion.datasets.manifest import MANIFEST, SCAN, PreparedManifest, RejectedEntry
from diffusion.datasets.mds import (
    INDEX,
    Layout,
    SampleDecoder,
    encode_sample,
    encode_shard,
    format_of,
    read_index,
    read_shard,
    read_shards,
    stored_file,
    write_index,
)
from diffusion.errors import DataError, UserError
from diffusion.files import PARTIAL
from diffusion.preparation.layout import (
    LISTINGS,
    METADATA,
    POSITIONS,
    REMOVED,
    REMOVED_SAMPLES,
    SCORES,
    SELECTION,
    SPLITS,
    part_name,
    positions_name,
    read_table,
    write_table,
)
from diffusion.preparation.metadata import hash_key, removed_row
from diffusion.preparation.output import claim, clear_result
from diffusion.preparation.records import Reason
from diffusion.preparation.scan import REREAD, Scan
from diffusion.preparation.select import read_selection
from diffusion.preparation.write import discard_generations, read_entries, write_indexes

logger = logging.getLogger(__name__)

_KEYS = "withdrawn.txt"
"""The keys themselves, one per line, in data sets of version 1."""

_REPORTS = ("report.html", "report.json")
_OF_VERSION_1 = ("facts/", "refused/", "partitions.json")


@dataclass(frozen=True, kw_only=True)
class Takedown:
    """What was removed."""

    marks: dict[str, list[int]]
    """Indices of all removed samples, of this time and before, by `<split>/<bucket>`."""

    absent: list[str]
    """Keys that the data set does not hold (any more), sorted."""

    num_rewritten: int
    """Shards that were rewritten."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A sample that is to be removed."""

    key: str
    place: str
    """`<split>/<bucket>`."""
    index: int
    """In the folder."""
    task: int = 0
    row_of_task: int = 0
    part: int = 0
    row: int = 0
    shard: str = ""
    index_in_shard: int = 0


def read_keys(path: Path) -> set[str]:
    """Read a file of keys, one per line; blank lines are skipped.

    A line is a key as it is, spaces and all. One that is a JSON string, `"..."`, stands for the text in it: so keys are
    written that hold a line break or begin with a quotation mark.

    Raises:
        DataError: it cannot be read, or is not UTF-8.
    """
    try:
        lines = path.read_bytes().decode().split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; give a file with one key per line") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}; give a file with one key per line") from error
    return {_parse_line(line.rstrip("\r")) for line in lines if line.strip()}


def _parse_line(line: str) -> str:
    try:
        return str(json.loads(line)) if line.startswith('"') else line
    except ValueError:
        return line


def read_removed(dataset: str) -> frozenset[str]:
    """Read the hashes of the removed keys of a data set (path or s3://); none if nothing was removed."""
    hashes: set[str] = set()
    if storage.exists(storage.join(dataset, REMOVED)):
        hashes.update(storage.read_json(storage.join(dataset, REMOVED)))
    if storage.exists(storage.join(dataset, _KEYS)):
        lines = storage.read(storage.join(dataset, _KEYS)).decode().split("\n")
        hashes.update(hash_key(_parse_line(line)) for line in lines if line)
    return frozenset(hashes)


def add_removed(dataset: str, keys: Iterable[str]) -> None:
    """Add keys to those that later scans reject."""
    known = read_removed(dataset)
    hashes = known.union(map(hash_key, keys))
    if hashes and (hashes != known or not storage.exists(storage.join(dataset, REMOVED))):
        storage.write_json(storage.join(dataset, REMOVED), sorted(hashes))
    storage.delete([storage.join(dataset, _KEYS)])


def reject_scanned(dataset: str, keys: Collection[str]) -> None:
    """Reject images of an unfinished data set, or of one that is replaced, and erase what is known of them.

    If there are some, what was selected and written is removed.
    """
    rows: dict[int, list[int]] = {}
    for part, row, _ in _find_metadata(dataset, keys):
        rows.setdefault(part, []).append(row)
    if rows:
        clear_result(dataset)
        _reject_metadata(dataset, rows, erase=True)


def read_marks(dataset: str) -> dict[str, list[int]]:
    """Read the indices of the removed samples by `<split>/<bucket>`; empty if nothing was removed."""
    uri = storage.join(dataset, REMOVED_SAMPLES)
    return storage.read_json(uri) if storage.exists(uri) else {}


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
        if kind == "prepared" and PreparedManifest.read(dataset).version > 1:
            found, count = _take_down_prepared(dataset, asked, erase)
        else:
            found, count = _take_down_shards(dataset, asked, erase)
        if erase:
            _delete_old_files(dataset)
    absent = sorted(asked.difference(one.key for one in found))
    if absent:
        logger.warning(
            "%s does not hold %d of the keys (such as %s); later scans reject them",
            storage.shown(dataset), len(absent), ascii(absent[0]),
        )  # fmt: skip
    return Takedown(marks=read_marks(dataset), absent=absent, num_rewritten=count)


def _mark(dataset: str, found: Iterable[_Found]) -> dict[str, list[int]]:
    """Add samples to those that training skips; return all marks."""
    old = read_marks(dataset)
    marks = {place: set(indices) for place, indices in old.items()}
    for one in found:
        marks.setdefault(one.place, set()).add(one.index)
    new = {place: sorted(marks[place]) for place in sorted(marks)}
    if new != old:
        storage.write_json(storage.join(dataset, REMOVED_SAMPLES), new)
    return new


# Prepared data. Samples are found by their positions, which are blanked last: until then the same command finds them.


def _take_down_prepared(dataset: str, asked: set[str], erase: bool) -> tuple[list[_Found], int]:
    manifest = PreparedManifest.read(dataset)
    last = read_selection(dataset, len(manifest.generations) - 1)
    num_tasks = last.first_task + len(last.tasks)
    found = list(_find_positions(dataset, num_tasks, asked, read_marks(dataset) if erase else {}))
    _mark(dataset, found)
    rows: dict[int, list[int]] = {}
    others = list(_find_metadata(dataset, asked.difference(one.key for one in found), marked=erase))
    keys = asked.union((one.key for one in found), (key for _, _, key in others))
    partitions = storage.read_json(storage.join(dataset, SCAN))["partitions"]
    later = {entry["number"] for entry in partitions if entry["generation"] > last.generation}
    if any(part in later for part, _, key in others if key in asked):
        logger.info("%s: what was written of an unfinished growth is removed", storage.shown(dataset))
        numbers = {entry["generation"] for entry in partitions if entry["generation"] > last.generation}
        storage.delete(storage.join(dataset, SELECTION, f"{number}.json") for number in numbers)
        discard_generations(dataset, last.generation + 1, num_tasks)
    for part, row in [*((part, row) for part, row, _ in others), *((one.part, one.row) for one in found)]:
        rows.setdefault(part, []).append(row)
    if not erase:
        _reject_metadata(dataset, rows, erase=False)
        return found, 0
    _erase_examples(dataset, rows)
    manifest = replace(manifest, rejected=_without(manifest.rejected, keys))
    manifest.write(dataset)
    _reject_metadata(dataset, rows, erase=True)  # Not before: it holds the keys of what was marked.
    rest = storage.join(dataset, REREAD)  # Of a comparison that was killed.
    storage.delete(storage.join(rest, name) for name in storage.list_files(rest))
    has_report = storage.exists(storage.join(dataset, _REPORTS[0]))
    storage.delete(storage.join(dataset, name) for name in _REPORTS)
    count = sum(_erase_task(dataset, task, of_task) for task, of_task in _by(found, "task").items())
    write_indexes(dataset, num_tasks)
    _update_splits(dataset, manifest)
    if has_report:
        _write_report(dataset)
    return found, count


def _find_positions(dataset: str, num_tasks: int, keys: set[str], marks: Mapping[str, list[int]]) -> Iterator[_Found]:
    """Find samples by their keys, and those that are marked and not erased yet."""
    marked = {(place, index) for place, indices in marks.items() for index in indices}
    wanted, counts = pa.array(sorted(keys), pa.string()), Counter[str]()
    starts: list[dict[tuple[str, str], int]] = []
    for entries in read_entries(dataset, range(num_tasks)):
        starts.append({})
        for one in entries:
            place = f"{one['split']}/{one['bucket']}"
            starts[-1][place, _stem(one["entry"]["raw_data"]["basename"])] = counts[place]
            counts[place] += one["entry"]["samples"]

    def find(task: int) -> list[_Found]:
        table = read_table(storage.join(dataset, POSITIONS, positions_name(task)))
        table = table.append_column("row_of_task", pa.array(range(table.num_rows), pa.int32()))
        if not marked:
            table = table.filter(pc.is_in(table["key"], wanted))  # pyright: ignore[reportAttributeAccessIssue]
        samples = []
        for row in table.to_pylist():
            place = f"{row['split']}/{row['bucket']}"
            index = starts[task][place, _stem(row["shard"])] + row["index"]
            if row["key"] in keys or (row["key"] and (place, index) in marked):
                names = ("key", "part", "row", "shard", "row_of_task")
                of_row = {name: row[name] for name in names} | {"index_in_shard": row["index"]}
                samples.append(_Found(place=place, index=index, task=task, **of_row))
        return samples

    for samples in storage.concurrent_map(find, range(num_tasks)):
        yield from samples


def _find_metadata(dataset: str, keys: Collection[str], *, marked: bool = False) -> Iterator[tuple[int, int, str]]:
    """Find images by their keys, and those that are marked and not erased yet: partition, row and key."""
    wanted = pa.array(sorted(keys), pa.string())

    def find(name: str) -> list[tuple[int, int, str]]:
        with storage.open_file(storage.join(dataset, METADATA, name), buffer_bytes=0) as file:
            table = pq.read_table(file, columns=["key", "reason"])
        of = table["key"]
        is_wanted = pc.is_in(of, wanted)  # pyright: ignore[reportAttributeAccessIssue]
        if marked:
            is_marked = pc.and_(pc.equal(table["reason"], Reason.REMOVED.value), pc.not_equal(of, ""))  # pyright: ignore[reportAttributeAccessIssue]
            is_wanted = pc.or_(is_wanted, is_marked)  # pyright: ignore[reportAttributeAccessIssue]
        rows = np.flatnonzero(is_wanted.to_numpy()).tolist()
        return [(int(Path(name).stem), row, of[row].as_py()) for row in rows]

    names = [name for name in storage.list_files(storage.join(dataset, METADATA)) if not name.endswith(PARTIAL)]
    for rows in storage.concurrent_map(find, names if keys or marked else []):
        yield from rows


def _reject_metadata(dataset: str, rows: Mapping[int, list[int]], erase: bool) -> None:
    """Reject rows of the metadata as removed; erase what they hold, and their scores before."""
    scores = storage.list_files(storage.join(dataset, SCORES)) if erase else ()
    entries = storage.read_json(storage.join(dataset, SCAN))["partitions"] if rows else ()
    files = {entry["number"]: entry["file"] for entry in entries}
    for part, of_part in rows.items():
        for name in scores:
            if name.endswith(f"/{part_name(part)}"):
                _change_rows(storage.join(dataset, SCORES, name), of_part, dict.fromkeys)
        if erase:
            storage.delete([storage.join(dataset, LISTINGS, part_name(part))])

        def reject(row: dict[str, Any], file: str = files[part]) -> dict[str, Any]:
            return removed_row(row, file) if erase else {**row, "reason": Reason.REMOVED.value}

        _change_rows(storage.join(dataset, METADATA, part_name(part)), of_part, reject)


def _change_rows(uri: str, rows: Iterable[int], change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change rows of a parquet file."""
    table = read_table(uri)
    values = table.to_pylist()
    for row in rows:
        values[row] = change(values[row])
    write_table(uri, pa.Table.from_pylist(values, table.schema))


def _erase_examples(dataset: str, rows: Mapping[int, list[int]]) -> None:
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
        elif name.endswith("-rejected.parquet") and "duplicate_of" in (table := read_table(uri)).column_names:
            write_table(uri, table.drop_columns("duplicate_of"))  # Keys, in data sets of an earlier version.


def _erase_task(dataset: str, task: int, found: list[_Found]) -> int:
    """Rewrite the shards and the positions of a write task; return how many shards were rewritten."""
    uri = storage.join(dataset, POSITIONS, positions_name(task))
    table = read_table(uri)
    entries, count = json.loads(table.schema.metadata[b"entries"]), 0
    for one in entries:
        place, stem = f"{one['split']}/{one['bucket']}", _stem(one["entry"]["raw_data"]["basename"])
        indices = [sample.index_in_shard for sample in found if (sample.place, _stem(sample.shard)) == (place, stem)]
        if indices:
            old, one["entry"] = one["entry"], _erase_shard(storage.join(dataset, place), one["entry"], indices)
            count += one["entry"] is not old
    keys = table["key"].to_pylist()
    for sample in found:
        keys[sample.row_of_task] = ""
    table = table.set_column(0, table.schema.field(0), pa.array(keys, pa.string()))
    write_table(uri, table.replace_schema_metadata({"entries": json.dumps(entries)}))
    return count


def _write_report(dataset: str) -> None:
    from diffusion.preparation.report import write_report  # Plotting takes a second to import.

    try:
        write_report(dataset, Scan.read(dataset))
    except UserError as error:
        logger.warning("the report was deleted and cannot be written anew: %s", error)


def _without(rejected: Mapping[str, RejectedEntry], keys: Collection[str]) -> dict[str, RejectedEntry]:
    """Drop the examples that name a key."""
    return {
        reason: replace(
            entry,
            examples=[
                one for one in entry.examples if one.key not in keys and one.detail.removeprefix("of ") not in keys
            ],
        )
        for reason, entry in rejected.items()
    }


def _update_splits(dataset: str, manifest: PreparedManifest) -> None:
    """Bring the sizes and hashes of the indexes in a manifest up to date."""
    splits = {
        split: {bucket: read_index(storage.join(dataset, split, bucket)) for bucket in buckets}
        for split, buckets in manifest.splits.items()
    }
    replace(manifest, splits=splits).write(dataset)


# Encoded data, and prepared data of version 1.


def _take_down_shards(dataset: str, asked: set[str], erase: bool) -> tuple[list[_Found], int]:
    names = storage.list_files(dataset)
    facts = [name for name in names if name.startswith("facts/") and name.endswith(".parquet")]
    indexes = sorted(name for name in names if name.split("/")[0] in SPLITS and name.endswith(f"/{INDEX}"))
    places = [name.removesuffix(f"/{INDEX}") for name in indexes]
    find = _find_in_facts(dataset, facts, asked) if facts else _find_in_shards(dataset, places, asked)
    found = list(find) if asked else []
    marks = _mark(dataset, found)
    if not erase:
        return found, 0
    count = sum(_erase_place(storage.join(dataset, place), set(indices)) for place, indices in marks.items())
    if storage.read_json(storage.join(dataset, MANIFEST))["kind"] == "prepared":
        manifest = PreparedManifest.read(dataset)
        manifest = replace(
            manifest, rejected={reason: replace(e, examples=[]) for reason, e in manifest.rejected.items()}
        )
        _update_splits(dataset, manifest)
        storage.delete(
            storage.join(dataset, name) for name in names if name in _REPORTS or name.startswith(_OF_VERSION_1)
        )
    return found, count


def _find_in_facts(dataset: str, files: Iterable[str], keys: set[str]) -> Iterator[_Found]:
    """Find samples by the tables beside data of version 1."""
    for name in files:
        table = read_table(storage.join(dataset, name)).select(["key", "split", "bucket", "index"])
        table = table.filter(pc.is_in(table["key"], pa.array(sorted(keys))))  # pyright: ignore[reportAttributeAccessIssue]
        for row in table.to_pylist():
            if row["index"] >= 0:
                yield _Found(key=row["key"], place=f"{row['split']}/{row['bucket']}", index=row["index"])


def _find_in_shards(dataset: str, places: Iterable[str], keys: set[str]) -> Iterator[_Found]:
    """Find samples by their keys in the shards, all of which are read."""
    for place in places:
        first = 0
        for entry in read_shards(storage.join(dataset, place)):
            decode = SampleDecoder(Layout.of(format_of(entry).columns), ["key"])
            for i, sample in enumerate(read_shard(storage.join(dataset, place), entry)):
                if (key := decode(sample)["key"]) in keys:
                    yield _Found(key=key, place=place, index=first + i)
            first += entry["samples"]


def _erase_place(folder: str, indices: set[int]) -> int:
    """Erase samples of an MDS folder; return how many shards were rewritten."""
    entries, first = read_shards(folder), 0
    new = list(entries)
    for number, entry in enumerate(entries):
        of_shard = [index - first for index in sorted(indices) if first <= index < first + entry["samples"]]
        first += entry["samples"]
        if of_shard:
            new[number] = _erase_shard(folder, entry, of_shard)
    if new != entries:
        write_index(folder, new)
    return sum(a is not b for a, b in zip(entries, new, strict=True))


# Shards.


def _erase_shard(folder: str, entry: dict[str, Any], indices: Iterable[int]) -> dict[str, Any]:
    """Write a shard with some samples blank under a new name; return its entry, the old one if they are blank."""
    shards, samples = format_of(entry), read_shard(folder, entry)
    decode, old = SampleDecoder(Layout.of(shards.columns)), list(samples)
    for i in indices:
        samples[i] = encode_sample(blanked(decode(samples[i])), shards.columns)
    if samples == old:
        return entry
    name = entry["raw_data"]["basename"]
    revision = int(found[1]) if (found := re.search(r"\.r(\d+)\.mds$", name)) else 0
    content, new = encode_shard(samples, f"{_stem(name)}.r{revision + 1}.mds", shards)
    storage.write(storage.join(folder, stored_file(new)["basename"]), content)
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


def _delete_old_files(dataset: str) -> None:
    """Delete shards of which the index names a newer revision, and unfinished files of killed runs."""
    names = storage.list_files(dataset)
    named: dict[tuple[str, str], str] = {}
    for name in names:
        folder, _, base = name.rpartition("/")
        if base == INDEX and folder.split("/")[0] in SPLITS:
            for entry in read_shards(storage.join(dataset, folder)):
                file = stored_file(entry)["basename"]
                named[folder, _stem(file)] = file
    old = [
        name
        for name in names
        for folder, _, base in [name.rpartition("/")]
        if named.get((folder, _stem(base)), base) != base or (base.startswith(".") and base.endswith(PARTIAL))
    ]
    storage.delete(storage.join(dataset, name) for name in old)


def _by(found: Iterable[_Found], name: str) -> dict[Any, list[_Found]]:
    groups: dict[Any, list[_Found]] = {}
    for one in found:
        groups.setdefault(getattr(one, name), []).append(one)
    return groups
