"""Logs a step: one read of the device, one mutable `logs` dictionary, passed to all callbacks."""

from __future__ import annotations

import copy
import logging
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType

import torch

from onstep.checkpoint import check_encodable
from onstep.errors import warn_once
from onstep.events import Dispatcher
from onstep.events.registration import Listeners
from onstep.metrics.memory_peaks import MemoryPeaks
from onstep.record.history import BRIDGE_KEY
from onstep.record.kinds import Kind
from onstep.train_state import TrainState
from onstep.training.compute.losses import Scalar, check_tokens
from onstep.training.compute.step import LastStep, Step
from onstep.training.protocols import Metrics, UserOptimizer
from onstep.training.reporting.loss_accumulator import IntervalReport, LossAccumulator
from onstep.training.run import Run

logger = logging.getLogger(__name__)


_OF_THE_LOG = frozenset(
    {"epoch", "step", "grad_norm", "max_grad_norm", "num_zeros", "skipped_steps", "learning_rate", "loss_scale"}
    | {"tokens", "total_tokens", "total_flos"}
)
"""Names of a record, besides `loss`, that a forward step's report would clash with."""


def log_step(state: Run, accumulator: LossAccumulator, optimizer: UserOptimizer, notify: Dispatcher) -> None:
    """Report the steps since the last logged one: read the device, fire `on_log_step`, then `on_log`. Collective."""
    report, extras = read_interval(state, accumulator)
    if report is None:
        return
    logs = build_logs(state, report, optimizer, extras=extras)
    state.features.add_to_log(logs)
    warn_if_all_skipped(state, report)
    warn_if_nothing_is_learned(state, report)
    notify.on_log_step(logs=logs)
    publish(state, logs, notify)
    state.interval.start = state.clock.elapsed()


def read_interval(state: Run, accumulator: LossAccumulator) -> tuple[IntervalReport | None, tuple[str, ...]]:
    """What is to be logged of the steps since the last logged one, which end here; None without any. Collective.

    Beside it, the names of the groups that features have added to what is read.
    """
    unread: dict[str, dict[str, torch.Tensor]] = {}
    state.features.add_to_read(unread)
    report = accumulator.read(**unread)
    if report is None:
        return None, ()
    accumulator.reset()
    state.features.after_read()
    advance_tokens(state, report)
    if report.num_losses:
        state.losses.logged = report.loss
    return report, tuple(unread)


def warn_if_all_skipped(state: Run, report: IntervalReport) -> None:
    """Warn, on rank 0, if every step was skipped and a norm above `grad_norm_skip_threshold` explains it."""
    most, norm = state.cfg.optimizer.grad_norm_skip_threshold, report.max_grad_norm
    if most is None or norm is None or norm <= most or report.num_skipped < report.num_steps:
        return
    if report.num_losses == report.num_steps and state.world.is_main:
        logger.warning(
            "all %d steps up to step %d were skipped, with gradient norms up to %.6g: nothing is learned; raise "
            "optimizer.grad_norm_skip_threshold=%g",
            report.num_steps,
            state.train_state.step,
            norm,
            most,
        )


def warn_if_nothing_is_learned(state: Run, report: IntervalReport) -> None:
    """Warn, on rank 0, if no label of the interval is trained on, or all its gradients are 0."""
    if not report.num_losses or not state.world.is_main:
        return
    step, has_gradient = state.train_state.step, bool(report.max_grad_norm)
    if report.tokens == 0 and (report.loss == 0 or not has_gradient):
        logger.warning(
            "the %d steps up to step %d have no label that is trained on (all are -100): their loss is 0, and nothing "
            "is learned; check the labels",
            report.num_steps,
            step,
        )
    elif report.tokens == 0:
        warn_once(
            logger,
            "the forward step reports 0 labels, though its loss has a gradient: tokens are counted as 0, and so are "
            "the rates and FLOPs derived from them; return the number of labels that the loss is computed from",
        )
    elif report.max_grad_norm == 0:
        cause = "labels that are all -100" if report.loss == 0 else "a loss that does not depend on the weights"
        warn_once(
            logger,
            f"all gradients are 0 in the {report.num_steps} steps up to step {step}, so nothing is learned; a usual "
            f"cause is {cause}",
        )


def publish(state: Run, logs: Metrics, notify: Dispatcher) -> None:
    """Publish a record; Megatron Bridge's tags belong to it."""
    state.features.wrap("log", partial(record, state, notify=notify))(logs)
    state.bridge_trackers.record.clear()


