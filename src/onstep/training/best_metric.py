"""The best value so far of the metric that a user cares about."""

from __future__ import annotations

import logging
from pathlib import Path

from onstep.events import Request
from onstep.training.run import Run
from onstep.training.seams import Metrics

logger = logging.getLogger(__name__)


def note_best_metric(state: Run, metrics: Metrics) -> None:
    """Remember the value of `validation.metric_for_best_model` if it is the best so far.

    Called after `on_evaluate`, so that early stopping compares with the best of the evaluations before. A metric whose
    name ends in `loss` or `perplexity` is better when smaller, unless `validation.greater_is_better` says otherwise.
    With `checkpoint.save_on_best` a checkpoint is asked for. All ranks have the same metrics.
    """
    name = state.cfg.validation.metric_for_best_model
    if name is None:
        return
    key = name if name in metrics else f"eval_{name}"
    if key not in metrics:
        known = ", ".join(sorted(metrics))
        logger.warning("validation.metric_for_best_model=%s is not among the metrics: %s", name, known)
        return
    greater = state.cfg.validation.greater_is_better
    if greater is None:
        greater = not name.endswith(("loss", "perplexity"))
    value, progress = float(metrics[key]), state.train_state
    best = progress.best_metric
    if best is None or (value > best if greater else value < best):
        progress.best_metric, progress.best_step = value, progress.step
        if state.cfg.checkpoint.save_on_best and progress.step > 0:
            _ask_to_save(state, f"best {key} so far: {value:.6g}")


def note_best_checkpoint(state: Run, step: int, path: str | Path) -> None:
    """Remember where the weights of the best step are, if `path` is the checkpoint of that step; nothing else changes.

    Called on every rank when a checkpoint is durable, and again when one was loaded: it was written before its own
    place was known. As in `transformers`, the place of an earlier best stays until the best step has a checkpoint.

    Args:
        state: of the run.
        step: of the checkpoint.
        path: its folder.
    """
    if step == state.train_state.best_step:
        state.train_state.best_model_checkpoint = str(path)


def _ask_to_save(state: Run, reason: str) -> None:
    """Every rank comes to it by itself; that of rank 0 goes on record."""
    if state.world.is_main:
        state.control.ask(Request("should_save", "save_on_best", "", reason, state.world.rank))
    else:
        state.control.decide("should_save")
