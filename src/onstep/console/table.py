"""Formats a run's console output: metric values, the table of steps, the final summary, and lines on a stream."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from onstep.config.suggestions import nearest
from onstep.console.style import Style, styled
from onstep.errors import ConfigError

Format = str | Callable[[Any], str]
"""A Python format specification, "si", "gib", "" for a default by type, or a callable that returns the text."""
Reduce = str | Callable[[Any], Any] | None
"""How to reduce a list: None or "max", "min", "mean", "sum", "all" (all elements, joined by "/"), or a callable."""

OutputStream = str | TextIO | None
"""Where to write lines: "stdout", "stderr", a text stream, or None for stdout."""

_INTEGER_PRESENTATIONS = frozenset("doxXbn")
_STEP_WIDTH = 8
_SPLIT_WIDTH = 5
_FINAL_LABEL_WIDTH = 24
_MANY = 5
"""Lines from which on the summary has two columns."""
_OMITTED_AT_ZERO = ("total_tokens", "tokens_per_second", "total_flops", "flops_per_second")
LOSSES = ("first_loss", "last_loss")
"""Final metrics that the title of the summary shows."""


def format_si(value: float) -> str:
    """Format a count with three significant digits and the unit K, M, G, T, P or E; below 1000, as a plain integer."""
    scaled = float(value)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        text = f"{scaled:.3g}" if unit else f"{scaled:.0f}"
        if abs(float(text)) < 1000:  # compared after rounding: 999,999 is 1M
            return text + unit
        scaled /= 1000
    return f"{value:.3g}"


def format_gib(num_bytes: float) -> str:
    """Format bytes as GiB (2**30) with three decimals."""
    return f"{num_bytes / 2**30:.3f} GiB"


def format_epoch(value: float) -> str:
    """Format an epoch in six characters: four decimals below 10, and as many as fit from there on."""
    return f"{value:.4f}"[:6].rstrip(".")


_NAMED: dict[str, Callable[[float], str]] = {"si": format_si, "gib": format_gib}

_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
}


def format_value(value: Any, fmt: Format = "", reduce: Reduce = None) -> str:
    """Format a metric's value.

    A list is reduced first. Values that `fmt` cannot format (None, text, NaN with an integer format) are shown as is.

    Raises:
        ConfigError: for a `reduce` or `fmt` that does not exist.
    """
    if callable(reduce):
        return _format_scalar(reduce(value), fmt)
    if not isinstance(value, (list, tuple)):
        return _format_scalar(value, fmt)
    if reduce == "all":
        return "/".join(_format_scalar(element, fmt) for element in value)
    check_reduce(reduce)
    return _format_scalar(_REDUCTIONS[reduce or "max"](value) if value else 0, fmt)


def check_format(fmt: Format) -> None:
    """Refuse a format that cannot be applied to numbers.

    Raises:
        ConfigError: naming it and the available formats.
    """
    if callable(fmt) or fmt in _NAMED:
        return
    try:
        _format_scalar(1, fmt)
        _format_scalar(0.5, fmt)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"fmt must be a Python format specification, 'si', 'gib', '' or a callable, got {fmt!r} ({error})."
        ) from error


def check_reduce(reduce: Reduce) -> None:
    """Refuse a reduction that does not exist.

    Raises:
        ConfigError: naming it and the available reductions.
    """
    if reduce is not None and not callable(reduce) and reduce != "all" and reduce not in _REDUCTIONS:
        raise ConfigError(
            f"reduce must be one of {', '.join([*_REDUCTIONS, 'all'])}, a callable or None (max), got {reduce!r}."
        )


def _format_scalar(value: Any, fmt: Format) -> str:
    if callable(fmt):
        return str(fmt(value))
    if not isinstance(value, Real):
        return str(value)
    if fmt in _NAMED:
        return _NAMED[fmt](float(value))
    if fmt:
        if fmt[-1] not in _INTEGER_PRESENTATIONS:
            return format(value, fmt)
        return format(math.trunc(value), fmt) if math.isfinite(value) else str(value)
    if isinstance(value, bool):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.4g}"


@dataclass(frozen=True)
class ColumnSpec:
    """A column of the rows printed during training."""

    key: str
    """Key in `logs` of the metric to show."""
    label: str = ""
    """Heading; "" means the key."""
    width: int = 10
    """Minimum width in characters; longer text is not truncated."""
    fmt: Format = ""
    reduce: Reduce = None

    def __post_init__(self) -> None:
        check_format(self.fmt)
        check_reduce(self.reduce)

    def cell(self, logs: Mapping[str, Any]) -> str:
        """The formatted metric, right-aligned."""
        return format_value(logs[self.key], self.fmt, self.reduce).rjust(self.width)

    def heading(self) -> str:
        """The label, right-aligned."""
        return (self.label or self.key).rjust(self.width)


@dataclass(frozen=True)
class MetricSpec:
    """A line of the summary printed when training is complete."""

    key: str
    label: str = ""
    """Label of the line; "" means the key."""
    fmt: Format = ""
    suffix: str = ""
    """Unit, omitted if there is no value."""

    def __post_init__(self) -> None:
        check_format(self.fmt)

    def line(self, logs: Mapping[str, Any]) -> str:
        """The indented line."""
        value = logs[self.key]
        unit = "" if value is None else self.suffix
        return f"  {(self.label or self.key) + ':':<{_FINAL_LABEL_WIDTH}}{format_value(value, self.fmt)}{unit}"


Spec = TypeVar("Spec", ColumnSpec, MetricSpec)


def default_step_columns() -> dict[str, ColumnSpec]:
    """The default columns of `ProgressCallback`, in order."""
    columns = (
        ColumnSpec("epoch", width=6, fmt=format_epoch),
        ColumnSpec("loss", width=8, fmt=".5f"),
        ColumnSpec("grad_norm", "grad", 8, ".4f"),
        ColumnSpec("learning_rate", "lr", 8, ".2e"),
        ColumnSpec("tokens", width=8, fmt=",d"),
        ColumnSpec("total_tokens", "total_tok", 9, "si"),
        ColumnSpec("tok_per_sec", "tok/s", 7, ",d"),
        ColumnSpec("mfu", width=5, fmt=".1%"),
        ColumnSpec("peak_mem", "memory", 9, "gib", "max"),
    )
    return {column.key: column for column in columns}


def default_final_metrics() -> dict[str, MetricSpec]:
    """The default lines of `ProgressCallback`'s final summary, in order."""
    metrics = (
        MetricSpec("train_runtime", "Runtime", ".2f", " s"),
        MetricSpec("step", "Total steps", ",d"),
        MetricSpec("train_samples", "Total samples", ",d"),
        MetricSpec("effective_batch_size", "Effective batch size", ",d"),
        MetricSpec("train_samples_per_second", "Samples/sec", ".3f"),
        MetricSpec("train_steps_per_second", "Steps/sec", ".3f"),
        MetricSpec("epoch", "Epoch", ".6g"),
        MetricSpec("total_tokens", "Total tokens", ",d"),
        MetricSpec("tokens_per_second", "Tokens/sec", ",.0f"),
        MetricSpec("total_flops", "Total FLOPs", ".3e"),
        MetricSpec("flops_per_second", "FLOPs/sec", ".3e"),
    )
    return {metric.key: metric for metric in metrics}


