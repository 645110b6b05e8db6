"""Tables of text: with columns of equal width for a terminal, and Markdown's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_table(rows: Sequence[Sequence[str]], sides: str = "<") -> str:
    """Rows of cells as lines, two spaces between columns, none at the end of a line.

    The first row says how many columns there are. A row may have fewer: its last cell then goes on beyond its column.
    `sides` aligns the columns, `<` to the left or `>` to the right; its last letter is that of all further columns.
    """
    columns = len(rows[0])
    widths = [max(len(row[at]) for row in rows if at < len(row) - 1 or len(row) == columns) for at in range(columns)]
    shape = list(zip(sides.ljust(columns, sides[-1]), widths, strict=True))
    lines = ([f"{cell:{side}{width}}" for cell, (side, width) in zip(row, shape, strict=False)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """The same in Markdown; the first row is the head."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
