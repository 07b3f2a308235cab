"""Select: which images are kept, in which order, decided by SQL over the metadata without a look at an image.

    metadata + scores --filters, where--> reasons --duplicates--> --small buckets--> kept rows --windows--> write tasks

A validation image is one with mix(key_hash, seed, "validation") < fraction * 2^64; within a bucket samples are written
by ascending mix(key_hash, seed, "order") of each window. Neither depends on partitions or workers. The result of a
generation is `selection/GENERATION.json` and two parquet files beside it (docs/architecture.md).
"""

import dataclasses
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from diffusion import storage
from diffusion.config.data import named_size
from diffusion.config.loading import to_dict
from diffusion.datasets.buckets import SizeBuckets
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import atomic_path
from diffusion.preparation.buckets import bucket_indices, build_buckets
from diffusion.preparation.config import DuplicatesConfig, PrepareConfig
from diffusion.preparation.duplicates import find_crowded, find_duplicates
from diffusion.preparation.filters import WHERE, Rule, build_rules, where_types
from diffusion.preparation.metadata import (
    MEASURES,
    METADATA,
    SCORES,
    SELECTION,
    Tables,
    add_table,
    identifier,
    literal,
    open_tables,
    part_name,
)
from diffusion.preparation.records import WITHOUT_CAPTION, Reason

if TYPE_CHECKING:
    import duckdb

logger = logging.getLogger(__name__)

WINDOWS_PER_TASK = 8
"""Windows of a write task: the rest of a shard is carried from one to the next."""

ROWS_PER_GROUP = 131_072
"""Rows of a row group of the files."""

SETTINGS = ("buckets", "validation_fraction", "seed", "shard_mb", "window_mb", "compression", "hashes", "filters",
            "where", "duplicates")  # fmt: skip
"""Keys of the configuration that determine a selection, or the shards that are written of it."""

TRAIN, VALIDATION = "train", "validation"

_PARTS_PER_QUERY = 64

_KEPT = pa.schema(
    {"task": pa.int32(), "window": pa.int32(), "part": pa.int32(), "row": pa.int32(), "split": pa.string(),
     "bucket": pa.string(), "order": pa.uint64()}
)  # fmt: skip
_REJECTED = pa.schema({"part": pa.int32(), "row": pa.int32(), "reason": pa.string(), "duplicate_of": pa.string()})


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Images and the bytes of their files."""

    images: int = 0
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selection of a generation, as `selection/GENERATION.json`."""

    generation: int

    identity: str
    """Changes with settings, metadata, scores and the selections of earlier generations."""

    settings: dict[str, Any]

    sources: dict[str, dict[str, int]]
    """Images by source and reason; the reason of kept images is empty."""

    places: dict[str, Counts]
    """Kept images by `SPLIT/BUCKET`."""

    first_task: int
    """Number of its first write task: tasks are numbered over all generations."""

    tasks: list[list[list[int]]]
    """Parts of each window of each write task."""

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


def mix(key_hash: NDArray[np.uint64], seed: int, purpose: str) -> NDArray[np.uint64]:
    """Draw 64 random bits for each key, for ever the same ones.

    With h = key_hash + xxh3_64("PURPOSE SEED"), all modulo 2^64, it is the output function of splitmix64 (Steele, Lea
    and Flood 2014): h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9; h = (h ^ h >> 27) * 0x94D049BB133111EB; h ^ h >> 31.

    Args:
        key_hash: uint64 [N].
        seed: of the preparation.
        purpose: what they are drawn for.

    Returns:
        uint64 [N].
    """
    bits = key_hash + np.uint64(xxhash.xxh3_64_intdigest(f"{purpose} {seed}"))
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ bits >> np.uint64(31)


# Selections of a data set


