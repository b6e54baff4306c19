"""Compares runs by their metrics and configurations, and formats the comparison as text, Markdown or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onstep.analysis.logs.run_status import run_record, status_of
from onstep.analysis.logs.tokenizers import PER_BYTE, LossUnit, loss_unit
from onstep.analysis.logs.training_log import TrainingLog, distinct_labels
from onstep.analysis.reports.summary import Summary, as_number, as_step, compute_summary_statistics, get_perplexity
from onstep.analysis.text_tables import printable, table
from onstep.config import ChangeClass, classify
from onstep.errors import ConfigError

RUN_FILE = "run.json"
ABSENT = "(absent)"
"""Placeholder for the value of a key that a configuration does not have."""
_OWN_KEYS = ("run.name",)
"""Keys that differ between any two runs and are redundant with the labels."""
_NO_RESULT = ("_runtime", "_per_second", "_samples", "_steps")
"""Suffixes of evaluation keys that do not measure the quality of the model."""


@dataclass(frozen=True)
class MetricRow:
    """One metric of each run."""

    name: str
    values: list[float | None]
    """None if the run does not have the metric."""
    steps: list[int | None]
    """The step of each value; None if it does not belong to a single step."""
    best: list[int] = field(default_factory=list)
    """Indices of the best runs; empty if there is no better one, or only one run has the metric."""


@dataclass(frozen=True)
class Difference:
    """A configuration key whose values differ between runs."""

    key: str
    values: list[Any]
    """None also for a run whose configuration is unknown; `ABSENT` if the configuration does not have the key."""
    changes_learning: bool
    """Whether the key affects training results."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs; every per-run list is in the order of the runs."""

    labels: list[str]
    paths: list[Path]
    statuses: list[str | None]
    """The status of each run, as in `status_of`; None if it has no run.json."""
    configs: list[dict[str, Any] | None]
    """The full configuration of each run by dotted key; None if unknown."""
    metrics: list[MetricRow]
    differences: list[Difference]
    notes: list[str]
    """Remarks on what was unknown or had to be recovered."""


@dataclass(frozen=True)
class _Row:
    """A row of the comparison: a metric and its lookup in a run."""

    name: str
    key: str
    step_key: str | None = None
    better: Callable[[Sequence[float]], float] | None = None
    is_loss: bool = False
    """Whether the value is per token, and the best is not known among different tokenizers."""


_ROWS = (
    _Row("steps", "total_steps"),
    _Row("epochs", "final_epoch"),
    _Row("final loss", "final_loss", None, min, True),
    _Row("best loss", "best_loss", "best_loss_step", min, True),
    _Row("final validation loss", "final_eval_loss", "final_eval_loss_step", min, True),
    _Row("best validation loss", "best_eval_loss", "best_eval_loss_step", min, True),
    _Row("best validation perplexity", "best_eval_perplexity", "best_eval_loss_step", min, True),
    _Row("mean gradient norm", "avg_grad_norm"),
    _Row("largest gradient norm", "max_grad_norm_value", "max_grad_norm_step"),
    _Row("final learning rate", "final_lr"),
    _Row("tokens", "total_tokens"),
    _Row("runtime (seconds)", "train_runtime"),
    _Row("samples per second", "train_samples_per_second", better=max),
)


def compare_runs(logs: Sequence[TrainingLog]) -> Comparison:
    """Compare runs by their logs and the configurations in the `run.json` next to each.

    Args:
        logs: the logs to compare.

    Raises:
        ConfigError: if there are no logs.
    """
    if not logs:
        raise ConfigError("there is no log to compare; pass at least two.")
    labels = distinct_labels(logs)
    stored = [run_record(log.log_path.parent).get("config") for log in logs]
    configs = [dict(flat(config)) if isinstance(config, Mapping) and config else None for config in stored]
    notes = [f"{label}: {note}" for label, log in zip(labels, logs, strict=True) for note in log.notes]
    notes += _without_config(labels, logs, configs)
    summaries = [compute_summary_statistics(log) for log in logs]
    unit = loss_unit(logs)
    notes += [unit.note] if unit.note else []
    notes += [f"{label}: {note}" for label, one in zip(labels, summaries, strict=True) for note in one.get("notes", [])]
    return Comparison(
        labels,
        [log.log_path for log in logs],
        [status_of(log.log_path) for log in logs],
        configs,
        _metric_rows(logs, summaries, unit),
        differences(configs),
        notes,
    )


