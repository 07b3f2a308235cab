"""Scan: every image of the sources is decoded once; what is known of it becomes a row of the metadata.

The sources are cut into partitions, which `scan.json` names before any is read: a scan that was killed goes on with the
same ones. A worker reads a partition and writes its metadata, whole. When the sources have grown, the new partitions
are scanned; what was scanned before must still be what it was.
"""

import functools
import json
import logging
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from tqdm import tqdm

from diffusion import storage
from diffusion.config.loading import to_dict
from diffusion.datasets.images import UndecodableImageError, decode_reduced
from diffusion.datasets.manifest import MANIFEST, SCAN
from diffusion.distributed import rank
from diffusion.errors import ConfigurationError, DataError
from diffusion.preparation.config import LimitsConfig, PrepareConfig
from diffusion.preparation.engine import Workers, run
from diffusion.preparation.layout import (
    LISTINGS,
    METADATA,
    REMOVED,
    SCHEMA,
    SELECTION,
    part_name,
    read_table,
    write_table,
)
from diffusion.preparation.measures import REDUCED_SIDE, file_format, jpeg_scans, perceptual_hash, sharpness
from diffusion.preparation.metadata import hash_key, removed_row
from diffusion.preparation.output import REREAD, clear
from diffusion.preparation.records import (
    WITHOUT_CAPTION,
    OutdatedError,
    Partition,
    Partitions,
    Record,
    Rejected,
    clean_text,
)
from diffusion.preparation.sources import Source, from_description, open_sources
from diffusion.preparation.sources.reading import printable

logger = logging.getLogger(__name__)

_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class ScannedPartition:
    """A partition with its place in the data set."""

    number: int
    """Counted over all sources and generations; names its files (`part_name`)."""

    source: int
    """Number of its source."""

    generation: int
    """Growth that it came with, from 0."""

    partition: Partition
    """Without items."""


@dataclass(frozen=True)
class Scan:
    """What `scan.json` says: the sources of a data set and their partitions."""

    sources: Sequence[Source]
    partitions: Sequence[ScannedPartition]
    """By number."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Limits and partition size."""

    def find(self, number: int) -> tuple[Source, Partition]:
        """Find source and partition of a number."""
        found = self.partitions[number]
        return self.sources[found.source], found.partition

    @classmethod
    def read(cls, out: str) -> "Scan":
        """Read the scan of a data set; a DataError if there is none."""
        uri = storage.join(out, SCAN)
        if not storage.exists(uri):
            raise DataError(f"{storage.shown(out)} has no {SCAN}: run the stage scan first")
        values = storage.read_json(uri)
        try:
            if values["version"] != _VERSION:
                raise OutdatedError(f"{storage.shown(uri)} has version {values['version']}, not {_VERSION}; "
                                    "prepare with --overwrite")  # fmt: skip
            sources = [from_description(description) for description in values["sources"]]
            return cls(sources, list(map(_partition_of, values["partitions"])), values["settings"])
        except (KeyError, TypeError, AttributeError) as error:
            raise OutdatedError(f"{storage.shown(uri)} is damaged ({error!r}); prepare with --overwrite") from error

    def write(self, out: str) -> None:
        """Write `scan.json`."""
        values = {
            "version": _VERSION,
            "settings": self.settings,
            "sources": [source.description() for source in self.sources],
            "partitions": list(map(_entry_of, self.partitions)),
        }
        storage.write(storage.join(out, SCAN), json.dumps(values, separators=(",", ":")).encode())


_FIELDS = tuple(one.name for one in fields(Partition) if one.name != "items")


def _entry_of(one: ScannedPartition) -> dict[str, Any]:
    entry = {"number": one.number, "source": one.source, "generation": one.generation}
    return entry | {name: getattr(one.partition, name) for name in _FIELDS}


def _partition_of(entry: dict[str, Any]) -> ScannedPartition:
    partition = Partition(**{name: entry[name] for name in _FIELDS})
    place = {name: entry[name] for name in ("number", "source", "generation")}
    return ScannedPartition(**place, partition=partition)


