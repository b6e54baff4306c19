"""The rules of what a run does beside training: skipped steps, memory, profiles, timers, watchdog, slow ranks."""

from __future__ import annotations

import warnings

from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

_said: set[str] = set()


def warn_once(text: str) -> None:
    """Warn (UserWarning) of `text`, once in this process: a run checks its configuration more than once."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)


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


def check_timing(config: ConfigContainer) -> None:
    """Check what says which parts are timed and which rank is slow.

    Raises:
        ConfigError: naming the key, the value, the rule and what to choose.
    """
    level = config.logger.timing_log_level
    if not -1 <= level <= 2:
        raise ConfigError(
            f"logger.timing_log_level={level} must be -1 (nothing), 0 (set-up, saves, evaluations), 1 (also the parts "
            "of a step) or 2 (also its micro-batches)."
        )
    shares = {
        "straggler.threshold": config.straggler.threshold,
        "nvrx_straggler.gpu_relative_perf_threshold": config.nvrx_straggler.gpu_relative_perf_threshold,
        "nvrx_straggler.gpu_individual_perf_threshold": config.nvrx_straggler.gpu_individual_perf_threshold,
    }
    for key, share in shares.items():
        if not 0 < share < 1:
            raise ConfigError(f"{key}={share} must be above 0 and below 1: the share of a healthy speed; such as 0.7.")
    port = config.straggler.straggler_ctrlr_port
    if port > 65535:
        raise ConfigError(f"straggler.straggler_ctrlr_port={port} must be at most 65535; choose a free port.")
    nvrx = config.nvrx_straggler
    if nvrx.enabled and not (nvrx.calc_relative_gpu_perf or nvrx.calc_individual_gpu_perf):
        raise ConfigError(
            "nvrx_straggler.enabled=True has nothing to compare; set nvrx_straggler.calc_relative_gpu_perf or "
            "nvrx_straggler.calc_individual_gpu_perf to true."
        )


def check_watching(config: ConfigContainer, world_size: int) -> None:
    """Refuse combinations about the watchdog and simulated faults that cannot work.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    _check_watchdog(config)
    _check_sections(config)
    _check_fault(config, world_size)


def _check_watchdog(config: ConfigContainer) -> None:
    seconds = config.ft.watchdog_seconds
    if seconds is not None and seconds < 1:
        raise ConfigError(
            f"ft.watchdog_seconds={seconds} must be at least 1: ranks look at each other a few times in it; choose "
            "more than the longest single operation takes, or null to watch nothing."
        )


def _check_sections(config: ConfigContainer) -> None:
    ft = config.ft
    names = [name for name in ("calc_ft_timeouts", "enable_ft_package") if getattr(ft, name)]
    if names and config.run.name is None and config.checkpoint.save is None:
        raise ConfigError(
            f"ft.{names[0]}=True keeps ft_state.json beside the checkpoints, and this run has no folder for them; set "
            "run.name or checkpoint.save."
        )
    if ft.calc_ft_timeouts and not ft.enable_ft_package and ft.watchdog_seconds is None:
        raise ConfigError(
            "ft.calc_ft_timeouts=True learns the limits of a watchdog, and ft.watchdog_seconds=null watches nothing; "
            "set ft.watchdog_seconds, which holds until limits are learned."
        )


def _check_fault(config: ConfigContainer, world_size: int) -> None:
    ft = config.ft
    rank = ft.simulated_fault_rank
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(
            f"ft.simulated_fault_rank={rank} must be one of the ranks 0 to {world_size - 1}; leave it null to draw one."
        )
