"""Prepares the curves of a figure to be drawn, as its options say: the visible range, smoothing, perplexity, hours."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.plots.series import (
    MOST_DRAWN,
    Curve,
    Values,
    check_x_axis,
    curves,
    drawable,
    is_loss,
    is_of_evaluation,
    metrics_of,
)
from onstep.analysis.plots.smoothing import automatic_window, smoothed, spikes
from onstep.errors import ConfigError, DataError


@dataclass(frozen=True)
class PlotOptions:
    """Options for drawing curves, shared by all axes of a figure."""

    x_axis: str = "step"
    smooth_window: int | None = None
    log_scale: bool = False
    output_path: str | Path | None = None
    figsize: tuple[float, float] = (12, 8)
    show: bool = False
    title: str | None = None
    ignore_outliers: bool = True
    perplexity: bool = False
    x_min: float | None = None
    x_max: float | None = None
    y_min: float | None = None
    y_max: float | None = None
    log_x: bool = False
    in_hours: bool = False
    """Whether the axis "time", including curves and bounds, is in hours instead of minutes."""

    def __post_init__(self) -> None:
        check_x_axis(self.x_axis)
        if self.smooth_window is not None and self.smooth_window < 1:
            raise ConfigError(f"smooth_window must be at least 1 (no smoothing), got {self.smooth_window}.")
        check_range("x", self.x_min, self.x_max)
        check_range("y", self.y_min, self.y_max)
        check_figsize(self.figsize)
        for name, bound in (("y_min", self.y_min), ("y_max", self.y_max)):
            if self.log_scale:
                _check_positive(name, bound)
        for name, bound in (("x_min", self.x_min), ("x_max", self.x_max)):
            if self.log_x:
                _check_positive(name, bound)


def _check_positive(name: str, bound: float | None) -> None:
    if bound is not None and bound <= 0:
        raise ConfigError(f"{name} must be > 0 on a logarithmic axis, got {bound:g}.")


def check_range(name: str, low: float | None, high: float | None) -> None:
    """Raise a ConfigError that names both bounds if nothing lies between them."""
    for bound in (low, high):
        if bound is not None and not math.isfinite(bound):
            raise ConfigError(f"{name}_min and {name}_max must be finite, got {bound}.")
        if bound is not None and abs(bound) > MOST_DRAWN:
            raise ConfigError(
                f"{name}_min and {name}_max must be from {-MOST_DRAWN:g} to {MOST_DRAWN:g}, got {bound:g}."
            )
    if low is not None and high is not None and not low < high:
        raise ConfigError(f"{name}_min must be below {name}_max, got {low:g} and {high:g}.")


def check_figsize(figsize: tuple[float, float]) -> None:
    """Raise a ConfigError for an invalid figure size in inches."""
    if len(figsize) != 2 or not all(0.5 <= side <= 200 for side in figsize):
        raise ConfigError(f"figsize must be width and height in inches, each from 0.5 to 200, got {figsize}.")


OUTLIER_METRICS = ("grad_norm", "max_grad_norm")
"""Metrics shown without their outliers, like losses."""

_HOURS_FROM = 180.0
"""Minutes from which on a time axis is in hours."""

_MOST_LISTED = 50
"""Maximum number of metrics listed in an error message."""

_X_ROOM = 0.02
"""Margin of the x axis on a side without a given limit, as a fraction of the visible range."""


@dataclass(frozen=True)
class Shape:
    """A curve prepared for drawing."""

    metric: str
    raw: Curve
    """The visible points, plus a neighbor on either side if the x axis is bounded."""
    smoothed: Values | None
    """Replaces `raw.y`; None if not smoothed."""
    is_inside: NDArray[np.bool_]
    """Mask of the points of `raw` between the bounds of the x axis."""
    log_x: bool = False
    """Whether the x axis is logarithmic; all x are then positive, unless none is."""

    @property
    def shown(self) -> Values:
        """The values of the main line."""
        return self.raw.y if self.smoothed is None else self.smoothed

    @property
    def inside(self) -> Curve:
        """The points of `raw` between the bounds of the x axis."""
        return Curve(self.raw.x[self.is_inside], self.raw.y[self.is_inside])


def has_outliers(metric: str) -> bool:
    """Whether outliers are excluded from the y limits of the metric."""
    return is_loss(metric) or metric in OUTLIER_METRICS


def shaped(curve: Curve, metric: str, options: PlotOptions) -> Shape:
    """Smooth a curve and cut it to the visible range. Evaluations (already means) and learning rates are not smoothed.

    A smoothed perplexity is that of the mean loss.
    """
    smoothed = _smoothed(curve, metric, options)
    if options.perplexity and is_loss(metric):
        curve = replace(curve, y=_perplexity(curve.y))
        smoothed = None if smoothed is None else _perplexity(smoothed)
    first = int(np.searchsorted(curve.x, 0.0, side="right")) if options.log_x else 0
    if 0 < first < len(curve):  # only now, since the moving mean starts with the first point
        curve = Curve(curve.x[first:], curve.y[first:])
        smoothed = None if smoothed is None else smoothed[first:]
    seen = curve.within(options.x_min, options.x_max)
    if smoothed is not None:
        smoothed = Curve(curve.x, smoothed).within(options.x_min, options.x_max).y
    return Shape(metric, seen, smoothed, seen.inside(options.x_min, options.x_max), options.log_x)


def with_x_bounds(options: PlotOptions, curves: Iterable[Curve]) -> PlotOptions:
    """The options with both limits of the x axis if one is given; the other is taken from the data.

    Raises:
        ConfigError: if no point of the curves lies between the bounds; the message gives the range of the data.
    """
    if options.x_min is None and options.x_max is None:
        return options
    known = [one for one in curves if len(one)]
    least, most = min(float(one.x[0]) for one in known), max(float(one.x[-1]) for one in known)
    if not any(one.inside(options.x_min, options.x_max).any() for one in known):
        bounds = (("x_min", options.x_min), ("x_max", options.x_max))
        given = [f"{name}={bound:g}" for name, bound in bounds if bound is not None]
        unit = "minutes" if options.x_axis == "time" else options.x_axis
        raise ConfigError(
            f"there are no points with {' and '.join(given)}; the x axis ({unit}) ranges from {least:g} to {most:g}."
        )
    low = least if options.x_min is None else options.x_min
    high = most if options.x_max is None else options.x_max
    if options.log_x:
        low = min((float(one.x[one.x > 0][0]) for one in known if one.x[-1] > 0), default=low)
        return replace(options, x_min=options.x_min or low, x_max=high)
    room = _X_ROOM * (high - low) or 0.05 * abs(high) or 0.5
    low = low - room if options.x_min is None else low
    return replace(options, x_min=low, x_max=high + room if options.x_max is None else high)


def _smoothed(curve: Curve, metric: str, options: PlotOptions) -> Values | None:
    """The moving mean, without isolated spikes unless outliers are requested."""
    window = automatic_window(len(curve)) if options.smooth_window is None else options.smooth_window
    if not 1 < window <= len(curve) or is_of_evaluation(metric) or metric.startswith("learning_rate"):
        return None
    left_out = spikes(curve.y, window) if options.ignore_outliers and has_outliers(metric) else None
    return smoothed(curve.y, window, left_out)


def _perplexity(losses: Values) -> Values:
    with np.errstate(over="ignore"):
        return drawable(np.exp(losses))


def found_curves(
    logs: list[TrainingLog], metrics: list[str], options: PlotOptions, need: int | None = None
) -> tuple[list[list[Curve]], PlotOptions]:
    """A row of curves for each metric, and the options with both limits of a bounded x axis.

    Args:
        logs: The runs.
        metrics: Metrics to draw.
        options: The requested options.
        need: None: each metric must be in some run; n: one of the first n metrics is enough.
    """
    if not metrics:
        raise ConfigError(f"metrics must name at least one key, got {metrics}.")
    found = curves(logs, metrics, options.x_axis)
    has_any = [any(map(len, row)) for row in found]
    missing = [metric for metric, has in zip(metrics, has_any, strict=True) if not has]
    if need is not None and not any(has_any[:need]):
        raise DataError(_nothing(logs, metrics[:need]))
    if need is None and missing:
        raise DataError(_nothing(logs, missing))
    options = with_x_bounds(options, [one for row in found for one in row])
    if options.x_axis != "time" or max(one.x[-1] for row in found for one in row if len(one)) <= _HOURS_FROM:
        return found, options
    options = replace(options, in_hours=True)
    if options.x_min is not None and options.x_max is not None:
        options = replace(options, x_min=options.x_min / 60, x_max=options.x_max / 60)
    return [[Curve(one.x / 60, one.y) for one in row] for row in found], options


def _nothing(logs: list[TrainingLog], metrics: list[str]) -> str:
    """The error message if no run has the requested metrics."""
    known = list(dict.fromkeys(name for log in logs for name in metrics_of(log)))
    where = str(logs[0].log_path) if len(logs) == 1 else "none of the logs"
    wanted = " or ".join(map(repr, metrics))
    head = f"{where} has no {wanted}" if len(logs) == 1 else f"{where} has {wanted}"
    if not known:
        return f"{head}, and no other metric yet; log at least one step first."
    near = difflib.get_close_matches(metrics[0], known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    more = f" and {len(known) - _MOST_LISTED} more" if len(known) > _MOST_LISTED else ""
    return f"{head}.{hint} Available: {', '.join(known[:_MOST_LISTED])}{more}."
