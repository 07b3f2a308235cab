"""Images that each condition of a selection rejects: their number, and examples."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.filters import SCAN_REASON, Conditions, explained_values, load_conditions
from diffusion.preparation.metadata import MetadataDatabase, groups, literal, open_database
from diffusion.preparation.records import Reason

if TYPE_CHECKING:
    from diffusion.preparation.scan import Scan


def explain(out: str, config: PrepareConfig, scan: "Scan") -> list[tuple[str, int, int, int]]:
    """Count what each condition costs, over the images of all generations; duplicates come after them.

    Returns:
        The reason of each condition's rejections, empty for those of the scan, and the number of images that it rejects
        whatever the others do, that it is the first to reject, and that neither it nor one before it rejects.

    Raises:
        ConfigurationError: a setting is wrong.
        DataError: a partition has not been scanned.
    """
    with open_database(out, scan, scratch=config.scratch) as database:
        parts = database.parts()
        conditions = load_conditions(database, config, parts)
        passed = f"({SCAN_REASON} = '')"
        names = ["", *(rule.name for rule in conditions.rules)]
        rejects = [f"NOT {passed}", *(f"{passed} AND {rule.rejects}" for rule in conditions.rules)]
        counted = ", ".join(f"count(*) FILTER ({condition})" for condition in rejects)
        first = f"CASE WHEN {passed} THEN {conditions.reason} END"
        alone, in_turn = np.zeros(len(names), int), dict.fromkeys(names, 0)
        num_images = 0
        for some in groups(parts):
            query = (
                f"SELECT {first} AS first, count(*), {counted} FROM {conditions.images(database, some)} GROUP BY first"
            )
            with explained_values(config):
                found = database.connection.execute(query).fetchall()
            for reason, num, *counts in found:
                num_images += num
                alone += counts
                if reason != "":  # Null are those that the scan has rejected.
                    in_turn[reason or ""] += num
    remaining = num_images - np.cumsum(list(in_turn.values()))
    return list(zip(names, alone.tolist(), in_turn.values(), remaining.tolist(), strict=True))


NUM_EXAMPLES = 12
"""Rejected images of each reason that a selection describes."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A rejected image."""

    key: str
    part: int
    row: int
    width: int | None
    height: int | None

    detail: str
    """Why, in a few words."""

    of_part: int | None
    """Part and row of the image that a duplicate is one of."""
    of_row: int | None


def describe_rejections(
    database: MetadataDatabase, config: PrepareConfig, conditions: Conditions
) -> dict[str, list[Rejection]]:
    """Describe the first rejected images of each reason, in the order of parts and rows.

    The database has a table `decided`: part, row_number, reason, of_part and of_row.
    """
    connection = database.connection
    first = f"""{{'part': part, 'row_number': row_number, '_reason': reason, '_of_part': of_part, '_of_row': of_row}},
        part::BIGINT << 32 | row_number, {NUM_EXAMPLES}"""
    connection.execute(f"""CREATE TABLE examples AS
        SELECT unnest(arg_min({first}), recursive := true) FROM decided WHERE reason <> '' GROUP BY reason""")
    listed = """SELECT list(DISTINCT part ORDER BY part), list(DISTINCT _of_part ORDER BY _of_part)
        FILTER (_of_part IS NOT NULL) FROM examples"""
    [(parts, original_parts)] = connection.execute(listed).fetchall()
    if not parts:
        return {}
    details = {rule.name: rule.detail for rule in conditions.rules} | {
        Reason.DUPLICATE.value: "concat('of ', _of_key)",
        Reason.NEAR_DUPLICATE.value: "concat('of ', _of_key)",
        Reason.SMALL_BUCKET.value: f"concat(_bucket, ' would hold fewer than {config.buckets.min_samples} images')",
    }
    cases = " ".join(f"WHEN {literal(reason)} THEN {detail}" for reason, detail in details.items())
    originals = database.metadata(original_parts or parts[:1])
    query = f"""SELECT _reason, key, part, row_number AS "row", width, height,
            _of_part AS of_part, _of_row AS of_row, coalesce(CASE _reason {cases} ELSE detail END, '') AS detail
        FROM {conditions.images(database, parts)} JOIN examples USING (part, row_number)
        LEFT JOIN (SELECT part AS _of_part, row_number AS _of_row, key AS _of_key FROM {originals})
            USING (_of_part, _of_row)
        WHERE key <> '' ORDER BY _reason, part, row_number"""  # A key is blank after a takedown.
    examples: dict[str, list[Rejection]] = {}
    for row in connection.sql(query).to_arrow_table().to_pylist():
        examples.setdefault(row.pop("_reason"), []).append(Rejection(**row))
    return examples
