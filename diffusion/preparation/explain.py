"""What the conditions of a selection cost."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diffusion.preparation.config import PrepareConfig
from diffusion.preparation.filters import SCAN_REASON, load_conditions
from diffusion.preparation.metadata import groups, open_database

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
            for reason, num, *counts in database.connection.execute(query).fetchall():
                num_images += num
                alone += counts
                if reason != "":  # Null are those that the scan has rejected.
                    in_turn[reason or ""] += num
    remaining = num_images - np.cumsum(list(in_turn.values()))
    return [
        Cost(condition=name, alone=int(count), first=in_turn[name], remaining=int(rest))
        for name, count, rest in zip(names, alone, remaining, strict=True)
    ]
