"""Draws a curve with Braille characters, for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_BLANK = 0x2800
"""The Braille character without dots."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""The bit of each dot of a character: two columns of four, from the top."""
_RULE = "\u2500"
_LABEL = 7
"""Columns of a label of the vertical axis."""

Point = tuple[float, float]


def terminal_curve(points: Sequence[Point], *, width: int, height: int) -> list[str]:
    """The lines of a plot of `points` (step, y), joined in their order, with axes.

    Points that are not finite are left out. The result is empty if fewer than two are left, and if the plot would be
    too small to read.

    Args:
        points: in ascending order of steps.
        width: columns of the whole plot.
        height: lines of the curve; two more hold the horizontal axis.
    """
    finite = [point for point in points if all(map(math.isfinite, point))]
    columns = width - _LABEL - 2
    if len(finite) < 2 or columns < 20 or height < 3:
        return []
    (first, last), (low, high) = _range([x for x, _ in finite]), _range([y for _, y in finite])
    dots = [
        (round((x - first) / (last - first) * (2 * columns - 1)), round((high - y) / (high - low) * (4 * height - 1)))
        for x, y in finite
    ]
    cells = [[_BLANK] * columns for _ in range(height)]
    for one, other in itertools.pairwise(dots):
        for column, row in _line(one, other):
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    labels = [f"{_short(high - (high - low) * row / (height - 1)):>{_LABEL}}" for row in range(height)]
    lines = [f"{label} \u2524{''.join(map(chr, row))}" for label, row in zip(labels, cells, strict=True)]
    end = f"{_short(last)} step"
    return [
        *lines,
        f"{'':{_LABEL}} \u2514{_RULE * columns}",
        f"{'':{_LABEL}}  {_short(first):<{columns - len(end)}}{end}",
    ]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest value, never the same."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _line(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots between two dots, both included."""
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
    return [
        (round(one[0] + (other[0] - one[0]) * at / steps), round(one[1] + (other[1] - one[1]) * at / steps))
        for at in range(steps + 1)
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"
