"""Centred moving means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

SMOOTHED_FROM = 40
"""Points from which on a curve is smoothed when nobody says how much."""
SMOOTHING_SHARE = 25
"""A window that nobody chose spans one in this many of the points."""


def smooth_values(values: Sequence[float] | Values, window: int) -> Values:
    """Centred moving mean of `values`, over `window // 2` neighbours on either side and fewer at the edges.

    So a window of 10 averages 11 points. What is not finite stays as it is and counts in no mean.

    Args:
        values: Shape (num_points,).
        window: The width in points; the values come back unchanged where it is at most 1 or longer than they are.
    """
    array = np.asarray(values, dtype=np.float64)
    if window <= 1 or window > len(array):
        return array
    is_finite = np.isfinite(array)
    width = 2 * (window // 2) + 1
    sums = _window_sums(np.where(is_finite, array, 0.0), width)
    counts = _window_sums(is_finite.astype(np.float64), width)
    return np.where(is_finite, sums / np.maximum(counts, 1.0), array)


def automatic_window(num_points: int) -> int:
    """A window for a curve of that many points: 1, which smooths nothing, for a short one."""
    return 1 if num_points < SMOOTHED_FROM else max(3, num_points // SMOOTHING_SHARE)


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
