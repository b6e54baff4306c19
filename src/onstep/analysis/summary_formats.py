"""Summaries of runs for people and programs: text, Markdown, JSON and one line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onstep.analysis.log_files import name_of_place
from onstep.analysis.summary import Summary, get_perplexity

ONE_LINE_HEADER = f"{'run':<32} | steps | time | loss | eval | samp/s"
"""What stands above several lines of `format_summary_one_line`."""

_NAME_LENGTH = 30
_MISSING = "N/A"


def format_summary_text(summary: Summary) -> str:
    """A summary for a terminal, in sections, and notes; what is not known is left out."""
    lines = [f"Summary of {_name(summary)}", f"  {summary['log_path']}"]
    for title, entries in _sections(summary):
        lines += ["", title, *(f"  {label + ':':<24} {text}{_at(step)}" for label, text, step in entries)]
    lines += ["", *_notes(summary)] if summary.get("notes") else []
    return "\n".join(lines)


def format_summary_markdown(summary: Summary) -> str:
    """A summary as Markdown: a table of the losses with their steps, and a list of the rest."""
    lines = [f"## Summary of {_name(summary)}", "", f"Log: `{summary['log_path']}`", ""]
    sections = dict(_sections(summary))
    metrics = sections.pop("Metrics", [])
    if metrics:
        lines += ["| Metric | Value | Step |", "|---|---:|---:|"]
        lines += [f"| {label} | {text} | {'' if step is None else step} |" for label, text, step in metrics]
        lines.append("")
    for title, entries in sections.items():
        lines += [f"- {title}: {label} {text}{_at(step)}" for label, text, step in entries]
    lines += ["", *_notes(summary)] if summary.get("notes") else []
    return "\n".join(lines).rstrip()


def format_summary_json(summaries: Summary | Sequence[Summary]) -> str:
    """One summary as a JSON object, several as an array; what is not finite is null, as JSON has no NaN."""
    content = summaries if isinstance(summaries, dict) else list(summaries)
    return json.dumps(_strict(content), indent=2)


def format_summary_one_line(summary: Summary) -> str:
    """A summary in one line: name, steps, time, loss, evaluation loss, samples per second; N/A where not known."""
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
    return " | ".join(fields)


def format_duration(seconds: float) -> str:
    """``MM:SS``, with hours in front from one hour on: ``01:30``, ``2:00:05``."""
    if not math.isfinite(seconds):
        return _MISSING
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


_Entry = tuple[str, str, int | None]
"""Label, text, and the step the value is of."""


def _sections(summary: Summary) -> list[tuple[str, list[_Entry]]]:
    """The known figures of each section; a section without any is left out."""
    sections = [
        ("Metrics", _metrics(summary)),
        ("Training Speed", _speed(summary)),
        ("Gradient Statistics", _gradients(summary)),
        ("Learning Rate", _learning_rate(summary)),
    ]
    return [(title, entries) for title, entries in sections if entries]


def _metrics(summary: Summary) -> list[_Entry]:
    entries = [
        _entry(summary, "Total Steps", "total_steps", "d"),
        _entry(summary, "Final Epoch", "final_epoch", ".4g"),
        _entry(summary, "Final Loss", "final_loss", ".4f", "total_steps"),
        _entry(summary, "Average Loss", "avg_loss", ".4f"),
        _entry(summary, "Best Loss", "best_loss", ".4f", "best_loss_step"),
        _entry(summary, "Final Eval Loss", "final_eval_loss", ".4f", "final_eval_loss_step"),
        _entry(summary, "Best Eval Loss", "best_eval_loss", ".4f", "best_eval_loss_step"),
    ]
    if summary.get("best_eval_loss") is not None:
        perplexity = get_perplexity(summary["best_eval_loss"])
        entries.append(("Best Eval Perplexity", f"{perplexity:.2f}", summary.get("best_eval_loss_step")))
    for name, figures in summary.get("eval_sets", {}).items():
        entries.append(_entry(figures, f"Final Eval Loss ({name})", "final_eval_loss", ".4f", "final_eval_loss_step"))
        entries.append(_entry(figures, f"Best Eval Loss ({name})", "best_eval_loss", ".4f", "best_eval_loss_step"))
    for key, what in (("nonfinite_losses", "Losses"), ("nonfinite_eval_losses", "Eval Losses")):
        entries.append(_entry(summary, f"NaN or Infinite {what}", key, "d"))
    return [entry for entry in entries if entry is not None]


def _speed(summary: Summary) -> list[_Entry]:
    runtime = summary.get("train_runtime")
    entries = [
        None if runtime is None else ("Runtime", format_duration(runtime), None),
        _entry(summary, "Samples", "train_samples", ",d"),
        _entry(summary, "Samples per Second", "train_samples_per_second", ".2f"),
        _entry(summary, "Steps per Second", "train_steps_per_second", ".2f"),
        _entry(summary, "Effective Batch Size", "effective_batch_size", "d"),
    ]
    return [entry for entry in entries if entry is not None]


def _gradients(summary: Summary) -> list[_Entry]:
    entries = [
        _entry(summary, "Average Norm", "avg_grad_norm", ".4g"),
        _entry(summary, "Largest Norm", "max_grad_norm_value", ".4g", "max_grad_norm_step"),
        _entry(summary, "NaN or Infinite", "nonfinite_grad_norms", "d"),
    ]
    return [entry for entry in entries if entry is not None]


def _learning_rate(summary: Summary) -> list[_Entry]:
    entries = [_entry(summary, "Initial", "initial_lr", ".3e"), _entry(summary, "Final", "final_lr", ".3e")]
    return [entry for entry in entries if entry is not None]


def _entry(summary: Summary, label: str, key: str, form: str, step_key: str | None = None) -> _Entry | None:
    if summary.get(key) is None:
        return None
    return label, _number(summary[key], form), summary.get(step_key) if step_key else None


def _at(step: int | None) -> str:
    return "" if step is None else f" (step {step})"


def _number(value: Any, form: str) -> str:
    """A number in a form; as it is where it is none or the form does not suit it."""
    if value is None:
        return _MISSING
    try:
        return format(value, form)
    except (TypeError, ValueError):
        return str(value)


def _name(summary: Summary) -> str:
    """The run's name, else that of the file or the folder that the log stands in."""
    return str(summary.get("run_name") or name_of_place(Path(summary["log_path"])))


def _notes(summary: Summary) -> list[str]:
    return [f"note: {one_line(note)}" for note in summary["notes"]]


def one_line(text: str) -> str:
    """Text of a log without what would break a line or move a cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _strict(value: Any) -> Any:
    """A value without what JSON has no form for."""
    if isinstance(value, dict):
        return {key: _strict(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
