"""Provides Megatron Bridge's `save_checkpoint` and `load_checkpoint`, for users who drive training themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from onstep.checkpoint import CheckpointInfo, resolve
from onstep.checkpoint.catalog.discovery import named_dirs
from onstep.data import as_step_source
from onstep.distributed import check_groups, on_main
from onstep.errors import CheckpointError, ConfigError
from onstep.events import CallbackManager, Dispatcher
from onstep.training.bridge.exits import join_ranks, open_checkpoints_of
from onstep.training.bridge.global_state import GlobalState
from onstep.training.checkpointing.writing import RunCheckpoints
from onstep.training.protocols import Trained, UserOptimizer, UserScheduler


def save_checkpoint(
    state: GlobalState,
    model: list[nn.Module],
    optimizer: UserOptimizer | None,
    opt_param_scheduler: UserScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: object = None,
    pipeline_rank: int | None = None,
    tensor_rank: int | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: Any = None,
    preprocess_common_state_dict_fn: object = None,
    prebuilt_state_dict: object = None,
    pg_collection: object = None,
    callback_manager: CallbackManager | list[object] | None = None,
) -> None:
    """Save a checkpoint now, in the run's directory or `checkpoint.save`. Collective.

    Args:
        state: the run's state; one of your own saves to `checkpoint.save`.
        model: list of model chunks.
        optimizer: the optimizer that trains.
        opt_param_scheduler: the learning-rate schedule, or None.
        num_floating_point_operations_so_far: of the whole run; saved with its progress.
        checkpointing_context: not read; the state's checkpoints are used.
        pipeline_rank: not read: there is one stage.
        tensor_rank: not read: tensors are whole.
        non_persistent_ckpt: whether only the newest checkpoint of this kind is kept.
        train_data_iterator: its position is saved; None saves none.
        preprocess_common_state_dict_fn: refused: a state is saved as it is.
        prebuilt_state_dict: refused, likewise.
        pg_collection: the process groups of the run (`state.pg_collection`), as None; others are refused.
        callback_manager: fires `on_checkpoint_save`, for a state of your own.

    Raises:
        CheckpointError: if the state has no directory to save in, or it cannot be written.
        ConfigError: for a function or a dictionary that would change what is saved.
    """
    for name, given in (
        ("preprocess_common_state_dict_fn", preprocess_common_state_dict_fn),
        ("prebuilt_state_dict", prebuilt_state_dict),
    ):
        if given is not None:
            raise ConfigError(
                f"{name} must be None: a checkpoint has the states of the model, the optimizer and the run as they "
                f"are; save what is your own in a callback's `state_dict()`."
            )
    join_ranks(state)
    check_groups(pg_collection, state.world)
    open_checkpoints_of(state, callback_manager)
    if state.checkpoints is None:
        raise CheckpointError("there is no directory to save in; set checkpoint.save, or run.name for pretrain().")
    state.train_state.floating_point_operations_so_far = num_floating_point_operations_so_far
    reader = None if train_data_iterator is None else as_step_source(train_data_iterator, state.world.data.size)
    trained = Trained(model, optimizer, opt_param_scheduler)
    state.checkpoints.save(
        trained,
        reader,  # type: ignore[arg-type]  # None saves no position
        persistent=not non_persistent_ckpt,
        reason="save_checkpoint()",
    )


def load_checkpoint(
    state: GlobalState,
    model: list[nn.Module],
    optimizer: UserOptimizer | None,
    opt_param_scheduler: UserScheduler | None,
    strict: bool = True,
    checkpointing_context: object = None,
    skip_load_to_model_and_opt: bool = False,
    *,
    pg_collection: object = None,
) -> tuple[int, float]:
    """Load the newest verified checkpoint of `checkpoint.load`, or that of `checkpoint.ckpt_step`. Collective.

    Progress, random generators, model, optimizer and scheduler continue where they were; with `checkpoint.finetune`,
    and from `checkpoint.pretrained_checkpoint`, only the weights are loaded. Data is the caller's:
    `state.train_state.consumed_train_samples` says where it continues.

    Args:
        state: the run's state, whose `train_state` is set.
        model: list of model chunks.
        optimizer: the optimizer that trains; None leaves its state out, as `checkpoint.load_optim=false` does.
        opt_param_scheduler: the learning-rate schedule, or None.
        strict: False is refused: weights load whole or not at all.
        checkpointing_context: not read.
        skip_load_to_model_and_opt: load everything but model, optimizer and scheduler.
        pg_collection: as in `save_checkpoint`.

    Returns:
        The steps done and the floating-point operations so far: 0 and 0 if `checkpoint.load` has no checkpoint yet,
        unless `checkpoint.exit_on_missing_checkpoint`.

    Raises:
        CheckpointError: if a checkpoint is missing, damaged, or does not fit; nothing of the model is changed then.
        ConfigError: if neither `checkpoint.load` nor `checkpoint.pretrained_checkpoint` is set.
    """
    if not strict:
        raise ConfigError(
            "strict=False is not supported: weights that do not fit would start at random without a word; load "
            "those that fit with onstep.checkpoint.loading.read_weights and the model's own load_state_dict."
        )
    config = state.cfg.checkpoint
    if config.load is None and config.pretrained_checkpoint is None:
        raise ConfigError("there is nothing to load; set checkpoint.load or checkpoint.pretrained_checkpoint.")
    join_ranks(state)
    check_groups(pg_collection, state.world)
    info = None if config.load is None else _found(state, Path(config.load).expanduser())
    if config.pretrained_checkpoint is not None and info is None:
        pretrained = Path(config.pretrained_checkpoint).expanduser()
        info = on_main(state.world, lambda: resolve(pretrained))
    elif info is None:
        return 0, 0.0
    elif not config.finetune:
        _load(state, info, Trained(model, optimizer, opt_param_scheduler), skip_load_to_model_and_opt)
        return state.train_state.step, state.train_state.floating_point_operations_so_far
    if not skip_load_to_model_and_opt:
        _load(state, info, Trained(model, None, None), only_model=True)
    return 0, 0.0


def _found(state: GlobalState, directory: Path) -> CheckpointInfo | None:
    """The checkpoint that `checkpoint.load` names; None if it has none yet and that is allowed. Collective."""
    config = state.cfg.checkpoint

    def found() -> CheckpointInfo | None:
        try:
            return resolve(directory, step=config.ckpt_step)
        except CheckpointError:
            if config.exit_on_missing_checkpoint or config.ckpt_step is not None or named_dirs(directory):
                raise
            return None

    return on_main(state.world, found)


def _load(
    state: GlobalState, info: CheckpointInfo, trained: Trained, skips_model: bool = False, only_model: bool = False
) -> None:
    """Load the components of a checkpoint: all, all but what is trained, or the weights alone. Collective."""
    given, own = state.checkpoints, RunCheckpoints(state, Dispatcher(None, state), info.path.parent)
    state.checkpoints, own.start, own.is_chosen_start = own, info, True
    try:
        parts = own.components.progress(trained, loads=True)
        if only_model:
            parts = [one for one in parts if one.key == "model"]
        else:
            parts += [*own.components.features(), *own.components.position(None, loads=True)]
        if skips_model:
            parts = [one for one in parts if one.key not in ("model", "optimizer", "scheduler")]
        known = set(info.manifest.components)
        missing = [one.key for one in parts if one.required and one.key not in known]
        if missing:
            raise CheckpointError(f"{info.path} has no {', '.join(missing)}; load another checkpoint.")
        there = [one for one in parts if one.key in known]
        own.manager.load(info, there, skip=known - {one.key for one in there})
    finally:
        own.close()
        state.checkpoints = given
