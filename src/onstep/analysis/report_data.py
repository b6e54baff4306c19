"""The curves of an interactive report: every numeric metric, grouped, thinned to what a browser can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onstep.analysis.limits import bulk_limits
from onstep.analysis.plots_axes import NAMES
from onstep.analysis.plots_style import look_of
from onstep.analysis.series import (
    X_COLUMNS,
    first_timestamp,
    is_loss,
    is_of_evaluation,
    metrics_of,
    newest_rows,
    places,
    rows_of,
    x_axes,
    x_keys,
)
from onstep.analysis.smoothing import automatic_window, spikes
from onstep.analysis.thinning import column_means, thinned_rows
from onstep.analysis.training_log import TrainingLog

Values = NDArray[np.float64]

GROUPS = (
    ("Loss", ()),
    ("Optimizer", ("learning_rate", "lr", "grad_norm", "weight_norm", "weight_decay", "loss_scale", "num_zeros")),
    ("Memory", ("mem", "memory")),
    ("Speed", ("per_second", "per_sec", "runtime", "mfu", "time", "tok_s", "flops", "throughput", "goodput")),
    ("Progress", ("tokens", "total_tokens", "total_flos", "num_input_tokens_seen", "samples")),
)
"""Groups in the order in which they are shown, and the words by which a metric belongs to one; the first that fits."""
OTHER, EVALUATION = "Other", "Evaluation"
MOST_POINTS = 120_000
"""Points of all curves together: a file of a few megabytes."""
_FEWEST_COLUMNS, _MOST_COLUMNS = 100, 500
_POINTS_PER_COLUMN = 6
"""At the most: five of a thinned curve, and a mean."""

_DASHES = {"-": "solid", "--": "dash", ":": "dot"}


def report_data(logs: Sequence[TrainingLog], labels: Sequence[str]) -> dict[str, Any]:
    """Everything that the page draws, as JSON takes it; metrics with a single value everywhere are left to the tables.

    {"runs": [{label, colour, dash}], "axes": [...], "groups": [{name, metrics: [{key, name, evaluation, series}]}]}, a
    series being {run, points, missing, range, bulk, raw: {step, ..., y}, means: the same for column means, or None}:
    `missing` values that are not finite, `range` and `bulk` the lowest and highest y of all of them and of those that
    are no outliers. Means of a curve with spikes have `calm` beside `y`, those without them; the raw points of a short
    one have `spikes`, their places.
    """
    metrics = _ordered(dict.fromkeys(metric for log in logs for metric in metrics_of(log)))
    for log in logs:
        log.load_columns([*(key for axis in X_COLUMNS for key in x_keys(axis)), "eval_loss", *metrics])
    starts = [first_timestamp(log, metrics) for log in logs]
    rows = {metric: [_rows(log, metric) for log in logs] for metric in metrics}
    drawn = [metric for metric in metrics if max(map(len, rows[metric])) > 1]
    columns = _columns_of([len(one) for metric in drawn for one in rows[metric]])
    entries: dict[str, list[dict[str, Any]]] = {}
    for metric in drawn:
        series = [
            _series(index, log, metric, found, start, columns)
            for index, (log, found, start) in enumerate(zip(logs, rows[metric], starts, strict=True))
            if len(found)
        ]
        entry = {"key": metric, "name": NAMES.get(metric, metric), "evaluation": is_of_evaluation(metric)}
        entries.setdefault(group_of(metric), []).append({**entry, "series": series})
    return {
        "runs": [_run(index, label) for index, label in enumerate(labels)],
        "axes": [axis for axis in X_COLUMNS if any(axis in x_axes(log) for log in logs)],
        "groups": [{"name": name, "metrics": entries[name]} for name in _group_names() if name in entries],
    }


def group_of(metric: str) -> str:
    """The group that a metric is shown in: `a/b` in group a, others by their words."""
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


def _ordered(metrics: Iterable[str]) -> list[str]:
    """What every run has first, then the rest in the order in which it was met."""
    known = list(NAMES)
    return sorted(metrics, key=lambda metric: known.index(metric) if metric in known else len(known))


def _group_names() -> list[str]:
    names = [name for name, _ in GROUPS]
    return [names[0], EVALUATION, *names[1:], OTHER]


def _run(index: int, label: str) -> dict[str, str]:
    look = look_of(index)
    return {"label": label, "colour": look.colour, "dash": _DASHES[look.dash]}


def _rows(log: TrainingLog, metric: str) -> NDArray[np.intp]:
    """The records that count for the metric, of the newest branch."""
    rows = np.flatnonzero(rows_of(log, metric) & np.isfinite(log.column("global_step")))
    return rows[newest_rows(log.column("global_step")[rows])]


def _columns_of(lengths: Iterable[int]) -> int:
    """How many columns each long curve may have, so that all fit."""
    lengths = list(lengths)
    columns = _MOST_COLUMNS
    while columns > _FEWEST_COLUMNS and sum(min(one, columns * _POINTS_PER_COLUMN) for one in lengths) > MOST_POINTS:
        columns = columns * 4 // 5
    return max(columns, _FEWEST_COLUMNS)


def _series(
    index: int, log: TrainingLog, metric: str, rows: NDArray[np.intp], start: float, columns: int
) -> dict[str, Any]:
    y = log.column(metric)[rows]
    y = np.where(np.isfinite(y), y, np.nan)
    found = {axis: _place(log, axis, start)[rows] for axis in X_COLUMNS}
    kept = thinned_rows(found["step"], y, columns)
    is_spike = spikes(y, automatic_window(len(y)))
    raw: dict[str, Any] = {axis: _short(x[kept]) for axis, x in found.items()}
    raw["y"] = _short(y[kept])
    means = None
    if len(kept) < len(rows):
        means = _means(found, y, is_spike, columns)
    elif is_spike.any():
        raw["spikes"] = np.flatnonzero(is_spike).tolist()
    return {"run": index, "points": len(rows), **_limits(y), "raw": raw, "means": means}


def _limits(y: Values) -> dict[str, Any]:
    """What the script needs to know of all values; None for limits that no number can be."""
    finite = y[np.isfinite(y)]
    limits = {"range": (float(finite.min()), float(finite.max())) if len(finite) else None, "bulk": bulk_limits(y)}
    told = {name: _short(np.array(pair)) if pair and np.isfinite(pair).all() else None for name, pair in limits.items()}
    return {"missing": len(y) - len(finite), **told}


def _means(found: dict[str, Values], y: Values, is_spike: NDArray[np.bool_], columns: int) -> dict[str, Any]:
    """Means of each column; of a curve with spikes also `calm`, those without them."""
    means = {axis: _short(column_means(x, y, columns)[0]) for axis, x in found.items()}
    means["y"] = _short(column_means(found["step"], y, columns)[1])
    if is_spike.any():
        means["calm"] = _short(column_means(found["step"], np.where(is_spike, np.nan, y), columns)[1])
    return means


def _place(log: TrainingLog, axis: str, start: float) -> Values:
    found = places(log, axis)
    return (found - start) / 60 if axis == "time" else found


def _short(values: Values) -> list[float | int | None] | None:
    """Numbers with six digits (whole ones with all), None for NaN; None where there is no number at all."""
    if not np.isfinite(values).any():
        return None
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
