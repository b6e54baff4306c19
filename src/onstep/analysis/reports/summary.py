"""Summarizes a run by its last, best and mean values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np

from onstep.analysis.logs.columns import Mask, Numbers, number
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.plots.series import newest_rows
from onstep.record.gaps import MISSING, describe_gap

Summary = dict[str, Any]

_FINAL_KEYS = (
    "train_runtime",
    "train_samples",
    "train_samples_per_second",
    "train_steps_per_second",
    "effective_batch_size",
)
_LOSS_OF_SET = re.compile(r"eval_(.+)_loss")
"""Key of the loss on a named evaluation set."""
_MOST_SETS = 200
"""Maximum number of evaluation sets to summarize."""
_MOST_KEYS = 12
"""Maximum number of keys to list if there is nothing to summarize."""
_MOST_GAPS = 5
"""Maximum number of gaps to list."""


def compute_summary_statistics(log: TrainingLog) -> Summary:
    """Compute the summary of a run; keys for which the log has no data are absent.

    Always: `run_name`, `log_path`. With training records: `total_steps`, `final_epoch`, `final_loss`, `avg_loss`,
    `min_loss`, `best_loss`, `best_loss_step`; `avg_grad_norm`, `max_grad_norm_value`, `max_grad_norm_step`;
    `initial_lr`, `final_lr`. With evaluations: `final_eval_loss`, `final_eval_loss_step`, `best_eval_loss`,
    `best_eval_loss_step`. After the end: `train_runtime` (seconds), `train_samples`, `train_samples_per_second`,
    `train_steps_per_second`, `effective_batch_size`. With several evaluation sets (`eval_<set>_loss`): `eval_sets`,
    with the same four evaluation values for each. `notes`: remarks on the values and on records that were lost.

    If a run was rolled back to an earlier step and its log still contains the records after that step, only the newer
    branch counts, as in plots.

    Final values are those that were logged, including NaN; mean, minimum and best are over finite values, and
    `nonfinite_losses` and `nonfinite_grad_norms` count the others, if any.

    Args:
        log: the log of one run.
    """
    summary: Summary = {"run_name": log.run_name, "log_path": str(log.log_path)}
    # evaluation set -> key of its loss
    found = [_LOSS_OF_SET.fullmatch(key) for key in log.keys()]  # noqa: SIM118 - a log is not a dictionary
    all_sets = {match[1]: match[0] for match in found if match is not None}
    sets = dict(islice(all_sets.items(), _MOST_SETS))
    training, evaluation = log.is_training, log.is_evaluation
    for key in sets.values():
        evaluation = evaluation | log.has(key)
    evaluation = _newest(log, training | evaluation) & evaluation
    training = _newest(log, training) & training
    final = log.get_final_record() or {}
    parts = [
        _training(log, training),
        _grad_norm(log, training & log.has("grad_norm")),
        {
            "initial_lr": _logged(log, "learning_rate", training, 0),
            "final_lr": _logged(log, "learning_rate", training, -1),
        },
        _evaluation(log, "eval_loss", evaluation & log.is_evaluation),
        {"eval_sets": {name: _known(_evaluation(log, key, evaluation)) for name, key in sets.items()} or None},
        {key: as_number(final.get(key)) for key in _FINAL_KEYS},
        {"notes": _notes(log, int(np.count_nonzero(log.is_training & ~training)), [*all_sets.values()]) or None},
    ]
    for part in parts:
        summary.update(_known(part))
    return summary


def get_perplexity(loss: float) -> float:
    """exp(loss); infinite on overflow.

    Args:
        loss: mean cross-entropy in nats per token.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _newest(log: TrainingLog, rows: Mask) -> Mask:
    """Mask of the records that are not on an abandoned branch; includes those without a step."""
    steps = np.where(rows, log.column("global_step"), np.nan)
    newest: Mask = ~np.isfinite(steps)
    newest[newest_rows(steps)] = True
    return newest


