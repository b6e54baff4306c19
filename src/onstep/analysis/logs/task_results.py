"""Keeps what tasks of lm-eval found about a run's weights, and reads it: in its record, and in `evaluations.jsonl`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from onstep.analysis.logs.record_file import objects_in
from onstep.analysis.logs.samples_log import append_lines
from onstep.record import Record
from onstep.record.kinds import FILE_NAME as RECORD

FILE_NAME = "evaluations.jsonl"
"""In the run's directory, beside its record: what `onstep evaluate` found, which a resume does not take back."""
_ERROR = "_stderr"


@dataclass(frozen=True)
class TaskResult:
    """What lm-eval found for one task or group."""

    metrics: Mapping[str, float]
    """Numbers by lm-eval's name of the metric, such as `acc`, `acc_stderr` and `exact_match,strict-match`."""
    num_samples: int | None = None
    """Questions that were asked; None if unknown."""
    num_fewshot: int | None = None
    """Solved examples before each question."""
    version: Any = None
    """The version that the task's file states."""
    limit: float | None = None
    """The limit that was set on the number of questions; None for all."""
    lm_eval: str = ""
    """The version of lm-eval."""


@dataclass(frozen=True)
class Evaluation:
    """The results of one evaluation of a run's weights."""

    timestamp: float
    """Unix time, in seconds."""
    step: int | None
    """The step that the weights are of; None if unknown."""
    weights: str
    """What was evaluated: the name of a checkpoint or directory; `training` for the model while it trained."""
    tasks: Mapping[str, TaskResult] = field(default_factory=dict)


def metrics_of(tasks: Mapping[str, TaskResult]) -> dict[str, float]:
    """The numbers under the names of a log: `eval_<task>_<metric>`, with `_` in place of lm-eval's comma."""
    return {
        f"eval_{name}_{metric.replace(',', '_')}": value
        for name, result in tasks.items()
        for metric, value in result.metrics.items()
    }


def line_of(tasks: Mapping[str, TaskResult]) -> dict[str, Any]:
    """The data of a line of the record, of the kind `evaluation`: the numbers, and the results as they are."""
    return {**metrics_of(tasks), "tasks": {name: asdict(one) for name, one in tasks.items()}}


def append_evaluation(directory: Path, step: int | None, weights: str, tasks: Mapping[str, TaskResult]) -> None:
    """Append an evaluation to `evaluations.jsonl` of a run, which may be running.

    Raises:
        OSError: if the file cannot be written, or is not a regular file.
    """
    evaluation = Evaluation(time.time(), step, weights, tasks)
    append_lines(directory / FILE_NAME, [json.dumps(asdict(evaluation))])


def evaluations_of_run(directory: Path) -> list[Evaluation]:
    """The evaluations in the directory of a run, in order: by `onstep evaluate`, and during the training.

    Damaged and foreign lines are skipped, and what `onstep evaluate` found before the steps behind the weights were
    trained again, after a new start or a rollback: it is of other weights.

    Raises:
        OSError: if a file exists and cannot be read.
    """
    during: list[Evaluation | None] = []
    trained: list[tuple[float, float]] = []
    for line in objects_in(directory / RECORD):
        if line.get("kind") == "evaluation":
            during.append(_during_training(line))
        elif line.get("kind") == "log" and "loss" in line:
            step, timestamp = line.get("global_step"), line.get("timestamp")
            if _is_number(step) and _is_number(timestamp):
                trained.append((step, timestamp))  # type: ignore[arg-type]
    later = filter(None, map(_evaluation, objects_in(directory / FILE_NAME)))
    of_weights = [one for one in later if not any(_is_replaced(one, *step) for step in trained)]
    return sorted(filter(None, [*during, *of_weights]), key=lambda one: one.timestamp)


def _is_replaced(evaluation: Evaluation, step: float, trained_at: float) -> bool:
    """Whether a step that the evaluated weights had behind them was trained after the evaluation."""
    return trained_at > evaluation.timestamp and (evaluation.step is None or step <= evaluation.step)


def evaluation_lines(tasks: Mapping[str, TaskResult]) -> list[str]:
    """Each task in words."""
    return [f"{name}: {', '.join(metric_words(result))}{_conditions(result)}" for name, result in tasks.items()]


def metric_words(result: TaskResult) -> list[str]:
    """Each metric with its standard error, if it has one."""
    words = []
    for metric, value in result.metrics.items():
        name, _, which = metric.partition(",")
        if not name.endswith(_ERROR):
            error = result.metrics.get(f"{name}{_ERROR}" + (f",{which}" if which else ""))
            words.append(f"{metric} {value:.4f}" + ("" if error is None else f" \u00b1 {error:.4f}"))
    return words


def _conditions(result: TaskResult) -> str:
    samples = "" if result.num_samples is None else f"{result.num_samples} questions"
    limit = "" if result.limit is None else f", limited by {result.limit:g}"
    shots = "" if result.num_fewshot is None else f"{result.num_fewshot}-shot"
    version = f"lm-eval {result.lm_eval}" if result.lm_eval else ""
    known = ", ".join(filter(None, (f"{samples}{limit}", shots, version)))
    return f" ({known})" if known else ""


def _during_training(line: Record) -> Evaluation | None:
    return _evaluation({**line, "step": line.get("global_step"), "weights": "training"})


def _evaluation(line: Record) -> Evaluation | None:
    timestamp, step, weights, tasks = (line.get(name) for name in ("timestamp", "step", "weights", "tasks"))
    if not _is_number(timestamp) or not isinstance(tasks, dict) or not isinstance(weights, str):
        return None
    results = {str(name): one for name, value in tasks.items() if (one := _result(value)) is not None}
    is_step = isinstance(step, int) and not isinstance(step, bool)
    return Evaluation(float(timestamp), step if is_step else None, weights, results) if results else None  # type: ignore[arg-type]


def _result(value: Any) -> TaskResult | None:
    metrics = value.get("metrics") if isinstance(value, dict) else None
    if not isinstance(metrics, dict):
        return None
    numbers = {str(name): float(number) for name, number in metrics.items() if _is_number(number)}
    counts = {
        name: value[name] if isinstance(value.get(name), int) else None for name in ("num_samples", "num_fewshot")
    }
    limit = value.get("limit")
    return TaskResult(
        numbers,
        **counts,
        version=value.get("version"),
        limit=limit if _is_number(limit) else None,
        lm_eval=str(value.get("lm_eval", "")),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
