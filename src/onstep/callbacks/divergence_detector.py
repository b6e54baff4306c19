"""Detects diverging training and stops it, aborts it or rolls back to a checkpoint."""

from __future__ import annotations

import logging
import math
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import ClassVar, Literal

from onstep.config import TrainingArguments
from onstep.config.field_types import is_integer_from, is_number
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, require
from onstep.events import Control, Request, RunState, Setting, TrainerCallback
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class DivergenceDetector(TrainerCallback):
    """Stops, aborts or rolls back a run whose smoothed loss stays too far above its best value so far.

    Each observation `x` updates the smoothed value to ``smoothing * x + (1 - smoothing) * smoothed``; the best smoothed
    value is kept. An observation counts if ``smoothed - best >= threshold`` or, with a `relative_threshold`, if
    ``smoothed >= best * relative_threshold`` (for a positive best only). After `patience` such observations in a row
    the detector acts, and acts again at every further one. It acts on NaN and infinity immediately. Observations are
    the metric's values in `on_log` and `on_evaluate`; records of steps skipped by the anomaly gate are ignored, since
    their update was not applied.

    With `action="rollback"`, the run rolls back to the newest checkpoint that is not newer than the last healthy
    observation, one whose value and smoothed value are both close enough to the best. If the curve did not become
    healthy after an earlier rollback, it rolls back to an older checkpoint. Weights, optimizer and this detector are
    restored, but the cooldown continues, and `anomaly.max_rollbacks` ends a run that keeps diverging. The rollback
    happens at the end of the step after the observation, or of the epoch.

    If the metric is missing for three logged steps (or three evaluations, for a name that begins with "eval"), or until
    training ends, the detector warns once and suggests the nearest name.

    A run that starts at step 0 starts with a new curve. After the end of training, the detector does not act.

    Args:
        smoothing: Weight of the newest value, in (0, 1]; the window is about ``1 / smoothing`` observations.
        threshold: Distance from the best, > 0; None disables this test.
        relative_threshold: Multiple of the best, > 1; None disables this test. With `mode="max"` it is mirrored: an
            observation counts if ``smoothed <= best / relative_threshold``.
        patience: Number of counting observations in a row that triggers the action, >= 1.
        warmup: Number of initial observations that never count, >= 0.
        action: "stop" (saves a final checkpoint), "abort" (does not), or "rollback".
        use_eval_loss: Watch `eval_loss` instead of `loss`.
        metric_key: Watch this metric, regardless of `use_eval_loss`.
        mode: "min" for a metric that should decrease, "max" for one that should increase.
        cooldown: Number of observations after an action that never count, >= 0; if > 0, an action also resets patience.

    Raises:
        ConfigError: for an invalid value; with `action="rollback"`, also at the start of training if the control does
            not support rollbacks, such as that of Hugging Face's Trainer.

    Source: Brown 1956, "Exponential Smoothing for Predicting Demand" (the smoothing).
    """

    reads_weights = False

    settable: ClassVar = {
        "threshold": Setting(float, 0, "How far the smoothed metric may be above its best"),
        "patience": Setting(int, 1, "Observations in a row beyond the threshold that count as divergence"),
    }
    smoothing: float = 0.3
    threshold: float | None = 1.0
    relative_threshold: float | None = None
    patience: int = 3
    warmup: int = 10
    action: Literal["stop", "abort", "rollback"] = "stop"
    use_eval_loss: bool = False
    metric_key: str | None = None
    _: KW_ONLY
    mode: Literal["min", "max"] = "min"
    cooldown: int = 0

    def __post_init__(self) -> None:
        smoothing, absolute, relative, key = self.smoothing, self.threshold, self.relative_threshold, self.metric_key
        is_fraction = is_number(smoothing) and 0 < smoothing <= 1
        require(is_fraction, "smoothing", "in (0, 1]", smoothing, "; pass 1 for no smoothing.")
        if absolute is None and relative is None:
            raise ConfigError("threshold and relative_threshold are both None, so nothing would be detected; set one.")
        is_right = absolute is None or (is_number(absolute) and absolute > 0)
        require(is_right, "threshold", "a number > 0", absolute, "; pass None to use relative_threshold alone.")
        is_right = relative is None or (is_number(relative) and relative > 1)
        require(is_right, "relative_threshold", "a number > 1", relative, "; 1.5 allows 50% above the best.")
        for name, least in (("patience", 1), ("warmup", 0), ("cooldown", 0)):
            count = getattr(self, name)
            require(is_integer_from(count, least), name, f"an integer >= {least}", count)
        require(self.action in ("stop", "abort", "rollback"), "action", "stop | abort | rollback", self.action)
        require(self.mode in ("min", "max"), "mode", "min | max", self.mode)
        is_right = key is None or (isinstance(key, str) and key != "")
        require(is_right, "metric_key", "the name of a metric", key, "; None watches the loss.")
        self._curve = _Curve()
        self._rollback = _Rollback()
        self._run = _Run()

    @property
    def metric(self) -> str:
        """Name of the watched metric."""
        return self.metric_key or ("eval_loss" if self.use_eval_loss else "loss")

    @property
    def smoothed_loss(self) -> float | None:
        """The smoothed metric; None before the first finite observation."""
        return self._curve.smoothed_loss

    @property
    def best_smoothed_loss(self) -> float | None:
        """The best smoothed value so far."""
        return self._curve.best_smoothed_loss

    @property
    def observation_count(self) -> int:
        """Finite observations."""
        return self._curve.observation_count

    @property
    def consecutive_above(self) -> int:
        """Counting observations in a row."""
        return self._curve.consecutive_above

    def on_init_end(self, args: object, state: object, control: Control, **kwargs: object) -> None:
        """Reject a control that does not support the action."""
        self._check_control(control)

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: Control, **kwargs: object) -> None:
        """Start a new curve, unless the run resumes one."""
        self._check_control(control)
        if state is not None and state.global_step == 0 and not self._run.is_loaded:
            self._curve = _Curve()
        if self.action == "rollback" and getattr(args, "save_strategy", None) == "no":
            logger.warning("DivergenceDetector: action='rollback' requires checkpoints, but this run does not save any")
        self._rollback, self._run = _Rollback(), _Run(is_training=True)

    def on_log(
        self, args: object, state: RunState, control: Control, logs: Metrics | None = None, **kwargs: object
    ) -> None:
        """Observe the metric of a logged step."""
        value = self._value(logs, state, is_evaluation=False)
        if value is not None:
            self._run.last_logged = None if state is None else (state.global_step, value)
            self._observe(value, state, control)

    def on_evaluate(
        self, args: object, state: RunState, control: Control, metrics: Metrics | None = None, **kwargs: object
    ) -> None:
        """Observe the metric of an evaluation, unless it was observed at `on_log`, as with Hugging Face's Trainer."""
        value = self._value(metrics, state, is_evaluation=True)
        if value is not None and (state is None or self._run.last_logged != (state.global_step, value)):
            self._observe(value, state, control)

    def on_checkpoint_load(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Record the target of a rollback; a checkpoint without this detector's state starts a new curve."""
        if self._rollback.is_asked:
            if not self._rollback.is_restored:
                self._curve = _Curve(cooldown_left=self._curve.cooldown_left)
            self._rollback = _Rollback(went_to=None if state is None else state.global_step)
        self._run.last_logged = None

    def on_train_end(self, args: object, state: RunState, control: object, **kwargs: object) -> None:
        """Do not act after the end of training."""
        if self._run.is_missing and _is_main(state):
            self._run.warn_of_absence(self.metric)
        self._run = _Run(is_over=True)

    def state_dict(self) -> StateDict:
        """The curve so far and the rest of the cooldown."""
        return asdict(self._curve)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue a saved curve; a cooldown that has started since then continues.

        Args:
            state_dict: what `state_dict()` returned.
        """
        documented = ("smoothed_loss", "best_smoothed_loss", "observation_count", "consecutive_above")
        further = {"cooldown_left": state_dict.get("cooldown_left", 0), "healthy_step": state_dict.get("healthy_step")}
        loaded = _Curve(*(state_dict[key] for key in documented), **further)
        if self._rollback.is_asked or self._run.is_training:
            loaded.cooldown_left = max(loaded.cooldown_left, self._curve.cooldown_left)
        if self._rollback.is_asked:
            loaded.consecutive_above, self._rollback.is_restored = 0, True
        self._curve, self._run.last_logged, self._run.is_loaded = loaded, None, not self._run.is_training

    def _value(self, record: Metrics | None, state: RunState, is_evaluation: bool) -> float | None:
        """The metric of a record; records without it are noted until the first that has it."""
        if self._run.is_over or not record or "anomaly" in record:
            return None
        value = record.get(self.metric)
        if value is None and self._run.is_missing and _is_main(state):
            self._run.note_absence(self.metric, record, is_evaluation)
        return None if value is None else float(value)

    def _observe(self, value: float, state: RunState, control: Control) -> None:
        curve = self._curve
        self._run.has_observed = True
        if not math.isfinite(value):
            self._act(f"{self.metric} is {value}", state, control)
            return
        smoothed = value if curve.smoothed_loss is None else curve.smoothed_loss
        if curve.smoothed_loss is not None:
            smoothed = self.smoothing * value + (1 - self.smoothing) * smoothed
        best = smoothed if curve.best_smoothed_loss is None else curve.best_smoothed_loss
        best = (min if self.mode == "min" else max)(best, smoothed)
        curve.smoothed_loss, curve.best_smoothed_loss = smoothed, best
        curve.observation_count += 1
        is_above = self._is_above(smoothed, best)
        if not is_above and not self._is_above(value, best):  # the smoothed value alone reacts too late
            curve.healthy_step = None if state is None else state.global_step
        if curve.cooldown_left > 0:
            curve.cooldown_left -= 1
        elif curve.observation_count > max(self.warmup, 1):
            curve.consecutive_above = curve.consecutive_above + 1 if is_above else 0
            if curve.consecutive_above >= self.patience:
                side = "above" if self.mode == "min" else "below"
                reason = f"smoothed {self.metric} {smoothed:.4g} is too far {side} its best, {best:.4g}, for "
                self._act(f"{reason}{curve.consecutive_above} observations in a row", state, control)

    def _is_above(self, value: float, best: float) -> bool:
        """Whether a value is worse than the best by more than a threshold."""
        worse, better = (value, best) if self.mode == "min" else (best, value)
        if self.threshold is not None and worse - better >= self.threshold:
            return True
        return self.relative_threshold is not None and best > 0 and worse >= better * self.relative_threshold

    def _act(self, reason: str, state: RunState, control: Control) -> None:
        if self._rollback.is_asked:
            return
        if _is_main(state):
            where = "" if state is None else f" at step {state.global_step}"
            logger.error("divergence%s: %s; action: %s", where, reason, self.action)
        if self.action == "rollback":
            self._request_rollback(reason, control)
        elif isinstance(control, Control):
            ask = control.stop if self.action == "stop" else control.abort
            ask(reason)
        else:
            control.should_training_stop = True
            if self.action == "abort":
                control.should_abort_without_save = True
        if self.cooldown > 0:
            self._curve.cooldown_left, self._curve.consecutive_above = self.cooldown, 0

    def _request_rollback(self, reason: str, control: Control) -> None:
        self._check_control(control)
        healthy_step, went_to = self._curve.healthy_step, self._rollback.went_to
        bad_step = None if healthy_step is None else healthy_step + 1
        if went_to is not None and (healthy_step is None or healthy_step <= went_to):
            bad_step = went_to  # that checkpoint led to divergence again, so go back further
        if bad_step is None or not isinstance(control, Control):
            control.rollback(reason)
        else:
            details = {"bad_step": bad_step}
            control.add_request(Request("rollback", control.author, control.event, reason, control.rank, details))
        self._rollback.is_asked, self._rollback.is_restored = True, False

    def _check_control(self, control: Control) -> None:
        if self.action == "rollback" and not callable(getattr(control, "rollback", None)):
            raise ConfigError(
                f"action='rollback' requires a control with rollback(), which {type(control).__name__} does not have; "
                f"train with Onstep's Trainer or pretrain(), or use action='stop' or 'abort'."
            )
        if self.action == "rollback" and getattr(control, "no_rollback", None):
            raise ConfigError(f"action='rollback' is not possible: {control.no_rollback}; or use action='stop'.")


DualTimeScaleDivergenceDetector = DivergenceDetector
"""An older name of `DivergenceDetector`."""

DualWindowDivergenceDetector = DivergenceDetector
"""An older name of `DivergenceDetector`."""


@dataclass
class _Run:
    """The detector's state of the current training."""

    is_training: bool = False
    is_over: bool = False
    is_loaded: bool = False
    """Whether the next training continues a saved curve."""
    has_observed: bool = False
    last_logged: tuple[int, float] | None = None
    """Step and value of the last `on_log`."""
    num_without: int = 0
    """Records without the metric while none has had it, since a mistyped name would silently watch nothing."""
    names: list[str] = field(default_factory=list)
    """Names of the numeric metrics found instead."""
    has_warned: bool = False

    @property
    def is_missing(self) -> bool:
        """Whether training is running and the metric has not appeared yet."""
        return self.is_training and not self.has_observed

    def note_absence(self, metric: str, record: Metrics, is_evaluation: bool) -> None:
        """Note a record without the metric; only records of the kind that should have it count."""
        numbers = [name for name, value in record.items() if isinstance(value, int | float)]
        self.names += [name for name in numbers if name not in self.names]
        has_evaluation = is_evaluation or any(name.startswith("eval_") for name in numbers)
        if is_evaluation or not has_evaluation:  # an evaluation that is also logged arrives twice
            self.num_without += metric.startswith("eval") == has_evaluation
        if self.num_without >= 3:
            self.warn_of_absence(metric)

    def warn_of_absence(self, metric: str) -> None:
        if self.names and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "DivergenceDetector watches %r, but nothing logged or evaluated so far has that metric, so nothing is "
                "detected.%s Available: %s",
                metric,
                nearest(metric, self.names),
                ", ".join(self.names),
            )


@dataclass
class _Curve:
    """The curve of the metric, with the field names used in checkpoints."""

    smoothed_loss: float | None = None
    best_smoothed_loss: float | None = None
    observation_count: int = 0
    """Finite observations."""
    consecutive_above: int = 0
    """Counting observations in a row."""
    cooldown_left: int = 0
    healthy_step: int | None = None
    """Step of the last observation whose value and smoothed value were both close enough to the best."""


@dataclass
class _Rollback:
    """The requested rollback, and the one before it."""

    is_asked: bool = False
    is_restored: bool = False
    """Whether the checkpoint contained the detector's state."""
    went_to: int | None = None
    """Step of the checkpoint that the last rollback loaded."""


def _is_main(state: RunState) -> bool:
    return state is None or bool(getattr(state, "is_world_process_zero", True))
