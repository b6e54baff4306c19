"""Lays out a run's console output: the table of steps, and the final summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from onstep.config.suggestions import nearest
from onstep.console.formats import Format, Reduce, format_epoch, formatter
from onstep.errors import ConfigError
from onstep.record.kinds import Metrics

_STEP_WIDTH = 8
_SPLIT_WIDTH = 5
_FINAL_LABEL_WIDTH = 24
_MANY = 5
"""Lines from which on the summary has two columns."""
_OMITTED_AT_ZERO = ("total_tokens", "tokens_per_second", "total_flops", "flops_per_second")
LOSSES = ("first_loss", "last_loss")
"""Final metrics that the title of the summary shows."""


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
    """A format specification, such as `.4f`."""
    reduce: Reduce = None
    """How the values since the last row become one."""

    def __post_init__(self) -> None:
        formatter(self.fmt, self.reduce)

    def heading(self) -> str:
        """The label, right-aligned."""
        return (self.label or self.key).rjust(self.width)


@dataclass(frozen=True)
class MetricSpec:
    """A line of the summary printed when training is complete."""

    key: str
    """The name of the metric."""
    label: str = ""
    """Label of the line; "" means the key."""
    fmt: Format = ""
    """A format specification, such as `.4f`."""
    suffix: str = ""
    """Unit, omitted if there is no value."""

    def __post_init__(self) -> None:
        formatter(self.fmt)

    def line(self, logs: Metrics) -> str:
        """The indented line.

        Args:
            logs: the logged metrics by name.
        """
        value = logs[self.key]
        unit = "" if value is None else self.suffix
        return f"  {(self.label or self.key) + ':':<{_FINAL_LABEL_WIDTH}}{formatter(self.fmt)(value)}{unit}"


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


def merge_specs(
    defaults: Mapping[str, Spec], overrides: Mapping[str, object] | None, kind: type[Spec]
) -> dict[str, Spec]:
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


def row_formatter(columns: Sequence[ColumnSpec]) -> Callable[[int, str, Metrics], str]:
    """A function that formats the row of a logged step or of an evaluation from its step, split and metrics.

    A metric that the row lacks is blank.
    """
    cells = [(column.key, column.width, formatter(column.fmt, column.reduce)) for column in columns]

    def row(step: int, split: str, logs: Metrics) -> str:
        texts = [(formatted(logs[key]) if key in logs else "").rjust(width) for key, width, formatted in cells]
        return "  ".join([f"{step:>{_STEP_WIDTH},d}", split.ljust(_SPLIT_WIDTH), *texts]).rstrip()

    return row


def summary_lines(metrics: Mapping[str, MetricSpec], logs: Metrics) -> list[str]:
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


def summary_title(logs: Metrics, *, is_complete: bool = True) -> str:
    """The first line of the summary: the loss of the first step, and that of the last row."""
    first, last = (logs.get(key) for key in LOSSES)
    ended = "Training complete:" if is_complete else f"Training stopped at step {logs.get('step', 0):,}:"
    if not isinstance(first, float) or not isinstance(last, float):
        return ended
    return f"{ended} loss {first:.4g} at the start, {last:.4g} at the end"