def differences(configs: Sequence[Mapping[str, Any] | None]) -> list[Difference]:
    """The keys whose values differ between the known configurations: first those that affect training results.

    Args:
        configs: Values by dotted key; None for an unknown configuration.
    """
    known = [config for config in configs if config is not None]
    keys = dict.fromkeys(key for config in known for key in config if key not in _OWN_KEYS)
    found = []
    for key in keys:
        values = [config.get(key, ABSENT) for config in known]
        if any(value != values[0] or type(value) is not type(values[0]) for value in values):
            shown = [None if config is None else config.get(key, ABSENT) for config in configs]
            found.append(Difference(key, shown, _changes_learning(key)))
    return sorted(found, key=lambda one: not one.changes_learning)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested dictionaries to dotted keys; lists and empty dictionaries are values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _changes_learning(key: str) -> bool:
    try:
        return classify(key) is not ChangeClass.SAFE
    except ConfigError:
        return True  # a key of another version of Onstep


def _without_config(labels: Sequence[str], logs: Sequence[TrainingLog], configs: Sequence[Any]) -> list[str]:
    """A single note for all runs whose configuration is unknown."""
    found = [(label, log) for label, log, config in zip(labels, logs, configs, strict=True) if config is None]
    if len(found) < 2:
        return [f"{label}: no {RUN_FILE} with a configuration next to {log.log_path}" for label, log in found]
    return [f"no {RUN_FILE} with a configuration next to the logs of {', '.join(label for label, _ in found)}"]


def _metric_rows(logs: Sequence[TrainingLog], summaries: Sequence[Summary], unit: LossUnit) -> list[MetricRow]:
    figures = [_numbers(log, summary) for log, summary in zip(logs, summaries, strict=True)]
    further = dict.fromkeys(key for numbers in figures for key in numbers if key.startswith("eval_"))
    rows = [*_rows_in(unit), *(_Row(f"final {key}", key) for key in further)]
    for ratio, numbers in zip(unit.bytes_per_token, figures, strict=False):
        known = {key: loss for key in _LOSSES if (loss := as_number(numbers.get(key))) is not None}
        numbers.update({f"{key}{PER_BYTE}": loss / ratio for key, loss in known.items()})
    found = [_metric_row(row, figures) for row in rows]
    return [row for row in found if any(value is not None for value in row.values)]


_LOSSES = ("final_loss", "best_loss", "final_eval_loss", "best_eval_loss")


def _rows_in(unit: LossUnit) -> Iterator[_Row]:
    """The rows of a comparison, each loss also per byte if that is what can be compared."""
    for row in _ROWS:
        if unit.is_common or not row.is_loss:
            yield row
            continue
        yield replace(row, better=None)
        if unit.bytes_per_token and row.key in _LOSSES:
            yield replace(row, name=f"{row.name}{PER_BYTE}", key=f"{row.key}{PER_BYTE}")


def _numbers(log: TrainingLog, summary: Summary) -> dict[str, Any]:
    """The summary of a run, its token count, and the last value of each other metric of its evaluations."""
    numbers = {key: value for key, value in summary.items() if key != "eval_sets"}
    if "best_eval_loss" in numbers:
        numbers["best_eval_perplexity"] = get_perplexity(numbers["best_eval_loss"])
    tokens = log.column("total_tokens")
    if np.isfinite(tokens).any():
        numbers["total_tokens"] = float(tokens[np.isfinite(tokens)][-1])
    for key in log.keys():  # noqa: SIM118 - a log is not a dictionary
        if key.startswith("eval_") and key not in ("eval_loss", "eval_perplexity") and not key.endswith(_NO_RESULT):
            _, values = log.columns.points(key)
            numbers[key] = float(values[-1])
    return numbers