# The stage


def scan_sources(config: PrepareConfig, *, workers: Workers, progress: bool = False, overwrite: bool = False) -> Scan:
    """Write the metadata of all images that the sources hold and that have none yet.

    A scan that was interrupted is completed, before the sources are looked at for more.

    Args:
        config: the preparation. Its folder is claimed by the caller.
        workers: who scans.
        progress: show a bar on stderr.
        overwrite: where the data set is of other sources or settings, or its sources have changed, remove it and begin
            anew. The metadata of one that fits are kept.

    Returns:
        The scan; all its partitions have metadata.

    Raises:
        DataError: a source is missing or unknown; the data set is of other sources or settings, or a source has changed
            in what was scanned before.
        MachineError: a file cannot be read or written, or a worker died.
    """
    sources = open_sources(
        config.sources, config.image_column, config.caption_column, config.limits, config.partition_size
    )
    _check_apart(sources, config.out)
    settings = {"limits": to_dict(config.limits), "partition_size": config.partition_size}
    scan = Scan([], [], settings)
    try:
        if storage.exists(storage.join(config.out, SCAN)):
            scan = Scan.read(config.out)
            _check_same(config.out, scan, sources, settings)
        elif storage.exists(storage.join(config.out, MANIFEST)):
            raise OutdatedError(
                f"{storage.shown(config.out)} was prepared by an earlier version, and nothing can be added to it; "
                "choose another folder, or replace it with --overwrite"
            )
        _complete(config.out, scan, workers, progress)
        scan = _grown(config.out, replace(scan, sources=sources), workers)
    except OutdatedError:
        if not overwrite:
            raise
        listed = [source.partitions() for source in sources]  # Their mistakes are found before anything is removed.
        clear(config.out)
        scan = _grown(config.out, Scan(sources, [], settings), workers, listed)
    _complete(config.out, scan, workers, progress)
    listings = storage.join(config.out, LISTINGS)
    storage.delete(storage.join(listings, name) for name in storage.list_files(listings))
    return scan


def _check_apart(sources: Sequence[Source], out: str) -> None:
    """Check that no output lies in a source, or the reverse."""
    for source in sources:
        here, there = f"{_resolved(source.path)}/", f"{_resolved(out)}/"
        if here.startswith(there) or there.startswith(here):
            raise ConfigurationError(
                f"out: {storage.shown(out)} and the source {source.path} lie in one another; choose another folder"
            )


def _resolved(uri: str) -> str:
    return uri.rstrip("/") if storage.is_url(uri) else str(Path(uri).resolve())


def _check_same(out: str, scan: Scan, sources: Sequence[Source], settings: dict[str, Any]) -> None:
    there, given = _flat(scan.settings), _flat(settings)
    if different := [key for key in given if given[key] != there.get(key)]:
        what = "other settings (" + ", ".join(f"{key}: {there.get(key)}, not {given[key]}" for key in different) + ")"
    else:
        given_sources = [source.description() for source in sources[: len(scan.sources)]]
        if given_sources == [source.description() for source in scan.sources]:
            return
        what = f"other sources ({', '.join(source.path for source in scan.sources)})"
    raise OutdatedError(
        f"{storage.shown(out)} was prepared with {what}; choose another folder, or replace it with --overwrite"
    )


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    limits = {f"limits.{key}": value for key, value in settings.get("limits", {}).items()}
    return {**limits, "partition_size": settings.get("partition_size")}


def _scanned(out: str) -> set[int]:
    """Numbers of the partitions that have metadata."""
    names = storage.list_files(storage.join(out, METADATA))
    return {int(name[:-8]) for name in names if re.fullmatch(r"\d+\.parquet", name)}


