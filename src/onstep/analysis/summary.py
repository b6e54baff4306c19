"""What a run came to: its last, best and mean values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from onstep.analysis.record_file import Mask, Numbers, number
from onstep.analysis.series import newest_rows
from onstep.analysis.training_log import TrainingLog

Summary = dict[str, Any]

_FINAL_KEYS = (
    "train_runtime",
    "train_samples",
    "train_samples_per_second",
    "train_steps_per_second",
    "effective_batch_size",
)
_LOSS_OF_SET = re.compile(r"eval_(.+)_loss")
"""Key of the loss on one of several evaluation sets."""
_MOST_KEYS = 12
"""Keys that are named where nothing could be summed up."""


def compute_summary_statistics(log: TrainingLog) -> Summary:
    """The figures of a run; a key is absent where the log has nothing for it.

    Always: `run_name`, `log_path`. With training records: `total_steps`, `final_epoch`, `final_loss`, `avg_loss`,
    `min_loss`, `best_loss`, `best_loss_step`; `avg_grad_norm`, `max_grad_norm_value`, `max_grad_norm_step`;
    `initial_lr`, `final_lr`. With evaluations: `final_eval_loss`, `final_eval_loss_step`, `best_eval_loss`,
    `best_eval_loss_step`. After the end: `train_runtime` (seconds), `train_samples`, `train_samples_per_second`,
    `train_steps_per_second`, `effective_batch_size`. With several evaluation sets (`eval_<set>_loss`): `eval_sets`, for
    each the same four figures of evaluations. `notes`: what to know of the figures, in words.

    Where a run went back to an earlier step, and its log still holds what came after that step, only the newer branch
    counts, as in figures.

    The last value is what was logged, also NaN; mean, least and best are taken over the finite values, and
    `nonfinite_losses` and `nonfinite_grad_norms` count the others where there are any.
    """
    summary: Summary = {"run_name": log.run_name, "log_path": str(log.log_path)}
    # name of each evaluation set, and the key of the loss on it
    found = [_LOSS_OF_SET.fullmatch(key) for key in log.keys()]  # noqa: SIM118 - a log is no dictionary
    sets = {match[1]: match[0] for match in found if match is not None}
    log.load_columns(["global_step", "loss", "grad_norm", "eval_loss", *sets.values()])
    training, evaluation = _rows_that_count(log, [*sets.values()])
    parts = [
        _training(log, training),
        _grad_norm(log, training & log.has("grad_norm")),
        _learning_rate(log, training),
        _evaluation(log, "eval_loss", evaluation & log.is_evaluation),
        {"eval_sets": {name: _known(_evaluation(log, key, evaluation)) for name, key in sets.items()} or None},
        _final(log),
        {"notes": _notes(log, int(np.count_nonzero(log.is_training & ~training)), [*sets.values()]) or None},
    ]
    for part in parts:
        summary.update(_known(part))
    return summary


def get_perplexity(loss: float) -> float:
    """exp(loss); infinite where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _rows_that_count(log: TrainingLog, more_losses: list[str]) -> tuple[Mask, Mask]:
    """Which records of training, and which of evaluations, are of the newest branch."""
    training, evaluation = log.is_training, log.is_evaluation
    for key in more_losses:
        evaluation = evaluation | log.has(key)
    return _newest(log, training) & training, _newest(log, training | evaluation) & evaluation


def _newest(log: TrainingLog, rows: Mask) -> Mask:
    """Which records are not of a branch that was left; those of an unknown step are not."""
    steps = np.where(rows, log.column("global_step"), np.nan)
    newest: Mask = ~np.isfinite(steps)
    newest[newest_rows(steps)] = True
    return newest


def _notes(log: TrainingLog, num_left: int, more_losses: list[str]) -> list[str]:
    notes = []
    if num_left:
        notes.append(
            f"the run went back to an earlier step: {num_left} records of training of the branch that it left are not "
            "counted"
        )
    if not any(log.has(key).any() for key in ("loss", "eval_loss", *more_losses)):
        keys = log.keys()
        more = ", ..." if len(keys) > _MOST_KEYS else ""
        its = f"no record has loss or eval_loss; its keys are {', '.join(keys[:_MOST_KEYS])}{more}"
        notes.append(its if keys else "the log has no records yet")
    return notes


