"""What a run shows on the console: how values are written, the table of metrics, and the lines on a stream."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from onstep.config.part import nearest
from onstep.errors import ConfigError

Format = str | Callable[[Any], str]
"""A Python format specification, "si", "gib", "" for what suits the type, or a callable that gives the text."""
Reduce = str | Callable[[Any], Any] | None
"""What becomes of a list: None or "max", "min", "mean", "sum", "all" (every element, joined by "/"), or a callable."""

OutputStream = str | TextIO | None
"""Where lines go: "stdout", "stderr", a text stream, or None for stdout."""

_INTEGER_PRESENTATIONS = frozenset("doxXbn")
_STEP_WIDTH = 10
_FINAL_LABEL_WIDTH = 28


def format_si(value: float) -> str:
    """A count with three significant digits and the unit K, M, G, T, P or E; a plain integer below 1000."""
    scaled = float(value)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        text = f"{scaled:.3g}" if unit else f"{scaled:.0f}"
        if abs(float(text)) < 1000:  # compared as rounded: 999 999 is 1M
            return text + unit
        scaled /= 1000
    return f"{value:.3g}"


def format_gib(num_bytes: float) -> str:
    """Bytes as GiB (2**30) with three decimals."""
    return f"{num_bytes / 2**30:.3f} GiB"


_NAMED: dict[str, Callable[[float], str]] = {"si": format_si, "gib": format_gib}

_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
}


def format_value(value: Any, fmt: Format = "", reduce: Reduce = None) -> str:
    """The text for a metric's value.

    A list is reduced first. What `fmt` cannot show (None, text, a NaN where an integer is wanted) is shown as it is.

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
    """Refuse a format that no number can be shown with.

    Raises:
        ConfigError: naming it and the formats there are.
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
        ConfigError: naming it and the reductions there are.
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
    """A column of the rows printed while training."""

    key: str
    """The metric in `logs` that the column shows."""
    label: str = ""
    """Heading; "" is the key."""
    width: int = 10
    """Least width in characters; a longer text is not cut."""
    fmt: Format = ""
    reduce: Reduce = None

    def __post_init__(self) -> None:
        check_format(self.fmt)
        check_reduce(self.reduce)

    def cell(self, logs: Mapping[str, Any]) -> str:
        """The metric's text, right-aligned."""
        return format_value(logs[self.key], self.fmt, self.reduce).rjust(self.width)

    def heading(self) -> str:
        """The label, right-aligned."""
        return (self.label or self.key).rjust(self.width)


@dataclass(frozen=True)
class MetricSpec:
    """A line of the summary printed when training is complete."""

    key: str
    label: str = ""
    """What the line is called; "" is the key."""
    fmt: Format = ""
    suffix: str = ""
    """A unit; left away where there is no value."""

    def __post_init__(self) -> None:
        check_format(self.fmt)

    def line(self, logs: Mapping[str, Any]) -> str:
        """The indented line."""
        value = logs[self.key]
        unit = "" if value is None else self.suffix
        return f"  {(self.label or self.key) + ':':<{_FINAL_LABEL_WIDTH}}{format_value(value, self.fmt)}{unit}"


Spec = TypeVar("Spec", ColumnSpec, MetricSpec)


def default_step_columns() -> dict[str, ColumnSpec]:
    """The columns that `ProgressCallback` shows unless told otherwise, in order."""
    columns = (
        ColumnSpec("epoch", fmt=".4g"),
        ColumnSpec("loss", width=8, fmt=".5f"),
        ColumnSpec("grad_norm", "grad", 8, ".4f"),
        ColumnSpec("learning_rate", "lr", 10, ".2e"),
        ColumnSpec("tokens", fmt=",d"),
        ColumnSpec("total_tokens", "total_tok", 10, "si"),
        ColumnSpec("tok_per_sec", "tok/s", 10, ",d"),
        ColumnSpec("mfu", width=6, fmt=".1%"),
        ColumnSpec("peak_mem", width=11, fmt="gib", reduce="max"),
    )
    return {column.key: column for column in columns}


def default_final_metrics() -> dict[str, MetricSpec]:
    """The lines of `ProgressCallback`'s final summary unless told otherwise, in order."""
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
    """`defaults` with `overrides` laid over them, in the order of `defaults`, new entries last.

    An override is a dictionary of the fields to change, a whole spec, or None, which erases the entry. The name of an
    entry is its metric unless the dictionary names another one as `key`, so that two entries can show one metric.

    Raises:
        TypeError: when an override is something else.
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
            raise TypeError(f"{name!r} must be a dictionary, a {kind.__name__} or None (erase), got {change!r}.")
    return merged


def present_columns(columns: Mapping[str, ColumnSpec], logs: Mapping[str, Any]) -> list[ColumnSpec]:
    """The columns whose metric is in `logs`."""
    return [column for column in columns.values() if column.key in logs]


def header_line(columns: list[ColumnSpec]) -> str:
    """The headings over the rows."""
    return "  ".join(["step".rjust(_STEP_WIDTH), *(column.heading() for column in columns)])


def row_line(step: int, columns: list[ColumnSpec], logs: Mapping[str, Any]) -> str:
    """The row of one logged step."""
    return "  ".join([f"{step:>{_STEP_WIDTH},d}", *(column.cell(logs) for column in columns)])


def summary_lines(metrics: Mapping[str, MetricSpec], logs: Mapping[str, Any]) -> list[str]:
    """The lines for the final metrics in `logs`: those of `metrics`, then what no spec is about.

    A default entry that was erased stays hidden.
    """
    known = default_final_metrics().keys() | {metric.key for metric in metrics.values()}
    others = [MetricSpec(key) for key in logs if key not in known]
    return [metric.line(logs) for metric in [*metrics.values(), *others] if metric.key in logs]


class LineWriter:
    """Writes log records to one stream, and hands them to the handlers that others gave the logger of that name.

    No handler is attached to the logger: it is shared by the process, and a second writer would double every line.
    """

    def __init__(
        self, logger_name: str, line_format: str, stream: OutputStream = None, level: int = logging.INFO
    ) -> None:
        if isinstance(stream, str) and stream not in ("stdout", "stderr"):
            raise ConfigError(f"output_stream must be 'stdout', 'stderr', a text stream or None, got {stream!r}.")
        self._stream = stream
        self._formatter = logging.Formatter(line_format)
        self._level = level
        self._logger = logging.getLogger(logger_name)
        self._logger.propagate = False
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.DEBUG)

    def write(self, text: str, level: int = logging.INFO) -> None:
        """Write one record, unless its level is below the writer's or the logger's."""
        if level < self._level or not self._logger.isEnabledFor(level):
            return
        record = self._logger.makeRecord(self._logger.name, level, __file__, 0, text, (), None)
        stream = self._resolve()
        tqdm.write(self._formatter.format(record), file=stream)  # above the bars, where there are any
        stream.flush()
        if self._logger.handlers:
            self._logger.handle(record)

    def _resolve(self) -> TextIO:
        """The stream, looked up at every line: a test or a notebook may have replaced `sys.stdout` since."""
        if isinstance(self._stream, str):
            return sys.stderr if self._stream == "stderr" else sys.stdout
        return sys.stdout if self._stream is None else self._stream