def _complete(out: str, scan: Scan, workers: Workers, progress: bool) -> None:
    """Scan the partitions that have no metadata yet."""
    done = _scanned(out)
    if len(done) == len(scan.partitions):
        return
    numbers = [one.partition.num_records for one in scan.partitions]
    total = None if None in numbers else sum(number or 0 for number in numbers)
    before = sum(numbers[number] or 0 for number in done)
    tasks = (
        ScanTask(source=source, partition=partition, number=one.number)
        for one in scan.partitions
        if one.number not in done
        for source, partition in [scan.find(one.number)]
    )
    interval = 0.2 if sys.stderr.isatty() else 30.0
    bar = tqdm(desc="scan", total=total, initial=before, unit=" images", mininterval=interval,
               disable=not progress or rank() != 0)  # fmt: skip
    num_rejected = 0
    with bar:
        for result in run(workers, functools.partial(Scanner, out, scan.settings["limits"]), tasks):
            num_rejected += result.num_rejected
            bar.set_postfix(rejected=num_rejected, refresh=False)
            bar.update(result.num_images)


# Growth


def _grown(out: str, scan: Scan, workers: Workers, listed: Sequence[Partitions] = ()) -> Scan:
    """Add what the sources hold beyond the scanned partitions; nothing of those may be gone or another.

    `listed` is what they hold where that is known and nothing was scanned.
    """
    last = max((one.generation for one in scan.partitions), default=0)
    generation = last + storage.exists(storage.join(out, SELECTION, f"{last}.json"))
    parts = list(scan.partitions)
    without_rows = {(one.source, one.partition.file, one.partition.version) for one in parts if one.partition.version}
    for index, source in enumerate(scan.sources):
        names = [part_name(one.number) for one in scan.partitions if one.source == index]
        with _local_copies(storage.join(out, METADATA), names) as known:
            found = listed[index] if listed else source.partitions(known)
            _check_unchanged(out, source, found, known, scan.settings["limits"], workers)
            for partition in found.new:
                if (index, partition.file, partition.version) in without_rows:
                    continue
                if partition.items:
                    items = pa.table({"item": list(partition.items)})
                    write_table(storage.join(out, LISTINGS, part_name(len(parts))), items)
                    partition = replace(partition, items=())
                place = {"number": len(parts), "source": index, "generation": generation}
                parts.append(ScannedPartition(**place, partition=partition))
    grown = replace(scan, partitions=parts)
    if len(parts) > len(scan.partitions):
        grown.write(out)
    return grown


@contextmanager
def _local_copies(folder: str, names: Sequence[str]) -> Iterator[list[str]]:
    """Paths of files without wildcards in them, in a folder that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="metadata-") as scratch:
        copies = Path(scratch, "copies")
        if storage.is_url(folder):
            for _ in storage.concurrent_map(lambda name: storage.download(f"{folder}/{name}", copies / name), names):
                pass
        else:
            copies.symlink_to(Path(folder).absolute())
        yield [str(copies / name) for name in names]


_CHANGED = """
WITH new AS (FROM read_parquet(?)), old AS (FROM read_parquet(?) SEMI JOIN (SELECT DISTINCT file FROM new) USING (file))
SELECT key FROM (SELECT * FROM new WHERE reason <> 'removed') new
FULL JOIN (SELECT * FROM old WHERE reason <> 'removed' AND version <> '') old USING (key)
WHERE new.reason IS NULL OR old.reason IS NULL OR row(new.xxh128, new.captions, new.metadata, new.reason)
    IS DISTINCT FROM row(old.xxh128, old.captions, old.metadata, old.reason)
