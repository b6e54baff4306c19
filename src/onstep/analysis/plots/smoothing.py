"""Smooths series, determines limits without outliers, and downsamples curves to the resolution of a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_BELOW, _ABOVE = 0.05, 0.15
"""Margin beyond the percentiles, as a fraction of the span between them."""


def outlier_limits(series: Iterable[Values]) -> tuple[float, float] | None:
    """The y limits that show the bulk of all series; None if nothing is finite.

    For each series, these are the 5th and 95th percentiles of its finite values, widened by 5 % of their span below and
    15 % above; the result is the union. An outlier is farther from a percentile than their span. A side without
    outliers is shown in full, so neither the end of a loss curve nor the first of ten evaluations is cut off.
    """
    found = [limits for limits in map(bulk_limits, series) if limits is not None]
    if not found:
        return None
    low, high = min(low for low, _ in found), max(high for _, high in found)
    return (low, high) if high > low else None


def bulk_limits(values: Values) -> tuple[float, float] | None:
    """The limits of one series, possibly equal; None if nothing is finite."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return None
    low, high = (float(bound) for bound in np.percentile(values, [5, 95]))
    span = high - low
    least, most = float(values.min()), float(values.max())
    bottom = least if least >= low - span else low
    top = most if most <= high + span else high + (_ABOVE - _BELOW) * span
    return bottom - _BELOW * span, top + _BELOW * span


SMOOTHED_FROM = 40
"""Minimum number of points for automatic smoothing."""
SMOOTHING_SHARE = 25
"""An automatic window spans one in this many points."""


def smooth_values(
    values: Sequence[float] | Values, window_size: int, left_out: NDArray[np.bool_] | None = None
) -> list[float]:
    """The list of `smoothed`, which has the arguments.

    Args:
        values: the values, one for each point.
        window_size: twice the number of neighbors on either side: 10 averages 11 values.
        left_out: True for the values that the mean leaves out.
    """
    return [float(value) for value in smoothed(values, window_size, left_out)]


def smoothed(values: Sequence[float] | Values, window_size: int, left_out: NDArray[np.bool_] | None = None) -> Values:
    """Centered moving mean of `values`, over `window_size // 2` neighbors on either side.

    A window of 10 therefore averages 11 points. At the start it narrows on both sides, so that the curve starts at its
    first value instead of at the mean of half a window, far below it where a loss falls quickly; at the end it has
    fewer neighbors on the right. Values that are not finite are unchanged and excluded from all means.

    Args:
        values: Shape (num_points,).
        window_size: The width in points; if it is at most 1 or longer than `values`, they are returned unchanged.
        left_out: Points excluded from all means, same shape; they get the mean of their neighbors.
    """
    array = np.asarray(values, dtype=np.float64)
    if window_size <= 1 or window_size > len(array):
        return array
    is_finite = np.isfinite(array)
    counted = is_finite if left_out is None else is_finite & ~left_out
    width = _width(window_size)
    sums = _narrowing_sums(np.where(counted, array, 0.0), width)
    counts = _narrowing_sums(counted.astype(np.float64), width)
    return np.where(is_finite & (counts > 0), sums / np.maximum(counts, 1.0), array)


def spikes(values: Values, window: int) -> NDArray[np.bool_]:
    """Isolated outliers that a moving mean of this window should exclude, shape (num_points,).

    A spike of one step would otherwise become a plateau as wide as the window. Spikes are outside the limits of the
    bulk (`bulk_limits`), with at most half of the surrounding window outside: a divergence is not a spike.
    """
    limits = bulk_limits(values)
    if limits is None or window <= 1:
        return np.zeros(len(values), dtype=bool)
    is_outside = (values < limits[0]) | (values > limits[1])
    if not is_outside.any():
        return is_outside
    width = _width(window)
    near = _window_sums(np.isfinite(values).astype(np.float64), width)
    return is_outside & (_window_sums(is_outside.astype(np.float64), width) <= near / 2)


def automatic_window(num_points: int) -> int:
    """The window for a curve with this many points; 1 (no smoothing) for a short curve."""
    return 1 if num_points < SMOOTHED_FROM else max(3, num_points // SMOOTHING_SHARE)


def _width(window: int) -> int:
    return 2 * (window // 2) + 1


def _window_sums(values: Values, width: int) -> Values:
    """Sums over the `width` (odd) values around each position; values beyond the ends count as 0.

    A window overlaps at most two blocks of `width` values: the end of one and the start of the next. Cumulative sums
    within blocks, instead of over everything, keep a spike of 1e20 from destroying the precision of later sums.
    """
    half, num = width // 2, len(values)
    padded = np.zeros(-(-(num + width) // width) * width)
    padded[half : half + num] = values
    blocks = padded.reshape(-1, width)
    from_start = np.cumsum(blocks, axis=1).ravel()
    to_end = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    first = np.arange(num)
    return np.where(first % width == 0, to_end[:num], to_end[:num] + from_start[first + width - 1])


def _narrowing_sums(values: Values, width: int) -> Values:
    """`_window_sums`, but the windows at the start are as narrow on the right as they are on the left."""
    sums = _window_sums(values, width)
    first = np.cumsum(values[: width - 2])[::2]  # positions 0, 1, 2, ... with 1, 3, 5, ... values
    sums[: len(first)] = first
    return sums


COLUMNS = 2000
"""Number of columns that a curve is reduced to: about the pixels across a printed figure."""


def downsampled_rows(x: Values, y: Values, columns: int = COLUMNS) -> NDArray[np.intp]:
    """Indices of the points that yield the same picture: at most five in each of `columns` columns.

    Each column keeps its first, last, lowest and highest point, so no spike is lost, and its first NaN, which is a gap.
    A short curve keeps all points.

    Args:
        x: Finite and non-decreasing, shape (num_points,).
        y: The same shape; NaN where the curve has a gap.
        columns: Number of equally wide columns that the range of `x` is divided into.
    """
    if len(x) <= 4 * columns:
        return np.arange(len(x))
    span = x[-1] - x[0]
    column = np.floor((x - x[0]) / (span if span > 0 else 1.0) * columns)
    starts = np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))  # of each non-empty column
    kept = np.zeros(len(x), dtype=bool)
    kept[starts] = True
    kept[np.append(starts[1:], len(x)) - 1] = True
    is_gap = np.isnan(y)
    kept[_first_where(y == _spread(np.minimum, np.where(is_gap, np.inf, y), starts), starts)] = True
    kept[_first_where(y == _spread(np.maximum, np.where(is_gap, -np.inf, y), starts), starts)] = True
    kept[_first_where(is_gap, starts)] = True
    return np.flatnonzero(kept)


def column_means(x: Values, y: Values, columns: int) -> tuple[Values, Values]:
    """Mean x and mean y of each column of a long curve; NaN where a column has no finite value.

    A curve of at most `columns` points is returned unchanged.
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


def _spread(reduce: np.ufunc, values: Values, starts: NDArray[np.intp]) -> Values:
    """The reduction of each column, repeated for each of its points."""
    return np.repeat(reduce.reduceat(values, starts), np.diff(np.append(starts, len(values))))


def _first_where(chosen: NDArray[np.bool_], starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """The first chosen index in each column that has one."""
    rows = np.flatnonzero(chosen)
    column = np.searchsorted(starts, rows, side="right")
    return rows[np.concatenate([[True], column[1:] != column[:-1]])] if len(rows) else rows