def select(out: str, config: PrepareConfig, scan: Any, *, memory_bytes: int | None = None) -> Selection:
    """Select the images of each generation, unless that was done with the same settings, metadata and scores.

    Args:
        out: folder of the data set.
        config: the preparation.
        scan: partitions and sources; all partitions have been scanned.
        memory_bytes: limit of DuckDB; None is a share of the memory.

    Returns:
        The selection of the newest generation.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a partition has not been scanned, or all buckets are too small.
        MachineError: something cannot be read or written.
    """
    _check(config)
    earlier: list[Selection] = []
    for generation in range(max((partition.generation for partition in scan.partitions), default=0) + 1):
        identity = _identity(out, config, scan, earlier, generation)
        if storage.exists(_uri(out, f"{generation}.json")):
            found = read_selection(out, generation)
            if found.identity == identity:
                earlier.append(found)
                continue
        with open_tables(out, scan, scratch=config.scratch, memory_bytes=memory_bytes) as tables:
            earlier.append(_select(out, config, tables, earlier, identity))
    return earlier[-1]


def read_selection(out: str, generation: int) -> Selection:
    """Read the selection of a generation.

    Raises:
        DataError: there is none, or it is damaged.
    """
    uri = _uri(out, f"{generation}.json")
    values = storage.read_json(uri)
    try:
        places = {name: Counts(**counts) for name, counts in values.pop("places").items()}
        return Selection(places=places, **values)
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{uri} is damaged ({error!r}); remove it and select again") from error


def kept_rows(out: str, generation: int, task: int) -> pa.Table:
    """Read the kept images of a write task; of the file only the row groups that hold some.

    Args:
        out: folder of the data set.
        generation: of the task.
        task: its number over all generations.

    Returns:
        task, window, part, row, split, bucket, order; by window, part and row.
    """
    with storage.open_file(_uri(out, f"{generation}-kept.parquet")) as file:
        parquet = pq.ParquetFile(file)
        groups = []
        for number in range(parquet.num_row_groups):
            tasks = parquet.metadata.row_group(number).column(0).statistics
            if tasks.min <= task <= tasks.max:
                groups.append(number)
        table = parquet.read_row_groups(groups)
    return table.filter(pc.equal(table["task"], task))


def _uri(out: str, name: str) -> str:
    return storage.join(out, SELECTION, name)


def _check(config: PrepareConfig) -> None:
    build_buckets(config.buckets)
    build_rules(config.filters, identifier)


def _identity(out: str, config: PrepareConfig, scan: Any, earlier: Sequence[Selection], generation: int) -> str:
    """Hash what determines a selection: settings, earlier selections, and names and sizes of metadata and scores."""
    names = {part_name(partition.number) for partition in scan.partitions if partition.generation <= generation}
    files = []
    for kind in (METADATA, SCORES):
        listed = storage.list_files(storage.join(out, kind))
        files += [f"{kind}/{name} {file.size}" for name, file in listed.items() if Path(name).name in names]
    columns = {f"{Path(name).parent}": name for name in sorted(files, reverse=True) if name.startswith(SCORES)}
    scores = {column: _score_identity(storage.join(out, name.partition(" ")[0])) for column, name in columns.items()}
    made_of = [_settings(config), [one.identity for one in earlier], sorted(files), scores]
    return xxhash.xxh3_128_hexdigest(json.dumps(made_of, sort_keys=True))


def _score_identity(uri: str) -> str:
    with storage.open_file(uri) as file:
        return ((pq.read_schema(file).metadata or {}).get(b"identity") or b"").decode()


def _settings(config: PrepareConfig) -> dict[str, Any]:
    values = to_dict(config)
    return {name: values[name] for name in SETTINGS}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a condition costs."""

    condition: str
    """Reason of the rejections; empty for those of the scan."""

    alone: int
    """Images that it rejects, whatever the others do."""

    first: int
    """Images that it is the first to reject."""

    remaining: int
    """Images that neither it nor one before it rejects."""


def explain(out: str, config: PrepareConfig, scan: Any) -> list[Cost]:
    """Count what each condition costs, over the images of all generations; duplicates come after them.

    Args:
        out: folder of the data set; nothing is written there.
        config: the preparation.
        scan: partitions and sources.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a partition has not been scanned.
    """
    with open_tables(out, scan, scratch=config.scratch) as tables:
        parts = tables.parts()
        conditions = _load_conditions(tables, config, parts)
        names = ["", *(rule.name for rule in conditions.rules)]
        alone, first = np.zeros(len(names), int), dict.fromkeys(names, 0)
        total = 0
        rejects = [f"({_SCAN_REASON} = '' AND {rule.rejects})" for rule in conditions.rules]
        counted = ", ".join(f"count(*) FILTER ({condition})" for condition in [f"{_SCAN_REASON} <> ''", *rejects])
        known = f"CASE WHEN {_SCAN_REASON} <> '' THEN NULL ELSE {conditions.reason} END"
        for some in _groups(parts):
            query = (
                f"SELECT {known} AS first, count(*), {counted} FROM {conditions.images(tables, some)} GROUP BY first"
            )
            for reason, num, *counts in tables.connection.execute(query).fetchall():
                total += num
                alone += counts
                if reason != "":
                    first[reason or ""] += num
    remaining = total - np.cumsum(list(first.values()))
    return [
        Cost(condition=name, alone=int(count), first=first[name], remaining=int(rest))
        for name, count, rest in zip(names, alone, remaining, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A rejected image."""

    part: int
    row: int
    key: str
    reason: str
    detail: str
    """Why, in a few words."""

    width: int | None
    height: int | None
    duplicate_of: str | None
    """Key of the image that is kept in place of it."""


