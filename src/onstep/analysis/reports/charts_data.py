"""Prepares the curves of runs for the charts of the report: grouped metrics, downsampled to a budget of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.logs.run_status import rewind_command
from onstep.analysis.logs.tokenizers import LossUnit, loss_unit
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.plots.axes import NAMES, look_of
from onstep.analysis.plots.series import (
    X_COLUMNS,
    drawable,
    first_timestamp,
    is_loss,
    is_of_evaluation,
    metrics_of,
    newest_rows,
    places,
    rows_of,
    x_axes,
)
from onstep.analysis.plots.smoothing import automatic_window, bulk_limits, spikes

Values = NDArray[np.float64]

GROUPS = (
    ("Loss", ()),
    ("Optimizer", ("learning_rate", "lr", "grad_norm", "weight_norm", "weight_decay", "loss_scale", "num_zeros")),
    ("Memory", ("mem", "memory")),
    ("Speed", ("per_second", "per_sec", "runtime", "mfu", "time", "tok_s", "flops", "throughput", "goodput")),
    ("Progress", ("tokens", "total_tokens", "total_flos", "num_input_tokens_seen", "samples")),
)
"""Groups in display order, and the words that assign a metric to a group; the first match counts."""
OTHER, EVALUATION = "Other", "Evaluation"
_GROUP_NAMES = (GROUPS[0][0], EVALUATION, *(name for name, _ in GROUPS[1:]), OTHER)
MOST_NUMBERS = 70_000
"""Maximum number of numbers of all curves together, about 7 bytes each."""
MOST_CHARTS = 1000
"""Maximum number of charts; further metrics are only named in a note."""
_FEWEST_COLUMNS, _MOST_COLUMNS = 20, 400
_PER_COLUMN = 3
"""Numbers per column: the lowest, the mean and the highest value."""
_MOST_NODES = 300
"""Maximum number of steps of a run whose epoch, time, tokens and operations are recorded; between them, a chart
interpolates."""
_MOST_GAPS = 100

_DASHES = {"-": "", "--": "7 4", ":": "2 3"}


def report_data(logs: Sequence[TrainingLog], labels: Sequence[str]) -> dict[str, Any]:
    """The data of all charts of the page, as JSON values; metrics with only one value appear in the tables only.

    Of more than `MOST_CHARTS` metrics, the first are drawn; `left_out` is the number of the others.

    {"left_out": ..., "runs": [{label, colour, dash, steps, axes, rewind}], "axes": [...], "groups": [{name, metrics:
    [{key, name, evaluation, series}]}]}. `colour` is an index; `steps` are the lists that the series of the run refer
    to; `axes` has, for each axis but "step", a list of steps and one of values; `rewind` is the command that shows a
    step, with `{step}` for its number. A series is {run, points, missing, gaps, range, bulk, at, y}: `missing` is the
    number of values that are not finite, `gaps` the first steps of these; `range` and `bulk` are the lowest and highest
    y of all values and of those that are not outliers; `at` is the index of the steps. A long curve is downsampled to
    columns, of which `low`, `y` and `high` are the lowest, the mean and the highest value; if it has spikes, `calm` are
    the means without them, and `peaks` the steps of the highest ones by column. A short one has `spikes`, their
    indices.
    """
    known = list(NAMES)  # these come first; the rest in order of appearance
    metrics = list(dict.fromkeys(metric for log in logs for metric in metrics_of(log)))
    metrics.sort(key=lambda metric: known.index(metric) if metric in known else len(known))
    several = [metric for metric in metrics if any(len(log.columns.points(metric)[0]) > 1 for log in logs)]
    rows = {metric: [_rows(log, metric) for log in logs] for metric in several[:MOST_CHARTS]}
    drawn = [metric for metric in rows if max(map(len, rows[metric])) > 1]
    columns = _columns_of([len(one) for metric in drawn for one in rows[metric]])
    unit = loss_unit(logs)
    runs = [_Run(index, log, first_timestamp(log, metrics), columns, unit) for index, log in enumerate(logs)]
    entries: dict[str, list[dict[str, Any]]] = {}
    for metric in drawn:
        series = [run.series(metric, found) for run, found in zip(runs, rows[metric], strict=True) if len(found)]
        name = NAMES.get(metric, metric) + unit.suffix(metric)
        entry = {"key": metric, "name": name, "evaluation": is_of_evaluation(metric)}
        entries.setdefault(group_of(metric), []).append({**entry, "series": series})
    return {
        "left_out": len(several[MOST_CHARTS:]),
        "runs": [run.entry(label) for run, label in zip(runs, labels, strict=True)],
        "axes": [axis for axis in X_COLUMNS if any(axis in x_axes(log) for log in logs)],
        "groups": [{"name": name, "metrics": entries[name]} for name in _GROUP_NAMES if name in entries],
    }


def _peaks(steps: Values, y: Values, is_spike: NDArray[np.bool_], starts: NDArray[np.intp]) -> dict[int, int]:
    """The step of the highest spike of each column that has one."""
    found: dict[int, int] = {}
    columns = np.searchsorted(starts, np.flatnonzero(is_spike), side="right") - 1
    for column, place in zip(columns.tolist(), np.flatnonzero(is_spike).tolist(), strict=True):
        if column not in found or y[place] > y[found[column]]:
            found[column] = place
    return {column: int(steps[place]) for column, place in found.items()}


def group_of(metric: str) -> str:
    """The group of a metric: group a for `a/b`, others by their words."""
    prefix, slash, _ = metric.partition("/")
    if slash and prefix:
        return next((name for name, words in GROUPS if prefix in words), OTHER)
    bare = metric.removeprefix("train_").removeprefix("eval_").removeprefix("test_").removeprefix("max_")
    if is_loss(bare) or bare == "perplexity":
        return "Loss"
    for name, words in GROUPS[1:]:
        if any(bare == word or bare.startswith(f"{word}_") or bare.endswith(f"_{word}") for word in words):
            return name
        if name == "Memory" and "mem" in bare.split("_"):
            return name
    return EVALUATION if is_of_evaluation(metric) else OTHER


class _Run:
    """The curves of one run, which share their lists of steps."""

    def __init__(self, index: int, log: TrainingLog, start: float, columns: int, unit: LossUnit) -> None:
        self._index, self._log, self._start, self._columns = index, log, start, columns
        self._unit = unit
        self._steps: dict[tuple[Any, ...], int] = {}

    def entry(self, label: str) -> dict[str, Any]:
        """The run itself; call it after all of its series."""
        look = look_of(self._index)
        return {
            "label": label,
            "colour": self._index % 10,
            "dash": _DASHES[look.dash],
            "steps": [list(steps) for steps in self._steps],
            "axes": self._axes(),
            "rewind": rewind_command(self._log.log_path.parent),
        }

    def series(self, metric: str, rows: NDArray[np.intp]) -> dict[str, Any]:
        """One curve; see `report_data`."""
        y = drawable(self._log.column(metric)[rows]) / self._unit.divisor(self._index, metric)
        steps = drawable(self._log.column("global_step"))[rows]
        finite = y[np.isfinite(y)]
        limits = {"range": (float(finite.min()), float(finite.max())) if len(finite) else None, "bulk": bulk_limits(y)}
        notified = {
            name: _short(np.array(pair)) if pair and np.isfinite(pair).all() else None for name, pair in limits.items()
        }
        curve = self._downsampled(steps, y) if len(rows) > _PER_COLUMN * self._columns else self._whole(steps, y)
        gaps = _short(steps[np.isnan(y)][:_MOST_GAPS])
        counts = {"run": self._index, "points": len(rows), "missing": len(y) - len(finite), "gaps": gaps or []}
        return {**counts, **notified, **curve}

    def _whole(self, steps: Values, y: Values) -> dict[str, Any]:
        found = np.flatnonzero(spikes(y, automatic_window(len(y)))).tolist()
        curve = {"at": self._at(steps), "y": _short(y)}
        return {**curve, "spikes": found} if found else curve

    def _downsampled(self, steps: Values, y: Values) -> dict[str, Any]:
        """Columns of equally many steps; the first and the last point are columns of their own."""
        span = steps[-1] - steps[0]
        column = np.floor((steps - steps[0]) / (span if span > 0 else 1.0) * self._columns)
        column[0], column[-1] = -1, self._columns + 1
        starts = np.flatnonzero(np.concatenate([[True], column[1:] != column[:-1]]))
        low = np.minimum.reduceat(np.where(np.isnan(y), np.inf, y), starts)
        high = np.maximum.reduceat(np.where(np.isnan(y), -np.inf, y), starts)
        centres = np.round(np.add.reduceat(steps, starts) / np.diff(np.append(starts, len(steps))))
        curve: dict[str, Any] = {"at": self._at(centres), "low": _short(low), "high": _short(high)}
        curve["y"] = _short(_means(y, starts))
        is_spike = spikes(y, automatic_window(len(y)))
        if is_spike.any():
            curve["calm"] = _short(_means(np.where(is_spike, np.nan, y), starts))
            curve["peaks"] = _peaks(steps, y, is_spike, starts)
        return curve

    def _at(self, steps: Values) -> int:
        """The index of these steps among the lists of the run."""
        return self._steps.setdefault(tuple(_short(steps) or ()), len(self._steps))

    def _axes(self) -> dict[str, list[Any]]:
        """For each axis that the log has, steps and the values at them."""
        steps = drawable(self._log.column("global_step"))
        found = {}
        for axis in X_COLUMNS:
            x = drawable(places(self._log, axis))
            rows = np.flatnonzero(np.isfinite(x) & np.isfinite(steps))
            if axis == "step" or not len(rows):
                continue
            rows = rows[newest_rows(steps[rows])]
            _, first = np.unique(steps[rows], return_index=True)
            rows = rows[first[np.unique(np.linspace(0, len(first) - 1, _MOST_NODES).round().astype(np.intp))]]
            values = (x[rows] - self._start) / 60 if axis == "time" else x[rows]
            found[axis] = [_short(steps[rows]), _short(values)]
        return found


def _means(y: Values, starts: NDArray[np.intp]) -> Values:
    """The mean of the finite values of each column; NaN where it has none."""
    is_finite = np.isfinite(y)
    counts = np.add.reduceat(is_finite.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(is_finite, y, 0.0), starts)
    return np.where(counts > 0, sums / np.maximum(counts, 1.0), np.nan)


def _rows(log: TrainingLog, metric: str) -> NDArray[np.intp]:
    """The records that count for the metric, on the newest branch."""
    rows = np.flatnonzero(rows_of(log, metric) & np.isfinite(drawable(log.column("global_step"))))
    return rows[newest_rows(log.column("global_step")[rows])]


def _columns_of(lengths: Iterable[int]) -> int:
    """Number of columns per long curve so that all curves fit."""
    lengths = list(lengths)
    columns = _MOST_COLUMNS
    while columns > _FEWEST_COLUMNS and sum(min(one, columns * _PER_COLUMN) for one in lengths) > MOST_NUMBERS:
        columns = columns * 9 // 10
    return max(columns, _FEWEST_COLUMNS)


def _short(values: Values) -> list[float | int | None] | None:
    """Round to six digits (integers are exact), with None for NaN and infinities; None if there are no numbers."""
    if not np.isfinite(values).any():
        return None
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
