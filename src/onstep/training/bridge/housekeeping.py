"""Provides Megatron Bridge's housekeeping functions for users who drive training themselves.

They run after each step, around an evaluation and at the end of a run. After a step they wait for the device, report,
compare weights, profile and collect garbage, in the order of `post_training_step_callbacks`. The loop does the same
with features.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from onstep.config import ConfigContainer
from onstep.distributed import World, shards
from onstep.training.bridge.global_state import GlobalState
from onstep.training.feature import is_due
from onstep.training.model_parallel.model_parallel import disable_forward_pre_hook, enable_forward_pre_hook
from onstep.training.profiling.memory import MemoryRelease
from onstep.training.profiling.profilers import NsysContext, Profiler, handle_profiling_stop
from onstep.training.run import Run
from onstep.training.runs.microbatches import unset_num_microbatches_calculator
from onstep.training.stages import evaluation, evaluation_report
from onstep.training.stragglers.detector import StragglerDetector
from onstep.training.stragglers.nvrx import safe_shutdown_nvrx_straggler_manager
from onstep.training.verification.weight_hash import check_weight_hashes

P = ParamSpec("P")
T = TypeVar("T")


def post_training_step_callbacks(
    model: list[nn.Module],
    num_floating_point_operations_since_last_log_event: float,
    straggler_timer: StragglerDetector,
    iteration: int,
    prof: Profiler | None,
    config: ConfigContainer,
    should_toggle_forward_pre_hook: bool,
    nsys_nvtx_context: NsysContext | None = None,
) -> float:
    """Do the housekeeping that is due after step `iteration`; user callbacks are not called. Collective.

    In order: wait for the device, report stragglers, compare weights, end a profile, collect garbage.

    Args:
        model: list of model chunks.
        num_floating_point_operations_since_last_log_event: model FLOPs since the last straggler report.
        straggler_timer: measures the ranks; its `report` is called at logged steps with `straggler.log_straggler`.
        iteration: number of steps done, including this one.
        prof: torch's profiler, if any.
        config: the run's configuration.
        should_toggle_forward_pre_hook: the chunks' forward pre-hooks are on and must be off while weights are compared.
            No optimizer prepares the parameters here (MXFP8); the loop, which has one, turns the hooks off around the
            call.
        nsys_nvtx_context: the return value of `handle_profiling_step`.

    Returns:
        The FLOPs to continue counting from: 0 after a report. Megatron Bridge's first version zeroed only its own copy,
        so the caller's number grew forever.

    Raises:
        ReplicaMismatchError: if replicas have different weights.
    """
    train = config.train
    maybe_synchronize_training_step(train.train_sync_interval, iteration)
    flops = maybe_report_stragglers(
        config.logger.log_interval,
        config.straggler.log_straggler,
        straggler_timer,
        iteration,
        num_floating_point_operations_since_last_log_event,
    )
    maybe_check_weight_hash_across_dp_replicas(
        model, None, train.check_weight_hash_across_dp_replicas_interval, iteration, should_toggle_forward_pre_hook
    )
    handle_profiling_stop(config.profiling, iteration, shards.rank(), prof, nsys_nvtx_context)
    maybe_run_manual_gc(train.manual_gc, train.manual_gc_interval, iteration)
    return flops


def maybe_synchronize_training_step(train_sync_interval: int | None, iteration: int) -> None:
    """Wait for the device if `iteration` (steps done) is a multiple of `train_sync_interval`; None never waits."""
    if is_due(iteration, train_sync_interval) and torch.cuda.is_available():
        torch.cuda.synchronize()


def maybe_report_stragglers(
    log_interval: int | None,
    log_straggler: bool,
    straggler_timer: StragglerDetector,
    iteration: int,
    num_floating_point_operations_since_last_log_event: float,
) -> float:
    """Compare the speed of the ranks at logged steps. Collective at those steps.

    Args:
        log_interval: steps between logs; None or 0 disables logging.
        log_straggler: whether to compare the ranks at all.
        straggler_timer: measures the ranks; its `report(flops, log_interval)` compares them.
        iteration: number of steps done.
        num_floating_point_operations_since_last_log_event: model FLOPs since the last report.

    Returns:
        The FLOPs to continue counting from: 0 after a report, else the given number.
    """
    if log_straggler and log_interval and iteration % log_interval == 0:
        straggler_timer.report(num_floating_point_operations_since_last_log_event, log_interval)
        return 0.0
    return num_floating_point_operations_since_last_log_event


def maybe_check_weight_hash_across_dp_replicas(
    model: list[nn.Module],
    optimizer: object,
    interval: int | None,
    iteration: int,
    should_toggle_forward_pre_hook: bool,
    world: World | None = None,
) -> None:
    """Compare all weights across data-parallel ranks at every `interval`-th step, and log on rank 0 that they match.

    Collective at those steps. Toggled hooks are turned on again afterwards, even if the weights differ.

    Args:
        model: list of model chunks.
        optimizer: prepares its main parameters if hooks are toggled and it supports that.
        interval: steps between comparisons; None never compares.
        iteration: number of steps done, including this one.
        should_toggle_forward_pre_hook: the chunks' forward pre-hooks are on: they are turned off during the comparison,
            with the parameters gathered.
        world: the ranks; None is the default process group.

    Raises:
        ReplicaMismatchError: see `check_param_hashes_across_dp_replicas`.
    """
    if not is_due(iteration, interval):
        return
    if should_toggle_forward_pre_hook:
        disable_forward_pre_hook(model, param_sync=True, optimizer=optimizer)
    try:
        check_weight_hashes(model, iteration, world)
    finally:
        if should_toggle_forward_pre_hook:
            enable_forward_pre_hook(model)


def maybe_run_manual_gc(enabled: bool, interval: int, iteration: int) -> None:
    """Collect garbage at every `interval`-th step if collection is manual.

    Args:
        enabled: whether collection is manual (`train.manual_gc`).
        interval: steps between collections; 0 never collects.
        iteration: number of steps done.
    """
    if enabled and is_due(iteration, interval):
        gc.collect()


def _alone(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap the function with the features that an evaluation outside of a run has."""

    @wraps(function)
    def evaluated(*args: P.args, **kwargs: P.kwargs) -> T:
        run = args[0] if args else kwargs["state"]
        assert isinstance(run, Run)
        with run.features.open((MemoryRelease,), run, run.world):
            return function(*args, **kwargs)

    return evaluated


evaluate = _alone(evaluation.evaluate)
evaluate_and_print_results = _alone(evaluation_report.evaluate_and_print_results)


def _finish_train(global_state: GlobalState, checkpoint_manager: object = None) -> None:
    """Finish a successful run: end measurements, make a pending save durable, close the trackers. Collective.

    `pretrain()` calls it after the final evaluations; inside `pretrain()` the trackers and the micro-batch calculator
    stay open until `on_run_end` fires.

    Args:
        global_state: the run's state.
        checkpoint_manager: an object with `finish()` to use instead of the run's own checkpoints; anything else, such
            as Megatron Bridge's dictionary, means the run's own.
    """
    safe_shutdown_nvrx_straggler_manager(global_state.nvrx_straggler_manager)
    finish = getattr(checkpoint_manager, "finish", None)
    if callable(finish):
        finish()
    elif global_state.checkpoints is not None:
        global_state.checkpoints.finish()
    if not global_state.bridge_trackers.is_held:
        global_state.bridge_trackers.close("completed")
    if not global_state.ending.in_run:
        unset_num_microbatches_calculator()
