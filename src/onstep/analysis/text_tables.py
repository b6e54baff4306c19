"""Tables for a terminal, and texts that fit into one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence


def terminal_width() -> int | None:
    """Columns to stay within; None where the output goes to a file or a pipe, which takes lines of any length."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def table(rows: Sequence[Sequence[str]], align: str, *, indent: str = "  ", shrink: int | None = None) -> list[str]:
    """Lines of a table with a heading, within the width of the terminal.

    Args:
        rows: the heading first.
        align: `<` or `>` for each column.
        indent: what each line begins with.
        shrink: the column whose texts lose their middle where a line would be too long.
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
    """A text without its middle, if it is longer than `width`; the end of a name tells more than its middle."""
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """A text from a file, without what would move the cursor or change colours."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
