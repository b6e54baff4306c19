"""Refuses arguments of a Trainer for optimizer and scheduler that contradict each other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onstep.config import ConfigContainer, OptimizerConfig, merge
from onstep.config.hf.checks import evaluates
from onstep.config.keys import diff
from onstep.errors import ConfigError
from onstep.optim import check_closure, check_scheduler, follows_metric
from onstep.optim.low_precision import LowPrecisionOptimizer
from onstep.optim.named_optimizers import check_installed, is_native
from onstep.optim.torch_optimizers import low_averages
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.overrides import overrides


def check_optimizers(trainer: BaseTrainer) -> None:
    """Reject (ConfigError) incompatible arguments for optimizer and scheduler."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    if trainer.optimizer_cls_and_kwargs is not None and optimizer not in (None, trainer.previous[0]):
        raise ConfigError("Pass the optimizer through optimizers or optimizer_cls_and_kwargs, not both.")
    has_own = creates_optimizer(trainer) or (is_object(optimizer) and optimizer is not trainer.previous[0])
    if trainer.optimizer_groups is not None and has_own:
        raise ConfigError(
            "optimizer_groups groups the parameters of an optimizer that the Trainer makes, but yours has its own "
            "groups; pass optimizer_factory in its place, or leave optimizer_groups out."
        )
    if trainer.model_init is not None and (is_object(optimizer) or is_object(scheduler)):
        raise ConfigError(
            "model_init creates new parameters for every train(), but an optimizer or scheduler object holds old ones; "
            "pass factories: optimizers=(lambda parameters: ..., lambda optimizer: ...)."
        )
    if is_object(scheduler) and not is_object(optimizer):
        raise ConfigError(
            "A scheduler object belongs to an optimizer; pass both in optimizers, or a factory: "
            "optimizers=(None, lambda optimizer: ...)."
        )
    if is_object(scheduler):
        check_scheduler(scheduler, optimizer)
    given = [type(optimizer) if is_object(optimizer) else optimizer, *(trainer.optimizer_cls_and_kwargs or ())[:1]]
    for kind in given:
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            check_closure(kind)
    if optimizer is None and trainer.optimizer_cls_and_kwargs is None and not creates_optimizer(trainer):
        check_installed(trainer.args)
        _check_options_are_free(trainer)
    if is_object(scheduler):
        check_evaluates(trainer, scheduler)


def check_metrics(trainer: BaseTrainer, metrics: object) -> None:
    """Refuse (ConfigError) what an overridden `evaluate` returns instead of metrics, where one of them is followed."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{type(trainer).__name__}.evaluate returned {metrics!r} instead of the dict of metrics, which contains "
            f"the one that the best model or the schedule depends on; return super().evaluate(...)."
        )


def check_rounding(optimizer: object, config: OptimizerConfig) -> None:
    """Refuse master weights, and a rounding other than torch's, for an optimizer that is not the configured one."""
    if low_averages(config) and not isinstance(optimizer, LowPrecisionOptimizer):
        raise ConfigError(
            f"optimizer.use_precision_aware_optimizer=true acts on the configured optimizer, and this is "
            f"{type(optimizer).__name__}; set it to false, or pass no optimizer."
        )
    is_plain = (config.main_params_dtype, config.rounding) == ("bfloat16", "nearest")
    if config.params_dtype == "bfloat16" and not is_plain and not isinstance(optimizer, LowPrecisionOptimizer):
        raise ConfigError(
            f"optimizer.params_dtype=bfloat16 has master weights or {config.rounding} rounding only with the "
            f"configured optimizer, and this is {type(optimizer).__name__}; set optimizer.main_params_dtype=bfloat16 "
            "and optimizer.rounding=nearest to let it update bfloat16 weights by itself, or pass no optimizer."
        )


def is_object(given: object) -> bool:
    """Whether `given` is an optimizer or scheduler, rather than a factory or nothing."""
    return given is not None and not isinstance(given, type) and hasattr(given, "step")


def creates_optimizer(trainer: BaseTrainer) -> bool:
    """Whether a method of the user creates the optimizer."""
    names = ("create_optimizer", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs")
    return any(overrides(trainer, name) for name in names)


def sets_schedule(trainer: BaseTrainer) -> list[str]:
    """Keys of `config_overrides` that shape the configuration's own schedule."""
    return [key for key in _overridden(trainer) if key.startswith("scheduler.") or key == "optimizer.min_lr"]


def _overridden(trainer: BaseTrainer) -> list[str]:
    """Keys that `config_overrides` sets to something other than their default."""
    config = ConfigContainer()
    merge(config, trainer.args.config_overrides or {})
    return [key for key, _, _ in diff(ConfigContainer(), config)]


def check_schedule_is_free(trainer: BaseTrainer) -> None:
    """Refuse keys of a schedule that is not used."""
    keys = sets_schedule(trainer)
    if keys:
        raise ConfigError(
            f"config_overrides sets {', '.join(keys)} of Onstep's own schedule, but this training uses a torch "
            f"scheduler for lr_scheduler_type={trainer.args.lr_scheduler_type!r}; drop one of them."
        )


def check_evaluates(trainer: BaseTrainer, scheduler: object) -> None:
    """Refuse a scheduler that follows a metric in a run without evaluations."""
    if follows_metric(scheduler) and not evaluates(trainer.args):
        raise ConfigError(
            f"{type(scheduler).__name__} requires a metric, which only evaluations give; set eval_strategy."
        )


def _check_options_are_free(trainer: BaseTrainer) -> None:
    """Reject settings of the configured optimizer that the one of the arguments would not read."""
    args, kinds = trainer.args, ("optimizer.sgd_", "optimizer.adam_", "optimizer.muon_", "optimizer.optimizer")
    found = (
        []
        if is_native(args) and trainer.optimizer_groups is None
        else [key for key in _overridden(trainer) if key.startswith(kinds)]
    )
    if found:
        raise ConfigError(
            f"config_overrides sets {', '.join(found)}, which optim={args.optim!r} with optim_args={args.optim_args!r} "
            f"does not read; use optim_args, or drop one of them."
        )


def check_groups_are_free(config: ConfigContainer) -> None:
    """Refuse settings of parameter groups for an optimizer that has its own."""
    options = config.optimizer
    if options.optimizer == "muon":
        raise ConfigError(
            "optimizer.optimizer=muon configures an optimizer, but the Trainer was given one; keep one of them."
        )
    for name in ("param_groups", "decoupled_lr", "decoupled_min_lr"):
        if getattr(options, name):
            raise ConfigError(
                f"optimizer.{name}={getattr(options, name)} groups the parameters of the configured optimizer, but the "
                f"Trainer was passed one with its own groups; set the groups there, or drop the key."
            )