def record(state: Run, logs: Metrics, notify: Dispatcher, kind: Kind = "log") -> None:
    """Append a record with its step to `log_history`, and fire `on_log`.

    Evaluations reach the callbacks of Hugging Face's convention there; others have them at `on_eval_end` only.
    """
    if state.checkpoints is not None:
        check_savable(logs)
    keep(state, kind, logs)
    if kind == "evaluation":
        notify = _to_those_that_log_evaluations(notify)
    notify.on_log(logs=logs)
    for name, value in logs.items():
        if getattr(value, "ndim", 0) > 0:
            warn_once(
                logger,
                f"the metric {name!r} is a {type(value).__name__} of shape {tuple(value.shape)}, which trackers leave "
                f"out; log one number for each name",
            )


def keep(state: Run, kind: Kind, metrics: Metrics) -> None:
    """Append metrics to `log_history`, and to the record; the line of a logged step has Megatron Bridge's tags."""
    state.info.history.append({**metrics, "step": state.train_state.step})
    tags = {} if state.info.bridge_tags is None or kind != "log" else state.info.bridge_tags.state_dict()
    state.note(kind, {**metrics, BRIDGE_KEY: tags} if tags else metrics)


def check_savable(logs: Metrics) -> None:
    """Reject what checkpoints cannot hold when it is first logged, not in the save that may be the only one.

    Raises:
        UnsupportedStateError: with the name of the metric.
    """
    for name, value in logs.items():
        if type(value) not in (float, int, str, bool, NoneType):
            check_encodable(value, f"the metric {name!r}")


def _to_those_that_log_evaluations(notify: Dispatcher) -> Dispatcher:
    some, listeners = copy.copy(notify), Listeners()
    some.on, its_own = listeners, tuple(one for one in notify.on.on_log if _logs_evaluations(one.owner))
    setattr(listeners, "on_log", its_own)  # noqa: B010 - slots are named after events
    return some


def _logs_evaluations(callback: object) -> bool:
    """Whether it says so, or has Hugging Face's base class; Forgather reports evaluations at `on_evaluate` alone."""
    of_base = [cls.__module__ for cls in type(callback).__mro__ if cls.__name__ == "TrainerCallback"]
    follows_hugging_face = bool(of_base) and not any(module.startswith("forgather") for module in of_base)
    return bool(getattr(callback, "logs_evaluations", follows_hugging_face))


def advance_tokens(state: Run, report: IntervalReport) -> None:
    """Update the counters of tokens and FLOPs, and the mean loss. Collective if a feature counts FLOPs.

    Raises:
        ConfigError: if the loss function has counted fewer than 0 labels.
    """
    tokens = report.tokens or 0
    check_tokens(tokens)
    state.train_state.consumed_tokens += tokens
    if report.num_losses:
        losses = state.losses
        losses.total += report.loss * report.num_losses
        losses.num_steps += report.num_losses
    state.features.wrap("count_flops", partial(_count_flops, state))(tokens)


def _count_flops(state: Run, tokens: float) -> None:
    state.train_state.floating_point_operations_so_far += tokens * state.flops_per_token


def build_logs(state: Run, report: IntervalReport, optimizer: UserOptimizer, extras: tuple[str, ...] = ()) -> Metrics:
    """The record of a logged step, under Hugging Face's names; `extras` are groups that features added to the read."""
    progress = state.train_state
    logs: Metrics = {"epoch": state.trainer_state.epoch, "loss": report.loss}
    logs |= {key: value for key, value in report.others.items() if key not in ("loss", "lm loss")}
    for group in extras:
        logs |= report.extras.get(group, {})
    for key in _OF_THE_LOG.intersection(report.others):
        warn_once(logger, f"the forward step reports {key!r}, which the log has itself; report it under another name")
    if report.grad_norm is not None:
        logs |= {"grad_norm": report.grad_norm, "max_grad_norm": report.max_grad_norm}
    if report.num_zeros is not None:
        logs["num_zeros"] = report.num_zeros
    if report.num_skipped:
        logs["skipped_steps"] = report.num_skipped
    if report.tokens is not None:
        logs |= {
            "tokens": report.tokens,
            "total_tokens": progress.consumed_tokens,
            "total_flos": progress.floating_point_operations_so_far,
        }
    logs["learning_rate"] = learning_rate(optimizer)
    scaler = state.loss_scaler(optimizer)
    if scaler is not None:
        logs["loss_scale"] = scaler.scale
    peak = state.features.room(MemoryPeaks).end_interval(state.world.device)
    if peak is not None:
        logs["peak_mem_allocated"] = state.world.gather(peak)
    return logs


