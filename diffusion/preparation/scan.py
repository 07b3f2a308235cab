"""Scan: every image of the sources is decoded once; what is known of it becomes a row of the metadata.

The sources are cut into partitions, which `scan.json` names before any is read: a scan that was killed goes on with the
same ones. A worker reads a partition and writes its metadata, whole. When the sources have grown, the new partitions
are scanned; what was scanned before must still be what it was.
"""

import functools
import itertools
import json
import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from diffusion import storage
from diffusion.config.loading import to_dict
from diffusion.config.secrets import redact
from diffusion.datasets.images import BYTES_PER_PIXEL, UndecodableImageError, decode_reduced
from diffusion.errors import ConfigurationError, DataError, printable
from diffusion.formats.data_set import LISTINGS, MANIFEST, METADATA, POSITIONS, REREAD, SCAN, SCORES
from diffusion.preparation.chat_captions import restore_answers
from diffusion.preparation.config import LimitsConfig, PrepareConfig
from diffusion.preparation.engine import Workers, death_error, limited_time, progress_bar, run
from diffusion.preparation.layout import (
    CAPTIONS,
    SCHEMA,
    file_numbers,
    local_copies,
    part_name,
    positions_name,
    read_table,
    write_table,
)
from diffusion.preparation.measures import (
    REDUCED_SIDE,
    file_format,
    is_truncated,
    jpeg_scans,
    perceptual_hash,
    sharpness,
)
from diffusion.preparation.metadata import (
    MetadataDatabase,
    as_pattern,
    key_hash,
    literal,
    read_files,
    removal_hash,
    removed_row,
)
from diffusion.preparation.output import clear, clear_folders, protect_answers, resolved
from diffusion.preparation.packing import Packs
from diffusion.preparation.records import (
    WITHOUT_CAPTION,
    NothingKeptError,
    OutdatedError,
    Partition,
    Partitions,
    Reason,
    Record,
    Rejected,
    SettingsError,
    clean_text,
)
from diffusion.preparation.removed import Removed
from diffusion.preparation.sources import Source, from_description, open_sources
from diffusion.preparation.sources.base import REVISION
from diffusion.preparation.sources.detection import source_config
from diffusion.preparation.sources.huggingface import pinned
from diffusion.preparation.sources.reading import matches

logger = logging.getLogger(__name__)

Taken = Mapping[int, Mapping[str, str]]
"""Files that are taken: by the number of their source, their versions by name."""

_VERSION = 2
_LIMITS = vars(LimitsConfig())
"""Limits of data sets of earlier versions, which lack some."""

_WRITTEN = (
    SCAN,
    f"{METADATA}/{part_name(0)}",
    f"{POSITIONS}/{positions_name(0)}",
    f"{SCORES}/{CAPTIONS}/{part_name(0)}",
)
"""Names of files of the output that the pattern of a source may match."""

_FIELDS = tuple(one.name for one in fields(Partition) if one.name != "items")


@dataclass(frozen=True)
class Scan:
    """Content of `scan.json`: the sources of a data set and their partitions."""

    sources: Sequence[Source]
    partitions: Sequence[Partition]
    """By number, without items."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Limits and partition size."""

    def find(self, number: int) -> tuple[Source, Partition]:
        """Find a partition and its source, small enough to be sent to a worker."""
        partition = self.partitions[number]
        return self.sources[partition.source], partition

    def files(self) -> set[tuple[int, str, str]]:
        """Number of the source, name and version of each file that is a partition or several; it may hold no image."""
        return {(one.source, one.file, one.version) for one in self.partitions if one.version}

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
            partitions = [Partition(**{name: entry[name] for name in _FIELDS}) for entry in values["partitions"]]
            return cls(sources, partitions, values["settings"])
        except (KeyError, TypeError, AttributeError) as error:
            raise OutdatedError(f"{storage.shown(uri)} is damaged ({error!r}); prepare with --overwrite") from error

    def write(self, out: str) -> None:
        """Write `scan.json`."""
        values = {
            "version": _VERSION,
            "settings": self.settings,
            "sources": [source.description() for source in self.sources],
            "partitions": [{name: getattr(one, name) for name in _FIELDS} for one in self.partitions],
        }
        storage.write(storage.join(out, SCAN), json.dumps(values, separators=(",", ":")).encode())


# The stage


