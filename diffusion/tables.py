"""Tables for a terminal."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, the first to the left, the others to the right.

    Args:
        rows: cells; all rows have the same number.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
