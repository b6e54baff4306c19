"""Curves made ready to be drawn: found, smoothed, cut to what shows, and the part of the x axis that shows them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.series import Curve, check_x_axis, curves, is_loss, is_of_evaluation, metrics_of
from onstep.analysis.smoothing import automatic_window, smooth_values, spikes
from onstep.analysis.training_log import TrainingLog
from onstep.errors import ConfigError, DataError


@dataclass(frozen=True)
class PlotOptions:
    """How curves are drawn; the same for every axes of a figure."""

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

    def __post_init__(self) -> None:
        check_x_axis(self.x_axis)
        if self.smooth_window is not None and self.smooth_window < 1:
            raise ConfigError(f"smooth_window must be at least 1 (no smoothing), got {self.smooth_window}.")
        check_range("x", self.x_min, self.x_max)
        check_range("y", self.y_min, self.y_max)
        check_figsize(self.figsize)
        for name, bound in (("y_min", self.y_min), ("y_max", self.y_max)):
            if self.log_scale and bound is not None and bound <= 0:
                raise ConfigError(f"{name} must be > 0 on a logarithmic axis, got {bound:g}.")


def check_range(name: str, low: float | None, high: float | None) -> None:
    """Refuse bounds that show nothing.

    Raises:
        ConfigError: naming both.
    """
    for bound in (low, high):
        if bound is not None and not math.isfinite(bound):
            raise ConfigError(f"{name}_min and {name}_max must be finite, got {bound}.")
    if low is not None and high is not None and not low < high:
        raise ConfigError(f"{name}_min must be below {name}_max, got {low:g} and {high:g}.")


def check_figsize(figsize: tuple[float, float]) -> None:
    """Refuse a size in inches that no picture can have.

    Raises:
        ConfigError: naming it.
    """
    if len(figsize) != 2 or not all(0.5 <= side <= 200 for side in figsize):
        raise ConfigError(f"figsize must be width and height in inches, each from 0.5 to 200, got {figsize}.")


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


def found_curves(
    logs: list[TrainingLog], metrics: list[str], options: PlotOptions, need: int | None = None
) -> tuple[list[list[Curve]], PlotOptions]:
    """A row of curves for each metric, and the options with both ends of a bounded x axis.

    Args:
        logs: The runs.
        metrics: What to draw.
        options: What was asked for.
        need: None: some run must have each of the metrics; else one of so many first metrics is enough.
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
    return found, with_x_bounds(options, [one for row in found for one in row])


def _nothing(logs: list[TrainingLog], metrics: list[str]) -> str:
    """What to say where no run has what was asked for."""
    known = list(dict.fromkeys(name for log in logs for name in metrics_of(log)))
    where = str(logs[0].log_path) if len(logs) == 1 else "none of the logs"
    wanted = " or ".join(map(repr, metrics))
    head = f"{where} has no {wanted}" if len(logs) == 1 else f"{where} has {wanted}"
    if not known:
        return f"{head}, and no other metric yet; log at least one step first."
    near = difflib.get_close_matches(metrics[0], known, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{head}.{hint} There is {', '.join(known)}."
