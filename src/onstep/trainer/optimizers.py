"""Builds the optimizer and scheduler of a training: the user's own, or the configured ones."""

from __future__ import annotations

from typing import Any

from torch import nn

from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.events import TrainerCallback
from onstep.optim import (
    OptimizerParamScheduler,
    TorchSchedulerAdapter,
    TrainingOptimizer,
    build_loss_scaler,
    build_optimizer,
    wrap_optimizer,
)
from onstep.optim.param_groups import trainable_parameters
from onstep.trainer.base_trainer import BaseTrainer
from onstep.training.setup.setup import scheduler_for


def check_optimizers(trainer: BaseTrainer) -> None:
    """Reject (ConfigError) incompatible arguments for optimizer and scheduler."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    if trainer.optimizer_cls_and_kwargs is not None and optimizer is not None:
        raise ConfigError("Pass the optimizer through optimizers or optimizer_cls_and_kwargs, not both.")
    if trainer.model_init is not None and (_is_object(optimizer) or _is_object(scheduler)):
        raise ConfigError(
            "model_init creates new parameters for every train(), but an optimizer or scheduler object holds old ones; "
            "pass factories: optimizers=(lambda parameters: ..., lambda optimizer: ...)."
        )
    if _is_object(scheduler) and not _is_object(optimizer):
        raise ConfigError(
            "A scheduler object belongs to an optimizer; pass both in optimizers, or a factory: "
            "optimizers=(None, lambda optimizer: ...)."
        )


def make_optimizer(trainer: BaseTrainer, module: nn.Module, config: ConfigContainer) -> Any:
    """The optimizer for the loop: the user's, one made by a factory or class, or the configured one.

    A factory is called with the trainable parameters; a class in `optimizer_cls_and_kwargs` with two groups, so that
    `weight_decay` applies to matrices only (excluding biases of stacked experts), unless its keywords set it.

    Raises:
        ConfigError: for an optimizer that has none of the model's parameters, or if group settings are used that only
            apply to the configured optimizer.
    """
    given = trainer.optimizer
    if trainer.optimizer_cls_and_kwargs is not None:
        cls, keywords = trainer.optimizer_cls_and_kwargs
        has_decay = "weight_decay" in keywords
        given = cls(_trainable(module) if has_decay else _groups(module, config.optimizer.weight_decay), **keywords)
    elif given is not None and not _is_object(given):
        given = given(_trainable(module))
    scaler = build_loss_scaler(config.optimizer, config.mixed_precision)
    if given is None:
        return build_optimizer([module], config.optimizer, scaler=scaler)
    _check_groups_are_free(config)
    optimizer = wrap_optimizer(
        given,
        config.optimizer.clip_grad,
        scaler=scaler,
        grad_norm_skip_threshold=config.optimizer.grad_norm_skip_threshold,
        log_num_zeros_in_grad=config.optimizer.log_num_zeros_in_grad,
    )
    _check_parameters(optimizer, module)
    return optimizer


def expose_optimizers(trainer: BaseTrainer, optimizer: Any, scheduler: Any) -> None:
    """Set `trainer.optimizer` and `lr_scheduler` to the objects made for this training, if the user passed none."""
    trainer.built_optimizers = (
        optimizer if trainer.optimizer is None else None,
        scheduler if trainer.lr_scheduler is None else None,
    )
    if trainer.optimizer is None:
        trainer.optimizer = optimizer
    if trainer.lr_scheduler is None:
        trainer.lr_scheduler = scheduler


def known_optimizers(trainer: BaseTrainer) -> tuple[Any, Any]:
    """The optimizer and the scheduler that the user passed or the last training created; None for one not made yet."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    return optimizer if _is_object(optimizer) else None, scheduler if _is_object(scheduler) else None


def withdraw_optimizers(trainer: BaseTrainer) -> None:
    """Undo `expose_optimizers`, unless the user has set other objects meanwhile: the next training makes its own."""
    optimizer, scheduler = trainer.built_optimizers
    if trainer.optimizer is optimizer:
        trainer.optimizer = None
    if trainer.lr_scheduler is scheduler:
        trainer.lr_scheduler = None
    trainer.built_optimizers = (None, None)


def make_scheduler(
    trainer: BaseTrainer,
    optimizer: Any,
    config: ConfigContainer,
    iters: int | None,
    world_size: int = 1,
    num_samples: int | None = None,
) -> Any:
    """The scheduler for the loop: the user's, one made by a factory, or the configured schedule.

    The configured schedule is built for `iters` steps over epochs of `num_samples`; it scales the learning rates of a
    user's optimizer and does not change its weight decay. A scheduler that is a callback is registered as one.
    """
    given = trainer.lr_scheduler
    if given is not None and not _is_object(given):
        given = given(optimizer.optimizer if isinstance(optimizer, TrainingOptimizer) else optimizer)
    if given is None:
        if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
            _keep_own_values(optimizer)
        return scheduler_for(config, optimizer, iters, world_size, num_samples)
    known = trainer.callback_manager.callbacks
    if isinstance(given, TrainerCallback) and all(callback is not given for callback in known):
        trainer.callback_manager.add(given)
    return given if isinstance(given, OptimizerParamScheduler) else TorchSchedulerAdapter(given)


def _is_object(given: Any) -> bool:
    """Whether `given` is an optimizer or scheduler, rather than a factory."""
    return given is not None and not isinstance(given, type) and hasattr(given, "step")


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    roles = trainable_parameters([module])
    matrices = [parameter for parameter, role in roles.items() if role.is_decayed]
    others = [parameter for parameter, role in roles.items() if not role.is_decayed]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _check_parameters(optimizer: Any, module: nn.Module) -> None:
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        return
    raise ConfigError(
        f"The optimizer has no parameter of {type(module).__name__}, so it would train nothing; build it from the "
        f"parameters of the Trainer's model, or pass a factory: optimizers=(lambda parameters: ..., None)."
    )


def _check_groups_are_free(config: ConfigContainer) -> None:
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


def _keep_own_values(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group.setdefault("max_lr", float(group["lr"]))
        decay = float(group.get("weight_decay", 0.0))
        group.setdefault("start_wd", decay)
        group.setdefault("end_wd", decay)
