"""Select: which images are kept, in which order, decided by SQL over the metadata without a look at an image.

    metadata + scores --filters, where--> reasons --duplicates--> --small buckets--> kept rows --windows--> write tasks

A validation image is one with splitmix64(key_hash, seed, "validation") < fraction * 2^64; within a bucket samples are
written by ascending splitmix64(key_hash, seed, "order") of each window. Neither depends on partitions or workers. The
result of a generation is `selection/GENERATION.json` and two parquet files beside it (docs/architecture.md).
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray
from tqdm import tqdm

from diffusion import storage
from diffusion.config.data import named_size
from diffusion.config.loading import to_dict
from diffusion.datasets.buckets import SizeBuckets
from diffusion.errors import DataError
from diffusion.formats.data_set import PACKED_SELECTIONS, SCORES, SELECTION, TRAIN, VALIDATION
from diffusion.preparation.buckets import build_buckets
from diffusion.preparation.config import DuplicatesConfig, PrepareConfig
from diffusion.preparation.duplicates import find_candidates, find_duplicates
from diffusion.preparation.explain import Rejection, describe_rejections
from diffusion.preparation.filters import Conditions, build_rules, explained_values, load_conditions, parse_where
from diffusion.preparation.layout import CAPTIONS, part_name, read_scores_record
from diffusion.preparation.metadata import (
    MetadataDatabase,
    add_table,
    fetch_arrays,
    groups,
    identifier,
    literal,
    open_database,
    read_files,
)
from diffusion.preparation.packing import Packs
from diffusion.preparation.plugins import determining
from diffusion.preparation.records import NothingKeptError, Reason
from diffusion.preparation.removed import Removed
from diffusion.preparation.scan import Scan, pack_known
from diffusion.storage import MissingFileError

if TYPE_CHECKING:
    import duckdb

logger = logging.getLogger(__name__)

WINDOWS_PER_TASK = 8
"""Windows of a write task: the rest of a shard is carried from one to the next."""

SETTINGS = ("buckets", "validation_fraction", "seed", "shard_mb", "window_mb", "compression", "hashes", "filters",
            "where", "duplicates")  # fmt: skip
"""Keys of the configuration that determine a selection, or the shards that are written of it."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selection of a generation, as `selection/GENERATION.json`."""

    generation: int

    identity: str
    """Changes with settings, metadata, scores and the selections of earlier generations."""

    settings: dict[str, Any]

    sources: dict[str, dict[str, int]]
    """Images by source and reason; the reason of kept images is empty."""

    places: dict[str, dict[str, int]]
    """Kept images by `SPLIT/BUCKET`: their number, `images`, and the `bytes` of their files."""

    first_task: int
    """Number of its first write task: tasks are numbered over all generations."""

    tasks: list[list[list[int]]]
    """Parts of each window of each write task."""

    examples: dict[str, list[Rejection]] = field(default_factory=dict)
    """The first rejected images by reason, in the order of parts and rows; none in selections of earlier versions."""

    types: dict[str, str] = field(default_factory=dict)
    """SQL types of the keys of the sources' metadata that `where` has named so far; later generations keep them."""

    @property
    def stop(self) -> int:
        """Number after that of its last write task."""
        return self.first_task + len(self.tasks)

    @property
    def reasons(self) -> dict[str, int]:
        """Rejected images by reason, sorted."""
        names = sorted({reason for counts in self.sources.values() for reason in counts if reason})
        return {name: sum(counts.get(name, 0) for counts in self.sources.values()) for name in names}

    @property
    def seen(self) -> int:
        """Images of all sources."""
        return sum(sum(counts.values()) for counts in self.sources.values())

    @property
    def kept(self) -> int:
        """Images that are to be written."""
        return sum(counts.get("", 0) for counts in self.sources.values())


