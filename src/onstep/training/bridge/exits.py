"""Provides Megatron Bridge's saving and exit decisions for users who drive training themselves.

The loop marks what is due, and lets the ranks agree, before it saves; here a single call does it all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from onstep.config.checks import check_parallel
from onstep.data import as_step_source
from onstep.distributed import check_groups, open_world
from onstep.events import CallbackManager, Dispatcher, normalize_callbacks
from onstep.training.bridge.global_state import GlobalState
from onstep.training.checkpointing.writing import RunCheckpoints
from onstep.training.feature import is_due
from onstep.training.protocols import Trained, UserOptimizer, UserScheduler
from onstep.training.stages.agreement import agree
from onstep.training.stages.exits import announce_exit, save_and_decide_exit, save_and_time
from onstep.training.stragglers.nvrx import check_nvrx_straggler_detection


def checkpoint_and_decide_exit(
    state: GlobalState,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: object = None,
    train_data_iterator: Any = None,
    *,
    checkpoint_manager: object = None,
    pg_collection: object = None,
    callback_manager: CallbackManager | list[object] | None = None,
    module_name: str | None = None,
) -> bool:
    """Save what is due, and decide whether training ends after the step that was just counted. Collective.

    A checkpoint is due every `checkpoint.save_interval` steps, on request (`state.control`), and before an exit: after
    a signal on any rank (`train.exit_signal_handler`), `train.exit_duration_in_mins`, `train.exit_interval`, or a slow
    GPU (`nvrx_straggler.stop_if_detected`).

    Args:
        state: the run's state. Checkpoints go to `checkpoint.save`, unless it is a run with checkpoints of its own. A
            state of your own decides for all ranks of the process group that you have opened.
        model: list of model chunks.
        optimizer: the optimizer that trains.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run; for the progress log.
        checkpointing_context: accepted for compatibility with Megatron Bridge, and ignored.
        train_data_iterator: its position is saved; None saves none.
        checkpoint_manager: Megatron Bridge's newer name of `checkpointing_context`.
        pg_collection: the process groups of the run (`state.pg_collection`), as None; others are refused.
        callback_manager: fires `on_checkpoint_save`, for a state of your own; a run fires it to its own callbacks.
        module_name: not read.

    Returns:
        True if training should end here; `state.exits.decided` says why.

    Raises:
        CheckpointError: if a checkpoint cannot be written and `checkpoint.on_save_error` is stop.
    """
    join_ranks(state)
    check_groups(pg_collection, state.world)
    open_checkpoints_of(state, callback_manager)
    train, step = state.cfg.train, state.train_state.step
    state.stage.has_stepped = True
    if state.checkpoints is not None and is_due(step, state.cfg.checkpoint.save_interval):
        state.control.set_due(log=False, evaluate=False, save=True)
    state.signal_handler  # noqa: B018 - installs it
    state.exits.start(train.exit_duration_in_mins, state.start_time)
    agree(state)
    manager = state.nvrx_straggler_manager
    if state.exits.decided is None and check_nvrx_straggler_detection(manager):
        state.exits.decided, state.exits.straggler = "straggler", getattr(manager, "found", "")
    trained, reader = Trained(model, optimizer, opt_param_scheduler), _source(train_data_iterator, state)
    leaves = save_and_decide_exit(state, trained, reader, num_floating_point_operations_so_far)
    if leaves:
        announce_exit(state)
    return leaves


def save_checkpoint_and_time(
    state: GlobalState,
    model: list[nn.Module],
    optimizer: UserOptimizer,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: object = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    *,
    checkpoint_manager: object = None,
    pg_collection: object = None,
    callback_manager: CallbackManager | list[object] | None = None,
    module_name: str | None = None,
) -> None:
    """Save a checkpoint now and print the time it took. Collective.

    A run without a directory for checkpoints warns once.

    Args:
        state: the run's state; see `checkpoint_and_decide_exit`, also for the other arguments.
        model: list of model chunks.
        optimizer: the optimizer that trains.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run; for the progress log.
        checkpointing_context: accepted for compatibility with Megatron Bridge, and ignored.
        non_persistent_ckpt: whether only the newest checkpoint of this kind is kept.
        train_data_iterator: its position is saved; None saves none.
        checkpoint_manager: see `checkpoint_and_decide_exit`, also for the next three.
        pg_collection: as there.
        callback_manager: fires `on_checkpoint_save`.
        module_name: not read.

    Raises:
        CheckpointError: if it cannot be written and `checkpoint.on_save_error` is stop; on all ranks alike.
    """
    join_ranks(state)
    check_groups(pg_collection, state.world)
    open_checkpoints_of(state, callback_manager)
    trained, reader = Trained(model, optimizer, opt_param_scheduler), _source(train_data_iterator, state)
    flops = num_floating_point_operations_so_far
    save_and_time(state, trained, reader, flops, persistent=not non_persistent_ckpt)


def join_ranks(state: GlobalState) -> None:
    """Give a state that is not a run's all ranks of the caller's process group. Collective."""
    if state.world.size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
        check_parallel(state.cfg, dist.get_world_size())
        state.world = open_world(state.cfg.dist, state.cfg.parallel_sizes(dist.get_world_size()))
        state.control.rank = state.world.rank


def open_checkpoints_of(state: GlobalState, callbacks: CallbackManager | list[object] | None = None) -> None:
    """Open `checkpoint.save` for a state that is not a run's; its checkpoints fire their events to `callbacks`."""
    checkpoints, place = state.checkpoints, state.cfg.checkpoint.save
    if checkpoints is None and place is not None:
        notify = Dispatcher(normalize_callbacks(callbacks), state)
        state.checkpoints = RunCheckpoints(state, notify, Path(place))


def _source(train_data_iterator: Any, state: GlobalState) -> Any:
    return None if train_data_iterator is None else as_step_source(train_data_iterator, state.world.data.size)
