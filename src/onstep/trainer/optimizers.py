"""Decides which optimizer and scheduler a training uses: the user's own, or the configured ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from onstep.config import ConfigContainer
from onstep.config.hf.argument import STYLES
from onstep.config.hf.schedules import is_expressed
from onstep.distributed.shards import updated_shard
from onstep.errors import ConfigError, text_of
from onstep.events import TrainerCallback
from onstep.optim import (
    MetricSchedulerAdapter,
    OptimizerParamScheduler,
    TorchSchedulerAdapter,
    TrainingOptimizer,
    build_loss_scaler,
    build_torch_optimizer,
    check_scheduler,
    follows_metric,
    wrap_configured,
)
from onstep.optim.fused_step import are_members
from onstep.optim.named_optimizers import construct, decay_groups, is_native
from onstep.optim.named_schedules import named_schedule
from onstep.record.kinds import Metrics
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.optimizer_checks import (
    check_evaluates,
    check_groups_are_free,
    check_metrics,
    check_rounding,
    check_schedule_is_free,
    creates_optimizer,
    is_object,
    sets_schedule,
)
from onstep.trainer.overrides import overrides
from onstep.trainer.own_arguments import config_of
from onstep.trainer.parameter_groups import Group, call_factory, groups_of
from onstep.trainer.parameter_groups import check_options as check_group_options
from onstep.training.protocols import UserOptimizer, UserScheduler
from onstep.training.setup.setup import scheduler_for
from onstep.training.stages.left_out import check_trains


def own_optimizer(trainer: BaseTrainer, module: nn.Module | None) -> object:
    """A new torch optimizer for `module`: of the user's factory or class, or of the arguments.

    A factory is called with the trainable parameters; a class, in `optimizers` with the learning rate of the arguments
    or in `optimizer_cls_and_kwargs`, with two groups, so that `weight_decay` applies to the parameters of
    `get_decay_parameter_names`, unless its keywords set it.
    """
    if module is None:
        raise ConfigError("Trainer has no model yet: model_init runs when training starts; call train().")
    given, wanted = trainer.optimizer_cls_and_kwargs, trainer.optimizer_groups
    if wanted is not None:
        return _grouped_optimizer(trainer, module, groups_of(wanted, module, _config(trainer).optimizer.weight_decay))
    if isinstance(trainer.optimizer, type) and issubclass(trainer.optimizer, torch.optim.Optimizer):
        given = trainer.optimizer, {"lr": _config(trainer).optimizer.lr}
    elif trainer.optimizer is not None:
        return call_factory(trainer.optimizer, module, None)
    methods: Any = trainer
    decayed = methods.get_decay_parameter_names(module)
    if given is not None:
        cls, keywords = given
        if "weight_decay" in keywords:
            return construct(cls, keywords, module, [{"params": _trainable(module)}])
    elif is_native(trainer.args) and not overrides(trainer, "get_optimizer_cls_and_kwargs"):
        parameters = {parameter for name, parameter in module.named_parameters() if name in set(decayed)}
        return build_torch_optimizer(
            [module], _config(trainer).optimizer, decayed=parameters, seed=_config(trainer).rng.seed
        )
    else:
        cls, keywords = methods.get_optimizer_cls_and_kwargs(trainer.args, module)
    return construct(cls, keywords, module, decay_groups(module, decayed, _config(trainer).optimizer.weight_decay))


def _grouped_optimizer(trainer: BaseTrainer, module: nn.Module, groups: list[Group]) -> object:
    """The optimizer of the user's factory or class, or of the arguments, with the groups of `optimizer_groups`."""
    made = trainer.optimizer
    if made is not None:
        if isinstance(made, type):
            made = partial(made, lr=_config(trainer).optimizer.lr)
        optimizer = call_factory(made, module, groups)
    else:
        methods: Any = trainer
        cls, keywords = trainer.optimizer_cls_and_kwargs or methods.get_optimizer_cls_and_kwargs(trainer.args, module)
        optimizer = construct(cls, keywords, module, groups)
    check_group_options(trainer.optimizer_groups, optimizer)
    return optimizer


def own_scheduler(trainer: BaseTrainer, optimizer: Any, num_training_steps: int) -> object:
    """A new scheduler for `optimizer`: of the user's factory, or the schedule of the arguments as a torch scheduler."""
    if optimizer is None:
        raise ConfigError("Trainer optimizer is None; call create_optimizer() before create_scheduler().")
    if isinstance(optimizer, TrainingOptimizer):
        optimizer = optimizer.optimizer
    if trainer.lr_scheduler is not None:
        return _scheduler_of(trainer.lr_scheduler, optimizer)
    check_schedule_is_free(trainer)
    scheduler = named_schedule(trainer.args, optimizer, num_training_steps)
    if trainer.session is None:  # as in Hugging Face, train() then makes one of its own length
        trainer.put_back["lr_scheduler"], trainer.previous = None, (trainer.previous[0], scheduler)
    return scheduler


