"""The console's table of metrics: which columns and final lines there are, and how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from onstep.config.part import nearest
from onstep.errors import ConfigError
from onstep.metrics.formatting import Format, Reduce, check_format, check_reduce, format_value

_STEP_WIDTH = 10
_FINAL_LABEL_WIDTH = 28


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
            merged[name] = _changed(name, merged.get(name), change, kind)
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


def _changed(name: str, current: Spec | None, change: Mapping[str, Any], kind: type[Spec]) -> Spec:
    known = [field.name for field in fields(kind)]
    for field_name in change:
        if field_name not in known:
            hint = nearest(field_name, known)
            raise ConfigError(f"{name!r}: {kind.__name__} has no field {field_name!r}.{hint} Its fields: {known}.")
    if current is not None:
        return replace(current, **change)
    return kind(**{"key": name, "label": name, **change})