def scan_sources(
    config: PrepareConfig,
    *,
    workers: Workers,
    progress: bool = False,
    overwrite: bool = False,
    only: Taken | None = None,
) -> Scan:
    """Write the metadata of all images that the sources hold and that have none yet.

    A scan that was interrupted is completed before the sources are listed again. The caller has claimed `config.out`.
    With `overwrite`, a data set of other sources or settings is removed, and so is one whose sources have changed.
    With `only`, other new files wait, and changes to files that were already scanned are ignored.

    Returns:
        The scan; all its partitions have metadata.

    Raises:
        NothingKeptError: no source holds an image.
        DataError: a source is missing or unknown; the data set is of other sources or settings,
            or a source has changed in what was scanned before.
        MachineError: a file cannot be read or written, or a worker died.
    """
    sources = open_configured(config, as_scanned=only is not None, anew=overwrite)
    _check_apart(sources, config.out)
    settings = {"limits": to_dict(config.limits), "partition_size": config.partition_size}
    scan = Scan([], [], settings)
    try:
        if storage.exists(storage.join(config.out, SCAN)):
            scan = Scan.read(config.out)
            _check_same(config.out, scan, sources, settings)
        elif storage.exists(storage.join(config.out, MANIFEST)):
            raise DataError(
                f"{storage.shown(config.out)} has no {SCAN}: it is of an earlier version, or damaged; choose another "
                "folder, or delete this one"
            )
        _run_missing(config.out, scan, file_numbers(storage.join(config.out, METADATA)), workers, progress)
        done = {one.number for one in scan.partitions}
        scan = _add_partitions(config, replace(scan, sources=sources), workers, only=only)
    except OutdatedError as error:
        if not overwrite:
            raise
        # Mistakes in the sources are found before anything is removed.
        listed = [source.partitions().checked() for source in sources]
        if isinstance(error, SettingsError):
            protect_answers(config.out, "for other sources or settings of the scan")
        restore_answers(config.out, file_numbers(storage.join(config.out, METADATA)))
        clear(config.out)
        done = set[int]()
        scan = _add_partitions(config, Scan(sources, [], settings), workers, listed)
    if not scan.partitions:
        raise NothingKeptError(f"there is no image in {', '.join(source.path for source in sources)}; correct sources")
    _run_missing(config.out, scan, done, workers, progress)
    clear_folders(config.out, LISTINGS)
    return scan


def open_configured(config: PrepareConfig, *, as_scanned: bool = False, anew: bool = False) -> list[Source]:
    """Open the sources of a configuration; with `as_scanned`, those of the scan as what they were then.

    A data set of the hub without a revision stays at the commit of the scan, unless `anew`.
    """
    entries = list(map(source_config, config.sources))
    scanned: Sequence[Source] = ()
    if not anew and storage.exists(storage.join(config.out, SCAN)):
        scanned = Scan.read(config.out).sources
    for number, (entry, source) in enumerate(zip(entries, scanned, strict=False)):
        if (path := pinned(entry.path, source)) != entry.path:
            entries[number] = replace(entry, path=path)
            if not as_scanned:
                logger.info("%s: what was scanned stays; --overwrite takes the newest commit", path)
    return open_sources(
        entries,
        config.image_column,
        config.caption_column,
        config.limits,
        config.partition_size,
        scanned if as_scanned else (),
    )


def _check_apart(sources: Sequence[Source], out: str) -> None:
    """Check that no output lies in a source, or the reverse."""
    for source in sources:
        here, there = f"{resolved(source.root)}/", f"{resolved(out)}/"
        is_read = there.startswith(here)
        if is_read and source.pattern:
            folder, pattern = there.removeprefix(here).split("/")[:-1], source.pattern.split("/")
            is_read = any(matches([*folder, *name.split("/")], pattern) for name in _WRITTEN)
        if is_read or here.startswith(there):
            raise ConfigurationError(
                f"out: {storage.shown(out)} and the source {source.path} lie in one another; choose another folder"
            )


def _check_same(out: str, scan: Scan, sources: Sequence[Source], settings: dict[str, Any]) -> None:
    given = [source.description() for source in sources[: len(scan.sources)]]
    if different := changed_settings(scan.settings, settings):
        what = f"other settings ({', '.join(different)})"
    elif given != [source.description() for source in scan.sources]:
        what = f"other sources (to continue, give {', '.join(source.path for source in scan.sources)})"
    else:
        return
    raise SettingsError(
        f"{storage.shown(out)} was prepared with {what}; choose another folder, or replace it with --overwrite"
    )


