"""Provides Megatron Bridge's `train()` and `train_step()`, which build a job from their arguments and run it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from onstep.checkpoint import CheckpointManager
from onstep.data import Batch, IteratorReader, StepBatches
from onstep.data.loaders.step_source import only_iterator
from onstep.distributed import check_groups, check_loader, refused_together
from onstep.errors import ConfigError, warn_once
from onstep.events import CallbackManager, Dispatcher, normalize_callbacks
from onstep.processes.forking import check_imports_are_done
from onstep.training.anomalies.gate import AnomalyGate
from onstep.training.bridge.exits import checkpoint_and_decide_exit, save_checkpoint_and_time
from onstep.training.bridge.global_state import GlobalState, TrainStepResult
from onstep.training.bridge.housekeeping import _finish_train as _finish_train
from onstep.training.bridge.housekeeping import post_training_step_callbacks
from onstep.training.checkpointing.writing import RunCheckpoints
from onstep.training.features import STEP
from onstep.training.loop import Loop
from onstep.training.model_parallel.model_parallel import (
    _handle_mxfp8_param_buffer_copy as _handle_mxfp8_param_buffer_copy,
)
from onstep.training.model_parallel.model_parallel import (
    disable_forward_pre_hook,
    enable_forward_pre_hook,
    should_disable_forward_pre_hook,
)
from onstep.training.protocols import DataSource, ForwardStep, NonLossFunction, UserOptimizer, UserScheduler
from onstep.training.run import Run
from onstep.training.run_job import run_job
from onstep.training.stages.ending import Leave
from onstep.training.stages.forward_step import check_chunks
from onstep.training.stages.job import Job
from onstep.training.stages.progress_log import (
    compute_throughputs_and_append_to_progress_log,
    get_start_time_from_progress_log,
)

logger = logging.getLogger(__name__)

__all__ = [
    "checkpoint_and_decide_exit",
    "compute_throughputs_and_append_to_progress_log",
    "disable_forward_pre_hook",
    "enable_forward_pre_hook",
    "get_start_time_from_progress_log",
    "post_training_step_callbacks",
    "save_checkpoint_and_time",
    "should_disable_forward_pre_hook",
    "train",
    "train_step",
]
"""The names of Megatron Bridge's page `training.train`."""


def train(
    forward_step_func: ForwardStep,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    scheduler: UserScheduler | None,
    train_data_iterator: object,
    valid_data_iterator: DataSource | None,
    global_state: GlobalState,
    checkpoint_manager: object = None,
    pg_collection: object = None,
    process_non_loss_data_func: NonLossFunction | None = None,
    non_loss_data_func: NonLossFunction | None = None,
    callback_manager: CallbackManager | list[object] | None = None,
    *,
    checkpointing_context: object = None,
) -> None:
    """Train until the configured number of steps, or until a stop is requested. Collective.

    Args:
        forward_step_func: a function with one of the documented signatures (`onstep.training.stages.forward_step`).
        model: list with one module, wrapped for data parallelism if there are several ranks:
            `onstep.distributed.data_parallel` gives a resumed run the same bits on any number of them.
        optimizer: a `TrainingOptimizer`, a torch optimizer (which is wrapped in one, with `optimizer.clip_grad`), or an
            object whose `step()` returns `(successful, grad_norm, num_zeros)` and which clips by itself. For the last
            kind, loss and gradients are read once before each `step()`, so that it never sees non-finite values.
        scheduler: an object with `step(increment in samples)`, a torch scheduler, or None for a constant rate.
        train_data_iterator: a loader of `onstep.data`, or an iterator of micro-batches, which forms one endless epoch;
            None for a forward step that needs no data, which is called with None.
        valid_data_iterator: an `EvalLoader` or iterator for evaluations inside the loop; None disables them.
        global_state: the run's state.
        checkpoint_manager: kept for Megatron Bridge; the state's checkpoints are used, and a warning says so of a
            manager of the caller's own.
        pg_collection: the process groups of the run, as `global_state.pg_collection` and None, which are the same;
            others are refused. Megatron Bridge 0.2 has `process_non_loss_data_func` and `non_loss_data_func` at this
            position and the next: a function here is the former.
        process_non_loss_data_func: passed to the evaluations inside the loop, as is
        non_loss_data_func: see `evaluate_and_print_results`.
        callback_manager: the callbacks to call, or a list of them.
        checkpointing_context: Megatron Bridge's older name of `checkpoint_manager`.

    Raises:
        NonFiniteError: if a loss or gradient norm is NaN or infinite; the update was not applied.
        ReplicaMismatchError: if replicas differ (`train.check_weight_hash_across_dp_replicas_interval`).
        ConfigError: if both `profiling.use_pytorch_profiler` and a callback profile, the model has several chunks, the
            state's world is not the process group, data is that of other ranks, some trained parameters are outside of
            what averages the gradients of the rest, the optimizer has no parameter of the model, or the scheduler is
            one of another optimizer or ends before the run.
        ShardingError: if parameters are sharded over ranks other than by `fully_shard` over all of them.
    """
    check_imports_are_done()
    if not isinstance(global_state, Run):
        raise ConfigError(
            f"global_state must be a GlobalState, got a {type(global_state).__name__}; pass GlobalState(config)"
        )
    if inspect.isroutine(pg_collection) or isinstance(pg_collection, partial):
        process_non_loss_data_func, non_loss_data_func = pg_collection, process_non_loss_data_func or non_loss_data_func
        pg_collection = None
    _say_if_unused(checkpoint_manager or checkpointing_context)
    callbacks = normalize_callbacks(callback_manager)
    job = Job.of(global_state, forward_step_func, model, optimizer, scheduler, train_data_iterator, callbacks)
    refused_together(global_state.world, lambda: _check_ranks_of(pg_collection, valid_data_iterator, global_state))
    job.valid_data_iterator = valid_data_iterator
    job.process_non_loss_data_func, job.non_loss_data_func = process_non_loss_data_func, non_loss_data_func
    run_job(job)