def splitmix64(key_hash: NDArray[np.uint64], seed: int, purpose: str) -> NDArray[np.uint64]:
    """Draw 64 random bits for each key and purpose, for ever the same ones: uint64 [N] -> uint64 [N].

    With h = key_hash + xxh3_64("PURPOSE SEED"), all modulo 2^64, it is the output function of splitmix64 (Steele, Lea
    and Flood 2014): h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9; h = (h ^ h >> 27) * 0x94D049BB133111EB; h ^ h >> 31.
    """
    bits = key_hash + np.uint64(xxhash.xxh3_64_intdigest(f"{purpose} {seed}".encode()))
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)


# Selections of a data set


def check(config: PrepareConfig) -> None:
    """Check the settings of a selection as far as that is possible without the metadata.

    Raises:
        ConfigurationError: one is wrong.
    """
    build_buckets(config.buckets)
    build_rules(config.filters, identifier)
    if config.where is not None:
        parse_where(config.where)


def select(out: str, config: PrepareConfig, scan: Scan, *, finished: int = 0, progress: bool = False) -> Selection:
    """Select the images of each generation, unless that was done with the same settings, metadata and scores.

    Selections of the `finished` first generations, which are written, stay: takedowns find samples by them. Returned is
    that of the newest generation.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a partition has not been scanned or scored, or all buckets are too small.
        MachineError: something cannot be read or written.
    """
    check(config)
    _check_scored(out, config, scan)
    earlier = read_selections(out, finished)
    last = max((partition.generation for partition in scan.partitions), default=0)
    for generation in range(finished, last + 1):
        identity = _identity(out, config, scan, earlier, generation)
        if storage.exists(_uri(out, f"{generation}.json")):
            found = read_selection(out, generation)
            if found.identity == identity:
                earlier.append(found)
                continue
        with open_database(out, scan, scratch=config.scratch) as database:
            if generation:
                pack_known(out, scan, database, generation)
            earlier.append(_select(out, config, database, earlier, identity, progress))
    return earlier[-1]


def check_kept(out: str, config: PrepareConfig, scan: Scan) -> None:
    """Check that a selection from one generation keeps an image; nothing is written.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a partition has not been scanned or scored, or nothing is kept.
    """
    _check_scored(out, config, scan)
    with open_database(out, scan, scratch=config.scratch) as database:
        _decide(out, config, database, [], progress=False)
        if not database.connection.execute("FROM decided WHERE reason = '' LIMIT 1").fetchall():
            raise NothingKeptError(f"no image is kept; {storage.shown(out)} stays as it is")


def read_selection(out: str, generation: int) -> Selection:
    """Read the selection of a generation.

    Raises:
        DataError: there is none, or it is damaged.
    """
    uri = _uri(out, f"{generation}.json")
    try:
        return _parse_selection(uri, storage.read_json(uri))
    except MissingFileError as error:
        raise DataError(f"{storage.shown(uri)} does not exist; run the stage select first") from error


def read_selections(out: str, finished: int) -> list[Selection]:
    """Read the selections of the finished generations, most of them by one request."""
    uri = storage.join(out, PACKED_SELECTIONS)
    known = storage.read_json(uri, [])[:finished]
    later = storage.concurrent_map(functools.partial(read_selection, out), range(len(known), finished))
    return [*(_parse_selection(uri, values) for values in known), *later]


def write_finished(out: str, selections: Sequence[Selection]) -> None:
    """Write the selections of the finished generations as one file, without the settings, which the manifest has."""
    values = [{**vars(one), "settings": {}} for one in selections]
    encoded = json.dumps(values, default=vars, allow_nan=False)  # `asdict` and `indent` take ten times as long.
    storage.write(storage.join(out, PACKED_SELECTIONS), encoded.encode())


def _parse_selection(uri: str, values: Any) -> Selection:
    try:
        examples = values.get("examples", {}).items()
        values["examples"] = {reason: [Rejection(**one) for one in listed] for reason, listed in examples}
        return Selection(**values)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{uri} is damaged ({error!r}); remove it and select again") from error


