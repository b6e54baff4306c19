"""Extracts metrics of runs as curves: selects records, places them on the x axis and prepares them to be drawn."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.plots.smoothing import automatic_window, smooth_values, spikes
from onstep.errors import ConfigError, DataError

Values = NDArray[np.float64]

X_COLUMNS = {
    "step": "global_step",
    "epoch": "epoch",
    "time": "timestamp",
    "tokens": "total_tokens",
    "flops": "total_flos",
}
"""x axis -> key of the records that it is read from."""
MOST_DRAWN = 1e100
"""Numbers beyond it are not drawn: they count as not finite, since sums and ratios of them would be."""
_ALSO_COLUMNS = {"tokens": "num_input_tokens_seen"}
"""Keys of Hugging Face's Trainer, read if a log has none of the above."""
TRAINING_METRICS = ("loss", "grad_norm", "max_grad_norm", "learning_rate")
"""Metrics read from training records only, even if evaluations report the same names."""
NOT_METRICS = ("timestamp", "global_step", "step", "epoch")
"""Keys of a record for its position in the run."""
_TOTALS = ("tokens", "flops")
"""Cumulative axes; an evaluation is placed at the total of its step."""


@dataclass(frozen=True)
class Curve:
    """Points of a metric, in order; two arrays of the same length."""

    x: Values
    """Finite and non-decreasing. On the axis "time", minutes since the start."""
    y: Values
    """NaN where the metric was not finite, or beyond `MOST_DRAWN`."""

    def __len__(self) -> int:
        return len(self.x)

    @property
    def num_not_finite(self) -> int:
        """Number of points that are gaps."""
        return int(np.isnan(self.y).sum())

    def inside(self, x_min: float | None, x_max: float | None) -> NDArray[np.bool_]:
        """Mask of the points between two bounds, shape (num_points,)."""
        return (self.x >= (-np.inf if x_min is None else x_min)) & (self.x <= (np.inf if x_max is None else x_max))

    def within(self, x_min: float | None, x_max: float | None) -> Curve:
        """The part between two bounds, plus a neighbor on either side so that lines extend to the edge."""
        first = 0 if x_min is None else max(int(np.searchsorted(self.x, x_min)) - 1, 0)
        end = len(self.x) if x_max is None else int(np.searchsorted(self.x, x_max, side="right")) + 1
        return Curve(self.x[first:end], self.y[first:end])


def drawable(values: Values) -> Values:
    """The values, NaN where they are not finite or beyond `MOST_DRAWN`."""
    return np.where(np.abs(values) <= MOST_DRAWN, values, np.nan)


def x_axes(log: TrainingLog) -> list[str]:
    """The x axes for which a log has values."""
    return [axis for axis in X_COLUMNS if np.isfinite(_x_column(log, axis)).any()]


def check_x_axis(x_axis: str) -> None:
    """Raise a ConfigError that lists the valid x axes if `x_axis` is not one of them."""
    if x_axis not in X_COLUMNS:
        raise ConfigError(f"Invalid x_axis: {x_axis!r}; choose one of {', '.join(X_COLUMNS)}.")


def is_loss(metric: str) -> bool:
    """Whether the metric is a mean loss in nats, whose exponential is a perplexity."""
    return metric == "loss" or metric.endswith("_loss")


def is_of_evaluation(metric: str) -> bool:
    """Whether the metric is reported by an evaluation or a test."""
    return metric.startswith(("eval_", "test_"))


def rows_of(log: TrainingLog, metric: str) -> NDArray[np.bool_]:
    """Mask of the records that count for the metric, shape (num_records,)."""
    rows = log.has(metric)
    return rows & ~log.is_evaluation if metric in TRAINING_METRICS else rows


def metrics_of(log: TrainingLog) -> list[str]:
    """The keys of a log that have a number in some record, in order of first appearance."""
    keys = [key for key in log.keys() if key not in NOT_METRICS]  # noqa: SIM118 - a log is not a dictionary
    return [key for key in keys if log.columns.has_finite(key)]


def first_timestamp(log: TrainingLog, metrics: Iterable[str]) -> float:
    """Time (Unix seconds) of the first record that has one of the metrics; NaN if there is none."""
    rows = np.zeros(log.num_records, bool)
    for metric in metrics:
        with_metric, _ = log.columns.points(metric)
        rows[with_metric] |= ~log.is_evaluation[with_metric] if metric in TRAINING_METRICS else True
    found = log.column("timestamp")[rows]
    found = found[np.isfinite(found)]
    return float(found.min()) if len(found) else float("nan")