def learning_rate(optimizer: UserOptimizer) -> float | None:
    """The rate that the optimizer will use next, read from its last non-empty parameter group.

    Groups of embedding and output layers with their own rate are ignored if there are others.
    """
    rate = _rate_of_last(optimizer, is_decoupled=False)
    return _rate_of_last(optimizer, is_decoupled=True) if rate is None else rate


def decoupled_learning_rate(optimizer: UserOptimizer) -> float | None:
    """The next rate of embedding and output matrices with their own rate; None without such groups."""
    return _rate_of_last(optimizer, is_decoupled=True)


def _rate_of_last(optimizer: UserOptimizer, is_decoupled: bool) -> float | None:
    for group in reversed(optimizer.param_groups):
        if group.get("params") and bool(group.get("is_decoupled_lr", False)) is is_decoupled:
            return float(group["lr"])
    return None


@dataclass
class RunStart:
    """The start of the timing for a run's final metrics: after its first step, which may compile."""

    seconds: float
    progress: TrainState
    """A copy of the counters at that time."""
    first_tokens: Scalar = 0
    """Labels of the first step, if excluded."""
    is_first: bool = True
    """Whether the first step is still to come."""

    @classmethod
    def now(cls, state: Run) -> RunStart:
        """A start at the present time."""
        return cls(time.perf_counter(), replace(state.train_state))

    def skip_step(self, samples: int) -> None:
        """Exclude a step that is not trained on from the rates."""
        self.progress.step += 1
        self.progress.consumed_train_samples += samples

    def note_first_step(self, run: Run, step: Step) -> None:
        """Log how losses are weighted, and exclude this step and its tokens from the rates, whose clock starts now."""
        log_weighting(run, step)
        if run.losses.first is None:
            run.losses.first = step.total.value()
        if run.is_over:
            return
        self.seconds, self.is_first = time.perf_counter(), False
        self.progress.step += 1
        self.first_tokens = 0 if step.total.tokens is None else step.total.tokens


def log_weighting(run: Run, step: Step) -> None:
    """Log once how mean losses are weighted, which only the first micro-batch shows; `Trainer` logs this itself."""
    if step.total.kind != "mean" or run.entry_point.names_loss or not run.world.is_main:
        return
    unit = run.cfg.train.loss_weighting
    if unit == "auto":
        unit = "samples" if step.total.tokens is None else "tokens"
    logger.info("loss: means of micro-batches, weighted by their %s (train.loss_weighting)", unit)


def final_metrics(state: Run, start: RunStart) -> Metrics:
    """Totals of this `train()`; the rates count only its own steps and tokens, even after a resume."""
    progress, before = state.train_state, start.progress
    steps = progress.step - before.step
    runtime = time.perf_counter() - start.seconds
    sizes = state.batch_sizes
    batch_size = state.cfg.train.global_batch_size or 0 if sizes is None else sizes.sizes.last
    samples = steps * batch_size
    if sizes is not None and sizes.varies:
        samples = progress.consumed_train_samples - before.consumed_train_samples
    left_out = float(start.first_tokens)
    all_tokens = progress.consumed_tokens - before.consumed_tokens
    tokens = all_tokens - left_out
    flops = progress.floating_point_operations_so_far - before.floating_point_operations_so_far
    flops *= tokens / all_tokens if all_tokens else 1.0
    per_second = 1 / runtime if steps > 0 and runtime > 0 else math.nan
    return {
        "train_runtime": runtime,
        "train_samples": progress.consumed_train_samples,
        "step": progress.step,
        "train_samples_per_second": round(samples * per_second, 3),
        "train_steps_per_second": round(steps * per_second, 3),
        "epoch": state.trainer_state.epoch,
        "effective_batch_size": batch_size,
        "total_tokens": progress.consumed_tokens,
        "tokens_per_second": round(tokens * per_second, 2),
        "total_flops": progress.floating_point_operations_so_far,
        "total_flos": progress.floating_point_operations_so_far,
        "train_loss": state.mean_loss(),
        "flops_per_second": flops * per_second,
        **first_and_last_loss(state),
    }


def first_and_last_loss(state: Run) -> Metrics:
    """The losses that the title of the summary shows, or nothing before the first step. Reads the device."""
    first, last = state.losses.first, last_loss(state)
    return {} if first is None or last is None else {"first_loss": float(first), "last_loss": last}


def last_loss(state: Run) -> float | None:
    """The loss of the newest record; of a run that is shorter than its log interval, that of the last step.

    Reads the device in the second case.
    """
    if state.losses.logged is not None:
        return state.losses.logged
    known = state.features.room(LastStep).loss
    return state.losses.restored if known is None else float(known.value())