def kept_rows(out: str, generation: int, task: int) -> pa.Table:
    """Read the kept images of a write task by window, part and row; of the file only the row groups that hold some."""
    with storage.open_file(_uri(out, f"{generation}-kept.parquet")) as file:
        return pq.read_table(file, filters=[("task", "=", task)])


def _uri(out: str, name: str) -> str:
    return storage.join(out, SELECTION, name)


def _check_scored(out: str, config: PrepareConfig, scan: Scan) -> None:
    """Check that each configured column has all its parts: an image without a score would be rejected."""
    columns = [*([CAPTIONS] if config.captioner else []), *(scorer.column for scorer in config.scorers)]
    files = storage.list_files(storage.join(out, SCORES)) if columns else {}
    wanted = [f"{column}/{part_name(one.number)}" for column in columns for one in scan.partitions]
    if missing := [name for name in wanted if name not in files]:
        raise DataError(
            f"{storage.shown(out)}: {SCORES}/{missing[0]} does not exist; run the stage score to its end first"
        )


def _identity(out: str, config: PrepareConfig, scan: Scan, earlier: Sequence[Selection], generation: int) -> str:
    """Hash what determines a selection: settings, earlier selections, partitions, and the identities of the scores."""
    parts = [one for one in scan.partitions if one.generation <= generation]
    files = [(one.file, one.version, one.start, one.stop) for one in parts]
    numbers = [(one.number, scan.sources[one.source].name, one.generation) for one in parts]
    names = {part_name(one.number) for one in parts}
    listed: dict[str, list[str]] = {}
    for name in sorted(storage.list_files(storage.join(out, SCORES))):
        if Path(name).name in names:
            listed.setdefault(Path(name).parent.name, []).append(name)
    record = read_scores_record(out)
    digests = {column: _hash_json(record[column]) for column in record}
    for column in listed.keys() - digests.keys():  # Of another tool.
        digest = xxhash.xxh3_128()
        for content in storage.concurrent_map(storage.read, (storage.join(out, SCORES, one) for one in listed[column])):
            digest.update(content)
        digests[column] = digest.hexdigest()
    scores = {column: (len(files), digests[column]) for column, files in listed.items()}
    settings = _settings(config)
    if not settings["scorers"]:  # As in selections of earlier versions.
        del settings["scorers"]
    made_of: list[Any] = [settings, [one.identity for one in earlier], scan.settings, numbers, files, scores]
    if removed := Removed.read(out):  # Selections of earlier versions, without any, keep their identity.
        made_of.append(sorted(removed))
    return _hash_json(made_of)