def _known(figures: Summary) -> Summary:
    return {key: value for key, value in figures.items() if value is not None}


def _training(log: TrainingLog, rows: Mask) -> Summary:
    losses = _numbers_at(log, "loss", rows)
    best = _extreme_row(log.column("loss"), rows, np.argmin)
    return {
        "total_steps": _as_step(_last(log, "global_step", rows)),
        "final_epoch": _last(log, "epoch", rows),
        "final_loss": _last(log, "loss", rows),
        "avg_loss": _mean(losses),
        "min_loss": _value(log, "loss", best),
        "best_loss": _value(log, "loss", best),
        "best_loss_step": _as_step(_value(log, "global_step", best)),
        "nonfinite_losses": _num_not_finite(log, "loss", rows),
    }


def _grad_norm(log: TrainingLog, rows: Mask) -> Summary:
    largest = _extreme_row(log.column("grad_norm"), rows, np.argmax)
    return {
        "avg_grad_norm": _mean(_numbers_at(log, "grad_norm", rows)),
        "max_grad_norm_value": _value(log, "grad_norm", largest),
        "max_grad_norm_step": _as_step(_value(log, "global_step", largest)),
        "nonfinite_grad_norms": _num_not_finite(log, "grad_norm", rows),
    }


def _learning_rate(log: TrainingLog, rows: Mask) -> Summary:
    return {"initial_lr": _first(log, "learning_rate", rows), "final_lr": _last(log, "learning_rate", rows)}


def _evaluation(log: TrainingLog, key: str, rows: Mask) -> Summary:
    chosen = np.flatnonzero(rows & log.has(key))
    best = _extreme_row(log.column(key), rows, np.argmin)
    return {
        "final_eval_loss": _last(log, key, rows),
        "final_eval_loss_step": _as_step(_value(log, "global_step", int(chosen[-1]) if len(chosen) else None)),
        "best_eval_loss": _value(log, key, best),
        "best_eval_loss_step": _as_step(_value(log, "global_step", best)),
        "nonfinite_eval_losses": _num_not_finite(log, key, rows),
    }


def _final(log: TrainingLog) -> Summary:
    record = log.get_final_record() or {}
    return {key: record.get(key) for key in _FINAL_KEYS}


def _first(log: TrainingLog, key: str, rows: Mask) -> float | None:
    chosen = np.flatnonzero(rows & log.has(key))
    return _value(log, key, int(chosen[0])) if len(chosen) else None


def _last(log: TrainingLog, key: str, rows: Mask) -> float | None:
    chosen = np.flatnonzero(rows & log.has(key))
    return _value(log, key, int(chosen[-1])) if len(chosen) else None


def _value(log: TrainingLog, key: str, row: int | None) -> float | None:
    """The number of one record, which is decoded for that: cheaper than a whole column."""
    value = None if row is None else log.records[row].get(key)
    return None if value is None or (math.isnan(number(value)) and not _is_nan(value)) else value


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _as_step(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) else None


def _numbers_at(log: TrainingLog, key: str, rows: Mask) -> Numbers:
    """The finite ones."""
    values = log.column(key)[rows]
    return values[np.isfinite(values)]


def _num_not_finite(log: TrainingLog, key: str, rows: Mask) -> int | None:
    """How many values are NaN or infinite; None for none."""
    having = rows & log.has(key)
    return int(np.count_nonzero(~np.isfinite(log.column(key)[having]))) or None


def _mean(values: Numbers) -> float | None:
    return float(values.mean()) if len(values) else None


def _extreme_row(values: Numbers, rows: Mask, best_of: Callable[[Numbers], Any]) -> int | None:
    """The first of the rows with the least or the largest finite value."""
    chosen = np.flatnonzero(rows & np.isfinite(values))
    return int(chosen[int(best_of(values[chosen]))]) if len(chosen) else None
