"""Stops training when an evaluation metric no longer improves."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from onstep.config import TrainingArguments
from onstep.config.field_types import is_integer_from, is_number
from onstep.config.hf.checks import evaluates
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, require
from onstep.events import Control, ExportableState, RunState, Setting, TrainerCallback
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class EarlyStopping(TrainerCallback):
    """Stops training after `patience` evaluations in a row without improvement on the best value.

    Only evaluations during training count. It requests a regular stop, so the run ends after the current step with its
    final log and checkpoint. To end with the best weights, set `load_best_model_at_end`.

    A run that starts at step 0 starts from scratch; a resumed run keeps its best value and its patience.

    Args:
        metric: Name of the metric in the evaluation; the prefix "eval_" is optional.
        patience: Evaluations in a row without improvement that stop training, >= 1.
        min_delta: Minimum change that counts as an improvement, >= 0.
        mode: "min" for a metric that should decrease, "max" for one that should increase.
        stop_at: Stops training as soon as the metric is at least this good; None for never.
        check_finite: Whether a NaN or infinite metric stops training immediately; otherwise it counts as no
            improvement.

    Raises:
        ConfigError: for an invalid value, and at an evaluation without the metric.
    """

    reads_weights = False

    settable: ClassVar = {
        "patience": Setting(int, 1, "Evaluations in a row without improvement that stop training"),
        "min_delta": Setting(float, 0, "Minimum change that counts as an improvement"),
    }
    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    stop_at: float | None = None
    check_finite: bool = True

    def __post_init__(self) -> None:
        delta, stop_at, metric = self.min_delta, self.stop_at, self.metric
        require(self.mode in ("min", "max"), "mode", "min | max", self.mode)
        is_count = is_integer_from(self.patience, 1)
        require(is_count, "patience", "an integer >= 1", self.patience, "; 1 stops at the first failure.")
        is_distance = is_number(delta) and delta >= 0
        require(is_distance, "min_delta", "a number >= 0", delta, "; the direction is set by mode.")
        is_limit = stop_at is None or (is_number(stop_at) and not math.isnan(stop_at))
        require(is_limit, "stop_at", "a number", stop_at, "; pass None for never.")
        is_name = isinstance(metric, str) and metric != ""
        require(is_name, "metric", "the name of a metric", metric, "; the default is 'eval_loss'.")
        self._record = _Record()
        self._is_training = False
        self._is_loaded = False

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first evaluation."""
        return self._record.best

    @property
    def best_step(self) -> int | None:
        """Step of the best value."""
        return self._record.best_step

    @property
    def wait_count(self) -> int:
        """Number of evaluations since the best one."""
        return self._record.wait_count

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Start from scratch, unless the run is resumed."""
        if state.global_step == 0 and not self._is_loaded:
            self._record = _Record()
        self._is_training, self._is_loaded = True, False
        if state.is_world_process_zero and not evaluates(args):
            logger.warning("EarlyStopping never stops: there is no evaluation during training; set eval_strategy")

    def on_evaluate(self, args: object, state: RunState, control: Control, metrics: Metrics, **kwargs: object) -> None:
        """Compare the metric with its best value."""
        if not self._is_training:
            return
        name, value = self._find(metrics)
        reason = self._reason_to_stop(name, value, state.global_step)
        if reason is None:
            return
        if state.is_world_process_zero:
            logger.info("early stopping at step %d: %s", state.global_step, reason)
        if callable(getattr(control, "stop", None)):
            control.stop(reason)
        else:
            control.should_training_stop = True

    def on_train_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Ignore evaluations after the end of training."""
        self._is_training = False

    def state_dict(self) -> StateDict:
        """The best value, its step, and the evaluations since."""
        return asdict(self._record)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore saved values.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self._record = _Record(state_dict["best"], state_dict["best_step"], state_dict["wait_count"])
        self._is_loaded = not self._is_training

    def _find(self, metrics: Metrics) -> tuple[str, float]:
        """The metric's name in the evaluation, and its value."""
        for name in (self.metric, f"eval_{self.metric}"):
            if metrics.get(name) is not None:
                return name, float(metrics[name])
        known = [name for name, value in metrics.items() if isinstance(value, int | float)]
        raise ConfigError(
            f"EarlyStopping watches {self.metric!r}, but the evaluation has no such metric."
            f"{nearest(self.metric, known)} It has: {', '.join(known) or 'none'}."
        )

    def _reason_to_stop(self, name: str, value: float, step: int) -> str | None:
        """Record a value; returns the reason to stop training, or None."""
        record, is_finite = self._record, math.isfinite(value)
        if not is_finite and self.check_finite:
            return f"{name} is {value}"
        if is_finite and (record.best is None or self._is_better(value, record.best)):
            record.best, record.best_step, record.wait_count = value, step, 0
        else:
            record.wait_count += 1
        if self.stop_at is not None and (value <= self.stop_at if self.mode == "min" else value >= self.stop_at):
            return f"{name} is {value:.6g}, at least as good as stop_at={self.stop_at}"
        if record.wait_count >= self.patience:
            best = "nothing" if record.best is None else f"{record.best:.6g} (step {record.best_step})"
            return f"{name} has not improved on {best} in {record.wait_count} evaluations"
        return None

    def _is_better(self, value: float, best: float) -> bool:
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