ORDER BY key LIMIT 1
"""


def _check_unchanged(
    out: str, source: Source, found: Partitions, known: Sequence[str], limits: dict[str, Any], workers: Workers
) -> None:
    """Read files that look changed again, and compare their images with what is known of them."""
    name = printable(source.name)
    remedy = f"undo that, or prepare all of {storage.shown(out)} anew with --overwrite"
    if found.gone:
        raise OutdatedError(f"source {name}: {found.gone[0]!a} is gone; {remedy}")
    if not found.changed:
        return
    import duckdb

    logger.info("source %s: %d partitions look changed; they are read again", name, len(found.changed))
    folder, names = storage.join(out, REREAD), [part_name(number) for number in range(len(found.changed))]
    tasks = (
        ScanTask(source=source, partition=partition, number=number, folder=REREAD)
        for number, partition in enumerate(found.changed)
    )
    try:
        for _ in run(workers, functools.partial(Scanner, out, limits), tasks):
            pass
        with _local_copies(folder, names) as new, duckdb.connect() as database:
            changed = database.execute(_CHANGED, [new, list(known)]).fetchone()
    finally:
        storage.delete(storage.join(folder, name) for name in names)
        if not storage.is_url(folder):
            shutil.rmtree(folder, ignore_errors=True)
    if changed:
        raise OutdatedError(
            f"source {name}: {changed[0]!a} has changed; {remedy} (mending an image that was rejected is a "
            "change, too; a mended copy under another name is new and is added)"
        )


# Workers


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A partition that is to be scanned."""

    source: Source
    partition: Partition
    number: int
    folder: str = METADATA


@dataclass(frozen=True, kw_only=True)
class _Result:
    num_images: int
    num_rejected: int


class Scanner:
    """Scans partitions. Memory holds one image, and the metadata of the partition."""

    def __init__(self, out: str, limits: dict[str, Any]) -> None:
        self._out, self._limits = out, LimitsConfig(**limits)
        removed = storage.join(out, REMOVED)
        self._removed = frozenset(storage.read_json(removed) if storage.exists(removed) else ())
        logging.getLogger("PIL").addHandler(logging.NullHandler())  # Messages about damaged files.

    def __call__(self, task: ScanTask) -> _Result:
        """Write the metadata of a partition."""
        partition, name = task.partition, part_name(task.number)
        if not partition.items and task.source.kind == "folder":
            partition = replace(partition, items=self._items(name))
        rows = [self._row(item, partition) for item in task.source.scan(partition)]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_table(storage.join(self._out, task.folder, name), table)
        return _Result(num_images=len(rows), num_rejected=sum(row["reason"] != "" for row in rows))

    def _items(self, name: str) -> tuple[str, ...]:
        """Read the listing of a partition of a folder of images."""
        uri = storage.join(self._out, LISTINGS, name)
        if not storage.exists(uri):
            raise OutdatedError(f"{storage.shown(uri)} is gone; prepare with --overwrite")
        return tuple(read_table(uri)["item"].to_pylist())

    def _row(self, item: Record | Rejected, partition: Partition) -> dict[str, Any]:
        row: dict[str, Any] = {"key": item.key, "key_hash": xxhash.xxh3_64_intdigest(item.key), **vars(item.location)}
        if hash_key(item.key) in self._removed:
            return removed_row(row, partition.file)
        reason, detail = (item.reason, item.detail) if isinstance(item, Rejected) else ("", "")
        record = item.record if isinstance(item, Rejected) else item
        if record is not None:
            row |= {
                "bytes": len(record.image),
                "format": file_format(record.image),
                "xxh128": xxhash.xxh3_128_hexdigest(record.image),
                "captions": record.captions,
                "metadata": json.dumps(record.metadata, ensure_ascii=False),
            }
            if not reason or reason in WITHOUT_CAPTION:
                try:
                    row |= self._measures(record.image)
                except UndecodableImageError as error:
                    reason, detail = error.reason, str(error)
        return row | {"reason": getattr(reason, "value", reason), "detail": clean_text(detail)}

    def _measures(self, image: bytes) -> dict[str, Any]:
        """Decode an image, once."""
        limit = self._limits.max_jpeg_scans
        if (scans := jpeg_scans(image)) > limit:
            raise UndecodableImageError("too_large", f"{scans} scans are more than limits.max_jpeg_scans")
        reduced = decode_reduced(image, REDUCED_SIDE)
        return {
            "width": reduced.width,
            "height": reduced.height,
            "phash": perceptual_hash(reduced.image),
            "sharpness": round(sharpness(reduced.image), 3),
        }
