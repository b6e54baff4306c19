"""One metric of one run as a curve: which records have it, and where they stand on the x axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.training_log import TrainingLog
from onstep.errors import ConfigError, DataError

Values = NDArray[np.float64]

X_COLUMNS = {
    "step": "global_step",
    "epoch": "epoch",
    "time": "timestamp",
    "tokens": "total_tokens",
    "flops": "total_flos",
}
"""What the x axis can show, and the key of the records that it is read from."""
_ALSO_COLUMNS = {"tokens": "num_input_tokens_seen"}
"""Read where a log has none of the above: the key of Hugging Face's Trainer."""
TRAINING_METRICS = ("loss", "grad_norm", "max_grad_norm", "learning_rate")
"""Read from records of training only, whatever an evaluation tells under these names."""
NOT_METRICS = ("timestamp", "global_step", "step", "epoch")
"""What a record says of its place in the run."""
_TOTALS = ("tokens", "flops")
"""Counted up by training; an evaluation stands at the total of its step."""


@dataclass(frozen=True)
class Curve:
    """Points of a metric, in order; two arrays of one length."""

    x: Values
    """Finite and not falling. Minutes since the start on the axis "time"."""
    y: Values
    """NaN where the metric was not finite."""

    def __len__(self) -> int:
        return len(self.x)

    @property
    def num_not_finite(self) -> int:
        """How many points are gaps."""
        return int(np.isnan(self.y).sum())

    def inside(self, x_min: float | None, x_max: float | None) -> NDArray[np.bool_]:
        """Which points lie between two bounds, shape (num_points,)."""
        return (self.x >= (-np.inf if x_min is None else x_min)) & (self.x <= (np.inf if x_max is None else x_max))

    def within(self, x_min: float | None, x_max: float | None) -> Curve:
        """The part that shows between two bounds, with the neighbour on either side so that lines go on to the edge."""
        first = 0 if x_min is None else max(int(np.searchsorted(self.x, x_min)) - 1, 0)
        end = len(self.x) if x_max is None else int(np.searchsorted(self.x, x_max, side="right")) + 1
        return Curve(self.x[first:end], self.y[first:end])


def x_keys(x_axis: str) -> list[str]:
    """The keys that an x axis may be read from; a column of a long log takes a while, so that no others are read."""
    found = [X_COLUMNS[x_axis], *([_ALSO_COLUMNS[x_axis]] if x_axis in _ALSO_COLUMNS else [])]
    return ["global_step", *found] if x_axis in _TOTALS else found


def x_axes(log: TrainingLog) -> list[str]:
    """The x axes that a log has anything for."""
    return [axis for axis in X_COLUMNS if np.isfinite(_x_column(log, axis)).any()]


def check_x_axis(x_axis: str) -> None:
    """Refuse an x axis that does not exist.

    Raises:
        ConfigError: a ValueError, with those there are.
    """
    if x_axis not in X_COLUMNS:
        raise ConfigError(f"Invalid x_axis: {x_axis!r}; choose one of {', '.join(X_COLUMNS)}.")


def is_loss(metric: str) -> bool:
    """Whether the metric is a mean loss in nats, whose exponential is a perplexity."""
    return metric == "loss" or metric.endswith("_loss")


def is_of_evaluation(metric: str) -> bool:
    """Whether the metric is told by an evaluation or a test."""
    return metric.startswith(("eval_", "test_"))


def rows_of(log: TrainingLog, metric: str) -> NDArray[np.bool_]:
    """Which records count for the metric, shape (num_records,)."""
    rows = log.has(metric)
    return rows & ~log.is_evaluation if metric in TRAINING_METRICS else rows


def metrics_of(log: TrainingLog) -> list[str]:
    """The keys of a log that hold numbers in some record, in the order in which they first appear."""
    keys = [key for key in log.keys() if key not in NOT_METRICS]  # noqa: SIM118 - a log is no dictionary
    log.load_columns(keys)
    return [key for key in keys if np.isfinite(log.column(key)).any()]


def first_timestamp(log: TrainingLog, metrics: Iterable[str]) -> float:
    """Time (unix seconds) of the first record that has one of the metrics; NaN where none has."""
    times = [log.column("timestamp")[rows_of(log, metric)] for metric in metrics]
    found = np.concatenate([*times, np.empty(0)])
    found = found[np.isfinite(found)]
    return float(found.min()) if len(found) else float("nan")


