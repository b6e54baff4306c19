"""The y axis of a figure: its scale and its limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from onstep.analysis.limits import outlier_limits
from onstep.analysis.plots_options import PlotOptions
from onstep.analysis.plots_shape import Shape, has_outliers
from onstep.analysis.plots_style import log_axis, number_axis

Values = NDArray[np.float64]


def scale_y(axes: Axes, shapes: Sequence[Shape], options: PlotOptions) -> None:
    """Scale, limits and ticks that fit the shapes; bounds that were given win over all."""
    values = np.concatenate([*(shape.raw.y for shape in shapes), np.empty(0)])
    values = values[np.isfinite(values)]
    is_log = options.log_scale and bool((values > 0).any())
    if is_log:
        axes.set_yscale("log", nonpositive="mask")
        limits = _log_range(values[values > 0])
    else:
        limits = _bulk(shapes, options) or _range(values)
    axes.set_ylim(*_bounded(limits, options, is_log=is_log))
    if is_log:
        log_axis(axes.yaxis, *axes.get_ylim())
    else:
        number_axis(axes.yaxis, si_from=1e4)


def _bounded(limits: tuple[float, float], options: PlotOptions, *, is_log: bool) -> tuple[float, float]:
    """The limits with the given bounds; where a bound is beyond all of the data, the other end moves away from it."""
    low = limits[0] if options.y_min is None else options.y_min
    high = limits[1] if options.y_max is None else options.y_max
    if low < high:
        return low, high
    if options.y_max is not None:
        return (high / 10 if is_log else high - (abs(high) or 1.0)), high
    return low, (low * 10 if is_log else low + max(abs(low), 1.0))


def _bulk(shapes: Sequence[Shape], options: PlotOptions) -> tuple[float, float] | None:
    """Limits that leave outliers out, where that is wanted and fits the metrics."""
    spiky = [shape.raw.y for shape in shapes if has_outliers(shape.metric)]
    return outlier_limits(spiky) if options.ignore_outliers else None


def _range(values: Values) -> tuple[float, float]:
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _log_range(values: Values) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = max((high / low) ** 0.05, 1.02)
    return low / room, high * room