def _notes(log: TrainingLog, num_left: int, more_losses: list[str]) -> list[str]:
    notes = []
    if num_left:
        notes.append(
            f"the run was rolled back to an earlier step: {num_left} training records of the abandoned branch are "
            "excluded"
        )
    gaps = np.flatnonzero(log.has(MISSING))[:_MOST_GAPS]
    notes += filter(None, (describe_gap(log.records[int(row)]) for row in gaps))
    if not more_losses and not any(log.has(key).any() for key in ("loss", "eval_loss")):
        keys = log.keys()
        more = ", ..." if len(keys) > _MOST_KEYS else ""
        its = f"no record has loss or eval_loss; its keys are {', '.join(keys[:_MOST_KEYS])}{more}"
        notes.append(its if keys else "the log has no records yet")
    if len(more_losses) > _MOST_SETS:
        notes.append(f"of {len(more_losses):,} evaluation sets, the first {_MOST_SETS} are summarized")
    return notes


def _known(figures: Summary) -> Summary:
    return {key: value for key, value in figures.items() if value is not None}


def _training(log: TrainingLog, rows: Mask) -> Summary:
    best = _extreme_row(log.column("loss"), rows, np.argmin)
    return {
        "total_steps": as_step(_logged(log, "global_step", rows, -1)),
        "final_epoch": _logged(log, "epoch", rows, -1),
        "final_loss": _logged(log, "loss", rows, -1),
        "avg_loss": _mean(log, "loss", rows),
        "min_loss": _value(log, "loss", best),
        "best_loss": _value(log, "loss", best),
        "best_loss_step": as_step(_value(log, "global_step", best)),
        "nonfinite_losses": _num_not_finite(log, "loss", rows),
    }


def _grad_norm(log: TrainingLog, rows: Mask) -> Summary:
    largest = _extreme_row(log.column("grad_norm"), rows, np.argmax)
    return {
        "avg_grad_norm": _mean(log, "grad_norm", rows),
        "max_grad_norm_value": _value(log, "grad_norm", largest),
        "max_grad_norm_step": as_step(_value(log, "global_step", largest)),
        "nonfinite_grad_norms": _num_not_finite(log, "grad_norm", rows),
    }


def _evaluation(log: TrainingLog, key: str, rows: Mask) -> Summary:
    chosen = np.flatnonzero(rows & log.has(key))
    best = _extreme_row(log.column(key), rows, np.argmin)
    return {
        "final_eval_loss": _logged(log, key, rows, -1),
        "final_eval_loss_step": as_step(_value(log, "global_step", int(chosen[-1]) if len(chosen) else None)),
        "best_eval_loss": _value(log, key, best),
        "best_eval_loss_step": as_step(_value(log, "global_step", best)),
        "nonfinite_eval_losses": _num_not_finite(log, key, rows),
    }


def _logged(log: TrainingLog, key: str, rows: Mask, place: int) -> float | None:
    """The value in the first (`place` 0) or last (-1) of the rows that have the key."""
    chosen = np.flatnonzero(rows & log.has(key))
    return _value(log, key, int(chosen[place])) if len(chosen) else None


def _value(log: TrainingLog, key: str, row: int | None) -> float | None:
    """The number in a record as it was logged: an integer or a float."""
    return None if row is None else as_number(log.records[row].get(key))


def as_number(value: Any) -> float | None:
    """The value if it is a number, otherwise None; an integer beyond the range of floats is infinite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if math.isfinite(as_float := number(value)) else as_float


def as_step(value: float | None) -> int | None:
    """A step as an integer; None if unknown."""
    return int(value) if value is not None and math.isfinite(value) else None


def _num_not_finite(log: TrainingLog, key: str, rows: Mask) -> int | None:
    """Number of NaN or infinite values; None if there are none."""
    having = rows & log.has(key)
    return int(np.count_nonzero(~np.isfinite(log.column(key)[having]))) or None


def _mean(log: TrainingLog, key: str, rows: Mask) -> float | None:
    """Mean of the finite values."""
    values = log.column(key)[rows]
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        return float(values.mean()) if len(values) else None


def _extreme_row(values: Numbers, rows: Mask, best_of: Callable[[Numbers], Any]) -> int | None:
    """The first of the rows with the smallest or largest finite value."""
    chosen = np.flatnonzero(rows & np.isfinite(values))
    return int(chosen[int(best_of(values[chosen]))]) if len(chosen) else None
