"""Runs validation and test: forward steps without gradients, token-weighted means, and the best metric so far."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep.data import Batch, EvalLoader, IteratorReader, StepBatches
from onstep.data.loaders.step_source import only_iterator
from onstep.distributed import World
from onstep.errors import warn_once
from onstep.events import CallbackManager, Dispatcher, Request
from onstep.models.generation.generate import preserve_modes
from onstep.training.compute.losses import MicroLoss, evaluation_sums, read_loss
from onstep.training.compute.step import MicroBatches
from onstep.training.protocols import DataSource, ForwardStep, Metrics, NonLossFunction
from onstep.training.reporting.bridge_tags import TENSORBOARD, evaluation_tags, write_tags
from onstep.training.run import Run
from onstep.training.stages.agreement import agree
from onstep.training.stages.exits import EvaluationInterrupted, exit_if_decided
from onstep.training.stages.forward_step import only_chunk, prepare_forward_step_func
from onstep.training.stages.record import publish_evaluation

logger = logging.getLogger(__name__)


def evaluate(
    state: Run,
    forward_step_func: ForwardStep,
    data_iterator: DataSource,
    model: list[nn.Module],
    process_non_loss_data_func: NonLossFunction | None,
    config: object,
    verbose: bool = False,
    non_loss_data_func: NonLossFunction | None = None,
    callback_manager: CallbackManager | None = None,
    is_test: bool = False,
    notify: Dispatcher | None = None,
    metric_key_prefix: str | None = None,
    extra_metrics: Callable[[], Metrics] | None = None,
) -> tuple[dict[str, Tensor] | None, Any, bool]:
    """Average the losses over an evaluation set. Collective.

    Args:
        data_iterator: an `EvalLoader`, read from its start, or an iterator of micro-batches, of which the next
            `validation.eval_iters` steps are read (None: all of them).
        process_non_loss_data_func: if given without `non_loss_data_func`, the first batch is passed through the model
            once more, and its loss functions, called with `non_loss_data=True`, return the collected data.
        config: the model's configuration; kept for Megatron Bridge.
        verbose: print the number of samples and the progress, on rank 0.
        non_loss_data_func: called with the model after the evaluation; its return value is the collected data.
        is_test: fire `on_test_*` instead of `on_eval_*`.
        metric_key_prefix: prefix of the metrics' names; `eval` or `test`.
        extra_metrics: called after the loop; its return value is added to the metrics.

    Returns:
        The token-weighted means by name (0-d tensors), the collected non-loss data, and whether
        `train.exit_duration_in_mins` cut the evaluation short; then the other two are None.

    Raises:
        ConfigError: if the model has several chunks.
        EvaluationInterrupted: if a signal ended it or, inside the training loop, a time limit: the loop saves the state
            from before it.
    """
    only_chunk(model)  # before any event
    notify = notify or Dispatcher(callback_manager, state, model)
    kind = "test" if is_test else "eval"
    forward_step_func = prepare_forward_step_func(forward_step_func, state)
    collected: object = None
    with preserve_modes(model):
        for chunk in model:
            chunk.eval()
        try:
            with state.features.pause("score"), state.timers("evaluate").measure(barrier=True):
                notify.fire(f"on_{kind}_start")
                started = time.perf_counter()
                totals = _sum_batches(state, forward_step_func, data_iterator, model, notify, kind, verbose)
                if non_loss_data_func is not None:
                    collected = non_loss_data_func(model)
                elif process_non_loss_data_func is not None:
                    collected = _collect_non_loss_data(state, forward_step_func, data_iterator, model)
            state.print_timers(["evaluate"])
            if totals.batches == 0 and state.cfg.validation.eval_iters != 0 and state.world.is_main:
                logger.warning(
                    "the %s data has no batches left at step %d, so there is no loss: an iterator is read only once; "
                    "pass an EvalLoader, which starts over",
                    kind,
                    state.train_state.step,
                )
            losses = {key: top / bottom.clamp(min=1) for key, (top, bottom) in totals.sums.items()}
            reported = {key: value for key, value in losses.items() if key != "loss"}
            means = reported or ({"lm loss": losses["loss"]} if losses else {})
            prefix = metric_key_prefix or kind
            metrics = _metrics(prefix, losses, totals, time.perf_counter() - started)
            metrics |= _further_metrics(metrics, extra_metrics)
            metrics["epoch"] = state.trainer_state.epoch
            state.evaluated.last_metrics = metrics
            state.evaluated.is_restartable = False
            if is_test or state.entry_point.trainer is None:
                state.info.history.append({**metrics, "step": state.train_state.step})
            else:
                publish_evaluation(state, metrics, notify)
            notify.fire(f"on_{kind}_end", total_loss_dict=means, metrics=metrics)
        except EvaluationInterrupted:
            if not _is_over_in_time(state):
                raise
            return None, None, True
    return means, collected, False


def _further_metrics(measured: Metrics, extra_metrics: Callable[[], Metrics] | None) -> Metrics:
    """The metrics that the user computes; one that replaces a measured one is named."""
    further = extra_metrics() if extra_metrics is not None else {}
    replaced = sorted(measured.keys() & further.keys())
    if replaced:
        warn_once(logger, f"compute_metrics returns {', '.join(replaced)}, which replaces what was measured")
    return further


@dataclass
class _Totals:
    """Sums over the batches of an evaluation."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    samples: int = 0
    batches: int = 0
    counts_tokens: bool = False

    def add(self, micros: list[MicroLoss], world: World) -> None:
        """Add one global batch. Collective."""
        self.counts_tokens = micros[0].tokens is not None
        for key, (top, bottom) in evaluation_sums(micros, world).items():
            before = self.sums.get(key)
            self.sums[key] = (top, bottom) if before is None else (before[0] + top, before[1] + bottom)