def curve(log: TrainingLog, metric: str, x_axis: str = "step", start: float | None = None) -> Curve:
    """The points of `metric`; empty if the log has none.

    If a run was rolled back to an earlier step and its log still contains the records after that step, only the newer
    branch is kept.

    Args:
        log: The run.
        metric: A key of its records.
        x_axis: "step", "epoch", "time" (minutes), "tokens" or "flops".
        start: Origin of the axis "time" (Unix seconds); None: the first record of the metric.

    Raises:
        ConfigError: for an unknown x axis.
        DataError: if the log has the metric, but no values for that x axis.
    """
    check_x_axis(x_axis)
    rows = rows_of(log, metric)
    if not rows.any():
        return Curve(np.empty(0), np.empty(0))
    x = drawable(places(log, x_axis)[rows])
    if not np.isfinite(x).any():
        known = x_axes(log)
        instead = f"choose another x axis: {', '.join(known)}" if known else "its records have no position in the run"
        keys = " or ".join(repr(key) for key in (X_COLUMNS[x_axis], _ALSO_COLUMNS.get(x_axis)) if key)
        raise DataError(
            f"{log.log_path}: the records with {metric!r} have no {keys} for the x axis {x_axis!r}; {instead}."
        )
    if x_axis == "time":
        x = (x - (first_timestamp(log, [metric]) if start is None else start)) / 60
    y = log.column(metric)[rows]
    newest = newest_rows(x)
    return Curve(x[newest], drawable(y[newest]))


def curves(logs: Sequence[TrainingLog], metrics: Sequence[str], x_axis: str) -> list[list[Curve]]:
    """For each metric, the curve of each log; on the axis "time", the curves of a log share their origin."""
    check_x_axis(x_axis)
    starts = [first_timestamp(log, metrics) if x_axis == "time" else None for log in logs]
    return [[curve(log, metric, x_axis, start) for log, start in zip(logs, starts, strict=True)] for metric in metrics]


def places(log: TrainingLog, x_axis: str) -> Values:
    """The position of each record on the x axis (time in Unix seconds), shape (num_records,); NaN if unknown."""
    found = _x_column(log, x_axis)
    if x_axis not in _TOTALS:
        return found
    steps, found = drawable(log.column("global_step")), drawable(found)
    known = np.isfinite(found) & np.isfinite(steps)
    if not known.any():
        return found
    return np.where(np.isfinite(found), found, _between(steps, steps[known], found[known]))


def newest_rows(x: Values) -> NDArray[np.intp]:
    """Indices of the newest branch: where positions go back, earlier records further right are dropped."""
    known = np.flatnonzero(np.isfinite(x))
    falls = np.where(np.diff(x[known]) < 0, x[known][1:], np.inf)
    lowest_later = np.append(np.minimum.accumulate(falls[::-1])[::-1], np.inf)[: len(known)]
    return known[x[known] < lowest_later]


def _x_column(log: TrainingLog, x_axis: str) -> Values:
    """The x values of the records; NaN where there is none."""
    found = log.column(X_COLUMNS[x_axis])
    if x_axis in _ALSO_COLUMNS and not np.isfinite(found).any():
        return log.column(_ALSO_COLUMNS[x_axis])
    return found


def _between(steps: Values, known_steps: Values, known_totals: Values) -> Values:
    """The total at each step: interpolated up to the last known step, extrapolated beyond it at the last rate."""
    known_steps, last_of_step = np.unique(known_steps[::-1], return_index=True)
    known_totals = known_totals[::-1][last_of_step]
    if known_steps[0] > 0:
        known_steps, known_totals = np.append(0.0, known_steps), np.append(0.0, known_totals)
    totals = np.interp(steps, known_steps, known_totals)
    if len(known_steps) > 1:
        with np.errstate(over="ignore"):
            rate = (known_totals[-1] - known_totals[-2]) / (known_steps[-1] - known_steps[-2])
            totals = totals + np.maximum(steps - known_steps[-1], 0.0) * (rate if np.isfinite(rate) else 0.0)
    return np.where(np.isfinite(steps), totals, np.nan)


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
    return smooth_values(curve.y, window, left_out)


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