def merge_specs(defaults: Mapping[str, Spec], overrides: Mapping[str, Any] | None, kind: type[Spec]) -> dict[str, Spec]:
    """`defaults` updated by `overrides`, in the order of `defaults`, with new entries last.

    An override is a dictionary of the fields to change, a complete spec, or None, which removes the entry. The name of
    an entry is its metric unless the dictionary gives another one as `key`, so two entries can show the same metric.

    Raises:
        TypeError: for any other kind of override.
        ConfigError: for a field that a spec does not have.
    """
    merged = dict(defaults)
    for name, change in (overrides or {}).items():
        if change is None:
            merged.pop(name, None)
        elif isinstance(change, kind):
            merged[name] = change
        elif isinstance(change, Mapping):
            known = [field.name for field in fields(kind)]
            for unknown in [field_name for field_name in change if field_name not in known]:
                hint = nearest(unknown, known)
                raise ConfigError(f"{name!r}: {kind.__name__} has no field {unknown!r}.{hint} Its fields: {known}.")
            is_new = name not in merged
            merged[name] = kind(**{"key": name, "label": name, **change}) if is_new else replace(merged[name], **change)
        else:
            raise TypeError(f"{name!r} must be a dictionary, a {kind.__name__} or None (to remove), got {change!r}.")
    return merged


def present_columns(columns: Mapping[str, ColumnSpec], logs: Mapping[str, Any]) -> list[ColumnSpec]:
    """The columns whose metric is in `logs`."""
    return [column for column in columns.values() if column.key in logs]


_SPARE = 30
"""Columns that must be free for the tokens of an interval, which are nearly constant."""
DROPPED_FIRST = ("tokens", "total_tokens", "epoch", "mfu", "peak_mem", "tok_per_sec")
"""Default columns that a narrow line omits, in this order."""