def examples(out: str, config: PrepareConfig, scan: Any, generation: int, *, per_reason: int = 5) -> list[Rejection]:
    """Read the first rejected images of each reason, by reason, part and row.

    Args:
        out: folder of the data set.
        config: the preparation by which the generation was selected.
        scan: partitions and sources.
        generation: of the images.
        per_reason: most images of a reason.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    with storage.open_file(_uri(out, f"{generation}-rejected.parquet")) as file:
        for batch in pq.ParquetFile(file).iter_batches(ROWS_PER_GROUP):
            reasons = np.asarray(batch["reason"])
            for reason in np.unique(reasons):
                listed = found.setdefault(reason, [])
                rows = np.flatnonzero(reasons == reason)[: per_reason - len(listed)]
                listed += batch.take(pa.array(rows)).to_pylist()
    rows = [row for reason in sorted(found) for row in found[reason]]
    parts = sorted({row["part"] for row in rows})
    if not parts:
        return []
    with open_tables(out, scan, scratch=config.scratch, only=parts) as tables:
        conditions = _load_conditions(tables, dataclasses.replace(config, where=None), parts)
        add_table(tables.connection, "found", pa.Table.from_pylist(rows, schema=_REJECTED))
        least = config.buckets.min_samples
        details = {rule.name: rule.detail for rule in conditions.rules} | {
            Reason.DUPLICATE.value: "concat('of ', found.duplicate_of)",
            Reason.NEAR_DUPLICATE.value: "concat('of ', found.duplicate_of)",
            Reason.SMALL_BUCKET.value: f"concat(_bucket, ' would hold fewer than {least} images')",
        }
        cases = " ".join(f"WHEN {literal(reason)} THEN {detail}" for reason, detail in details.items())
        query = f"""SELECT found.part, found."row", key, found.reason, width, height, found.duplicate_of,
                CASE found.reason {cases} ELSE images.detail END AS detail
            FROM {conditions.images(tables, parts)} images
            JOIN found ON found.part = images.part AND found."row" = images.row_number
            ORDER BY found.reason, found.part, found."row\""""
        return [Rejection(**row) for row in tables.connection.sql(query).to_arrow_table().to_pylist()]


# Selection of a generation


def _select(out: str, config: PrepareConfig, tables: Tables, earlier: Sequence[Selection], identity: str) -> Selection:
    generation, connection = len(earlier), tables.connection
    _load_rows(out, config, tables, earlier)
    connection.execute("CREATE TABLE duplicates (part INT, row_number INT, of_part INT, of_row INT, same BOOLEAN)")
    if config.duplicates is not None and (config.duplicates.exact or config.duplicates.near):
        _find_duplicates(connection, config.duplicates)
    _move_small_buckets(connection, config, {name for one in earlier for name in one.places})
    _decide(connection)
    tasks = _cut_windows(connection, config, generation)
    first_task = sum(len(one.tasks) for one in earlier)
    uri = _uri(out, f"{generation}.json")
    storage.delete([uri])  # It must not name files that are not its own.
    _write_files(out, tables, generation, tasks, first_task)
    sources: dict[str, dict[str, int]] = {}
    counted = "SELECT source, reason, count(*) FROM decided JOIN parts USING (part) GROUP BY ALL ORDER BY ALL"
    for source, reason, count in connection.execute(counted).fetchall():
        sources.setdefault(source, {})[reason] = count
    counted = (
        f"SELECT {_PLACE} AS place, count(*), sum(bytes) FROM decided WHERE reason = '' GROUP BY place ORDER BY place"
    )
    places = {place: Counts(images=num, bytes=int(size)) for place, num, size in connection.execute(counted).fetchall()}
    selection = Selection(
        generation=generation,
        identity=identity,
        settings=_settings(config),
        sources=sources,
        places=places,
        first_task=first_task,
        tasks=tasks,
    )
    storage.write_json(uri, dataclasses.asdict(selection))
    logger.info("kept %s of %s images", f"{selection.kept:,}", f"{selection.seen:,}")
    return selection