@dataclass(frozen=True)
class Length:
    """What a schedule depends on."""

    iters: int | None
    """Optimizer steps of the run."""
    world_size: int = 1
    num_samples: int | None = None
    """Samples of an epoch."""


def make_optimizers(
    trainer: BaseTrainer, module: nn.Module, config: ConfigContainer, length: Length
) -> tuple[UserOptimizer, UserScheduler]:
    """The optimizer and the scheduler for the loop; those in them become `trainer.optimizer` and `lr_scheduler`.

    They are the user's, or created by factories or the Trainer's methods. The schedule of the arguments scales the
    learning rates of a user's optimizer and does not change its weight decay. As in Hugging Face, a further `train()`
    continues with the optimizer's state. A scheduler that is a callback is registered as one.

    Raises:
        ConfigError: for an optimizer that has none of the model's parameters; for group settings that only apply to the
            configured optimizer; for a scheduler that follows a metric in a run without evaluations.
    """
    given, schedule, is_configured = trainer.optimizer, trainer.lr_scheduler, _is_configured(trainer)
    _create_optimizer(trainer, length.iters)
    is_created_again = is_configured or trainer.model_init is not None or (given is not None and not is_object(given))
    trainer.put_back = {"lr_scheduler": schedule, **({"optimizer": given} if is_created_again else {})}
    if is_configured:
        _continue_state(trainer.previous[0], trainer.optimizer)
    else:
        check_groups_are_free(config)
    check_rounding(trainer.optimizer, config.optimizer)
    scaler = build_loss_scaler(config.optimizer, config.mixed_precision)
    optimizer = wrap_configured(trainer.optimizer, [module], config.optimizer, scaler=scaler)
    check_trains(optimizer.param_groups, [module])
    _create_scheduler(trainer, config, length, has_own_rates=not is_configured)
    trainer.previous = trainer.optimizer, trainer.lr_scheduler
    return optimizer, _as_loop_scheduler(trainer)


def known_optimizers(trainer: BaseTrainer) -> tuple[UserOptimizer | None, UserScheduler | None]:
    """The optimizer and the scheduler that the user passed or the last training created; None for one not made yet."""
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
    return optimizer if is_object(optimizer) else None, scheduler if is_object(scheduler) else None


def withdraw_optimizers(trainer: BaseTrainer) -> None:
    """Put back what the last training replaced by its own optimizer and scheduler, unless the user changed them.

    Each training creates these again, but an optimizer of the user's methods or class stays, as in Hugging Face.
    """
    made = dict(zip(("optimizer", "lr_scheduler"), trainer.previous, strict=True))
    for name, before in trainer.put_back.items():
        if getattr(trainer, name) is made[name]:
            setattr(trainer, name, before)
    trainer.put_back = {}


def step_on_metric(trainer: BaseTrainer, scheduler: object, metrics: Metrics) -> None:
    """Step a scheduler that follows a metric with the one of this evaluation. All ranks have the same metrics.

    Raises:
        ConfigError: if the metric is not among them.
    """
    if not isinstance(scheduler, MetricSchedulerAdapter):
        return
    check_metrics(trainer, metrics)
    name = trainer.args.metric_for_best_model or "loss"
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        raise ConfigError(
            f"{type(scheduler.torch_scheduler).__name__} follows metric_for_best_model={name!r}, but the evaluation "
            f"has no {key}; it has {', '.join(sorted(metrics))}."
        )
    scheduler.observe(metrics[key])


class OptimizerModes(TrainerCallback):
    """Switches an optimizer that has other weights for evaluations, such as a schedule-free one, back for each step."""

    def on_step_begin(self, args: object, state: object, control: object, **kwargs: Any) -> None:
        """Switch to the weights that are trained."""
        getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"]).train()


def use_evaluation_weights(optimizer: object) -> None:
    """Switch an optimizer that has other weights for evaluations to these; as in Hugging Face, until the next step."""
    use = getattr(optimizer, "eval", None) if is_object(optimizer) else None
    if callable(use):
        use()


def _is_configured(trainer: BaseTrainer) -> bool:
    """Whether the optimizer is the one of the configuration, whose learning rate then applies to it."""
    given = (trainer.optimizer, trainer.optimizer_cls_and_kwargs, trainer.optimizer_groups)
    is_given = any(one is not None for one in given)
    return not is_given and not creates_optimizer(trainer) and is_native(trainer.args)


def _config(trainer: BaseTrainer) -> ConfigContainer:
    if trainer.session is not None:
        config: ConfigContainer = trainer.session.state.cfg
        return config
    return config_of(trainer.args, num_samples=None, world_size=trainer.args.world_size, for_training=False)


def _create_optimizer(trainer: BaseTrainer, iters: int | None) -> None:
    methods: Any = trainer
    name = "create_optimizer"
    if overrides(trainer, "create_optimizer_and_scheduler"):
        name = "create_optimizer_and_scheduler"
        methods.create_optimizer_and_scheduler(num_training_steps=iters)
    else:
        created = methods.create_optimizer()
        trainer.optimizer = trainer.optimizer if is_object(trainer.optimizer) else created
    if not is_object(trainer.optimizer):
        raise ConfigError(f"{type(trainer).__name__}.{name} returns None and sets no self.optimizer; set it there.")


