"""Writes an interactive report of one or more runs as a self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from onstep.analysis.plots.smoothing import automatic_window, bulk_limits, column_means, downsampled_rows, spikes
from onstep.analysis.reports.comparison import Comparison, compare_runs, difference_cells, metric_cells, value_text
from onstep.errors import DataError, MissingExtraError

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
MOST_POINTS = 120_000
"""Maximum number of points of all curves together, for a file of a few megabytes."""
MOST_CHARTS = 1000
"""Maximum number of charts; further metrics are only named in a note."""
_FEWEST_COLUMNS, _MOST_COLUMNS = 100, 500
_POINTS_PER_COLUMN = 6
"""Maximum: five of a downsampled curve, and a mean."""

_DASHES = {"-": "solid", "--": "dash", ":": "dot"}


def report_data(logs: Sequence[TrainingLog], labels: Sequence[str]) -> dict[str, Any]:
    """The data of all charts of the page, as JSON values; metrics with only one value appear in the tables only.

    Of more than `MOST_CHARTS` metrics, the first are drawn; `left_out` is the number of the others.

    {"left_out": ..., "runs": [{label, colour, dash}], "axes": [...],
    "groups": [{name, metrics: [{key, name, evaluation, series}]}]}. A
    series is {run, points, missing, range, bulk, raw: {step, ..., y}, means: the same for column means, or None}:
    `missing` is the number of values that are not finite; `range` and `bulk` are the lowest and highest y of all values
    and of those that are not outliers. For curves with spikes, means have `calm` in addition to `y`, the means without
    spikes; raw points of a short curve have `spikes`, the indices of the spikes.
    """
    known = list(NAMES)  # these come first; the rest in order of appearance
    metrics = list(dict.fromkeys(metric for log in logs for metric in metrics_of(log)))
    metrics.sort(key=lambda metric: known.index(metric) if metric in known else len(known))
    starts = [first_timestamp(log, metrics) for log in logs]
    several = [metric for metric in metrics if any(len(log.columns.points(metric)[0]) > 1 for log in logs)]
    rows = {metric: [_rows(log, metric) for log in logs] for metric in several[:MOST_CHARTS]}
    drawn = [metric for metric in rows if max(map(len, rows[metric])) > 1]
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
        "left_out": len(several[MOST_CHARTS:]),
        "runs": [
            {"label": label, "colour": look.colour, "dash": _DASHES[look.dash]}
            for label, look in zip(labels, map(look_of, range(len(labels))), strict=True)
        ],
        "axes": [axis for axis in X_COLUMNS if any(axis in x_axes(log) for log in logs)],
        "groups": [{"name": name, "metrics": entries[name]} for name in _GROUP_NAMES if name in entries],
    }


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


def _rows(log: TrainingLog, metric: str) -> NDArray[np.intp]:
    """The records that count for the metric, on the newest branch."""
    rows = np.flatnonzero(rows_of(log, metric) & np.isfinite(drawable(log.column("global_step"))))
    return rows[newest_rows(log.column("global_step")[rows])]


def _columns_of(lengths: Iterable[int]) -> int:
    """Number of columns per long curve so that all curves fit."""
    lengths = list(lengths)
    columns = _MOST_COLUMNS
    while columns > _FEWEST_COLUMNS and sum(min(one, columns * _POINTS_PER_COLUMN) for one in lengths) > MOST_POINTS:
        columns = columns * 4 // 5
    return max(columns, _FEWEST_COLUMNS)


def _series(
    index: int, log: TrainingLog, metric: str, rows: NDArray[np.intp], start: float, columns: int
) -> dict[str, Any]:
    y = drawable(log.column(metric)[rows])
    found = {axis: drawable(places(log, axis)[rows]) for axis in X_COLUMNS}
    found["time"] = (found["time"] - start) / 60
    kept = downsampled_rows(found["step"], y, columns)
    is_spike = spikes(y, automatic_window(len(y)))
    raw: dict[str, Any] = {axis: _short(x[kept]) for axis, x in found.items()}
    raw["y"] = _short(y[kept])
    means = None
    if len(kept) < len(rows):
        means = {axis: _short(column_means(x, y, columns)[0]) for axis, x in found.items()}
        means["y"] = _short(column_means(found["step"], y, columns)[1])
        if is_spike.any():  # means without spikes
            means["calm"] = _short(column_means(found["step"], np.where(is_spike, np.nan, y), columns)[1])
    elif is_spike.any():
        raw["spikes"] = np.flatnonzero(is_spike).tolist()
    finite = y[np.isfinite(y)]
    limits = {"range": (float(finite.min()), float(finite.max())) if len(finite) else None, "bulk": bulk_limits(y)}
    notified = {
        name: _short(np.array(pair)) if pair and np.isfinite(pair).all() else None for name, pair in limits.items()
    }
    return {"run": index, "points": len(rows), "missing": len(y) - len(finite), **notified, "raw": raw, "means": means}


def _short(values: Values) -> list[float | int | None] | None:
    """Round to six digits (integers are exact), with None for NaN; None if there are no numbers at all."""
    if not np.isfinite(values).any():
        return None
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


STYLE, SCRIPT, _PAGE = (
    files("onstep.analysis.reports").joinpath(f"report.{suffix}").read_text("utf-8") for suffix in ("css", "js", "html")
)


def write_report(logs: Sequence[TrainingLog] | TrainingLog, path: str | Path, title: str | None = None) -> Path:
    """Write a page with a summary of the runs, the differences of their configurations, and a chart for each metric.

    Charts can be zoomed, smoothed, and drawn over steps, epochs, time, tokens or operations. The file contains the
    plotly library (about 5 MB); logs of any length add at most a few megabytes. Text from logs and configurations is
    escaped, and the page's content security policy blocks foreign scripts and all connections.

    Args:
        logs: The runs, or a single run.
        path: The HTML file; its directory is created if needed.
        title: The heading; None: the label of the run, or the number of runs.

    Returns:
        `path`.

    Raises:
        MissingExtraError: if plotly is not installed.
        ConfigError: a ValueError; if there are no logs.
        DataError: a ValueError; if no run has a metric with two values.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError(
            f"the report requires plotly ({error}); install it with: pip install 'onstep[reports]'"
        ) from error
    logs = [logs] if isinstance(logs, TrainingLog) else list(logs)
    comparison = compare_runs(logs)
    data = report_data(logs, comparison.labels)
    if not data["groups"]:
        raise DataError(f"{logs[0].log_path} has no metric with two values to plot; log more steps first.")
    heading = title or (comparison.labels[0] if len(logs) == 1 else f"{len(logs)} runs")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page(heading, comparison, data, str(get_plotlyjs())), encoding="utf-8", errors="replace")
    return target