_SPLIT = f"CASE WHEN is_validation THEN '{VALIDATION}' ELSE '{TRAIN}' END"
_PLACE = f"concat({_SPLIT}, '/', bucket)"

_SCAN_REASON = f"""CASE WHEN reason IN ({", ".join(literal(reason.value) for reason in WITHOUT_CAPTION)})
    AND len(captions) > 0 THEN '' ELSE reason END"""
"""Reason of the scan, but for images that a captioner has given captions."""

_TOO_SMALL = Rule(Reason.TOO_SMALL.value, "_bucket IS NULL", "printf('%d x %d', width, height)")


@dataclass(frozen=True)
class _Conditions:
    """Conditions on images, and what they look at."""

    rules: list[Rule]
    """In the order in which they are applied."""

    keys: list[str]
    """Of the sources' metadata, for the filters."""

    types: dict[str, str]
    """SQL type of the keys that `where` names."""

    def images(self, tables: Tables, parts: Sequence[int]) -> str:
        """Write a query of the images of some parts that the rules can look at."""
        return f"({tables.named_images(parts, self.types, self.keys)} LEFT JOIN sizes USING (width, height))"

    @property
    def reason(self) -> str:
        """SQL of the first reason to reject an image, empty for none."""
        rules = " ".join(f"WHEN {rule.rejects} THEN {literal(rule.name)}" for rule in self.rules)
        return f"CASE WHEN {_SCAN_REASON} <> '' THEN {_SCAN_REASON} {rules} ELSE '' END"


def _load_conditions(tables: Tables, config: PrepareConfig, parts: Sequence[int]) -> _Conditions:
    """Write the conditions of a configuration, and make the table of the bucket of each size in these parts."""
    keys: list[str] = []

    def column(name: str) -> str:
        if name in MEASURES or name in tables.scores:
            return identifier(name)
        if name not in keys:
            keys.append(name)
        return f"_keys[{keys.index(name) + 1}]"

    rules = [_TOO_SMALL, *build_rules(config.filters, column)]
    buckets = build_buckets(config.buckets)
    sizes = f"SELECT DISTINCT width, height FROM {tables.metadata(parts)} WHERE width IS NOT NULL"
    widths, heights = tables.connection.execute(sizes).fetchnumpy().values()
    names = np.array([*buckets.names, None])[bucket_indices(buckets, widths, heights)]
    table = {"width": widths, "height": heights, "_bucket": pa.array(names, pa.string())}
    add_table(tables.connection, "sizes", pa.table(table))
    types = {}
    if config.where is not None:
        types = where_types(tables, config.where, parts)
        rules.append(Rule(WHERE, f"(\n{config.where}\n) IS NOT TRUE", "''"))
    return _Conditions(rules, keys, types)


