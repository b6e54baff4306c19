"""The rules of what a run does beside training: skipped steps, device memory, profiles."""

from __future__ import annotations

from onstep.config.notices import warn_once
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

MEMORY_LEVELS = (0, 1, 2)
"""Values of `train.empty_unused_memory_level`."""


def check_housekeeping(config: ConfigContainer, world_size: int) -> None:
    """Check skipped steps, the memory level, and the window and the ranks of a profile.

    Raises:
        ConfigError: naming value, rule and remedy.
    """
    train, profiling = config.train, config.profiling
    for step in train.iterations_to_skip:
        if step < 1:
            raise ConfigError(f"train.iterations_to_skip holds {step}; steps are counted from 1, so give 1 or more.")
    if train.empty_unused_memory_level not in MEMORY_LEVELS:
        raise ConfigError(
            f"train.empty_unused_memory_level={train.empty_unused_memory_level} must be 0 (never), 1 (before each "
            "update) or 2 (before and after it)."
        )
    if profiling.use_pytorch_profiler and profiling.use_nsys_profiler:
        raise ConfigError(
            "profiling.use_pytorch_profiler and use_nsys_profiler are both true, but a process has one profiler; set "
            "one of them to false."
        )
    profiles = profiling.use_pytorch_profiler or profiling.use_nsys_profiler
    if profiles and profiling.profile_step_end <= profiling.profile_step_start:
        raise ConfigError(
            f"profiling.profile_step_end={profiling.profile_step_end} must be after "
            f"profile_step_start={profiling.profile_step_start}; the steps between them are profiled."
        )
    if any(rank < 0 for rank in profiling.profile_ranks):
        raise ConfigError(
            f"profiling.profile_ranks={profiling.profile_ranks} must be ranks from 0 on; [] is every rank."
        )
    beyond = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if beyond and (profiles or profiling.record_memory_history):
        raise ConfigError(
            f"profiling.profile_ranks={profiling.profile_ranks} has the rank {beyond[0]}, but this run has the ranks 0 "
            f"to {world_size - 1}; leave it out."
        )


def warn_of_steps_never_skipped(config: ConfigContainer, iters: int) -> None:
    """Warn (UserWarning, once) where `train.iterations_to_skip` names steps behind the last of `iters`."""
    beyond = sorted(step for step in set(config.train.iterations_to_skip) if step > iters)
    if beyond:
        warn_once(
            f"train.iterations_to_skip has the step {beyond[0]}, but the run has {iters} steps; it is not reached.",
        )