def _hash_json(value: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def _settings(config: PrepareConfig) -> dict[str, Any]:
    values = to_dict(config)
    scorers = [determining(scorer) for scorer in values["scorers"]]  # Their columns go into the samples, in this order.
    return {**{name: values[name] for name in SETTINGS}, "scorers": scorers}


# Selection of a generation


def _select(
    out: str,
    config: PrepareConfig,
    database: MetadataDatabase,
    earlier: Sequence[Selection],
    identity: str,
    progress: bool,
) -> Selection:
    generation, connection = len(earlier), database.connection
    conditions = _decide(out, config, database, earlier, progress)
    tasks = _cut_windows(connection, config)
    first_task = sum(len(one.tasks) for one in earlier)
    uri = _uri(out, f"{generation}.json")
    storage.delete([uri])  # It must not name files that are not its own.
    _write_files(database, generation, tasks, first_task)
    sources: dict[str, dict[str, int]] = {}
    counted = "SELECT source, reason, count(*) FROM decided JOIN parts USING (part) GROUP BY ALL ORDER BY ALL"
    for source, reason, count in connection.execute(counted).fetchall():
        sources.setdefault(source, {})[reason] = count
    counted = f"SELECT {_PLACE}, count(*), sum(bytes)::BIGINT FROM decided WHERE reason = '' GROUP BY 1 ORDER BY 1"
    places = {place: {"images": num, "bytes": size} for place, num, size in connection.execute(counted).fetchall()}
    selection = Selection(
        generation=generation,
        identity=identity,
        settings=_settings(config),
        sources=sources,
        places=places,
        first_task=first_task,
        tasks=tasks,
        examples=describe_rejections(database, config, conditions),
        types=dict(conditions.types),
    )
    storage.write_json(uri, dataclasses.asdict(selection))
    logger.info("kept %s of %s images", f"{selection.kept:,}", f"{selection.seen:,}")
    num_small = selection.reasons.get(Reason.TOO_SMALL.value, 0)
    if num_small and not config.buckets.upscale and isinstance(build_buckets(config.buckets), SizeBuckets):
        logger.info("%s images are smaller than every bucket; buckets.upscale: true takes them, too", f"{num_small:,}")
    return selection


def _decide(
    out: str, config: PrepareConfig, database: MetadataDatabase, earlier: Sequence[Selection], progress: bool
) -> Conditions:
    """Make the table `decided` of the images of a generation; nothing is written for the first one."""
    generation, connection = len(earlier), database.connection
    conditions = load_conditions(database, config, database.parts(generation), earlier[-1].types if earlier else {})
    _load_images(out, config, database, conditions, earlier, progress)
    connection.execute("CREATE TABLE duplicates (part INT, row_number INT, of_part INT, of_row INT, same BOOLEAN)")
    if config.duplicates is not None and (config.duplicates.exact or config.duplicates.near):
        _find_duplicates(connection, config.duplicates)
    _move_small_buckets(connection, config, {name for one in earlier for name in one.places})
    _join_decisions(connection)
    return conditions


_SPLIT = f"CASE WHEN is_validation THEN '{VALIDATION}' ELSE '{TRAIN}' END"
_PLACE = f"concat({_SPLIT}, '/', bucket)"


def _load_images(
    out: str,
    config: PrepareConfig,
    database: MetadataDatabase,
    conditions: Conditions,
    earlier: Sequence[Selection],
    progress: bool,
) -> None:
    """Make the table `images` of the images of a generation, and of the kept ones of earlier generations."""
    generation, connection = len(earlier), database.connection
    parts = database.parts(generation)
    limit = int(config.validation_fraction * 2**64)

    def order(key_hash: pa.Array) -> pa.Array:
        return pa.array(splitmix64(key_hash.to_numpy(), config.seed, "order"))

    def is_validation(key_hash: pa.Array) -> pa.Array:
        return pa.array(splitmix64(key_hash.to_numpy(), config.seed, "validation") < np.uint64(limit))

    removed = Removed.read(out)

    def is_like(phash: pa.Array) -> pa.Array:
        return pa.array(removed.is_like(phash.to_numpy()))

    for function, kind in ((order, "UBIGINT"), (is_validation, "BOOLEAN"), (is_like, "BOOLEAN")):
        name = f"_{function.__name__}"
        connection.create_function(name, function, ["UBIGINT"], kind, type="arrow")  # pyright: ignore
    columns = """part, row_number, width, height, bytes, phash, ('0x' || xxh128[:16])::UBIGINT AS high,
        ('0x' || xxh128[17:])::UBIGINT AS low, _order(key_hash) AS "order", _is_validation(key_hash) AS is_validation"""

    reason = conditions.reason
    if removed:
        add_table(connection, "removed", pa.table({"hash": sorted(removed)}))
        is_near = "phash IS NOT NULL AND _is_like(coalesce(phash, 0))" if len(removed.phashes) else "false"
        is_copy = f"xxh128 IN (SELECT hash FROM removed) OR {is_near}"
        reason = f"CASE WHEN {is_copy} THEN '{Reason.REMOVED.value}' ELSE {reason} END"

    def insert(some: Sequence[int]) -> str:
        return f"""SELECT {columns}, _bucket AS bucket, {reason} AS reason, false AS kept_before
            FROM {conditions.images(database, some)}"""

    connection.execute(f"CREATE TABLE images AS {insert(parts[:1])} LIMIT 0").fetchall()
    with explained_values(config):
        for some in tqdm([*groups(parts)], desc="select", mininterval=1.0, disable=not progress):
            connection.execute(f"INSERT INTO images {insert(some)}").fetchall()
    if config.duplicates is None:
        return
    packs = Packs(out, "hashes", [one.identity for one in earlier])
    for pack in packs.packs:
        packed = read_files(out, [pack.name], database.folder)
        connection.execute(f"INSERT INTO images SELECT *, NULL, '', true FROM {packed}").fetchall()
    for one in earlier[packs.stop :]:
        with storage.open_file(_uri(out, f"{one.generation}-kept.parquet")) as file:
            add_table(connection, "kept", pq.read_table(file, columns=["part", "row"]))
        for some in groups(database.parts(one.generation)):
            connection.execute(f"""INSERT INTO images
                SELECT {columns}, NULL, '', true FROM {database.metadata(some)}
                SEMI JOIN (SELECT part, "row" AS row_number FROM kept) USING (part, row_number)
                WHERE reason <> '{Reason.REMOVED.value}'""").fetchall()
    if packs.stop < generation:
        pack, _ = packs.next()
        query = f"""SELECT * EXCLUDE (bucket, reason, kept_before) FROM images SEMI JOIN (SELECT part FROM parts
            WHERE generation >= {pack.first}) USING (part) WHERE kept_before ORDER BY part, row_number"""
        database.write(query, pack.name)
        packs.add(pack)


def _find_duplicates(connection: "duckdb.DuckDBPyConnection", config: DuplicatesConfig) -> None:
    """Fill the table `duplicates`."""
    hashes = fetch_arrays(connection, "SELECT phash FROM images WHERE reason = ''")["phash"]
    candidates = find_candidates(hashes, config.max_distance if config.near else None)
    del hashes
    if num_dense := len(candidates.dense):
        message = (
            "%s different perceptual hashes have so many near ones that not all were compared: copies of these images "
            "may be kept. One is %s; look at its images, which may have been made for this, and filter them"
        )
        logger.warning(message, f"{num_dense:,}", candidates.dense[0])
    add_table(connection, "candidates", pa.table({"phash": candidates.values}))
    query = """SELECT part, row_number, phash, high, low, width::BIGINT * height AS pixels, "order", kept_before
        FROM images SEMI JOIN candidates USING (phash) WHERE reason = ''"""
    rows = fetch_arrays(connection, query)
    exact = np.stack([rows["high"], rows["low"]], axis=1)
    near = candidates if config.near else None
    of = find_duplicates(rows["order"], exact, rows["phash"], rows["pixels"], rows["kept_before"], near)
    dropped = np.flatnonzero((of != np.arange(len(of))) & ~rows["kept_before"])
    kept = of[dropped]
    found = {
        "part": rows["part"][dropped],
        "row_number": rows["row_number"][dropped],
        "of_part": rows["part"][kept],
        "of_row": rows["row_number"][kept],
        "same": (exact[dropped] == exact[kept]).all(axis=1),
    }
    add_table(connection, "duplicates", pa.table(found))


def _move_small_buckets(
    connection: "duckdb.DuckDBPyConnection", config: PrepareConfig, places: Collection[str]
) -> None:
    """Make the table `moves`: where images go whose bucket would hold too few; a null bucket is nowhere."""
    buckets, min_samples = build_buckets(config.buckets), config.buckets.min_samples or 0
    kept = "FROM images ANTI JOIN duplicates USING (part, row_number) WHERE reason = '' AND NOT kept_before"
    moves: dict[str, Any] = {"width": [], "height": [], "bucket": [], "target": []}
    if isinstance(buckets, SizeBuckets) and min_samples:
        counted = f"SELECT bucket, count(*) FILTER (NOT is_validation) {kept} GROUP BY bucket"
        counts = dict(connection.execute(counted).fetchall())
        existing = {place.partition("/")[2] for place in places}
        small = [name for name, count in counts.items() if count < min_samples and name not in existing]
        large = {name for name, count in counts.items() if count >= min_samples} | existing
        if small and not large:
            raise NothingKeptError(
                f"no bucket has {min_samples} images (buckets.min_samples), the largest has {max(counts.values())}: "
                "lower it, or divide the images into fewer buckets"
            )
        sizes = tuple(size for name in buckets.names if name in large and (size := named_size(name)))
        others = dataclasses.replace(buckets, sizes=sizes)
        listed = ", ".join(map(literal, small)) or "NULL"
        moving = f"SELECT DISTINCT width, height, bucket {kept} AND bucket IN ({listed}) ORDER BY ALL"
        moves = fetch_arrays(connection, moving)
        targets = others.indices(moves["width"], moves["height"]) if sizes else []
        reject = config.buckets.reject_small
        names = [None if reject or index < 0 else others.names[index] for index in targets]
        moves = {**moves, "target": names}
    schema = pa.schema({"width": pa.int32(), "height": pa.int32(), "bucket": pa.string(), "target": pa.string()})
    add_table(connection, "moves", pa.table(moves, schema=schema))


def _join_decisions(connection: "duckdb.DuckDBPyConnection") -> None:
    connection.execute(f"""CREATE TABLE decided AS
        SELECT images.part, images.row_number, bytes, is_validation, "order", of_part, of_row,
            CASE WHEN duplicates.part IS NOT NULL THEN CASE WHEN same THEN '{Reason.DUPLICATE.value}'
                    ELSE '{Reason.NEAR_DUPLICATE.value}' END
                WHEN images.reason <> '' THEN images.reason
                WHEN moves.bucket IS NOT NULL AND target IS NULL THEN '{Reason.SMALL_BUCKET.value}'
                ELSE '' END AS reason,
            coalesce(target, images.bucket) AS bucket
        FROM images LEFT JOIN duplicates USING (part, row_number) LEFT JOIN moves USING (width, height, bucket)
        WHERE NOT kept_before""").fetchall()
    connection.execute("DROP TABLE images")


def _cut_windows(connection: "duckdb.DuckDBPyConnection", config: PrepareConfig) -> list[list[list[int]]]:
    """Put the parts into windows and tasks, in an order drawn from the seed and the number of the part."""
    query = "SELECT part, sum(bytes)::BIGINT AS bytes FROM decided WHERE reason = '' GROUP BY part ORDER BY part"
    parts, sizes = fetch_arrays(connection, query).values()
    order = np.argsort(splitmix64(parts.astype(np.uint64), config.seed, "windows"), kind="stable")
    windows: list[list[int]] = [[]]
    num_bytes = 0
    for part, size in zip(parts[order].tolist(), sizes[order].tolist(), strict=True):
        if num_bytes >= config.window_mb * 2**20:
            windows.append([])
            num_bytes = 0
        windows[-1].append(part)
        num_bytes += size
    windows = [window for window in windows if window]
    return [windows[start : start + WINDOWS_PER_TASK] for start in range(0, len(windows), WINDOWS_PER_TASK)]


def _write_files(database: MetadataDatabase, generation: int, tasks: list[list[list[int]]], first_task: int) -> None:
    """Write the parquet files of kept and rejected images."""
    placed = [
        {"task": task, "window": window, "part": part}
        for task, windows in enumerate(tasks, start=first_task)
        for window, parts in enumerate(windows)
        for part in parts
    ]
    schema = pa.schema({"task": pa.int32(), "window": pa.int32(), "part": pa.int32()})
    add_table(database.connection, "placed", pa.Table.from_pylist(placed, schema=schema))
    kept = f"""SELECT task, "window", part, row_number AS "row", {_SPLIT} AS split, bucket, "order"
        FROM decided JOIN placed USING (part) WHERE reason = '' ORDER BY task, "window", part, row_number"""
    database.write(kept, f"{SELECTION}/{generation}-kept.parquet")
    rejected = """SELECT part, row_number AS "row", reason, of_part, of_row FROM decided
        WHERE reason <> '' ORDER BY part, row_number"""
    database.write(rejected, f"{SELECTION}/{generation}-rejected.parquet")