def _load_rows(out: str, config: PrepareConfig, tables: Tables, earlier: Sequence[Selection]) -> None:
    """Make the table `images` of the images of a generation, and of the kept ones of earlier generations."""
    import duckdb

    generation, connection = len(earlier), tables.connection
    parts = tables.parts(generation)
    conditions = _load_conditions(tables, config, parts)
    limit = int(config.validation_fraction * 2**64)

    def order(key_hash: pa.Array) -> pa.Array:
        return pa.array(mix(key_hash.to_numpy(), config.seed, "order"))

    def is_validation(key_hash: pa.Array) -> pa.Array:
        return pa.array(mix(key_hash.to_numpy(), config.seed, "validation") < np.uint64(limit))

    connection.create_function("_order", order, ["UBIGINT"], "UBIGINT", type="arrow")
    connection.create_function("_is_validation", is_validation, ["UBIGINT"], "BOOLEAN", type="arrow")
    columns = """part, row_number, width, height, bytes, phash, ('0x' || xxh128[:16])::UBIGINT AS high,
        ('0x' || xxh128[17:])::UBIGINT AS low, _order(key_hash) AS "order", _is_validation(key_hash) AS is_validation"""

    def insert(some: Sequence[int]) -> str:
        return f"""SELECT {columns}, _bucket AS bucket, {conditions.reason} AS reason, false AS settled
            FROM {conditions.images(tables, some)}"""

    connection.execute(f"CREATE TABLE images AS {insert(parts[:1])} LIMIT 0").fetchall()
    try:
        for some in _groups(parts):
            connection.execute(f"INSERT INTO images {insert(some)}").fetchall()
    except (duckdb.ConversionException, duckdb.OutOfRangeException) as error:
        raise ConfigurationError(f"where: {str(error).splitlines()[0]}") from error
    if config.duplicates is None:
        return
    for one in earlier:
        with storage.open_file(_uri(out, f"{one.generation}-kept.parquet")) as file:
            add_table(connection, "kept", pq.read_table(file, columns=["part", "row"]))
        for some in _groups(tables.parts(one.generation)):
            connection.execute(f"""INSERT INTO images
                SELECT {columns}, NULL, '', true FROM {tables.metadata(some)}
                SEMI JOIN (SELECT part, "row" AS row_number FROM kept) USING (part, row_number)""").fetchall()


def _groups(parts: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(parts), _PARTS_PER_QUERY):
        yield parts[start : start + _PARTS_PER_QUERY]


def _find_duplicates(connection: "duckdb.DuckDBPyConnection", config: DuplicatesConfig) -> None:
    """Fill the table `duplicates`."""
    hashes = connection.execute("SELECT phash FROM images WHERE reason = ''").fetchnumpy()["phash"]
    crowded = find_crowded(hashes, config.max_distance if config.near else None)
    del hashes
    add_table(connection, "crowded", pa.table({"phash": crowded.values}))
    rows = connection.execute("""
        SELECT part, row_number, phash, high, low, width::BIGINT * height AS pixels, "order", settled
        FROM images SEMI JOIN crowded USING (phash) WHERE reason = ''""").fetchnumpy()
    exact = np.stack([rows["high"], rows["low"]], axis=1)
    near = crowded if config.near else None
    of = find_duplicates(rows["order"], exact, rows["phash"], rows["pixels"], rows["settled"], near)
    dropped = np.flatnonzero((of != np.arange(len(of))) & ~rows["settled"])
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
    buckets, least = build_buckets(config.buckets), config.buckets.min_samples or 0
    kept = "FROM images ANTI JOIN duplicates USING (part, row_number) WHERE reason = '' AND NOT settled"
    moves = {"width": [], "height": [], "bucket": [], "target": []}
    if isinstance(buckets, SizeBuckets) and least:
        counts = dict(
            connection.execute(f"SELECT bucket, count(*) FILTER (NOT is_validation) {kept} GROUP BY bucket").fetchall()
        )
        existing = {place.partition("/")[2] for place in places}
        small = [name for name, count in counts.items() if count < least and name not in existing]
        large = {name for name, count in counts.items() if count >= least} | existing
        if small and not large:
            raise DataError(
                f"no bucket has {least} images (buckets.min_samples), the largest has {max(counts.values())}: lower "
                "it, or divide the images into fewer buckets"
            )
        sizes = tuple(size for name in buckets.names if name in large and (size := named_size(name)))
        others = dataclasses.replace(buckets, sizes=sizes)
        listed = ", ".join(map(literal, small)) or "NULL"
        moving = f"SELECT DISTINCT width, height, bucket {kept} AND bucket IN ({listed}) ORDER BY ALL"
        moves = connection.execute(moving).fetchnumpy()
        targets = bucket_indices(others, moves["width"], moves["height"]) if sizes else []
        reject = config.buckets.reject_small
        names = [None if reject or index < 0 else others.names[index] for index in targets]
        moves = {**moves, "target": names}
    schema = pa.schema({"width": pa.int32(), "height": pa.int32(), "bucket": pa.string(), "target": pa.string()})
    add_table(connection, "moves", pa.table(moves, schema=schema))


