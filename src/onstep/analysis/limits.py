"""How high a picture of a curve has to be, where a few points lie far outside."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

_BELOW, _ABOVE = 0.05, 0.15
"""Room beyond the percentiles, in parts of the span between them."""


def outlier_limits(series: Iterable[Values]) -> tuple[float, float] | None:
    """Lowest and highest y that shows the bulk of all series; None where there is nothing finite.

    For each series: the 5th and 95th percentile of its finite values, widened by 5 % of their span below and 15 %
    above; of these the least and the greatest. An outlier lies beyond a percentile by more than their span: where a
    side has none, all of it shows, so that neither the end of a loss nor the first of ten evaluations is cut off.
    """
    found = [limits for limits in map(bulk_limits, series) if limits is not None]
    if not found:
        return None
    low, high = min(low for low, _ in found), max(high for _, high in found)
    return (low, high) if high > low else None


def bulk_limits(values: Values) -> tuple[float, float] | None:
    """The limits of one series, also where they are the same; None where there is nothing finite."""
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return None
    low, high = (float(bound) for bound in np.percentile(values, [5, 95]))
    span = high - low
    least, most = float(values.min()), float(values.max())
    bottom = least if least >= low - span else low
    top = most if most <= high + span else high + (_ABOVE - _BELOW) * span
    return bottom - _BELOW * span, top + _BELOW * span
