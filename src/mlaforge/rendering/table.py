"""Text tables for terminals, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def text_table(rows: Sequence[Sequence[str]], sides: str = "<") -> str:
    """Format rows of cells as aligned lines, with two spaces between columns and no trailing spaces.

    The first row determines the number of columns. A row may have fewer: its last cell may then exceed its column.
    sides: alignment of the columns, `<` left or `>` right; its last letter applies to all further columns.
    """
    columns = len(rows[0])
    widths = [max(len(row[at]) for row in rows if at < len(row) - 1 or len(row) == columns) for at in range(columns)]
    shape = list(zip(sides.ljust(columns, sides[-1]), widths, strict=True))
    lines = ([f"{cell:{side}{width}}" for cell, (side, width) in zip(row, shape, strict=False)] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """Format rows of cells as a Markdown table; the first row is the header."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
