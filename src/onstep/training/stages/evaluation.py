"""Runs validation and test: forward steps without gradients, token-weighted means, and the best metric so far."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onstep.config.pipelines import schedule_of
from onstep.data import Batch, StepBatches
from onstep.data.loaders.dead_workers import dead_workers_named
from onstep.distributed import World, attempt, check_groups, check_loader, check_ranks, raise_together
from onstep.distributed.exchanges import casts_weights
from onstep.distributed.pipeline.elsewhere import items_of_stages
from onstep.distributed.pipeline.seats import is_staged
from onstep.events import CallbackManager, Dispatcher
from onstep.models.generation.generate import preserve_modes
from onstep.training.compute.forward_errors import call_forward_step
from onstep.training.compute.loss_sums import LossForms, evaluation_sums
from onstep.training.compute.losses import MicroLoss, read_loss
from onstep.training.compute.step import MicroBatches
from onstep.training.protocols import DataSource, ForwardStep, Metrics, NonLossFunction
from onstep.training.run import Run
from onstep.training.stages.agreement import agree
from onstep.training.stages.evaluation_batches import eval_batches
from onstep.training.stages.exits import CurrentEvaluation, EvaluationInterrupted, exit_if_decided
from onstep.training.stages.forward_step import check_chunks, prepare_forward_step_func
from onstep.training.stages.record import keep
from onstep.training.stages.staged import staged_results

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
    *,
    pg_collection: object = None,
) -> tuple[dict[str, Tensor] | None, Any, bool]:
    """Average the losses over an evaluation set. Collective.

    Args:
        data_iterator: an `EvalLoader`, read from its start, or an iterator of micro-batches, of which the next
            `validation.eval_iters` steps are read (None: all of them). Ranks with iterators of their own are evaluated
            until the longest ends.
        process_non_loss_data_func: if given without `non_loss_data_func`, the first batch is passed through the model
            once more, and its loss functions, called with `non_loss_data=True`, return the collected data.
        config: the model's configuration; kept for Megatron Bridge.
        verbose: print the number of samples and the progress, on rank 0.
        non_loss_data_func: called with the model after the evaluation; its return value is the collected data.
        is_test: fire `on_test_*` instead of `on_eval_*`.
        state: the run.
        forward_step_func: the forward step, as in training.
        model: the model chunks.
        callback_manager: the callbacks of the run; None for none.
        notify: fires the events; None for one of `callback_manager`.
        pg_collection: the process groups of the run (`state.pg_collection`), as None; others are refused.

    Returns:
        The token-weighted means by name (0-d tensors), the collected non-loss data, and whether
        `train.exit_duration_in_mins` cut the evaluation short; then the other two are None.

    Raises:
        ConfigError: if the model has several chunks, or there are neither data nor `validation.eval_iters`.
        DataError: on all ranks, for data that is not the same where each keeps its share of it (see `eval_batches`).
        EvaluationInterrupted: if a signal ended it or, inside the training loop, a time limit: the loop saves the state
            from before it.
    """
    check_chunks(model)  # before any event
    check_ranks(model, state.world)
    state.model_casts = casts_weights(model)
    check_groups(pg_collection, state.world)
    refusal = attempt(lambda: check_loader(data_iterator, state.world))[1]
    raise_together(state.world, refusal, "the evaluation")
    notify = notify or Dispatcher(callback_manager, state, model)
    collected: object = None

    def collect() -> None:
        nonlocal collected
        if non_loss_data_func is not None:
            collected = non_loss_data_func(model)
        elif process_non_loss_data_func is not None:
            step_func = prepare_forward_step_func(forward_step_func, state)
            collected = _collect_non_loss_data(state, step_func, data_iterator, model)

    with evaluation_mode(model), until_interrupted(state) as interruption:
        kind = "test" if is_test else "eval"
        means, metrics, _ = score(
            state, forward_step_func, data_iterator, model, notify, is_test=is_test, verbose=verbose, afterwards=collect
        )
        record_evaluation(state, metrics)
        keep(state, "test" if is_test else "evaluation", metrics)
        notify.fire(f"on_{kind}_end", total_loss_dict=means, metrics=metrics)
    return (None, None, True) if interruption.is_over else (means, collected, False)


class Scores(NamedTuple):
    """The result of one pass over an evaluation set."""

    means: dict[str, Tensor]
    """The token-weighted means by name, 0-d, as Megatron Bridge reports them."""
    metrics: Metrics
    """The same and the rates, under Hugging Face's names."""
    num_samples: int


