"""Tables as text: for a terminal, and in Markdown."""

from collections.abc import Iterable, Sequence


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, the first to the left, the others to the right; all rows have as many cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


_ESCAPES = str.maketrans({"\\": "\\\\", "|": "\\|", "&": "&amp;", "<": "&lt;"})


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Table in GitHub's Markdown; HTML in the cells is shown as text."""
    lines = ([cell.translate(_ESCAPES) for cell in row] for row in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)
