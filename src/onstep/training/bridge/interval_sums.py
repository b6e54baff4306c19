"""Provides Megatron Bridge's `training_log`, for users who drive training themselves and keep the interval's sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer
from onstep.training.bridge.global_state import GlobalState
from onstep.training.experts.moe_log import step_losses
from onstep.training.feature import is_due
from onstep.training.interval_log.console_line import IntervalValues
from onstep.training.interval_log.interval import LogContext, is_nan, report_interval, report_step, whole
from onstep.training.reporting.bridge_tags import StepValues
from onstep.training.reporting.loss_accumulator import read_together

ADVANCED, SKIPPED, NAN = COUNTERS = ("advanced iterations", "skipped iterations", "nan iterations")
"""Keys of `total_loss_dict` that are not losses: steps of the interval that updated the weights, steps that did not,
and those among the latter whose loss was not finite."""


def training_log(
    loss_dict: Mapping[str, Tensor],
    total_loss_dict: dict[str, Tensor | int],
    learning_rate: float | None,
    decoupled_learning_rate: float | None,
    loss_scale: float,
    report_memory_flag: bool,
    skipped_iter: int,
    grad_norm: Tensor | float | None,
    params_norm: Tensor | float | None,
    num_zeros_in_grad: Tensor | int | None,
    config: ConfigContainer,
    global_state: GlobalState,
    history_wct: Sequence[float],
    model: list[nn.Module],
    pg_collection: object = None,
    log_max_attention_logit: Tensor | float | None = None,
    loaded_iteration: int = 0,
    seq_length: int | None = None,
) -> bool:
    """Record the step that was just counted, and report it if due. Must be called on all ranks after each step.

    At every `logger.tensorboard_log_interval`-th step the trackers get its tags
    (`onstep.training.reporting.bridge_tags`); values on the device are passed on unread. At every
    `logger.log_interval`-th step Megatron Bridge's lines are printed to the console, which reads the device, and a new
    interval begins. Collective if there are several pipeline stages, and with gradient norms of sharded
    parameters.

    Args:
        loss_dict: losses of the step, reduced over the ranks.
        total_loss_dict: sums and counters of the interval, changed in place; an empty dictionary at first.
        learning_rate: the rate of the next step.
        decoupled_learning_rate: that of the embedding and output layer, if they have their own.
        loss_scale: the factor applied to the loss; 1 without a loss scaler.
        report_memory_flag: the return value of the last call; True at first.
        skipped_iter: 1 if the update was not applied.
        grad_norm: L2 norm of the gradients before clipping.
        params_norm: L2 norm of all parameters.
        num_zeros_in_grad: number of zeros in the gradients.
        config: the run's configuration.
        global_state: the run's progress, clock and loggers.
        history_wct: seconds at the end of each of the latest `logger.throughput_window_size` steps.
        model: list of model chunks; FLOPs are computed for a model that carries its configuration.
        pg_collection: process groups; memory reports are reduced over its `pp`. None means those of the run.
        log_max_attention_logit: largest attention logit of the step.
        loaded_iteration: step that this process continued from.
        seq_length: tokens per sequence, if different from the configuration.

    Returns:
        Whether to report the memory again at the next logged step.
    """
    run = LogContext(config, global_state, model, pg_collection, loaded_iteration, seq_length)
    values = StepValues(
        losses=loss_dict,
        learning_rate=learning_rate,
        decoupled_learning_rate=decoupled_learning_rate,
        loss_scale=loss_scale,
        grad_norm=grad_norm,
        num_zeros=whole(num_zeros_in_grad),
        params_norm=params_norm,
        max_attention_logit=log_max_attention_logit,
    )
    experts = {} if skipped_iter else step_losses(global_state.experts)
    shown = {name: loss for name, loss in experts.items() if name.endswith("loss")}
    add_to_interval({**loss_dict, **shown}, total_loss_dict, skipped_iter)
    report_step(run, lambda: values, history_wct)
    if not is_due(global_state.train_state.step, config.logger.log_interval):
        return report_memory_flag
    num_steps = int(total_loss_dict[ADVANCED] + total_loss_dict[SKIPPED])
    info = partial(values_of_totals, values, total_loss_dict)
    report_memory_flag = report_interval(run, num_steps, info, report_memory_flag)
    for name, value in total_loss_dict.items():
        total_loss_dict[name] = 0 if name in COUNTERS else torch.zeros_like(torch.as_tensor(value))
    return report_memory_flag


def add_to_interval(
    loss_dict: Mapping[str, Tensor], total_loss_dict: dict[str, Tensor | int], skipped_iter: int
) -> None:
    """Add a step to the sums of the interval without reading the device.

    The losses of a skipped step are not added; a NaN or infinite loss counts it as a nan iteration.
    """
    for counter in COUNTERS:
        total_loss_dict.setdefault(counter, 0)
    total_loss_dict[SKIPPED if skipped_iter else ADVANCED] += 1
    if skipped_iter:
        total_loss_dict[NAN] = total_loss_dict[NAN] + is_nan(loss_dict)
        return
    for name, loss in loss_dict.items():
        row = loss.detach().reshape(1)
        total = total_loss_dict.get(name)
        # a copy at first: a tracker may still be about to read the loss itself
        total_loss_dict[name] = row.to(torch.float64, copy=True) if total is None else total + row


def values_of_totals(values: StepValues, total_loss_dict: Mapping[str, Tensor | int]) -> IntervalValues:
    """The console line's values from the sums given to `training_log`. Reads the device once."""
    last = {("last", name): value for name, value in values.shown.items()}
    read = read_together({**total_loss_dict, **last})
    shown = {name: read.pop(("last", name)) for name in values.shown}
    counts = {name: int(read.pop(name)) for name in COUNTERS}
    losses = {name: value / counts[ADVANCED] for name, value in read.items() if counts[ADVANCED]}
    return IntervalValues(values.learning_rate, losses, shown, counts[SKIPPED], counts[NAN])