def changed_settings(there: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describe the settings of a data set that differ from the given ones, as `seed: 17, not 5`, without secrets."""
    found = []
    for name, value in given.items():
        if name == "convert_to_srgb" and name not in there:  # Of an earlier version, too.
            continue
        old = there.get(name, _LIMITS.get(name))
        if isinstance(old, dict) and isinstance(value, dict):
            found += changed_settings(old, {**dict.fromkeys(old), **value}, f"{prefix}{name}.")
        elif old != value:
            shown_old, shown = (redact({name: one})[name] for one in (old, value))
            found.append(f"{prefix}{name}: {shown_old}, not {shown}")
    return found


def _run_missing(out: str, scan: Scan, done: Collection[int], workers: Workers, progress: bool) -> None:
    """Scan the partitions that are not among those with metadata."""
    missing = [one.number for one in scan.partitions if one.number not in done]
    if not missing:
        return
    sizes = [one.num_records for one in scan.partitions]
    total = None if None in sizes else sum(filter(None, sizes))
    before = sum(sizes[number] or 0 for number in done)
    tasks = (ScanTask(*scan.find(number)) for number in missing)
    make = functools.partial(Scanner, out, scan.settings["limits"])
    with (
        progress_bar("scan", total, initial=before, shown=progress) as bar,
        tempfile.TemporaryDirectory(prefix="deaths-") as folder,
    ):
        rejected, retry = 0, functools.partial(_after_death, folder)
        for num_images, num_rejected in run(workers, make, tasks, describe=_describe, on_death=retry):
            rejected += num_rejected
            bar.set_postfix(rejected=rejected, refresh=False)
            bar.update(num_images)


def _describe(task: "ScanTask") -> str:
    return task.source.describe(task.partition)


def _after_death(folder: str, task: "ScanTask") -> "ScanTask":
    """Return the task to do after a worker died at one: once more, with a trace; then without what it died at."""
    if not task.trace:
        return replace(task, trace=str(Path(folder) / str(task.partition.number)))
    trace = Path(task.trace).read_text() if Path(task.trace).exists() else ""
    if not trace:
        raise death_error(task, _describe)
    what, position = trace[0], int(trace[1:])
    if what == _MEASURED and len(task.deadly) < _MAX_DEADLY:
        return replace(task, deadly=task.deadly | {position})
    if task.stop is not None and task.stop <= position:
        raise death_error(task, _describe)
    logger.warning("%s: a worker dies when it is read; what comes after %d images is rejected", _describe(task),
                   position)  # fmt: skip
    return replace(task, stop=position)


# Growth


def _add_partitions(
    config: PrepareConfig,
    scan: Scan,
    workers: Workers,
    listed: Sequence[Partitions] = (),
    only: Taken | None = None,
) -> Scan:
    """Add what the sources hold beyond the scanned partitions; nothing of those may be gone or changed.

    `listed` is what they hold where that is known and nothing was scanned. `only` is that of `scan_sources`.
    """
    out, last = config.out, max((one.generation for one in scan.partitions), default=0)
    finished = storage.read_json(storage.join(out, MANIFEST), {}).get("generations", ())
    generation = max(last, len(finished))  # An unfinished one takes in what has come meanwhile.
    parts = list(scan.partitions)
    scanned = scan.files()
    for index, source in enumerate(scan.sources):
        if only is not None and index not in only:
            continue
        with local_metadata(config, scan, index) as known:
            found = listed[index] if listed else source.partitions(known, None if only is None else only[index])
            if only is None:
                found.checked()
                names = [part_name(one.number) for one in scan.partitions if one.source == index]
                _check_unchanged(config, source, found, names, scan.settings["limits"], workers)
            for partition in found.new:
                if (index, partition.file, partition.version) in scanned:
                    continue
                if partition.items:
                    items = pa.table({"item": list(partition.items)})
                    write_table(storage.join(out, LISTINGS, part_name(len(parts))), items)
                numbers = {"number": len(parts), "source": index, "generation": generation}
                parts.append(replace(partition, **numbers, items=()))
    grown = replace(scan, partitions=parts)
    if len(parts) > len(scan.partitions):
        grown.write(out)
    return grown


@contextmanager
def local_metadata(config: PrepareConfig, scan: Scan, source: int) -> Iterator[list[str]]:
    """Give patterns, for DuckDB, of the files of a source that are known: `file`, `version` and `reason`.

    They are those of its metadata, most of them packed. Copies are gone after the block.
    """
    packs, names = _known_packs(config.out, scan, source)
    names = [*(pack.name for pack in packs.packs), *names[packs.stop :]]
    with _local_copies(config.out, names, config.scratch) as patterns:
        yield patterns


def _known_packs(out: str, scan: Scan, source: int, stop: int | None = None) -> tuple[Packs, list[str]]:
    """Return the packed files of a source, and the names of its metadata, of the generations before `stop`."""
    partitions = [one for one in scan.partitions if one.source == source and (stop is None or one.generation < stop)]
    names = [storage.join(METADATA, part_name(one.number)) for one in partitions]
    return Packs(out, f"files-{source}", list(map(repr, partitions))), names


def pack_known(out: str, scan: Scan, database: MetadataDatabase, generation: int) -> None:
    """Pack the names of the files of each source in the generations before one, which may still grow."""
    removed = literal(Reason.REMOVED.value)
    for source in range(len(scan.sources)):
        packs, names = _known_packs(out, scan, source, generation)
        if packs.stop == len(names):
            continue
        new = names[packs.stop :]
        pack, taken = packs.next()
        files = read_files(out, [*(one.name for one in taken), *new], database.folder)
        database.write(
            f"""SELECT file, max(version) AS version, if(bool_and(reason = {removed}), {removed}, '') AS reason
                FROM {files} GROUP BY file ORDER BY file""",
            pack.name,
        )
        packs.add(pack)


@contextmanager
def _local_copies(folder: str, names: Sequence[str], scratch: str | None) -> Iterator[list[str]]:
    """Patterns, for DuckDB, of files on this machine; copies are gone after the block."""
    with tempfile.TemporaryDirectory(prefix="metadata-", dir=scratch) as temporary:
        local = local_copies(folder, names, Path(temporary))
        yield [as_pattern(str(local / name)) for name in names]


# Earlier versions hashed no image that was rejected for its texts. Rejected duplicates may have one key.
_HASH = "if(reason = 'duplicate_key', NULL, xxh128) AS hash"
_CHANGED = f"""
WITH new AS (SELECT *, {_HASH} FROM read_parquet(?, hive_partitioning = false)),
known AS (SELECT * REPLACE (regexp_replace(file, {literal(REVISION)}, '\\1\\2') AS file), {_HASH}
    FROM read_parquet(?, hive_partitioning = false)),
old AS (FROM known SEMI JOIN (SELECT DISTINCT file FROM new) USING (file)
    ANTI JOIN (SELECT key_hash FROM new WHERE reason = 'removed') USING (key_hash)
    ANTI JOIN (SELECT file, "row" FROM new WHERE reason = 'removed') USING (file, "row"))
SELECT key FROM (SELECT * FROM new WHERE reason <> 'removed') new
FULL JOIN (SELECT * FROM old WHERE reason <> 'removed' AND version <> '') old USING (key)
WHERE new.reason IS NULL OR old.reason IS NULL OR row(new.hash, new.captions, new.metadata, new.reason)
    IS DISTINCT FROM row(coalesce(old.hash, new.hash), old.captions, old.metadata, old.reason)
ORDER BY key LIMIT 1
"""


def _check_unchanged(
    config: PrepareConfig,
    source: Source,
    found: Partitions,
    scanned: Sequence[str],
    limits: dict[str, Any],
    workers: Workers,
) -> None:
    """Read files that look changed again, and compare their images with what is known of them."""
    out, name = config.out, printable(source.name)
    remedy = f"undo that, or prepare all of {storage.shown(out)} again with --overwrite"
    if found.gone:
        raise OutdatedError(f"source {name}: {found.gone[0]!a} is gone; {remedy}")
    if not found.changed:
        return
    import duckdb

    logger.info("source %s: %d partitions look changed; they are read again", name, len(found.changed))
    changed = [replace(partition, number=number) for number, partition in enumerate(found.changed)]
    tasks = (ScanTask(source, partition, folder=REREAD) for partition in changed)
    try:
        for _ in run(workers, functools.partial(Scanner, out, limits), tasks):
            pass
        names = [part_name(partition.number) for partition in changed]
        with (
            _local_copies(storage.join(out, REREAD), names, config.scratch) as new,
            _local_copies(storage.join(out, METADATA), scanned, config.scratch) as known,
            duckdb.connect() as database,
        ):
            different = database.execute(_CHANGED, [new, known]).fetchone()
    finally:
        clear_folders(out, REREAD)
    if different:
        raise OutdatedError(
            f"source {name}: {different[0]!a} has changed; {remedy} (fixing an image that was rejected is a "
            "change, too; a fixed copy under another name is new and is added)"
        )


# Workers


@dataclass(frozen=True)
class ScanTask:
    """A partition that is to be scanned."""

    source: Source
    partition: Partition
    folder: str = METADATA
    limit: int | None = None
    """Most images; None is all."""
    trace: str = ""
    """File of this machine that says at which image the worker is; empty: not asked for."""
    deadly: frozenset[int] = frozenset()
    """Images, by their position, at which a worker died: they are rejected."""
    stop: int | None = None
    """Position from which on nothing can be read, since a worker died there."""


_READ, _MEASURED = "r", "m"
"""States of an image in a trace."""

_MAX_DEADLY = 10
"""Images of a partition at which a worker may die; then the rest of it is rejected."""

_DEADLY = "its decoder crashes, takes more memory than there is, or more time than limits.max_decoding_seconds"


class Scanner:
    """Scans partitions. Memory holds one image, and the metadata of the partition."""

    def __init__(self, out: str, limits: dict[str, Any]) -> None:
        self._out, self._limits = out, LimitsConfig(**limits)
        self._removed = Removed.read(out)
        logging.getLogger("PIL").addHandler(logging.NullHandler())  # Messages about damaged files.

    def __call__(self, task: ScanTask) -> tuple[int, int]:
        """Write the metadata of a partition; return the number of its images, and of the rejected ones among them."""
        partition, name = task.partition, part_name(task.partition.number)
        if not partition.items and task.source.kind == "folder":
            uri = storage.join(self._out, LISTINGS, name)
            if not storage.exists(uri):
                raise OutdatedError(f"{storage.shown(uri)} is gone; prepare with --overwrite")
            partition = replace(partition, items=tuple(read_table(uri)["item"].to_pylist()))
        rows = [self._row(item, partition) for item in self._surviving(replace(task, partition=partition))]
        write_table(storage.join(self._out, task.folder, name), pa.Table.from_pylist(rows, schema=SCHEMA))
        return len(rows), sum(row["reason"] != "" for row in rows)

    def _surviving(self, task: ScanTask) -> Iterator[Record | Rejected]:
        """Yield the images of a partition, those at which a worker died as rejections."""
        items = itertools.islice(task.source.scan(task.partition), task.limit if task.stop is None else task.stop)
        with Path(task.trace or os.devnull).open("wb", buffering=0) as trace:  # What is in it outlives the process.
            for position in itertools.count():
                os.pwrite(trace.fileno(), f"{_READ}{position:012}".encode(), 0)
                with limited_time(self._limits.max_decoding_seconds):
                    item = next(items, None)
                if item is None:
                    break
                os.pwrite(trace.fileno(), f"{_MEASURED}{position:012}".encode(), 0)
                if position in task.deadly:
                    item = Rejected(item.key, Reason.UNDECODABLE, item.location, _DEADLY)
                yield item
        if task.stop is not None:
            yield from task.source.lost(task.partition, task.stop)

    def _row(self, item: Record | Rejected, partition: Partition) -> dict[str, Any]:
        row: dict[str, Any] = {
            "key": item.key,
            "key_hash": key_hash(item.key),
            **vars(item.location),
        }
        if removal_hash(item.key) in self._removed:
            return removed_row(row, partition.file)
        reason, detail = (item.reason, item.detail) if isinstance(item, Rejected) else ("", "")
        record = item.record if isinstance(item, Rejected) else item
        if record is not None:
            row |= {
                "bytes": len(record.image),
                "format": file_format(record.image),
                "xxh128": xxhash.xxh3_128_hexdigest(record.image),
            }
            if not reason or reason in WITHOUT_CAPTION:
                row["captions"] = record.captions
                row["metadata"] = json.dumps(record.metadata, ensure_ascii=False)
                try:
                    with limited_time(self._limits.max_decoding_seconds):
                        row |= self._measures(record.image)
                except UndecodableImageError as error:
                    reason, detail = error.reason, str(error)
        if self._removed.has_copy(row):
            return removed_row(row, partition.file)
        return row | {"reason": getattr(reason, "value", reason), "detail": clean_text(detail)}

    def _measures(self, image: bytes) -> dict[str, Any]:
        """Decode an image, once (a JPEG with a corner in the grey of missing data: twice)."""
        limit = self._limits.max_jpeg_scans
        if (scans := jpeg_scans(image)) > limit:
            raise UndecodableImageError("too_large", f"{scans} scans are more than limits.max_jpeg_scans")
        max_pixels = self._limits.max_decoded_mb * 2**20 // BYTES_PER_PIXEL
        reduced = decode_reduced(image, REDUCED_SIDE, max_pixels)
        if is_truncated(image, reduced.image, max_pixels):
            raise UndecodableImageError(
                "undecodable", "a damaged JPEG: its data end before the image, or zeros stand in them"
            )
        return {
            "width": reduced.width,
            "height": reduced.height,
            "phash": perceptual_hash(reduced.image),
            "sharpness": round(sharpness(reduced.image), 3),
        }