def score(
    state: Run,
    forward_step_func: ForwardStep,
    data_iterator: DataSource,
    model: list[nn.Module],
    notify: Dispatcher,
    *,
    is_test: bool = False,
    prefix: str | None = None,
    verbose: bool = False,
    afterwards: Callable[[], None] = lambda: None,
) -> Scores:
    """Run the forward steps of an evaluation, with its events up to the last batch; nothing is recorded. Collective.

    Args:
        prefix: prefix of the metrics' names, default `eval` or `test`.
        afterwards: called after the last batch, within the time of the evaluation.
    """
    kind = "test" if is_test else "eval"
    forward_step_func = prepare_forward_step_func(forward_step_func, state)
    with dead_workers_named(), state.features.pause("score"), state.timers("evaluate").measure(barrier=True):
        notify.fire(f"on_{kind}_start")
        started = time.perf_counter()
        totals = _sum_batches(state, forward_step_func, data_iterator, model, notify, kind, verbose)
        afterwards()
    state.print_timers(["evaluate"])
    if totals.batches == 0 and state.cfg.validation.eval_iters != 0 and state.world.is_main:
        logger.warning(
            "the %s data has no batches left at step %d, so there is no loss: an iterator is read only once; "
            "pass an EvalLoader, which starts over",
            kind,
            state.train_state.step,
        )
    losses = {
        key: top / bottom.clamp(min=1) if bottom else top * math.nan for key, (top, bottom) in totals.sums.items()
    }
    if "loss" in losses and not totals.sums["loss"][1] and state.world.is_main:
        logger.warning(
            "the %s data has no label to compute a loss from in %d samples (all are -100), so its loss is NaN; check "
            "the labels",
            prefix or kind,
            totals.samples,
        )
    reported = {key: value for key, value in losses.items() if key != "loss"}
    means = reported or ({"lm loss": losses["loss"]} if losses else {})
    metrics = _metrics(prefix or kind, losses, totals, time.perf_counter() - started)
    metrics["epoch"] = state.trainer_state.epoch
    return Scores(means, metrics, totals.samples)


def record_evaluation(state: Run, metrics: Metrics) -> None:
    """Keep the metrics of the most recent evaluation, which is about to be reported."""
    state.evaluated.last_metrics = metrics
    state.features.room(CurrentEvaluation).has_reported = True


@contextmanager
def evaluation_mode(model: list[nn.Module]) -> Iterator[None]:
    """Set the model to evaluation; on exit every submodule has its own mode again."""
    with preserve_modes(model):
        for chunk in model:
            chunk.eval()
        yield


@dataclass
class Interruption:
    """How an evaluation ended."""

    is_over: bool = False
    """Whether a time limit cut it short."""


@contextmanager
def until_interrupted(state: Run) -> Iterator[Interruption]:
    """Outside of the training loop, end the block at a time limit without an error; see `Interruption`."""
    interruption = Interruption()
    try:
        yield interruption
    except EvaluationInterrupted:
        if not _is_over_in_time(state):
            raise
        interruption.is_over = True


@dataclass
class _Totals:
    """Sums over the batches of an evaluation."""

    sums: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    samples: int = 0
    batches: int = 0
    counts_tokens: bool = False

    def add(self, micros: list[MicroLoss], world: World, forms: LossForms) -> None:
        """Add one global batch. Collective."""
        sums = evaluation_sums(micros, world, forms)
        form = forms.known.get("evaluation")
        self.counts_tokens = micros[0].tokens is not None if micros else form is not None and form.counts_tokens
        for key, (top, bottom) in sums.items():
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
    forms = state.features.room(LossForms)
    if shows:
        batch_size = options.eval_global_batch_size or state.cfg.train.global_batch_size or 1
        print(f"Evaluating on {'all' if limit is None else limit * batch_size} samples", flush=True)  # noqa: T201

    def score_batch(step: StepBatches) -> None:
        with torch.no_grad():
            results = zip(_results(state, forward_step_func, step, model), step.is_filler, strict=False)
            micros = [
                _kept(read_loss(result, batch, weighting, is_filler))
                for (batch, result), is_filler in results
                if result is not None
            ]
        if micros or is_staged(model):
            totals.add(micros, state.world, forms)

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


def _kept(micro: MicroLoss) -> MicroLoss:
    """The loss in memory of its own, in float32 if it has less, so that weighting it costs no precision."""
    micro.keep()
    micro.loss = micro.loss.to(torch.promote_types(micro.loss.dtype, torch.float32))
    return micro


def _is_over_in_time(state: Run) -> bool:
    """Whether a time limit ended an evaluation outside of the training loop; the run then counts as stopped."""
    if state.exits.is_preempted:
        return False
    if state.world.is_main:
        print("Exiting during evaluation, timelimit reached", flush=True)  # noqa: T201 - Bridge's line
    if state.ending.training == "during":
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
        collected = [result for _, result in _results(state, forward_step_func, step, model, non_loss_data=True)]
    if is_staged(model) and schedule_of(state.cfg.parallel).chunks == "two":
        # the last stage is on the first rank of a pipeline, and the last rank of all has the tracker
        return next(filter(None, items_of_stages(collected, state.world)), [])
    return collected


def _results(
    state: Run, forward_step_func: ForwardStep, step: StepBatches, model: list[nn.Module], **asked: bool
) -> Iterator[tuple[Batch, object]]:
    """A batch's micro-batches, each with its loss function's result; None for data without labels.

    On a rank whose part of the model ends in no loss there are none.
    """
    if is_staged(model):
        yield from staged_results(state, forward_step_func, step, model, **asked)
        return
    micro_batches, [chunk] = MicroBatches(step, state.world.device), model
    iterator = micro_batches if step.has_data else None
    for index in range(len(micro_batches)):
        batch = micro_batches.stage(index)
        with state.autocast():
            result = call_forward_step(forward_step_func, iterator, batch, chunk, state.train_state.step, **asked)
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