def _create_scheduler(trainer: BaseTrainer, config: ConfigContainer, length: Length, *, has_own_rates: bool) -> None:
    iters = length.iters
    if overrides(trainer, "create_scheduler") and not overrides(trainer, "create_optimizer_and_scheduler"):
        _call_create_scheduler(trainer, iters)
    elif trainer.lr_scheduler is not None:
        if not is_object(trainer.lr_scheduler):
            trainer.lr_scheduler = _scheduler_of(trainer.lr_scheduler, trainer.optimizer)
        return
    else:
        if has_own_rates:
            _keep_own_values(trainer.optimizer)
        if iters is None or _is_native_schedule(trainer, config, iters, has_own_rates=has_own_rates):
            trainer.lr_scheduler = scheduler_for(
                config, trainer.optimizer, iters, length.world_size, length.num_samples
            )
        else:
            trainer.lr_scheduler = named_schedule(trainer.args, trainer.optimizer, iters)


def _scheduler_of(factory: Callable[..., object], optimizer: UserOptimizer) -> object:
    """What a factory of schedulers makes; an error, or what is not a scheduler, is refused (ConfigError)."""
    name = getattr(factory, "__name__", type(factory).__name__)
    rule = (
        f"the scheduler in optimizers is a factory, {name}, which is called with the optimizer and returns its "
        f"scheduler, such as lambda optimizer: StepLR(optimizer, step_size=10)"
    )
    try:
        made = factory(optimizer)
    except TypeError as error:
        raise ConfigError(f"{rule}; it raised TypeError: {text_of(error)}") from error
    if not is_object(made):
        raise ConfigError(f"{rule}; it returned {made!r}")
    check_scheduler(made, optimizer)
    return made


def _call_create_scheduler(trainer: BaseTrainer, iters: int | None) -> None:
    create: Callable[..., object] = trainer.create_scheduler  # type: ignore[attr-defined]
    optimizer = inspect.signature(create).parameters.get("optimizer")
    is_required = optimizer is not None and optimizer.default is optimizer.empty  # as in scripts for 4.x
    created = create(num_training_steps=iters, **({"optimizer": trainer.optimizer} if is_required else {}))
    trainer.lr_scheduler = trainer.lr_scheduler if is_object(trainer.lr_scheduler) else created
    if not is_object(trainer.lr_scheduler):
        raise ConfigError(
            f"{type(trainer).__name__}.create_scheduler returns None and sets no self.lr_scheduler; set it there."
        )


def _as_loop_scheduler(trainer: BaseTrainer) -> UserScheduler:
    scheduler, known = trainer.lr_scheduler, trainer.callback_manager.callbacks
    has_modes = callable(getattr(trainer.optimizer, "train", None))
    if has_modes and not any(isinstance(callback, OptimizerModes) for callback in known):
        trainer.callback_manager.add(OptimizerModes())
    if isinstance(scheduler, TrainerCallback) and all(callback is not scheduler for callback in known):
        trainer.callback_manager.add(scheduler)
    if isinstance(scheduler, OptimizerParamScheduler):
        return scheduler
    check_evaluates(trainer, scheduler)
    return MetricSchedulerAdapter(scheduler) if follows_metric(scheduler) else TorchSchedulerAdapter(scheduler)


def _is_native_schedule(trainer: BaseTrainer, config: ConfigContainer, iters: int, *, has_own_rates: bool) -> bool:
    """Whether the configuration's schedule is used; its keys in `config_overrides` decide for it."""
    args = trainer.args
    if args.lr_scheduler_type in STYLES and sets_schedule(trainer):
        return True
    scales_groups = has_own_rates and any(g["max_lr"] != args.learning_rate for g in trainer.optimizer.param_groups)
    if is_expressed(config.scheduler, args, iters, scales_groups=scales_groups):
        return True
    check_schedule_is_free(trainer)
    return False


def _continue_state(previous: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a new optimizer of the same parameters and kind continue with the state of the previous training's."""
    if type(previous) is not type(optimizer):
        return
    updated = [{"params": [updated_shard(one) for one in group["params"]]} for group in optimizer.param_groups]
    if are_members(updated, [list(group["params"]) for group in previous.param_groups]):
        optimizer.state.update(previous.state)


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _keep_own_values(optimizer: UserOptimizer) -> None:
    """Make the configuration's schedule scale each group's own rate, and leave its weight decay alone."""
    for group in optimizer.param_groups:
        group.setdefault("max_lr", float(group["lr"]))
        decay = float(group.get("weight_decay", 0.0))
        group.setdefault("start_wd", decay)
        group.setdefault("end_wd", decay)
        if "wd_mult" in group:  # of a group that `create_optimizer` made
            group["wd_mult"] = 1.0
