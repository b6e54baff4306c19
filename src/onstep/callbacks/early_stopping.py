"""Ends training when an evaluation metric has stopped improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onstep.config.part import nearest
from onstep.config.typed import is_number, is_whole
from onstep.errors import ConfigError
from onstep.events import TrainerCallback

logger: logging.Logger = logging.getLogger(__name__)


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

    def __init__(
        self,
        metric: str = "eval_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        stop_at: float | None = None,
        check_finite: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be min | max, got {mode!r}.")
        if not is_whole(patience, 1):
            raise ConfigError(f"patience must be a whole number >= 1, got {patience!r}; 1 ends at the first one.")
        if not is_number(min_delta) or not min_delta >= 0:
            raise ConfigError(f"min_delta must be a number >= 0, got {min_delta!r}; mode says which way is better.")
        if stop_at is not None and (not is_number(stop_at) or math.isnan(stop_at)):
            raise ConfigError(f"stop_at must be a number, got {stop_at!r}; pass None for never.")
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f"metric must be the name of a metric, got {metric!r}; the default is 'eval_loss'.")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.stop_at = stop_at
        self.check_finite = check_finite
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
        record = self._record
        if not math.isfinite(value) and self.check_finite:
            return f"{name} is {value}"
        if math.isfinite(value) and (record.best is None or self._is_better(value, record.best)):
            record.best, record.best_step, record.wait_count = value, step, 0
        else:
            record.wait_count += 1
        if self._is_reached(value):
            return f"{name} is {value:.6g}, at least as good as stop_at={self.stop_at}"
        if record.wait_count >= self.patience:
            best = "nothing" if record.best is None else f"{record.best:.6g} (step {record.best_step})"
            return f"{name} has not improved on {best} in {record.wait_count} evaluations"
        return None

    def _is_better(self, value: float, best: float) -> bool:
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    def _is_reached(self, value: float) -> bool:
        if self.stop_at is None:
            return False
        return value <= self.stop_at if self.mode == "min" else value >= self.stop_at


@dataclass
class _Record:
    """The evaluations so far."""

    best: float | None = None
    best_step: int | None = None
    wait_count: int = 0
