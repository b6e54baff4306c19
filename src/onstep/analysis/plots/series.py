"""Extracts metrics of runs as curves: selects records and places them on the x axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.training_log import TrainingLog
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
