"""Ends training when an evaluation metric has stopped improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onstep.config.part import is_number, is_whole, nearest
from onstep.errors import ConfigError, require
from onstep.events import TrainerCallback

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class EarlyStopping(TrainerCallback):
    """Asks for the end of training after `patience` evaluations in a row that did not improve on the best one.

    Counted are the evaluations while training runs; the ask is a stop, so the run ends after this step with its final
    log and checkpoint. To end with the best weights, set `load_best_model_at_end`.

    A run that begins at step 0 begins anew; one that continues keeps its best value and its patience.

    Args:
        metric: Name of the metric in the evaluation; the prefix "eval_" may be left out.
        patience: Evaluations in a row without improvement that end training, >= 1.
        min_delta: How far a value must be beyond the best to be an improvement, >= 0.
        mode: "min" for a metric that should fall, "max" for one that should rise.
        stop_at: Ends training as soon as the metric is at least this good; None for never.
        check_finite: Whether a metric that is NaN or infinite ends training at once; else it is no improvement.

    Raises:
        ConfigError: for a value that breaks a rule, and at an evaluation that has no such metric.
    """

    metric: str = "eval_loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    stop_at: float | None = None
    check_finite: bool = True

    def __post_init__(self) -> None:
        delta, stop_at, metric = self.min_delta, self.stop_at, self.metric
        require(self.mode in ("min", "max"), "mode", "min | max", self.mode)
        is_count = is_whole(self.patience, 1)
        require(is_count, "patience", "a whole number >= 1", self.patience, "; 1 ends at the first one.")
        is_distance = is_number(delta) and delta >= 0
        require(is_distance, "min_delta", "a number >= 0", delta, "; mode says which way is better.")
        is_limit = stop_at is None or (is_number(stop_at) and not math.isnan(stop_at))
        require(is_limit, "stop_at", "a number", stop_at, "; pass None for never.")
        is_name = isinstance(metric, str) and metric != ""
        require(is_name, "metric", "the name of a metric", metric, "; the default is 'eval_loss'.")
        self._record = _Record()
        self._is_training = False
        self._is_loaded = False

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first."""
        return self._record.best

    @property
    def best_step(self) -> int | None:
        """The step of the best value."""
        return self._record.best_step

    @property
    def wait_count(self) -> int:
        """Evaluations since the best one."""
        return self._record.wait_count

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, unless the run continues."""
        if state.global_step == 0 and not self._is_loaded:
            self._record = _Record()
        self._is_training, self._is_loaded = True, False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any], **kwargs: Any) -> None:
        """Compare the metric with the best one."""
        if not self._is_training:
            return
        name, value = self._find(metrics)
        reason = self._judge(name, value, state.global_step)
        if reason is None:
            return
        if state.is_world_process_zero:
            logger.info("early stopping at step %d: %s", state.global_step, reason)
        if callable(getattr(control, "stop", None)):
            control.stop(reason)
        else:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on there is nothing to stop."""
        self._is_training = False

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step, and the evaluations since."""
        return asdict(self._record)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with saved values."""
        self._record = _Record(state_dict["best"], state_dict["best_step"], state_dict["wait_count"])
        self._is_loaded = not self._is_training

    def _find(self, metrics: Mapping[str, Any]) -> tuple[str, float]:
        """The metric's name in the evaluation, and its value."""
        for name in (self.metric, f"eval_{self.metric}"):
            if metrics.get(name) is not None:
                return name, float(metrics[name])
        known = [name for name, value in metrics.items() if isinstance(value, int | float)]
        raise ConfigError(
            f"EarlyStopping watches {self.metric!r}, and the evaluation has no such metric."
            f"{nearest(self.metric, known)} It has: {', '.join(known) or 'none'}."
        )

    def _judge(self, name: str, value: float, step: int) -> str | None:
        """Take in a value; why training is to end, or None."""
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
    """The evaluations so far. Not attributes of the callback: checkpoints know it by the plain ones."""

    best: float | None = None
    best_step: int | None = None
    wait_count: int = 0
