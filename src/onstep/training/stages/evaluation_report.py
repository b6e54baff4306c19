"""Reports an evaluation in Megatron Bridge's way: its printed block, and its tags for the trackers."""

from __future__ import annotations

import logging

from torch import Tensor, nn

from onstep.events import CallbackManager, Dispatcher
from onstep.training.protocols import DataSource, ForwardStep, NonLossFunction
from onstep.training.reporting.bridge_tags import TENSORBOARD, evaluation_tags, write_tags
from onstep.training.run import Run
from onstep.training.stages.evaluation import evaluate, perplexity

logger = logging.getLogger(__name__)


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
    *,
    pg_collection: object = None,
) -> dict[str, Tensor] | None:
    """Evaluate, and report the losses with their perplexities on the last rank. Collective.

    They are printed between two rules with `logger.console=bridge`, and sent to the trackers of Megatron Bridge's
    tags: `<loss> validation` or `<loss> test`, at most once per step.

    Args:
        write_to_tensorboard: False skips TensorBoard, but not the other trackers.
        process_non_loss_data_func: called on the last rank, if it has a TensorBoard logger, with the collected data,
            the step and the logger.
        pg_collection: as in `evaluate`.

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
        pg_collection=pg_collection,
    )
    if means and state.prints_console_line and state.is_last_rank:
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
