"""The configuration of a repeated run: the original's, without everything that writes, serves, evaluates or exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onstep.config import ConfigContainer

_OFF: dict[str, Any] = {
    "run.fresh": False,
    "run.control": False,
    "run.default_callbacks": False,
    "run.without_commands_from": None,
    "run.save_weights": False,
    "checkpoint.save": None,
    "checkpoint.save_at_end": False,
    "checkpoint.load_best_model_at_end": False,
    "checkpoint.resume": True,
    "checkpoint.async_save": False,
    "checkpoint.exit_on_missing_checkpoint": False,
    "logger.console": "quiet",
    "logger.logging_level": None,
    "logger.logging_dir": None,
    "logger.log_progress": False,
    "logger.report_to": [],
    "logger.tensorboard_dir": None,
    "logger.wandb_project": None,
    "logger.mlflow_experiment": None,
    "logger.comet_project": None,
    "logger.log_energy": False,
    "train.exit_interval": None,
    "train.exit_duration_in_mins": None,
    "train.exit_signal_handler": False,
    "train.data_timeout": None,
    "profiling.use_pytorch_profiler": False,
    "profiling.use_nsys_profiler": False,
    "profiling.record_memory_history": False,
    "profiling.nvtx_ranges": False,
    "ft.watchdog_seconds": None,
    "ft.enable_ft_package": False,
    "ft.calc_ft_timeouts": False,
    "ft.simulate_fault": False,
    "straggler.log_straggler": False,
    "nvrx_straggler.enabled": False,
}
_WITHOUT_SAVES: dict[str, Any] = {
    "checkpoint.save_interval": None,
    "checkpoint.save_each_epoch": False,
    "checkpoint.save_on_best": False,
    "checkpoint.non_persistent_save_interval": None,
}
_KEEP_ALL: dict[str, Any] = {
    "checkpoint.most_recent_k": -1,
    "checkpoint.keep_best_n": 0,
    "checkpoint.keep_every_n": None,
}
_WITHOUT_EVALUATIONS: dict[str, Any] = {
    "validation.eval_interval": None,
    "validation.eval_on_start": False,
    "validation.eval_each_epoch": False,
    "validation.eval_on_save": False,
    "validation.start_eval_at_iter": None,
    "validation.start_eval_at_epoch": None,
}
_NEVER = 10**9
"""An interval in steps that no run reaches."""


def repeating(config: ConfigContainer, directory: Path, *, saves: bool, evaluates: bool) -> None:
    """Let a configuration repeat its run in another directory, in place; what is learned stays the same.

    Args:
        config: that of the run.
        directory: of the repeated run.
        saves: whether it saves its checkpoints there, for a rollback that it repeats.
        evaluates: whether it evaluates, for callbacks that listen.
    """
    values = dict(_OFF | _KEEP_ALL)
    values |= {} if saves else _WITHOUT_SAVES
    values |= {} if evaluates else _WITHOUT_EVALUATIONS
    if not saves and "rollback" in (config.train.on_nonfinite, config.anomaly.on_spike):
        values["checkpoint.save_interval"] = _NEVER  # the policy requires one
    values |= {"run.output_dir": str(directory.parent), "run.name": directory.name}
    for key, value in values.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
