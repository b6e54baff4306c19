"""Centred moving means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.limits import bulk_limits

Values = NDArray[np.float64]

SMOOTHED_FROM = 40
"""Points from which on a curve is smoothed when nobody says how much."""
SMOOTHING_SHARE = 25
"""A window that nobody chose spans one in this many of the points."""


def smooth_values(values: Sequence[float] | Values, window: int, left_out: NDArray[np.bool_] | None = None) -> Values:
    """Centred moving mean of `values`, over `window // 2` neighbours on either side and fewer at the edges.

    So a window of 10 averages 11 points. What is not finite stays as it is and counts in no mean.

    Args:
        values: Shape (num_points,).
        window: The width in points; the values come back unchanged where it is at most 1 or longer than they are.
        left_out: Points that count in no mean, the same shape; they get the mean of those around them.
    """
    array = np.asarray(values, dtype=np.float64)
    if window <= 1 or window > len(array):
        return array
    is_finite = np.isfinite(array)
    counted = is_finite if left_out is None else is_finite & ~left_out
    width = _width(window)
    sums = _window_sums(np.where(counted, array, 0.0), width)
    counts = _window_sums(counted.astype(np.float64), width)
    return np.where(is_finite & (counts > 0), sums / np.maximum(counts, 1.0), array)


def spikes(values: Values, window: int) -> NDArray[np.bool_]:
    """Which points a moving mean of that window should leave out, shape (num_points,): lone ones far outside.

    A spike of one step would be a plateau as wide as the window. They lie outside the limits of the bulk
    (`bulk_limits`), and no more than half of the window around them does: a divergence is no spike.
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
    """A window for a curve of that many points: 1, which smooths nothing, for a short one."""
    return 1 if num_points < SMOOTHED_FROM else max(3, num_points // SMOOTHING_SHARE)


def _width(window: int) -> int:
    return 2 * (window // 2) + 1


def _window_sums(values: Values, width: int) -> Values:
    """Sums of the `width` (odd) values around each place, what is beyond the ends counting as 0.

    A window touches at most two blocks of `width` values: the end of one and the beginning of the next. Sums that run
    within a block, instead of over everything, keep a spike of 1e20 from spoiling what comes after it.
    """
    half, num = width // 2, len(values)
    padded = np.zeros(-(-(num + width) // width) * width)
    padded[half : half + num] = values
    blocks = padded.reshape(-1, width)
    from_start = np.cumsum(blocks, axis=1).ravel()
    to_end = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
    first = np.arange(num)
    return np.where(first % width == 0, to_end[:num], to_end[:num] + from_start[first + width - 1])