@dataclass
class _Record:
    """The evaluations so far. Kept apart because the callback's own plain attributes identify it in checkpoints."""

    best: float | None = None
    best_step: int | None = None
    wait_count: int = 0


class EarlyStoppingCallback(TrainerCallback, ExportableState):
    """Stops training after evaluations in a row without improvement on `state.best_metric`, as Hugging Face's does.

    The metric is `args.metric_for_best_model`; `greater_is_better` says what improves it.

    Args:
        early_stopping_patience: evaluations in a row without improvement that stop training.
        early_stopping_threshold: change that an improvement must exceed; None is 0.

    Raises:
        ConfigError: when training starts without `metric_for_best_model` or without evaluations.
    """

    reads_weights = False

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float | None = 0.0) -> None:
        if early_stopping_patience < 0:
            raise ConfigError(f"early_stopping_patience must be an integer >= 0, got {early_stopping_patience}")
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def check_metric_value(
        self, args: TrainingArguments, state: RunState, control: object, metric_value: float
    ) -> None:
        """Count an evaluation that is not an improvement, as NaN never is; one that is starts the count from zero.

        Args:
            metric_value: the metric of the newest evaluation.
        """
        best = state.best_metric
        if math.isnan(metric_value):
            is_better = False
        elif best is None or math.isnan(best):
            is_better = True
        else:
            gain = metric_value - best if args.greater_is_better else best - metric_value
            is_better = gain > max(self.early_stopping_threshold or 0.0, 0.0)
        self.early_stopping_patience_counter = 0 if is_better else self.early_stopping_patience_counter + 1

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Check the arguments that it depends on."""
        if not args.load_best_model_at_end and state.is_world_process_zero:
            logger.warning(
                "EarlyStoppingCallback without load_best_model_at_end=True: the last weights are kept, not the best"
            )
        if args.metric_for_best_model is None:
            raise ConfigError(
                "EarlyStoppingCallback requires metric_for_best_model in TrainingArguments, such as 'loss'."
            )
        if args.eval_strategy == "no":
            raise ConfigError("EarlyStoppingCallback requires eval_strategy='steps' or 'epoch' in TrainingArguments.")

    def on_evaluate(
        self, args: TrainingArguments, state: RunState, control: Control, metrics: Metrics, **kwargs: object
    ) -> None:
        """Compare the metric with the best one before this evaluation."""
        metric = args.metric_for_best_model or "loss"
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        if metrics.get(name) is None:
            logger.warning("EarlyStoppingCallback: the evaluation has no %s, so it is not counted", name)
            return
        self.check_metric_value(args, state, control, metrics[name])
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state(self) -> dict[str, Any]:
        """The arguments, and the evaluations since the best one."""
        return {
            "args": {
                "early_stopping_patience": self.early_stopping_patience,
                "early_stopping_threshold": self.early_stopping_threshold,
            },
            "attributes": {"early_stopping_patience_counter": self.early_stopping_patience_counter},
        }
