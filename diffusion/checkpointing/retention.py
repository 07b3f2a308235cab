"""Which checkpoints of a run stay: arithmetic of steps."""

import math
from collections.abc import Sequence


def superseded_steps(steps: Sequence[float], *, num_replaceable: int, every: float | None) -> list[int]:
    """Which of the older checkpoints go.

    Args:
        steps: after how many steps each was written, ascending.
        num_replaceable: so many of the oldest go unless `every` keeps them.
        every: the first checkpoint at or after each multiple of so many steps stays.

    Returns:
        Their positions.
    """
    removed, previous = [], 0.0
    for position, step in enumerate(steps[:num_replaceable]):
        if every is None or math.floor(step / every) == math.floor(previous / every):
            removed.append(position)
        previous = step
    return removed


def kept_steps(steps: Sequence[float], *, newest: int, every: float | None) -> list[float]:
    """What is left of checkpoints after a run.

    Args:
        steps: after how many steps each was written, ascending.
        newest: so many of the newest stay.
        every: the first one at or after each multiple of so many steps stays as well.
    """
    gone = set(superseded_steps(steps, num_replaceable=max(len(steps) - newest, 0), every=every))
    return [step for position, step in enumerate(steps) if position not in gone]
