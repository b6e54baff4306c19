"""Follows the metric that chooses the best checkpoint: its best value, step and location so far."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from onstep.checkpoint.catalog.retention import is_greater_better
from onstep.errors import ConfigError
from onstep.events import Request
from onstep.training.protocols import Metrics
from onstep.training.run import Run

logger = logging.getLogger(__name__)


def note_best_metric(state: Run, metrics: Metrics) -> bool:
    """Remember the value of `validation.metric_for_best_model` if it is the best so far; returns whether it is.

    Called after `on_evaluate`, so that early stopping compares with the best of the earlier evaluations. For a metric
    whose name ends in `loss` or `perplexity`, smaller is better, unless `validation.greater_is_better` says otherwise.
    NaN is never the best. All ranks have the same metrics.

    Raises:
        ConfigError: if the evaluation has no such metric.
    """
    name = state.cfg.validation.metric_for_best_model
    if name is None:
        return False
    key = name if name in metrics else f"eval_{name}"
    if key not in metrics:
        known = ", ".join(sorted(metrics)) or "none"
        raise ConfigError(
            f"{state.entry_point.best_metric}={name!r} is not a metric of the evaluation, which has {known}; name one "
            f"of them, or have compute_metrics return it."
        )
    greater = is_greater_better(name, state.cfg.validation.greater_is_better)
    value, progress = float(metrics[key]), state.train_state
    if math.isnan(value):
        if state.world.is_main:
            logger.warning("%s is NaN at step %d, so it is not the best", key, progress.step)
        return False
    best = progress.best_metric
    is_best = best is None or math.isnan(best) or (value > best if greater else value < best)
    if is_best:
        progress.best_metric, progress.best_step = value, progress.step
    return is_best


def save_best(state: Run) -> None:
    """Request a checkpoint of a new best metric if `checkpoint.save_on_best` is set; on every rank."""
    if not state.cfg.checkpoint.save_on_best or state.train_state.step == 0:
        return
    if state.world.is_main:
        reason = f"best {state.cfg.validation.metric_for_best_model} so far: {state.train_state.best_metric}"
        state.control.add_request(Request("should_save", "save_on_best", "", reason, state.world.rank))
    else:
        state.control.set_flag("should_save")


def note_best_checkpoint(state: Run, step: int, path: str | Path) -> None:
    """Remember where the weights of the best step are, if `path` is that step's checkpoint; change nothing else.

    Called on every rank when a checkpoint is durable, and again after loading one: it was written before its own
    location was known. As in `transformers`, the location of an earlier best remains until the best step has a
    checkpoint.
    """
    if step == state.train_state.best_step:
        state.train_state.best_model_checkpoint = str(path)