def _sum_batches(
    state: Run,
    forward_step_func: ForwardStep,
    data_iterator: DataSource,
    model: list[nn.Module],
    notify: Dispatcher,
    kind: str,
    verbose: bool,
) -> _Totals:
    totals, options, shows = _Totals(), state.cfg.validation, verbose and state.world.is_main
    weighting, limit = state.cfg.train.loss_weighting, options.eval_iters
    if shows:
        batch_size = options.eval_global_batch_size or state.cfg.train.global_batch_size or 1
        print(f"Evaluating on {'all' if limit is None else limit * batch_size} samples", flush=True)  # noqa: T201

    def score_batch(step: StepBatches) -> None:
        with torch.no_grad():
            results = zip(_results(state, forward_step_func, step, model), step.is_filler, strict=True)
            micros = [
                read_loss(result, batch, weighting, is_filler)
                for (batch, result), is_filler in results
                if result is not None
            ]
        if micros:
            totals.add(micros, state.world)

    score = state.features.wrap("score", score_batch)
    for number, step in enumerate(eval_batches(state, data_iterator), start=1):
        if shows:
            print(f"Evaluating iter {number}/{limit or '?'}", flush=True)  # noqa: T201 - asked for
        notify.fire(f"on_{kind}_step_start")
        score(step)
        notify.fire(f"on_{kind}_step_end")
        agree(state)
        exit_if_decided(state)
        totals.samples += step.num_samples or 0
        totals.batches += 1
    state.train_state.consumed_valid_samples += totals.samples
    return totals


def _is_over_in_time(state: Run) -> bool:
    """Whether a time limit ended an evaluation outside of the training loop; the run then counts as stopped."""
    if state.exits.decided == "signal":
        return False
    if state.world.is_main:
        print("Exiting during evaluation, timelimit reached", flush=True)  # noqa: T201 - Bridge's line
    if state.ending.train_started and not state.ending.train_ended:
        return False
    state.ending.was_stopped = True
    return True


def _collect_non_loss_data(
    state: Run, forward_step_func: ForwardStep, data_iterator: DataSource, model: list[nn.Module]
) -> list[object]:
    """Collect the loss functions' non-loss data for one batch's micro-batches. Must run on all ranks."""
    step = next(eval_batches(state, data_iterator), None)
    if step is None:
        return []
    with torch.no_grad():
        return [result for _, result in _results(state, forward_step_func, step, model, non_loss_data=True)]


def eval_batches(state: Run, data_iterator: DataSource) -> Iterator[StepBatches]:
    """The global batches of one evaluation, at most `validation.eval_iters`."""
    limit = state.cfg.validation.eval_iters
    if isinstance(data_iterator, EvalLoader):
        yield from data_iterator.batches(limit)
        return
    source = only_iterator(data_iterator)
    for _ in itertools.count() if limit is None else range(limit):
        step = IteratorReader(source, world_size=state.world.size).read(state.num_eval_microbatches)
        if step is None:
            return
        yield step


def _results(
    state: Run, forward_step_func: ForwardStep, step: StepBatches, model: list[nn.Module], **asked: bool
) -> Iterator[tuple[Batch, object]]:
    """A batch's micro-batches, each with its loss function's result; None for data without labels."""
    iterator, chunk = MicroBatches(step, state.world.device), only_chunk(model)
    for index in range(len(iterator)):
        batch = iterator.stage(index)
        with state.autocast():
            output, loss_function = forward_step_func(iterator, chunk)
            result = loss_function(output, **asked)
        yield batch, result


def _metrics(prefix: str, losses: dict[str, Tensor], totals: _Totals, seconds: float) -> Metrics:
    """Numbers under Hugging Face's names: `eval_loss`, `eval_perplexity`, rates."""
    metrics: Metrics = {f"{prefix}_{key}": mean.item() for key, mean in losses.items() if key != "lm loss"}
    loss = metrics.get(f"{prefix}_loss")
    if loss is not None and totals.counts_tokens:
        metrics[f"{prefix}_perplexity"] = perplexity(loss)
    metrics[f"{prefix}_runtime"] = round(seconds, 4)
    metrics[f"{prefix}_samples_per_second"] = round(totals.samples / seconds, 3) if seconds else math.nan
    metrics[f"{prefix}_steps_per_second"] = round(totals.batches / seconds, 3) if seconds else math.nan
    return metrics


