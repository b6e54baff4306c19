"""Formats tables for a terminal, and makes texts safe and short enough for it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence


def terminal_width() -> int | None:
    """Width of the terminal in columns; None if the output goes to a file or pipe, where lines can be of any length."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def table(rows: Sequence[Sequence[str]], align: str, *, indent: str = "  ", shrink: int | None = None) -> list[str]:
    """Format the lines of a table with a heading, within the width of the terminal.

    Args:
        rows: the rows, heading first.
        align: `<` or `>` for each column.
        indent: prefix of each line.
        shrink: the column whose texts are shortened if lines would be too long.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(align))]
    limit = terminal_width()
    if shrink is not None and limit is not None:
        too_long = len(indent) + sum(widths) + 2 * (len(widths) - 1) - limit
        widths[shrink] = max(8, widths[shrink] - max(0, too_long))
        for row in cells:
            row[shrink] = shortened(row[shrink], widths[shrink])
    return [
        (
            indent + "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def shortened(text: str, width: int) -> str:
    """Cut the middle out of a text longer than `width`; the end of a name is more informative."""
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """Replace control characters of a text, which could move the cursor or change colors."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
