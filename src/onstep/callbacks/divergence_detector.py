"""Notices that training diverges, and stops it, aborts it or goes back to a checkpoint."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from onstep.config.part import nearest
from onstep.config.typed import is_number, is_whole
from onstep.errors import ConfigError
from onstep.events import Control, Request, TrainerCallback

logger: logging.Logger = logging.getLogger(__name__)

ACTIONS = ("stop", "abort", "rollback")


class DivergenceDetector(TrainerCallback):
    """Compares the smoothed loss with the best it has ever been, and acts where it stays too far above.

    Each observation `x` moves the smoothed value to ``smoothing * x + (1 - smoothing) * smoothed``; the best smoothed
    value is remembered. An observation counts where ``smoothed - best >= threshold``, or, with a `relative_threshold`,
    where ``smoothed >= best * relative_threshold`` (for a positive best only). After `patience` of them in a row the
    detector acts, and acts again at every further one. NaN and infinity are acted on at once. Observations are the
    values that `on_log` and `on_evaluate` bring under the metric's name; a record of a step that the anomaly gate has
    left out is none, since that update was not applied.

    With `action="rollback"` the run goes back to the newest checkpoint that is not newer than the last observation that
    was well, neither smoothed nor by itself too far from the best; where the curve was never well again after such a
    return, to an older one. The weights, the optimizer and this detector are then as they were, but the cooldown goes
    on, and `anomaly.max_rollbacks` ends a run that diverges again and again. It is done at the end of the step after
    the observation, or of the epoch.

    Where three logged steps (for a name that begins with "eval", three evaluations) have passed, or the training is
    over, without the metric, it warns once, with the nearest name that there was.

    A run that begins at step 0 begins with a new curve; after the end of training nothing is acted on.

    Args:
        smoothing: Weight of the newest value, in (0, 1]; the window is about ``1 / smoothing`` observations.
        threshold: Distance from the best, > 0; None for no such test.
        relative_threshold: Multiple of the best, > 1; None for no such test. With `mode="max"` it is mirrored: an
            observation counts where ``smoothed <= best / relative_threshold``.
        patience: Observations in a row that must count, >= 1.
        warmup: First observations that never count, >= 0.
        action: "stop" (a final checkpoint is saved), "abort" (none is), or "rollback".
        use_eval_loss: Watch `eval_loss` in place of `loss`.
        metric_key: Watch this metric, whatever `use_eval_loss` says.
        mode: "min" for a metric that falls while training goes well, "max" for one that rises.
        cooldown: Observations after an action that never count, >= 0. With more than 0, patience begins anew after it.

    Raises:
        ConfigError: for a value that breaks a rule; with `action="rollback"` also at the start of a training whose
            control cannot go back, such as that of Hugging Face's Trainer.
    """

    def __init__(
        self,
        smoothing: float = 0.3,
        threshold: float | None = 1.0,
        relative_threshold: float | None = None,
        patience: int = 3,
        warmup: int = 10,
        action: Literal["stop", "abort", "rollback"] = "stop",
        use_eval_loss: bool = False,
        metric_key: str | None = None,
        *,
        mode: Literal["min", "max"] = "min",
        cooldown: int = 0,
    ) -> None:
        _check_thresholds(smoothing, threshold, relative_threshold)
        _check_counts(patience=(patience, 1), warmup=(warmup, 0), cooldown=(cooldown, 0))
        _check_choice("action", action, ACTIONS)
        _check_choice("mode", mode, ("min", "max"))
        if metric_key is not None and (not isinstance(metric_key, str) or not metric_key):
            raise ConfigError(f"metric_key must be the name of a metric, got {metric_key!r}; None watches the loss.")
        self.smoothing = smoothing
        self.threshold = threshold
        self.relative_threshold = relative_threshold
        self.patience = patience
        self.warmup = warmup
        self.action = action
        self.use_eval_loss = use_eval_loss
        self.metric_key = metric_key
        self.mode = mode
        self.cooldown = cooldown
        self._curve = _Curve()
        self._way_back = _WayBack()
        self._run = _Run()

    @property
    def metric(self) -> str:
        """The name of the metric that is watched."""
        return self.metric_key or ("eval_loss" if self.use_eval_loss else "loss")

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a control that cannot do what is asked of it."""
        self._check_control(control)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a new curve, unless the run continues one."""
        self._check_control(control)
        if state is not None and state.global_step == 0 and not self._run.is_loaded:
            self._curve = _Curve()
        if self.action == "rollback" and getattr(args, "save_strategy", None) == "no":
            logger.warning("DivergenceDetector: action='rollback' needs checkpoints, and this run saves none by itself")
        self._way_back, self._run = _WayBack(), _Run(is_training=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Observe the metric of a logged step."""
        value = self._value(logs)
        if value is None:
            if self._run.is_missing and _is_main(state):
                self._run.absence.note(self.metric, logs, is_evaluation=False)
            return
        self._run.told = None if state is None else (state.global_step, value)
        self._observe(value, state, control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Observe the metric of an evaluation, which Hugging Face's Trainer has already told at `on_log`."""
        value = self._value(metrics)
        if value is None:
            if self._run.is_missing and _is_main(state):
                self._run.absence.note(self.metric, metrics, is_evaluation=True)
            return
        if state is not None and self._run.told == (state.global_step, value):
            return
        self._observe(value, state, control)

    def on_checkpoint_load(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember where a rollback went; one to a checkpoint without this detector's state begins a new curve."""
        if self._way_back.is_asked:
            if not self._way_back.is_restored:
                self._curve = _Curve(cooldown_left=self._curve.cooldown_left)
            self._way_back = _WayBack(went_to=None if state is None else state.global_step)
        self._run.told = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here on there is nothing to stop."""
        if self._run.is_missing and _is_main(state):
            self._run.absence.warn(self.metric)
        self._run = _Run(is_over=True)

    def state_dict(self) -> dict[str, Any]:
        """The curve so far and what is left of the cooldown."""
        curve = self._curve
        return {
            "smoothed_loss": curve.smoothed,
            "best_smoothed_loss": curve.best,
            "observation_count": curve.count,
            "consecutive_above": curve.consecutive,
            "cooldown_left": curve.cooldown_left,
            "healthy_step": curve.healthy_step,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a saved curve; a cooldown that began since then goes on."""
        loaded = _Curve(
            state_dict["smoothed_loss"],
            state_dict["best_smoothed_loss"],
            state_dict["observation_count"],
            state_dict["consecutive_above"],
            state_dict.get("cooldown_left", 0),
            state_dict.get("healthy_step"),
        )
        if self._way_back.is_asked or self._run.is_training:
            loaded.cooldown_left = max(loaded.cooldown_left, self._curve.cooldown_left)
        if self._way_back.is_asked:
            loaded.consecutive = 0
            self._way_back = replace(self._way_back, is_restored=True)
        self._curve, self._run.told, self._run.is_loaded = loaded, None, not self._run.is_training

    def _value(self, metrics: Mapping[str, Any] | None) -> float | None:
        if self._run.is_over or not metrics or metrics.get(self.metric) is None or "anomaly" in metrics:
            return None
        return float(metrics[self.metric])

    def _observe(self, value: float, state: Any, control: Any) -> None:
        curve = self._curve
        self._run.has_observed = True
        if not math.isfinite(value):
            self._act(f"{self.metric} is {value}", state, control)
            return
        curve.add(value, self.smoothing, self.mode)
        is_above = self._is_above(curve.smoothed)
        if not is_above and not self._is_above(value):  # the smoothed value alone notices it too late
            curve.healthy_step = None if state is None else state.global_step
        if curve.cooldown_left > 0:
            curve.cooldown_left -= 1
        elif curve.count > max(self.warmup, 1):
            curve.consecutive = curve.consecutive + 1 if is_above else 0
            if curve.consecutive >= self.patience:
                self._act(self._reason(), state, control)

    def _is_above(self, value: float | None) -> bool:
        """Whether a value is too far from the best, on the wrong side of it."""
        best = self._curve.best
        assert value is not None
        assert best is not None
        distance = value - best if self.mode == "min" else best - value
        if self.threshold is not None and distance >= self.threshold:
            return True
        if self.relative_threshold is None or best <= 0:
            return False
        if self.mode == "min":
            return value >= best * self.relative_threshold
        return value * self.relative_threshold <= best

    def _reason(self) -> str:
        curve = self._curve
        side = "above" if self.mode == "min" else "below"
        return (
            f"smoothed {self.metric} {curve.smoothed:.4g} is too far {side} its best, {curve.best:.4g}, for "
            f"{curve.consecutive} observations in a row"
        )

    def _act(self, reason: str, state: Any, control: Any) -> None:
        if self.action == "rollback" and self._way_back.is_asked:
            return
        if _is_main(state):
            where = "" if state is None else f" at step {state.global_step}"
            logger.error("divergence%s: %s; action: %s", where, reason, self.action)
        if self.action == "rollback":
            self._ask_to_go_back(reason, control)
        else:
            self._ask_to_end(reason, control)
        if self.cooldown > 0:
            self._curve.cooldown_left, self._curve.consecutive = self.cooldown, 0

    def _ask_to_end(self, reason: str, control: Any) -> None:
        if isinstance(control, Control):
            ask = control.stop if self.action == "stop" else control.abort
            ask(reason)
            return
        control.should_training_stop = True
        if self.action == "abort":
            control.should_abort_without_save = True

    def _ask_to_go_back(self, reason: str, control: Any) -> None:
        self._check_control(control)
        bad_step = self._way_back.first_bad_step(self._curve.healthy_step)
        if bad_step is None or not isinstance(control, Control):
            control.rollback(reason)
        else:
            details = {"bad_step": bad_step}
            control.ask(Request("rollback", control.author, control.event, reason, control.rank, details))
        self._way_back = replace(self._way_back, is_asked=True, is_restored=False)

    def _check_control(self, control: Any) -> None:
        if self.action == "rollback" and not callable(getattr(control, "rollback", None)):
            raise ConfigError(
                f"action='rollback' needs a control that can go back to a checkpoint, and {type(control).__name__} has "
                f"no rollback(); train with Onstep's Trainer or pretrain(), or use action='stop' or 'abort'."
            )


DualTimeScaleDivergenceDetector = DivergenceDetector
"""An older name of the same class."""

DualWindowDivergenceDetector = DivergenceDetector
"""An older name of the same class."""


@dataclass
class _Run:
    """Where the training stands that the detector is told of."""

    is_training: bool = False
    is_over: bool = False
    is_loaded: bool = False
    """Whether the training that is about to begin continues a saved curve."""
    has_observed: bool = False
    told: tuple[int, float] | None = None
    """Step and value of the last `on_log`."""
    absence: _Absence = field(default_factory=lambda: _Absence())

    @property
    def is_missing(self) -> bool:
        """Whether training goes on and the metric was not there yet."""
        return self.is_training and not self.has_observed


@dataclass
class _Absence:
    """The records without the metric, as long as none had it: a mistyped name would watch nothing, silently."""

    count: int = 0
    names: list[str] = field(default_factory=list)
    """What there was instead, with numbers as values."""
    has_warned: bool = False

    def note(self, metric: str, record: Mapping[str, Any] | None, is_evaluation: bool) -> None:
        """Take in a record without the metric; those of the kind that would have it count."""
        if not record or "anomaly" in record:
            return
        numbers = [name for name, value in record.items() if isinstance(value, int | float)]
        self.names += [name for name in numbers if name not in self.names]
        has_evaluation = is_evaluation or any(name.startswith("eval_") for name in numbers)
        if is_evaluation or not has_evaluation:  # an evaluation that is logged as well is told twice
            self.count += metric.startswith("eval") == has_evaluation
        if self.count >= 3:
            self.warn(metric)

    def warn(self, metric: str) -> None:
        if self.names and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "DivergenceDetector watches %r, and nothing that was logged or evaluated so far has it: nothing is "
                "detected.%s There was: %s",
                metric,
                nearest(metric, self.names),
                ", ".join(self.names),
            )


@dataclass
class _Curve:
    """What is known of the metric."""

    smoothed: float | None = None
    best: float | None = None
    """Best of the smoothed values."""
    count: int = 0
    """Finite observations."""
    consecutive: int = 0
    """Observations in a row that counted."""
    cooldown_left: int = 0
    healthy_step: int | None = None
    """Step of the last observation that was not too far from the best, neither smoothed nor by itself."""

    def add(self, value: float, smoothing: float, mode: str) -> None:
        self.count += 1
        if self.smoothed is None or self.best is None:
            self.smoothed = self.best = value
            return
        self.smoothed = smoothing * value + (1 - smoothing) * self.smoothed
        self.best = (min if mode == "min" else max)(self.best, self.smoothed)


@dataclass(frozen=True)
class _WayBack:
    """The rollback that is asked for, and the one before it."""

    is_asked: bool = False
    is_restored: bool = False
    """Whether the checkpoint had a state for the detector."""
    went_to: int | None = None
    """Step of the checkpoint that the last rollback loaded."""

    def first_bad_step(self, healthy_step: int | None) -> int | None:
        """The first step that is to be undone; None where no step is known to be good.

        A checkpoint from which the curve was never well again is as bad as what came after it.
        """
        if self.went_to is not None and (healthy_step is None or healthy_step <= self.went_to):
            return self.went_to
        return None if healthy_step is None else healthy_step + 1


def _is_main(state: Any) -> bool:
    return state is None or bool(getattr(state, "is_world_process_zero", True))


def _check_thresholds(smoothing: float, threshold: float | None, relative_threshold: float | None) -> None:
    if not is_number(smoothing) or not 0 < smoothing <= 1:
        raise ConfigError(f"smoothing must be in (0, 1], got {smoothing!r}; 1 looks at each value by itself.")
    if threshold is None and relative_threshold is None:
        raise ConfigError("threshold and relative_threshold are both None, so nothing would be detected; set one.")
    if threshold is not None and not (is_number(threshold) and threshold > 0):
        raise ConfigError(
            f"threshold must be a number > 0, got {threshold!r}; pass None to use relative_threshold alone."
        )
    if relative_threshold is not None and not (is_number(relative_threshold) and relative_threshold > 1):
        raise ConfigError(
            f"relative_threshold must be a number > 1, got {relative_threshold!r}; 1.5 is half as much again."
        )


def _check_counts(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        if not is_whole(value, least):
            raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}.")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be {' | '.join(known)}, got {value!r}.")