def fitting_columns(columns: list[ColumnSpec], width: int) -> list[ColumnSpec]:
    """The columns that fit into a line; only default columns are dropped, not those that the user has set."""
    defaults = default_step_columns()
    for key in DROPPED_FIRST:
        if len(header_line(columns)) <= width - (_SPARE if key == "tokens" else 0):
            break
        columns = [column for column in columns if column != defaults[key]]
    return columns


def header_line(columns: list[ColumnSpec]) -> str:
    """The headings above the rows."""
    first = ("step".rjust(_STEP_WIDTH), "split".ljust(_SPLIT_WIDTH))
    return "  ".join([*first, *(column.heading() for column in columns)])


def row_line(step: int, split: str, columns: list[ColumnSpec], logs: Mapping[str, Any]) -> str:
    """The row of a logged step or of an evaluation; a metric that it lacks is blank."""
    cells = (column.cell(logs) if column.key in logs else " " * column.width for column in columns)
    return "  ".join([f"{step:>{_STEP_WIDTH},d}", split.ljust(_SPLIT_WIDTH), *cells]).rstrip()


def summary_lines(metrics: Mapping[str, MetricSpec], logs: Mapping[str, Any]) -> list[str]:
    """The lines for the final metrics in `logs`: those of `metrics`, then metrics without a spec.

    A default entry that was removed stays hidden, and so does `total_flos`, Hugging Face's name of `total_flops`.
    Counts of tokens and FLOPs that are 0, as for a model without tokens, are omitted, as are the losses of the title.
    """
    known = default_final_metrics().keys() | {metric.key for metric in metrics.values()} | {"total_flos", *LOSSES}
    others = [MetricSpec(key, "Mean loss" if key == "train_loss" else "") for key in logs if key not in known]
    shown = [metric for metric in [*metrics.values(), *others] if metric.key in logs]
    return [metric.line(logs) for metric in shown if logs[metric.key] or metric.key not in _OMITTED_AT_ZERO]


def in_two_columns(lines: Sequence[str], width: int) -> list[str]:
    """The lines side by side, the first half on the left, if two of them fit into `width`."""
    half = (len(lines) + 1) // 2
    left, right = lines[:half], lines[half:]
    widest = max(map(len, left), default=0) + 2
    if len(lines) < _MANY or widest + max(map(len, right), default=0) > width:
        return list(lines)
    pairs = zip(left, [*right, ""], strict=False)
    return [(one.ljust(widest) + other.strip()).rstrip() for one, other in pairs]


def summary_title(logs: Mapping[str, Any], *, is_complete: bool = True) -> str:
    """The first line of the summary: the loss of the first step, and that of the last row."""
    first, last = (logs.get(key) for key in LOSSES)
    ended = "Training complete:" if is_complete else f"Training stopped at step {logs.get('step', 0):,}:"
    if not isinstance(first, float) or not isinstance(last, float):
        return ended
    return f"{ended} loss {first:.4g} at the start, {last:.4g} at the end"


class LineWriter:
    """Writes log records to a stream, and passes them to existing handlers of the logger of that name.

    Attaches no handler itself: the logger is shared by the process, and a second writer would duplicate every line.
    """

    def __init__(
        self,
        logger_name: str,
        line_format: str,
        stream: OutputStream = None,
        level: int = logging.INFO,
        date_format: str | None = None,
    ) -> None:
        if isinstance(stream, str) and stream not in ("stdout", "stderr"):
            raise ConfigError(f"output_stream must be 'stdout', 'stderr', a text stream or None, got {stream!r}.")
        self._stream = stream
        self._formatter = logging.Formatter(line_format, date_format)
        self._level = level
        self._logger = logging.getLogger(logger_name)
        self._logger.propagate = False
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.DEBUG)

    @property
    def prefix_width(self) -> int:
        """Characters of a line besides its text."""
        return len(self._formatter.format(self._record("", logging.INFO)))

    def write(self, text: str, level: int = logging.INFO, style: Style | None = None) -> None:
        """Write a record unless its level is below that of the writer or the logger; a terminal shows its style."""
        if level < self._level or not self._logger.isEnabledFor(level):
            return
        record, stream = self._record(text, level), self._resolve()
        line = self._formatter.format(record)
        # above any progress bars
        tqdm.write(line if style is None else styled(line, style, stream), file=stream)
        stream.flush()
        if self._logger.handlers:
            self._logger.handle(record)

    def _record(self, text: str, level: int) -> logging.LogRecord:
        return self._logger.makeRecord(self._logger.name, level, __file__, 0, text, (), None)

    def _resolve(self) -> TextIO:
        """The stream, looked up for every line, since a test or notebook may have replaced `sys.stdout`."""
        if isinstance(self._stream, str):
            return sys.stderr if self._stream == "stderr" else sys.stdout
        return sys.stdout if self._stream is None else self._stream
