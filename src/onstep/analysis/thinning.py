"""Long curves, reduced to what a picture of a given width can show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

COLUMNS = 2000
"""Columns that a curve is reduced to: about the pixels across a printed figure."""


def thin(x: Values, y: Values, columns: int = COLUMNS) -> tuple[Values, Values]:
    """The points of a curve that `thinned_rows` keeps."""
    rows = thinned_rows(x, y, columns)
    return x[rows], y[rows]


def thinned_rows(x: Values, y: Values, columns: int = COLUMNS) -> NDArray[np.intp]:
    """Which points make the same picture: at most five for each of `columns` columns.

    Each column keeps its first, last, lowest and highest point, so that no spike is lost, and its first NaN, which is a
    gap. A curve that is short enough keeps all.

    Args:
        x: Finite and not falling, shape (num_points,).
        y: The same shape; NaN where the curve has a gap.
        columns: How many equally wide columns to divide the range of `x` into.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    starts = _starts(x, columns)
    kept = np.zeros(len(x), dtype=bool)
    kept[starts] = True
    kept[np.append(starts[1:], len(x)) - 1] = True
    is_gap = np.isnan(y)
    kept[_first_where(y == _spread(np.minimum, np.where(is_gap, np.inf, y), starts), starts)] = True
    kept[_first_where(y == _spread(np.maximum, np.where(is_gap, -np.inf, y), starts), starts)] = True
    kept[_first_where(is_gap, starts)] = True
    return np.flatnonzero(kept)


def column_means(x: Values, y: Values, columns: int) -> tuple[Values, Values]:
    """Middle and mean of each column of a long curve; NaN where a column holds nothing finite.

    A curve of at most `columns` points comes back as it is.
    """
    if len(x) <= columns:
        return x, y
    starts = np.unique(np.linspace(0, len(x), columns, endpoint=False).astype(np.intp))
    sizes = np.diff(np.append(starts, len(x)))
    is_finite = np.isfinite(y)
    counts = np.add.reduceat(is_finite.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(is_finite, y, 0.0), starts)
    means = np.where(counts > 0, sums / np.maximum(counts, 1.0), np.nan)
    return np.add.reduceat(x, starts) / sizes, means


def _starts(x: Values, columns: int) -> NDArray[np.intp]:
    """The index at which each column that holds a point begins."""
    span = x[-1] - x[0]
    column = np.floor((x - x[0]) / (span if span > 0 else 1.0) * columns)
    return np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))


def _spread(reduce: np.ufunc, values: Values, starts: NDArray[np.intp]) -> Values:
    """The reduction of each column, repeated for each of its points."""
    return np.repeat(reduce.reduceat(values, starts), np.diff(np.append(starts, len(values))))


def _first_where(chosen: NDArray[np.bool_], starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """The first chosen index of each column that has one."""
    rows = np.flatnonzero(chosen)
    column = np.searchsorted(starts, rows, side="right")
    return rows[np.concatenate([[True], column[1:] != column[:-1]])] if len(rows) else rows
