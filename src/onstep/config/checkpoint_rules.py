"""The rules of values about checkpoints, signals, anomalies and float16 that only mean something together."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from onstep.config.part import nearest
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""What `checkpoint.components` selects from."""

SPIKE_METRICS = ("loss", "grad_norm")
"""What `anomaly.spike_metrics` selects from."""

NO_REQUEST = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "no process can handle"),
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"), "tells of a broken process"
    ),
    "SIGCHLD": "data workers use",
    "SIGALRM": "train.data_timeout uses",
}
"""Signals that cannot ask a run to save and leave, and why."""

ROLLBACK_NEEDS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
"""Components without which a rollback does not come back to where the checkpoint was."""


def check_checkpoints(config: ConfigContainer) -> None:
    """Refuse combinations about checkpoints, signals and anomalies that cannot work.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    _check_names(config)
    _check_retention(config)
    _check_place(config)
    _check_best(config)
    _check_rollback(config)
    _check_loss_scale(config)


def _check_names(config: ConfigContainer) -> None:
    checkpoint, anomaly, train = config.checkpoint, config.anomaly, config.train
    if checkpoint.components is not None:
        _check_chosen("checkpoint.components", checkpoint.components, COMPONENTS, "null is all")
    if anomaly.on_spike != "ignore":
        _check_chosen("anomaly.spike_metrics", anomaly.spike_metrics, SPIKE_METRICS, "anomaly.on_spike=ignore is none")
    if train.exit_signal_handler:
        known = [one.name for one in signal.Signals if one.name not in NO_REQUEST]
        _check_chosen("train.exit_signals", train.exit_signals, known, "train.exit_signal_handler=false is none")
    if checkpoint.certify and "trainer" not in (checkpoint.components or COMPONENTS):
        raise ConfigError(
            "checkpoint.certify keeps its chain with the component trainer; add it to checkpoint.components."
        )


def _check_chosen(key: str, chosen: Sequence[str], known: Sequence[str], instead: str) -> None:
    if not chosen:
        raise ConfigError(f"{key}=[] chooses nothing; give at least one ({instead}).")
    for name in chosen:
        if name not in known:
            rule = NO_REQUEST.get(name, "is not known")
            hint = nearest(name, list(known)) or f" Known: {', '.join(known)}."
            raise ConfigError(f"{key} has {name!r}, which {rule}; leave it out or correct it.{hint}")


def _check_retention(config: ConfigContainer) -> None:
    kept = config.checkpoint.most_recent_k
    if kept == 0 or kept < -1:
        raise ConfigError(
            f"checkpoint.most_recent_k={kept} would keep no checkpoint; use -1 for all, or at least 1: the newest one."
        )


def _check_place(config: ConfigContainer) -> None:
    """What reads checkpoints of this very run takes a folder of them; a save without one only warns."""
    checkpoint = config.checkpoint
    if config.run.name is not None or checkpoint.save is not None or config.validation.skip_train:
        return
    asked = {
        "checkpoint.load_best_model_at_end": checkpoint.load_best_model_at_end,
        "checkpoint.ckpt_step": checkpoint.ckpt_step if checkpoint.load is None else None,
    }
    for key, value in asked.items():
        if value:
            raise ConfigError(
                f"{key}={value} takes a folder of checkpoints, and this run has none; set run.name or checkpoint.save."
            )


def _check_best(config: ConfigContainer) -> None:
    """The best checkpoint is one that was evaluated: saves and evaluations have to meet.

    What only keeps best checkpoints may leave it to a callback to ask for both at the same step.
    """
    checkpoint, validation = config.checkpoint, config.validation
    asked = {
        "checkpoint.load_best_model_at_end": checkpoint.load_best_model_at_end,
        "validation.eval_on_save": validation.eval_on_save,
    }
    for key, value in asked.items():
        if value and validation.eval_iters == 0 and not validation.skip_train:
            raise ConfigError(f"{key}={value} takes evaluations, got validation.eval_iters=0; set it to null or > 0.")
    if not checkpoint.load_best_model_at_end or validation.skip_train:
        return
    if not saves_meet_evaluations(config):
        raise ConfigError(
            f"checkpoint.load_best_model_at_end=True takes checkpoints of evaluated steps, got "
            f"checkpoint.save_interval={checkpoint.save_interval} and validation.eval_interval="
            f"{validation.eval_interval}; make the first a multiple of the second, or set checkpoint.save_on_best or "
            f"validation.eval_on_save."
        )
    if "model" not in (checkpoint.components or COMPONENTS):
        raise ConfigError("checkpoint.load_best_model_at_end takes the weights; add model to checkpoint.components.")


def saves_meet_evaluations(config: ConfigContainer) -> bool:
    """Whether checkpoints are saved at steps that are evaluated."""
    checkpoint, validation = config.checkpoint, config.validation
    saved, evaluated = checkpoint.save_interval, validation.eval_interval
    if checkpoint.save_on_best:
        return True
    if validation.eval_on_save:
        return saved is not None or checkpoint.save_each_epoch
    if checkpoint.save_each_epoch and validation.eval_each_epoch:
        return True
    return saved is not None and evaluated is not None and saved % evaluated == 0


def _check_rollback(config: ConfigContainer) -> None:
    """A rollback goes to a checkpoint of this run, so there has to be one, with everything in it."""
    policies = {"train.on_nonfinite": config.train.on_nonfinite, "anomaly.on_spike": config.anomaly.on_spike}
    key = next((key for key, value in policies.items() if value == "rollback"), None)
    if key is None:
        return
    checkpoint = config.checkpoint
    if config.run.name is None and checkpoint.save is None:
        raise ConfigError(f"{key}=rollback takes a folder of checkpoints; set run.name or checkpoint.save.")
    intervals = (checkpoint.save_interval, checkpoint.non_persistent_save_interval)
    if not any(intervals) and not checkpoint.save_each_epoch and not checkpoint.save_on_best:
        raise ConfigError(
            f"{key}=rollback goes back to a checkpoint, and none is saved while training; set "
            f"checkpoint.save_interval or checkpoint.non_persistent_save_interval."
        )
    for name in ("save_optim", "save_rng", "load_optim", "load_rng"):
        if not getattr(checkpoint, name):
            raise ConfigError(f"{key}=rollback takes the whole state, got checkpoint.{name}=False; set it to true.")
    lacking = [name for name in ROLLBACK_NEEDS if name not in (checkpoint.components or COMPONENTS)]
    if lacking:
        raise ConfigError(f"{key}=rollback takes the whole state; add {', '.join(lacking)} to checkpoint.components.")


def _check_loss_scale(config: ConfigContainer) -> None:
    optimizer = config.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        raise ConfigError(
            f"optimizer.min_loss_scale={optimizer.min_loss_scale} must be at most "
            f"optimizer.initial_loss_scale={optimizer.initial_loss_scale}."
        )