def _metric_row(row: _Row, figures: Sequence[Mapping[str, Any]]) -> MetricRow:
    values = [as_number(numbers.get(row.key)) for numbers in figures]
    steps = [None if row.step_key is None else as_step(numbers.get(row.step_key)) for numbers in figures]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    best: list[int] = []
    if row.better is not None and len(finite) > 1:
        winner = row.better(finite)
        best = [index for index, value in enumerate(values) if value == winner]
    return MetricRow(row.name, values, steps, best if len(best) < len(values) else [])


_VALUE_LENGTH = 40
_UNKNOWN = "-"
_HUGE = 1e7
"""Numbers from here on that are not integers are shown with an exponent."""


def format_comparison(comparison: Comparison, form: str = "text") -> str:
    """Format a comparison as "text", "md" or "json".

    Args:
        comparison: what `compare_runs` returned.
        form: the format of the text.

    Raises:
        ConfigError: for an unknown format.
    """
    if form not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {form!r}.")
    return FORMATS[form](comparison)


def metric_cells(comparison: Comparison) -> list[list[str]]:
    """The table of metrics: a heading, the status of each run, and a row per metric with the best marked by ``*``."""
    rows = [["", *comparison.labels]]
    if any(comparison.statuses):
        rows.append(["status", *(status or _UNKNOWN for status in comparison.statuses)])
    for row in comparison.metrics:
        cells = [row.name]
        for index, (value, step) in enumerate(zip(row.values, row.steps, strict=True)):
            at = "" if step is None or value is None else f" @ {step:,}"
            cells.append(f"{number_text(value)}{at}{' *' if index in row.best else ''}")
        rows.append(cells)
    return rows


def difference_cells(comparison: Comparison) -> list[list[str]]:
    """The table of differences: a heading, then a row per key."""
    rows = []
    for one in comparison.differences:
        configs = zip(one.values, comparison.configs, strict=True)
        rows.append([one.key, *(_UNKNOWN if config is None else value_text(value) for value, config in configs)])
    return [["key", *comparison.labels], *rows]


def value_text(value: Any, length: int = _VALUE_LENGTH) -> str:
    """A configuration value in at most `length` characters."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def number_text(value: float | None) -> str:
    """Integers with separators, other numbers with four digits: 1,234.5, or 1.234e+20 if huge."""
    if value is None:
        return _UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if 1000 <= abs(value) < _HUGE else f"{value:.4g}"


def _as_text(comparison: Comparison) -> str:
    lines = _side_by_side(metric_cells(comparison))
    if any(row.best for row in comparison.metrics):
        lines += ["", "* best of the runs; @ step of the value"]
    if comparison.differences:
        lines += ["", "Configuration differences:", "", *_side_by_side(difference_cells(comparison))]
    else:
        lines += ["", _no_differences(comparison)]
    return "\n".join([*lines, *_notes(comparison, "note: ")])


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
    return ["", *(f"{mark}{printable(note)}" for note in comparison.notes)] if comparison.notes else []


def _as_json(comparison: Comparison) -> str:
    runs = zip(comparison.labels, comparison.paths, comparison.statuses, strict=True)
    content = {
        "runs": [{"label": label, "log_path": str(path), "status": status} for label, path, status in runs],
        "metrics": {
            row.name: {
                "values": [value if value is None or math.isfinite(value) else str(value) for value in row.values],
                "steps": row.steps,
                "best": row.best,
            }
            for row in comparison.metrics
        },
        "differences": {one.key: one.values for one in comparison.differences},
        "notes": comparison.notes,
    }
    return json.dumps(content, indent=2, default=str)


def _side_by_side(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with the first column left-aligned and the runs right-aligned, without a width limit."""
    return table(rows, "<" + ">" * (len(rows[0]) - 1), indent="")


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = [[printable(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *body)]


FORMATS: dict[str, Callable[[Comparison], str]] = {"text": _as_text, "md": _as_markdown, "json": _as_json}
"""Format name -> function that writes it."""