def perplexity(loss: float) -> float:
    """`exp(loss)`, with the exponent capped at 20 so that the loss of an untrained model does not overflow."""
    return math.exp(min(20.0, loss)) if not math.isnan(loss) else math.nan


def evaluate_and_print_results(
    state: Run,
    prefix: str,
    forward_step_func: ForwardStep,
    data_iterator: DataSource,
    model: list[nn.Module],
    config: object,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    process_non_loss_data_func: NonLossFunction | None = None,
    non_loss_data_func: NonLossFunction | None = None,
    callback_manager: CallbackManager | None = None,
    is_test: bool = False,
    notify: Dispatcher | None = None,
) -> dict[str, Tensor] | None:
    """Evaluate, and report the losses with their perplexities on the last rank. Collective.

    They are printed between two rules if no callback shows progress, and sent to the trackers of Megatron Bridge's
    tags: `<loss> validation` or `<loss> test`, at most once per step.

    Args:
        write_to_tensorboard: False skips TensorBoard, but not the other trackers.
        process_non_loss_data_func: called on the last rank, if it has a TensorBoard logger, with the collected data,
            the step and the logger.

    Returns:
        The means by name; None if a time limit ended the evaluation.
    """
    means, collected, is_over = evaluate(
        state,
        forward_step_func,
        data_iterator,
        model,
        process_non_loss_data_func,
        config,
        verbose,
        non_loss_data_func,
        callback_manager,
        is_test,
        notify,
    )
    if means and state.entry_point.prints_console_line and state.is_last_rank:
        print(result_block(prefix, means), flush=True)  # noqa: T201 - this block is what was asked for
    state.bridge_trackers.join(callback_manager)
    if state.bridge_trackers.recipients and not is_over:
        with state.bridge_trackers.held(lambda: state.ending.ended):
            if means:
                write_evaluation(state, means, "test" if is_test else "validation", write_to_tensorboard)
            writer = state.bridge_trackers.get(TENSORBOARD) if write_to_tensorboard else None
            if process_non_loss_data_func is not None and writer is not None:
                process_non_loss_data_func(collected, state.train_state.step, writer)
    return means


def write_evaluation(state: Run, means: dict[str, Tensor], kind: str, write_to_tensorboard: bool = True) -> None:
    """Send an evaluation's losses to the trackers; another one of its kind at the same step adds no second point."""
    trackers, progress = state.bridge_trackers, state.train_state
    if trackers.evaluated.get(kind) == progress.step:
        return
    trackers.evaluated[kind] = progress.step
    trackers.open(progress.step, progress.consumed_train_samples, adds_only=True)
    losses = {name: mean.item() for name, mean in means.items()}
    shows_perplexity = state.cfg.logger.log_validation_ppl_to_tensorboard
    perplexities = {name: perplexity(loss) for name, loss in losses.items()} if shows_perplexity else {}
    loggers = {name: one for name, one in trackers.recipients.items() if write_to_tensorboard or name != TENSORBOARD}
    tags = evaluation_tags(kind, losses, perplexities)
    write_tags(loggers, tags, progress.step, progress.consumed_train_samples, over_samples=tags)


def result_block(prefix: str, means: dict[str, Tensor]) -> str:
    """Megatron Bridge's block of an evaluation's losses."""
    line = f" validation loss at {prefix} | "
    for key, mean in means.items():
        line += f"{key} value: {mean.item():.6E} | {key} PPL: {perplexity(mean.item()):.6E} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def note_best_metric(state: Run, metrics: Metrics) -> None:
    """Remember the value of `validation.metric_for_best_model` if it is the best so far.

    Called after `on_evaluate`, so that early stopping compares with the best of the earlier evaluations. For a metric
    whose name ends in `loss` or `perplexity`, smaller is better, unless `validation.greater_is_better` says otherwise.
    With `checkpoint.save_on_best` a checkpoint is requested. All ranks have the same metrics.
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
            _request_save(state, f"best {key} so far: {value:.6g}")


def note_best_checkpoint(state: Run, step: int, path: str | Path) -> None:
    """Remember where the weights of the best step are, if `path` is that step's checkpoint; change nothing else.

    Called on every rank when a checkpoint is durable, and again after loading one: it was written before its own
    location was known. As in `transformers`, the location of an earlier best remains until the best step has a
    checkpoint.
    """
    if step == state.train_state.best_step:
        state.train_state.best_model_checkpoint = str(path)


def _request_save(state: Run, reason: str) -> None:
    """Request a save on every rank; rank 0's request is recorded."""
    if state.world.is_main:
        state.control.add_request(Request("should_save", "save_on_best", "", reason, state.world.rank))
    else:
        state.control.set_flag("should_save")