def _decide(connection: "duckdb.DuckDBPyConnection") -> None:
    """Make the table `decided` of the images of this generation."""
    connection.execute(f"""CREATE TABLE decided AS
        SELECT images.part, images.row_number, bytes, is_validation, "order", of_part, of_row,
            CASE WHEN duplicates.part IS NOT NULL THEN CASE WHEN same THEN '{Reason.DUPLICATE.value}'
                    ELSE '{Reason.NEAR_DUPLICATE.value}' END
                WHEN images.reason <> '' THEN images.reason
                WHEN moves.bucket IS NOT NULL AND target IS NULL THEN '{Reason.SMALL_BUCKET.value}'
                ELSE '' END AS reason,
            coalesce(target, images.bucket) AS bucket
        FROM images LEFT JOIN duplicates USING (part, row_number) LEFT JOIN moves USING (width, height, bucket)
        WHERE NOT settled""").fetchall()
    connection.execute("DROP TABLE images")


def _cut_windows(
    connection: "duckdb.DuckDBPyConnection", config: PrepareConfig, generation: int
) -> list[list[list[int]]]:
    """Put the parts into windows and tasks, in an order drawn from the seed and the number of the part."""
    query = "SELECT part, sum(bytes)::BIGINT AS bytes FROM decided WHERE reason = '' GROUP BY part ORDER BY part"
    parts, sizes = connection.execute(query).fetchnumpy().values()
    order = np.argsort(mix(parts.astype(np.uint64), config.seed, "windows"), kind="stable")
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


def _write_files(out: str, tables: Tables, generation: int, tasks: list[list[list[int]]], first_task: int) -> None:
    """Write the parquet files of kept and rejected images."""
    connection = tables.connection
    placed = [
        (first_task + task, window, part)
        for task, windows in enumerate(tasks)
        for window, parts in enumerate(windows)
        for part in parts
    ]
    schema = pa.schema([("task", pa.int32()), ("window", pa.int32()), ("part", pa.int32())])
    columns = np.array(placed, np.int32).reshape(-1, 3).T
    add_table(connection, "placed", pa.table(list(columns), schema=schema))
    kept = f"""SELECT task, "window", part, row_number AS "row", {_SPLIT} AS split, bucket, "order"
        FROM decided JOIN placed USING (part) WHERE reason = '' ORDER BY task, "window", part, row_number"""
    _write_parquet(connection, kept, _KEPT, _uri(out, f"{generation}-kept.parquet"))
    connection.execute("CREATE TABLE stands (of_part INT, of_row INT, key VARCHAR)")
    stands = "SELECT DISTINCT of_part AS part, of_row AS row_number FROM decided WHERE of_part IS NOT NULL"
    for some in _groups(tables.parts()):
        keys = f"SELECT part, row_number, key FROM {tables.metadata(some)}"
        connection.execute(f"INSERT INTO stands {keys} SEMI JOIN ({stands}) USING (part, row_number)").fetchall()
    rejected = """SELECT part, row_number AS "row", reason, key AS duplicate_of FROM decided
        LEFT JOIN stands USING (of_part, of_row) WHERE reason <> '' ORDER BY part, row_number"""
    _write_parquet(connection, rejected, _REJECTED, _uri(out, f"{generation}-rejected.parquet"))


def _write_parquet(connection: "duckdb.DuckDBPyConnection", query: str, schema: pa.Schema, uri: str) -> None:
    """Write the result of a query in row groups; the file is there whole or not."""
    with TemporaryDirectory(prefix="select-") as temporary:
        path = Path(temporary, "rows.parquet") if storage.is_url(uri) else Path(uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for batch in connection.sql(query).to_arrow_reader(ROWS_PER_GROUP):
                writer.write_batch(batch.cast(schema), row_group_size=ROWS_PER_GROUP)
        if storage.is_url(uri):
            storage.upload(path, uri)
