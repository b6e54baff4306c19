"""Formats the summary of a run as text, Markdown, JSON or one line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onstep.analysis.logs.files import name_of_place
from onstep.analysis.reports.summary import Summary, get_perplexity
from onstep.analysis.text_tables import printable
from onstep.files.json_values import finite

ONE_LINE_HEADER = f"{'run':<32} | steps | time | loss | eval | samp/s"
"""Header for lines of `format_summary_oneline`."""

_NAME_LENGTH = 30

_MISSING = "N/A"


def format_summary_text(summary: Summary) -> str:
    """Format a summary for a terminal, in sections, with notes; unknown values are omitted.

    Args:
        summary: what `compute_summary_statistics` returned.
    """
    lines = [f"Summary of {_name(summary)}", *(f"  {path}" for path in _place(summary))]
    for title, entries in _sections(summary):
        lines += ["", title, *(f"  {label + ':':<24} {text}{_at(step)}" for label, text, step in entries)]
    lines += _note_lines(summary)
    return "\n".join(map(printable, lines))


def format_summary_markdown(summary: Summary) -> str:
    """Format a summary as Markdown: a table of the losses with their steps, and a list of the rest.

    Args:
        summary: what `compute_summary_statistics` returned.
    """
    lines = [
        f"## Summary of {_name(summary)}",
        "",
        *(line for path in _place(summary) for line in (f"Log: `{path}`", "")),
    ]
    sections = dict(_sections(summary))
    metrics = sections.pop("Metrics", [])
    if metrics:
        lines += ["| Metric | Value | Step |", "|---|---:|---:|"]
        lines += [f"| {label} | {text} | {'' if step is None else step} |" for label, text, step in metrics]
        lines.append("")
    for title, entries in sections.items():
        lines += [f"- {title}: {label} {text}{_at(step)}" for label, text, step in entries]
    lines += _note_lines(summary)
    return "\n".join(map(printable, lines)).rstrip()


def format_summary_json(summaries: Summary | Sequence[Summary]) -> str:
    """Format one summary as a JSON object, several as an array; values that are not finite become null.

    Args:
        summaries: what `compute_summary_statistics` returned, of each run.
    """
    content = summaries if isinstance(summaries, dict) else list(summaries)
    return json.dumps(finite(content), indent=2)


def format_summary_oneline(summary: Summary) -> str:
    """Format a summary in one line: name, steps, time, loss, evaluation loss, samples per second; N/A if unknown.

    Args:
        summary: what `compute_summary_statistics` returned.
    """
    name = _name(summary)[:_NAME_LENGTH]
    steps, runtime = summary.get("total_steps"), summary.get("train_runtime")
    fields = [
        f"{name:<32}",
        f"steps={_MISSING if steps is None else steps}",
        f"time={_MISSING if runtime is None else format_duration(runtime)}",
        f"loss={_number(summary.get('final_loss'), '.4f')}",
        f"eval={_number(summary.get('best_eval_loss'), '.4f')}",
        f"samp/s={_number(summary.get('train_samples_per_second'), '.1f')}",
    ]
    return printable(" | ".join(fields))


def format_duration(seconds: float) -> str:
    """Format as ``MM:SS``, or ``H:MM:SS`` from one hour on: ``01:30``, ``2:00:05``."""
    if not math.isfinite(seconds):
        return _MISSING
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


_Entry = tuple[str, str, int | None]
"""Label, text, and step of the value."""

_Row = tuple[str, str, str, str | None]
"""Label, key, format, and the key of the step."""

_METRICS: tuple[_Row, ...] = (
    ("Total Steps", "total_steps", "d", None),
    ("Final Epoch", "final_epoch", ".4g", None),
    ("Final Loss", "final_loss", ".4f", "total_steps"),
    ("Average Loss", "avg_loss", ".4f", None),
    ("Best Loss", "best_loss", ".4f", "best_loss_step"),
)

_EVALUATION: tuple[_Row, ...] = (
    ("Final Eval Loss", "final_eval_loss", ".4f", "final_eval_loss_step"),
    ("Best Eval Loss", "best_eval_loss", ".4f", "best_eval_loss_step"),
)

_NOT_FINITE: tuple[_Row, ...] = (
    ("NaN or Infinite Losses", "nonfinite_losses", "d", None),
    ("NaN or Infinite Eval Losses", "nonfinite_eval_losses", "d", None),
)

_SPEED: tuple[_Row, ...] = (
    ("Samples", "train_samples", ",d", None),
    ("Samples per Second", "train_samples_per_second", ".2f", None),
    ("Steps per Second", "train_steps_per_second", ".2f", None),
    ("Effective Batch Size", "effective_batch_size", "d", None),
)

_GRADIENTS: tuple[_Row, ...] = (
    ("Average Norm", "avg_grad_norm", ".4g", None),
    ("Largest Norm", "max_grad_norm_value", ".4g", "max_grad_norm_step"),
    ("NaN or Infinite", "nonfinite_grad_norms", "d", None),
)

_LEARNING_RATE: tuple[_Row, ...] = (("Initial", "initial_lr", ".3e", None), ("Final", "final_lr", ".3e", None))


def _sections(summary: Summary) -> list[tuple[str, list[_Entry]]]:
    """The known values of each section; empty sections are omitted."""
    metrics = _entries(summary, (*_METRICS, *_EVALUATION))
    if summary.get("best_eval_loss") is not None:
        perplexity = get_perplexity(summary["best_eval_loss"])
        metrics.append(("Best Eval Perplexity", f"{perplexity:.2f}", summary.get("best_eval_loss_step")))
    for name, figures in summary.get("eval_sets", {}).items():
        metrics += [(f"{label} ({name})", text, step) for label, text, step in _entries(figures, _EVALUATION)]
    metrics += _entries(summary, _NOT_FINITE)
    runtime = summary.get("train_runtime")
    speed: list[_Entry] = [] if runtime is None else [("Runtime", format_duration(runtime), None)]
    sections = [
        ("Metrics", metrics),
        ("Training Speed", speed + _entries(summary, _SPEED)),
        ("Gradient Statistics", _entries(summary, _GRADIENTS)),
        ("Learning Rate", _entries(summary, _LEARNING_RATE)),
    ]
    return [(title, entries) for title, entries in sections if entries]


def _entries(summary: Summary, rows: Sequence[_Row]) -> list[_Entry]:
    return [
        (label, _number(summary[key], form), summary.get(step_key) if step_key else None)
        for label, key, form, step_key in rows
        if summary.get(key) is not None
    ]


def _at(step: int | None) -> str:
    return "" if step is None else f" (step {step})"


def _number(value: Any, form: str) -> str:
    """Format a value; a value that the format does not apply to is converted to a string."""
    if value is None:
        return _MISSING
    try:
        return format(value, form)
    except (TypeError, ValueError):
        return str(value)


def _name(summary: Summary) -> str:
    """The run's name, or else the name of the log's file or directory."""
    return str(summary.get("run_name") or "".join(name_of_place(Path(path)) for path in _place(summary)) or "a run")


def _place(summary: Summary) -> list[str]:
    """The path of the log; empty for a summary that was made by hand without one."""
    return [str(summary["log_path"])] if summary.get("log_path") else []


def _note_lines(summary: Summary) -> list[str]:
    notes = [f"note: {printable(note)}" for note in summary.get("notes", [])]
    return ["", *notes] if notes else []
