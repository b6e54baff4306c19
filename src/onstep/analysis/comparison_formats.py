"""A comparison of runs as text, as Markdown and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from onstep.analysis.comparison import Comparison, MetricRow
from onstep.analysis.summary_formats import one_line
from onstep.errors import ConfigError

_VALUE_LENGTH = 40
_UNKNOWN = "-"
_HUGE = 1e7
"""From here on a number that is not whole is told by its exponent."""


def format_comparison(comparison: Comparison, form: str = "text") -> str:
    """The comparison in one of `FORMATS`: "text", "md" or "json".

    Raises:
        ConfigError: for another form.
    """
    if form not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {form!r}.")
    return FORMATS[form](comparison)


def metric_cells(comparison: Comparison) -> list[list[str]]:
    """The table of metrics: a heading, how each run stands, a row for each metric with the best marked by ``*``."""
    rows = [["", *comparison.labels]]
    if any(comparison.statuses):
        rows.append(["status", *(status or _UNKNOWN for status in comparison.statuses)])
    return rows + [[row.name, *_cells(row)] for row in comparison.metrics]


def difference_cells(comparison: Comparison) -> list[list[str]]:
    """The table of differences: a heading, then a row for each key."""
    rows = []
    for one in comparison.differences:
        configs = zip(one.values, comparison.configs, strict=True)
        rows.append([one.key, *(_UNKNOWN if config is None else value_text(value) for value, config in configs)])
    return [["key", *comparison.labels], *rows]


def value_text(value: Any, length: int = _VALUE_LENGTH) -> str:
    """A value of a configuration in at most `length` characters."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def number_text(value: float | None) -> str:
    """A whole number with separators, any other with four digits: 1,234.5, and 1.234e+20 where it is huge."""
    if value is None:
        return _UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if 1000 <= abs(value) < _HUGE else f"{value:.4g}"


def _cells(row: MetricRow) -> list[str]:
    cells = []
    for index, (value, step) in enumerate(zip(row.values, row.steps, strict=True)):
        at = "" if step is None or value is None else f" @ {step:,}"
        cells.append(f"{number_text(value)}{at}{' *' if index in row.best else ''}")
    return cells


def _as_text(comparison: Comparison) -> str:
    lines = _aligned(metric_cells(comparison))
    if any(row.best for row in comparison.metrics):
        lines += ["", "* the best of the runs; @ the step at which it was so"]
    lines += ["", *_differences_as_text(comparison)]
    return "\n".join([*lines, *_notes(comparison, "note: ")])


def _differences_as_text(comparison: Comparison) -> list[str]:
    if comparison.differences:
        return ["Configuration, where it differs:", "", *_aligned(difference_cells(comparison))]
    return [_no_differences(comparison)]


def _no_differences(comparison: Comparison) -> str:
    known = sum(config is not None for config in comparison.configs)
    if known > 1:
        return "The configurations are the same."
    return "There are no two configurations to compare."


def _as_markdown(comparison: Comparison) -> str:
    lines = ["# Comparison of runs", "", *_markdown_table(metric_cells(comparison)), "", "## Configuration differences"]
    if comparison.differences:
        lines += ["", *_markdown_table(difference_cells(comparison))]
    else:
        lines += ["", _no_differences(comparison)]
    return "\n".join([*lines, *_notes(comparison, "- ")])


def _notes(comparison: Comparison, mark: str) -> list[str]:
    return ["", *(f"{mark}{one_line(note)}" for note in comparison.notes)] if comparison.notes else []


def _as_json(comparison: Comparison) -> str:
    runs = zip(comparison.labels, comparison.paths, comparison.statuses, strict=True)
    content = {
        "runs": [{"label": label, "log_path": str(path), "status": status} for label, path, status in runs],
        "metrics": {
            row.name: {"values": [_strict(value) for value in row.values], "steps": row.steps, "best": row.best}
            for row in comparison.metrics
        },
        "differences": {one.key: one.values for one in comparison.differences},
        "notes": comparison.notes,
    }
    return json.dumps(content, indent=2, default=str)


def _strict(value: float | None) -> float | str | None:
    """JSON has no word for what is not finite."""
    return value if value is None or math.isfinite(value) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side: the first to the left, the runs to the right."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [[one_line(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *body)]


FORMATS: dict[str, Callable[[Comparison], str]] = {"text": _as_text, "md": _as_markdown, "json": _as_json}
"""Name of a form, and what writes it."""