def _page(heading: str, comparison: Comparison, data: dict[str, Any], library: str) -> str:
    digests = (hashlib.sha256(script.encode()).digest() for script in (library, SCRIPT))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = (  # only these scripts may run, and nothing may be loaded
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    content = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "&<>":  # so that no text can end its script element
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    left_out = (
        f"{data['left_out']:,} metrics beyond the first {MOST_CHARTS:,} have no chart; use onstep logs plot --metrics"
    )
    found = [*comparison.notes, *([left_out] if data["left_out"] else [])]
    notes = "".join(f"<li>{escape(note)}</li>" for note in found)
    return Template(_PAGE).substitute(
        policy=policy,
        heading=escape(heading),
        style=STYLE,
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        summary=_summary(comparison),
        configuration=_configuration(comparison),
        notes=f"<section><h2>Notes</h2><ul>{notes}</ul></section>" if notes else "",
        data=content,
        library=library,
        script=SCRIPT,
    )


def _summary(comparison: Comparison) -> str:
    best = {row.name: row.best for row in comparison.metrics}
    head, *rows = metric_cells(comparison)
    body = [
        [
            (cell.removesuffix(" *"), "best" if column - 1 in best.get(row[0], []) else "")
            for column, cell in enumerate(row)
        ]
        for row in rows
    ]
    return f"<section><h2>Summary</h2>{_table(head, body)}</section>"


def _configuration(comparison: Comparison) -> str:
    """The differences of the configurations; for a single run, the whole configuration, collapsed."""
    if len(comparison.labels) == 1:
        config = comparison.configs[0]
        if config is None:
            return ""
        rows = [[(key, ""), (value_text(value, 200), "")] for key, value in config.items()]
        table = _table(["key", "value"], rows)
        return f"<details><summary><h2>Configuration</h2></summary>{table}</details>"
    head, *rows_ = difference_cells(comparison)
    if not rows_:
        return "<section><h2>Configuration differences</h2><p>None known.</p></section>"
    classes = ["" if one.changes_learning else "safe" for one in comparison.differences]
    body = [[(cell, name) for cell in row] for row, name in zip(rows_, classes, strict=True)]
    quiet = '<p class="quiet">Gray: does not affect training results.</p>' if "safe" in classes else ""
    return f"<section><h2>Configuration differences</h2>{quiet}{_table(head, body)}</section>"


def _table(head: Sequence[str], body: Sequence[Sequence[tuple[str, str]]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f'<td class="{name}">{escape(cell)}</td>' for cell, name in row) + "</tr>" for row in body
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>'
