"""Keeps current values of optimizer and scheduler where a checkpoint is loaded under a changed configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onstep.checkpoint import CheckpointInfo
from onstep.config import ConfigContainer
from onstep.config.checks.optimizer import GROUP_SETTINGS
from onstep.config.differences import configured_schedule_holds
from onstep.config.lengths import schedule_samples
from onstep.optim import OptimizerParamScheduler
from onstep.training.protocols import UserOptimizer
from onstep.training.run import Run


@contextmanager
def current_values(state: Run, info: CheckpointInfo, optimizer: UserOptimizer | None) -> Iterator[None]:
    """With `checkpoint.on_config_change=apply`, let the current optimizer settings override the loaded ones.

    The groups' values from the schedule are overridden wherever the current schedule applies. A best metric under
    another name is dropped.
    """
    config = state.cfg
    applies = config.checkpoint.on_config_change == "apply"
    if optimizer is None or not (applies or configured_schedule_holds(config)):
        yield
        return
    before = [
        {key: value for key, value in group.items() if is_configured(key, config)} for group in optimizer.param_groups
    ]
    yield
    for group, values in zip(optimizer.param_groups, before, strict=False):
        group.update(values)
    if not applies:
        return
    stored = info.manifest.config_section("validation").get("metric_for_best_model")
    if stored != state.cfg.validation.metric_for_best_model:
        state.train_state.best_metric = state.train_state.best_step = None
        state.train_state.best_model_checkpoint = None


def is_configured(key: str, config: ConfigContainer) -> bool:
    """Whether the current value of a parameter group's key overrides the loaded one."""
    if key in GROUP_SETTINGS:
        return configured_schedule_holds(config)
    of_the_scheduler = ("params", "lr", "initial_lr", "weight_decay")
    return config.checkpoint.on_config_change == "apply" and key not in of_the_scheduler


def place_scheduler(scheduler: OptimizerParamScheduler, state: Run) -> None:
    """Move a schedule whose own position was not loaded to the run's progress."""
    progress, sizes = state.train_state, state.batch_sizes
    passed_over = [step for step in set(state.cfg.train.iterations_to_skip) if step <= progress.step]
    if sizes is None or not sizes.varies:
        taken = progress.step - progress.num_skips - len(passed_over)
        scheduler.num_steps = taken * state.current_running_global_batch_size
    else:
        after = schedule_samples(state.cfg, state.info.samples_per_epoch, world_size=state.world.data.size)
        num_skipped_samples = sum(after(step) - after(step - 1) for step in passed_over)
        num_skipped_samples += progress.num_skips * sizes.sizes.at(progress.consumed_train_samples)
        scheduler.num_steps = max(0, after(progress.step) - num_skipped_samples)
    scheduler.step(0)
