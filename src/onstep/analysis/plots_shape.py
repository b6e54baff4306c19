"""Curves made ready to be drawn: smoothed, cut to what shows, and the part of the x axis that shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.plots_options import PlotOptions
from onstep.analysis.series import Curve, is_loss, is_of_evaluation
from onstep.analysis.smoothing import automatic_window, smooth_values, spikes
from onstep.errors import ConfigError

Values = NDArray[np.float64]

OUTLIER_METRICS = ("grad_norm", "max_grad_norm")
"""Shown without their outliers, as losses are."""
_X_ROOM = 0.02
"""Room beside the data where only the other end of the x axis was given, in parts of what shows."""


@dataclass(frozen=True)
class Shape:
    """A curve made ready to be drawn."""

    metric: str
    raw: Curve
    """What shows, with a neighbour on either side where the x axis is bounded."""
    smoothed: Values | None
    """In place of `raw.y`; None where nothing is smoothed."""
    is_inside: NDArray[np.bool_]
    """Which points of `raw` lie between the bounds of the x axis."""

    @property
    def shown(self) -> Values:
        """The values that the reader looks at."""
        return self.raw.y if self.smoothed is None else self.smoothed

    @property
    def inside(self) -> Curve:
        """The points of `raw` between the bounds of the x axis."""
        return Curve(self.raw.x[self.is_inside], self.raw.y[self.is_inside])


def has_outliers(metric: str) -> bool:
    """Whether a few points far outside are left out of the limits of the metric."""
    return is_loss(metric) or metric in OUTLIER_METRICS


def shaped(curve: Curve, metric: str, options: PlotOptions) -> Shape:
    """A curve smoothed and cut to what shows. An evaluation's values are means already, and a learning rate is exact.

    A smoothed perplexity is that of the mean loss.
    """
    smoothed = _smoothed(curve, metric, options)
    if options.perplexity and is_loss(metric):
        curve = replace(curve, y=_perplexity(curve.y))
        smoothed = None if smoothed is None else _perplexity(smoothed)
    seen = curve.within(options.x_min, options.x_max)
    if smoothed is not None:
        smoothed = Curve(curve.x, smoothed).within(options.x_min, options.x_max).y
    return Shape(metric, seen, smoothed, seen.inside(options.x_min, options.x_max))


def with_x_bounds(options: PlotOptions, curves: Iterable[Curve]) -> PlotOptions:
    """The options with both ends of the x axis where one was given, the other at the end of the data.

    Raises:
        ConfigError: when no point of the curves lies between the bounds; with the range that the data have.
    """
    if options.x_min is None and options.x_max is None:
        return options
    known = [one for one in curves if len(one)]
    least, most = min(float(one.x[0]) for one in known), max(float(one.x[-1]) for one in known)
    if not any(one.inside(options.x_min, options.x_max).any() for one in known):
        given = [f"{name}={bound:g}" for name, bound in _bounds(options).items() if bound is not None]
        unit = "minutes" if options.x_axis == "time" else options.x_axis
        raise ConfigError(f"no point lies where {' and '.join(given)}; the x axis ({unit}) has {least:g} to {most:g}.")
    low = least if options.x_min is None else options.x_min
    high = most if options.x_max is None else options.x_max
    room = _X_ROOM * (high - low) or 0.05 * abs(high) or 0.5
    low = low - room if options.x_min is None else low
    return replace(options, x_min=low, x_max=high + room if options.x_max is None else high)


def _bounds(options: PlotOptions) -> dict[str, float | None]:
    return {"x_min": options.x_min, "x_max": options.x_max}


def _smoothed(curve: Curve, metric: str, options: PlotOptions) -> Values | None:
    """The moving mean, which no lone spike widens unless outliers are wanted."""
    window = automatic_window(len(curve)) if options.smooth_window is None else options.smooth_window
    if not 1 < window <= len(curve) or is_of_evaluation(metric) or metric.startswith("learning_rate"):
        return None
    left_out = spikes(curve.y, window) if options.ignore_outliers and has_outliers(metric) else None
    return smooth_values(curve.y, window, left_out)


def _perplexity(losses: Values) -> Values:
    with np.errstate(over="ignore"):
        values = np.exp(losses)
    return np.where(np.isfinite(values), values, np.nan)
