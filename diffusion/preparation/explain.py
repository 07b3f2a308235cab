"""What the conditions of a selection cost, and examples of what they reject."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diffusion import storage
from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.filters import load_conditions
from diffusion.preparation.layout import SELECTION
from diffusion.preparation.metadata import Tables, add_table, groups, literal, open_tables
from diffusion.preparation.records import Reason
from diffusion.preparation.select import REJECTED

if TYPE_CHECKING:
    from diffusion.preparation.scan import Scan


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


def explain(out: str, config: PrepareConfig, scan: "Scan") -> list[Cost]:
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
        conditions = load_conditions(tables, config, parts)
        passed = f"({conditions.scan} = '')"
        names = ["", *(rule.name for rule in conditions.rules)]
        rejects = [f"NOT {passed}", *(f"{passed} AND {rule.rejects}" for rule in conditions.rules)]
        counted = ", ".join(f"count(*) FILTER ({condition})" for condition in rejects)
        first = f"CASE WHEN {passed} THEN {conditions.reason} END"
        alone, in_turn = np.zeros(len(names), int), dict.fromkeys(names, 0)
        num_images = 0
        for some in groups(parts):
            query = (
                f"SELECT {first} AS first, count(*), {counted} FROM {conditions.images(tables, some)} GROUP BY first"
            )
            for reason, num, *counts in tables.connection.execute(query).fetchall():
                num_images += num
                alone += counts
                if reason != "":  # Null are those that the scan has rejected.
                    in_turn[reason or ""] += num
    remaining = num_images - np.cumsum(list(in_turn.values()))
    return [
        Cost(condition=name, alone=int(count), first=in_turn[name], remaining=int(rest))
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
    """Key of the image that is kept in its place."""


def examples(out: str, config: PrepareConfig, scan: "Scan", generation: int, *, per_reason: int = 5) -> list[Rejection]:
    """Read the first rejected images of each reason, by reason, part and row.

    Args:
        out: folder of the data set.
        config: the preparation by which the generation was selected.
        scan: partitions and sources.
        generation: of the images.
        per_reason: most images of a reason.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    with storage.open_file(storage.join(out, SELECTION, f"{generation}-rejected.parquet")) as file:
        for batch in pq.ParquetFile(file).iter_batches():
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
        return describe(tables, config, rows)


def describe(tables: Tables, config: PrepareConfig, rows: Sequence[dict[str, Any]]) -> list[Rejection]:
    """Say in a few words why images were rejected, by reason, part and row.

    Args:
        tables: the metadata.
        config: the preparation by which they were.
        rows: part, row, reason and duplicate_of of each.
    """
    parts = sorted({row["part"] for row in rows})
    conditions = load_conditions(tables, dataclasses.replace(config, where=None), parts)
    add_table(tables.connection, "found", pa.Table.from_pylist(list(rows), schema=REJECTED))
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