def curve(log: TrainingLog, metric: str, x_axis: str = "step", start: float | None = None) -> Curve:
    """The points of `metric`, empty where the log has none.

    Where a run went back to an earlier step, and its log still holds what came after that step, only the newer branch
    is kept.

    Args:
        log: The run.
        metric: A key of its records.
        x_axis: "step", "epoch", "time" (minutes), "tokens" or "flops".
        start: Where the axis "time" begins (unix seconds); None: at the first record of the metric.

    Raises:
        ConfigError: for another x axis.
        DataError: when the log has the metric and nothing to place it on that axis by.
    """
    check_x_axis(x_axis)
    log.load_columns([*x_keys(x_axis), metric])
    rows = rows_of(log, metric)
    if not rows.any():
        return Curve(np.empty(0), np.empty(0))
    x = places(log, x_axis)[rows]
    if not np.isfinite(x).any():
        raise DataError(_no_place(log, metric, x_axis))
    if x_axis == "time":
        x = (x - (first_timestamp(log, [metric]) if start is None else start)) / 60
    y = log.column(metric)[rows]
    newest = newest_rows(x)
    return Curve(x[newest], np.where(np.isfinite(y), y, np.nan)[newest])


def curves(logs: Sequence[TrainingLog], metrics: Sequence[str], x_axis: str) -> list[list[Curve]]:
    """For each metric the curve of each log; on the axis "time" the curves of a log begin together."""
    check_x_axis(x_axis)
    for log in logs:
        log.load_columns([*x_keys(x_axis), "eval_loss", *metrics])  # in one pass over the file
    starts = [first_timestamp(log, metrics) if x_axis == "time" else None for log in logs]
    return [[curve(log, metric, x_axis, start) for log, start in zip(logs, starts, strict=True)] for metric in metrics]


def places(log: TrainingLog, x_axis: str) -> Values:
    """Where each record stands on the x axis (time in unix seconds), shape (num_records,); NaN where not known."""
    found = _x_column(log, x_axis)
    if x_axis not in _TOTALS:
        return found
    steps = log.column("global_step")
    known = np.isfinite(found) & np.isfinite(steps)
    if not known.any():
        return found
    return np.where(np.isfinite(found), found, _between(steps, steps[known], found[known]))


def newest_rows(x: Values) -> NDArray[np.intp]:
    """The places of the newest branch: where they fall back, what came before and stands further right is left out."""
    known = np.flatnonzero(np.isfinite(x))
    falls = np.where(np.diff(x[known]) < 0, x[known][1:], np.inf)
    lowest_later = np.append(np.minimum.accumulate(falls[::-1])[::-1], np.inf)[: len(known)]
    return known[x[known] < lowest_later]


def _x_column(log: TrainingLog, x_axis: str) -> Values:
    """What the records say of their place; NaN where they say nothing."""
    found = log.column(X_COLUMNS[x_axis])
    if x_axis in _ALSO_COLUMNS and not np.isfinite(found).any():
        return log.column(_ALSO_COLUMNS[x_axis])
    return found


def _between(steps: Values, known_steps: Values, known_totals: Values) -> Values:
    """The total at each step: in between and before the first in proportion, beyond the last at the last rate."""
    known_steps, last_of_step = np.unique(known_steps[::-1], return_index=True)
    known_totals = known_totals[::-1][last_of_step]
    if known_steps[0] > 0:
        known_steps, known_totals = np.append(0.0, known_steps), np.append(0.0, known_totals)
    totals = np.interp(steps, known_steps, known_totals)
    if len(known_steps) > 1:
        rate = (known_totals[-1] - known_totals[-2]) / (known_steps[-1] - known_steps[-2])
        totals = totals + np.maximum(steps - known_steps[-1], 0.0) * rate
    return np.where(np.isfinite(steps), totals, np.nan)


def _no_place(log: TrainingLog, metric: str, x_axis: str) -> str:
    known = x_axes(log)
    instead = f"choose another x axis: {', '.join(known)}" if known else "its records have no place in the run"
    keys = " or ".join(repr(key) for key in (X_COLUMNS[x_axis], _ALSO_COLUMNS.get(x_axis)) if key)
    return f"{log.log_path}: the records with {metric!r} have no {keys} for the x axis {x_axis!r}; {instead}."