def _check_ranks_of(pg_collection: object, valid_data_iterator: object, state: GlobalState) -> None:
    check_groups(pg_collection, state.world)
    check_loader(valid_data_iterator, state.world)


def _say_if_unused(manager: object) -> None:
    """Warn of a checkpoint manager that the caller would expect to be called."""
    if callable(getattr(manager, "save", None)) and not isinstance(manager, (CheckpointManager, RunCheckpoints)):
        warn_once(
            logger,
            f"train(): checkpoint_manager, a {type(manager).__name__}, is not called; the run saves by itself, to "
            f"checkpoint.save.",
        )


def train_step(
    forward_step_func: ForwardStep,
    data_iterator: StepBatches | Iterator[Batch] | list[Iterator[Batch]] | None,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    scheduler: UserScheduler | None,
    global_state: GlobalState,
    pg_collection: object = None,
    *,
    notify: Dispatcher | None = None,
) -> TrainStepResult:
    """Run forward and backward over the step's micro-batches and apply one update. Collective.

    Args:
        forward_step_func: called as `(iterator, model chunk)`, with its state already injected.
        data_iterator: the step's `StepBatches`, or any iterator of micro-batches, of which `num_microbatches` are read;
            None for a forward step that needs no data, which is called with None.
        model: list with one module.
        optimizer: a `TrainingOptimizer`, or any object whose `step()` returns `(successful, grad_norm, num_zeros)`.
        scheduler: stepped after a successful update, by the samples of a full step even if the tail of an epoch is
            shorter: the schedule is as long as the run. None keeps the learning rate.
        global_state: the run's state.
        pg_collection: as in `train`.
        notify: fires the events inside the step; None fires none.

    Returns:
        Megatron Bridge's values. Unless `train.on_nonfinite` is raise, the update of a step whose loss or gradient norm
        is not finite is left out (`skipped_iter`), and the next one is applied; stop sets `should_exit`. Ending,
        rolling back and counting the step is up to the caller. On an accelerator, raise and stop act a few steps later,
        without waiting for the device: until then no update is applied, and the error names the bad step.

    Raises:
        ConfigError: if the model has several chunks or the groups are not those of the run; no data has been read.
        NonFiniteError: with `train.on_nonfinite` raise, for a loss or gradient norm that is NaN or infinite.
        AnomalyError: for a spike, with `anomaly.on_spike` raise.
    """
    check_chunks(model)
    check_groups(pg_collection, global_state.world)
    batches = step_batches(data_iterator, global_state.num_microbatches, global_state.world.data.size)
    loop = _loop_of(forward_step_func, model, optimizer, scheduler, global_state, notify)
    step = loop.last.begin(global_state.train_state.step + 1, batches)
    gate = global_state.features.find(AnomalyGate)
    try:
        loop.train_step(step)
    except Leave as leave:
        return TrainStepResult({}, 1, leave.position is not None, True, int(leave.code or 0), None, None)
    is_over = gate is not None and gate.end_alone(step)
    return TrainStepResult.of(step)._replace(should_exit=is_over)


@dataclass
class _StandaloneLoop:
    """The loop of steps that are trained without `train()`; the state of its features continues from step to step."""

    given: tuple[object, ...] = ()
    loop: Loop | None = None


def _loop_of(
    forward_step_func: ForwardStep,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    scheduler: UserScheduler | None,
    state: GlobalState,
    notify: Dispatcher | None,
) -> Loop:
    room, built = state.features.room(_StandaloneLoop), state.features.built
    given = (forward_step_func, *model, optimizer, scheduler, notify)
    is_same = len(given) == len(room.given) - 1 and all(a is b for a, b in zip(given, room.given, strict=False))
    if room.loop is not None and is_same and room.given[-1] is built:
        return room.loop
    job = Job.of(state, forward_step_func, model, optimizer, scheduler, iter(()))
    job.notify = notify or job.notify
    state.features.build(STEP, job, state.world)
    room.loop = Loop(job)
    room.given = (*given, state.features.built)
    return room.loop


def step_batches(
    data_iterator: StepBatches | Iterator[Batch] | list[Iterator[Batch]] | None,
    num_microbatches: int,
    world_size: int = 1,
) -> StepBatches:
    """The step's micro-batches, read now if they come as an iterator; fewer if it ends within the step.

    Raises:
        StopIteration: if the iterator is exhausted.
    """
    if isinstance(data_iterator, StepBatches):
        return data_iterator
    batches = IteratorReader(only_iterator(data_iterator), world_size=world_size).read(num_microbatches)
    if batches is None:
        raise StopIteration
    return batches
