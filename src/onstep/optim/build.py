"""Builds the optimizer and scheduler that the loop drives, from a run's configuration or a user's own objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from onstep.config import OptimizerConfig, SchedulerConfig
from onstep.config.checks.optimizer import check_param_groups
from onstep.config.sections.optimizer import OF_PACKAGES
from onstep.config.suggestions import nearest
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.pipeline.seats import names_of_whole
from onstep.errors import ConfigError
from onstep.events.context import unwrap
from onstep.optim.distributed_optimizer import DistributedOptimizer
from onstep.optim.loss_scaler import LossScaler
from onstep.optim.megatron_optimizer import ForeignOptimizer, MegatronOptimizer
from onstep.optim.named_optimizers import of_package
from onstep.optim.optimizer import TrainingOptimizer
from onstep.optim.param_groups import param_groups, trainable_parameters
from onstep.optim.param_scheduler import OptimizerParamScheduler
from onstep.optim.protocol import HasParamGroups
from onstep.optim.torch_optimizers import optimizer_of

OPTIMIZERS = ("adam", "adamw", "sgd", "muon", *OF_PACKAGES)
_ITERATION_FIELDS = ("lr_decay_iters", "lr_wsd_decay_iters", "lr_warmup_iters")
_SAMPLE_FIELDS = ("lr_decay_samples", "lr_wsd_decay_samples", "lr_warmup_samples")

Foreign = TypeVar("Foreign")


def build_optimizer(
    model_chunks: list[nn.Module], config: OptimizerConfig, *, scaler: LossScaler | None = None, seed: int = 0
) -> TrainingOptimizer:
    """The optimizer of `build_torch_optimizer` as the loop drives it.

    Args:
        scaler: the loss scaler; see `build_loss_scaler`.
        model_chunks: the model chunks; one unless the model is split into several.
        config: the section `optimizer` of a configuration.
        seed: for stochastic rounding.
    """
    built = build_torch_optimizer(model_chunks, config, seed=seed)
    optimizer = wrap_configured(built, model_chunks, config, scaler=scaler)
    assert isinstance(optimizer, TrainingOptimizer)
    return optimizer


def build_torch_optimizer(
    model_chunks: list[nn.Module],
    config: OptimizerConfig,
    *,
    decayed: Collection[nn.Parameter] | None = None,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """The configured optimizer over the trainable parameters of all chunks; a shared parameter counts once.

    `adam` and `adamw` are both AdamW (decoupled weight decay), as in Megatron-Core; torch's fused kernels are used on
    CPU and CUDA. `muon` is torch's Muon for the matrices of the layers and AdamW for the rest: embeddings, the output
    matrix, biases, norms, and the weights of experts that are stacked in three dimensions. See `of_package` for others.

    There are two groups: tensors of at least two dimensions, with weight decay (`wd_mult` 1), and biases and parameters
    of fewer dimensions, such as the scales of norms, without (`wd_mult` 0). Each is split further for Muon, for a
    separate learning rate of embedding and output (`is_decoupled_lr`), and by `optimizer.param_groups`.

    With `optimizer.params_dtype=bfloat16` they are updated in float32; see `LowPrecisionOptimizer`.

    Args:
        decayed: the parameters with weight decay, where the rule above does not apply.
        model_chunks: the model chunks; one unless the model is split into several.
        config: the section `optimizer` of a configuration.
        seed: for stochastic rounding.

    Raises:
        ConfigError: if the optimizer is unknown or has no learning rate, if nothing is trainable, or if an entry of
            `optimizer.param_groups` is wrong or matches nothing.
    """
    if config.optimizer not in OPTIMIZERS:
        hint = nearest(config.optimizer, list(OPTIMIZERS))
        raise ConfigError(
            f"optimizer.optimizer must be one of {', '.join(OPTIMIZERS)}, got {config.optimizer!r}.{hint}"
        )
    if config.lr is None or config.lr < 0:
        raise ConfigError(f"optimizer.lr must be a number >= 0, got {config.lr}; set it to 3e-4, for example")
    check_param_groups(config)
    roles = trainable_parameters(model_chunks, decayed)
    if not roles:
        raise ConfigError(
            f"a model must have parameters with requires_grad, got none in {len(model_chunks)} chunk(s); "
            "unfreeze the parameters to train; if it has none at all, put layers kept in a list or a dict into "
            "nn.ModuleList or nn.ModuleDict, which register them"
        )
    for_muon, others = param_groups(roles, config, names_of_whole(unwrap(model_chunks[0])))
    if config.optimizer == "muon" and not for_muon:
        raise ConfigError(
            "optimizer.optimizer=muon requires trainable matrices between embedding and output, got none; use adam"
        )
    if config.optimizer in OF_PACKAGES:
        return of_package(config, model_chunks, others)
    return optimizer_of(for_muon, others, config, config.lr, seed=seed)


def wrap_optimizer(
    optimizer: Foreign,
    clip_grad: float | None,
    *,
    order: list[nn.Parameter] | None = None,
    scaler: LossScaler | None = None,
    grad_norm_skip_threshold: float | None = None,
    log_num_zeros_in_grad: bool = False,
    model: Sequence[nn.Module] = (),
) -> TrainingOptimizer | Foreign:
    """The optimizer interface that the loop drives, for a user's own `optimizer`.

    A torch optimizer is wrapped, with all of these settings; see `TrainingOptimizer`. Any other object whose `step()`
    follows Megatron's convention, returning (update_successful, grad_norm, num_zeros), is returned as is, and clips by
    itself.

    Args:
        clip_grad: the greatest norm of the gradients; None or 0 for no clipping.
        order: the order in which the norm sums the gradients; None for that of the groups.
        scaler: the loss scaler; None for none.
        grad_norm_skip_threshold: the gradient norm above which an update is skipped; None for none.
        log_num_zeros_in_grad: whether zeros in the gradients are counted.
        model: the model chunks, which decide whether ranks divide the updates.

    Raises:
        ConfigError: if it has no `step()`, or ranks are to divide the updates of an optimizer that is not torch's.
    """
    divides = bool(buffered_chunks(model))
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = partial(DistributedOptimizer, chunks=model) if divides else TrainingOptimizer
        return kind(
            optimizer,
            clip_grad=clip_grad,
            order=order,
            scaler=scaler,
            grad_norm_skip_threshold=grad_norm_skip_threshold,
            log_num_zeros_in_grad=log_num_zeros_in_grad,
        )
    if divides:
        raise ConfigError(
            f"ranks that divide the updates require an optimizer of torch, got {type(optimizer).__name__}; pass a "
            f"torch.optim.Optimizer, or set ddp.use_distributed_optimizer=false."
        )
    if isinstance(optimizer, type):
        raise ConfigError(
            f"the optimizer must be an object, got the class {optimizer.__name__} itself; pass "
            f"{optimizer.__name__}(model.parameters(), lr=...)"
        )
    if not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"an optimizer must have a step() method, got {type(optimizer).__name__}; pass a torch.optim.Optimizer"
        )
    return optimizer


def wrap_configured(
    optimizer: Foreign, model_chunks: list[nn.Module], config: OptimizerConfig, *, scaler: LossScaler | None = None
) -> TrainingOptimizer | Foreign:
    """`wrap_optimizer` with the configured settings; the norm sums gradients in the order of the model's parameters.

    Args:
        optimizer: the optimizer.
        model_chunks: the model chunks; one unless the model is split into several.
        config: the section `optimizer` of a configuration.
        scaler: the loss scaler; None for none.
    """
    return wrap_optimizer(
        optimizer,
        config.clip_grad,
        order=list(trainable_parameters(model_chunks)),
        scaler=scaler,
        grad_norm_skip_threshold=config.grad_norm_skip_threshold,
        log_num_zeros_in_grad=config.log_num_zeros_in_grad,
        model=model_chunks,
    )


def as_step_optimizer(
    optimizer: TrainingOptimizer | ForeignOptimizer | torch.optim.Optimizer | MegatronOptimizer,
    model: Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    device: torch.device,
    scaler: LossScaler | None = None,
) -> TrainingOptimizer | ForeignOptimizer:
    """The optimizer interface that the loop drives: `optimizer` itself, a wrapped torch optimizer, or an adapter.

    An optimizer that the loop can already drive keeps its settings, and receives `scaler` if it has none. The adapter
    is for Megatron's convention.

    Args:
        model: the model chunks.
        config: the section `optimizer` of a configuration.
        device: the device of the values.

    Raises:
        ConfigError: if it has no `step()`.
    """
    threshold = config.grad_norm_skip_threshold
    is_own = isinstance(optimizer, TrainingOptimizer | ForeignOptimizer)
    if is_own and buffered_chunks(model) and not isinstance(optimizer, DistributedOptimizer):
        raise ConfigError(
            f"the optimizer, a {type(optimizer).__name__}, was not made for this model, whose updates the ranks "
            f"divide; pass the torch.optim.Optimizer itself, made of its parameters."
        )
    if not isinstance(optimizer, TrainingOptimizer | ForeignOptimizer):
        zeros = config.log_num_zeros_in_grad
        optimizer = wrap_optimizer(
            optimizer, config.clip_grad, grad_norm_skip_threshold=threshold, log_num_zeros_in_grad=zeros, model=model
        )
    if not isinstance(optimizer, TrainingOptimizer | ForeignOptimizer):
        assert not isinstance(optimizer, torch.optim.Optimizer)
        optimizer = ForeignOptimizer(optimizer, model, device=device, grad_norm_skip_threshold=threshold)
    if isinstance(optimizer, TrainingOptimizer):
        optimizer.join()
    if optimizer.scaler is None and scaler is not None:
        optimizer.scaler = scaler
    return optimizer


def build_scheduler(
    optimizer: HasParamGroups,
    scheduler_config: SchedulerConfig,
    optimizer_config: OptimizerConfig,
    *,
    train_iters: int,
    global_batch_size: int,
    override_opt_param_scheduler: bool = False,
    use_checkpoint_opt_param_scheduler: bool = False,
    samples_after: Callable[[int], int] | None = None,
) -> OptimizerParamScheduler:
    """The configured scheduler, with the values at 0 samples already written.

    Values that the configuration leaves open are the optimizer's: with `lr` None each group keeps its own learning rate
    as its maximum, and a group without `wd_mult` (one not made by `build_optimizer`) keeps its own weight decay unless
    the scheduler's configuration sets one. Such values are written into the groups as `max_lr`, `start_wd` and
    `end_wd`. A warm-up that is not shorter than the decay is cut to one sample less, with a UserWarning.

    Args:
        train_iters: optimizer steps of the run.
        global_batch_size: samples of one step over all ranks.
        samples_after: total samples of the first given number of steps, for a batch-size ramp-up.
        optimizer: the optimizer.
        scheduler_config: the section `scheduler` of a configuration.
        optimizer_config: the section `optimizer` of a configuration.
        override_opt_param_scheduler: whether this schedule replaces a loaded one.
        use_checkpoint_opt_param_scheduler: whether a loaded schedule replaces this one.

    Raises:
        ConfigError: if iteration and sample fields are mixed, `max_steps` is below `train_iters`, or a value does not
            define a valid schedule (see `LrSchedule`, `WdSchedule`).
    """
    samples_after = samples_after or (lambda steps: steps * global_batch_size)
    planned = train_iters if scheduler_config.max_steps is None else scheduler_config.max_steps
    if planned < train_iters:
        raise ConfigError(
            f"scheduler.max_steps must be >= train_iters ({train_iters}), got {planned}; "
            "raise it, or leave it None for a schedule as long as the run"
        )
    decay, warmup, wsd_decay = _lengths(scheduler_config, planned, samples_after)
    if decay <= 0:
        raise ConfigError(
            f"a learning-rate schedule must decay over more than 0 samples, got {decay} "
            f"({train_iters} steps); set train.train_iters or scheduler.lr_decay_iters"
        )
    max_lr = _max_lr_of(optimizer, optimizer_config)
    _keep_weight_decay(optimizer, scheduler_config)
    start_wd, end_wd = scheduler_config.start_weight_decay, scheduler_config.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler_config.lr_warmup_init,
        max_lr=max_lr,
        min_lr=optimizer_config.min_lr or 0.0,
        lr_warmup_steps=_warmup(scheduler_config, warmup, decay),
        lr_decay_steps=decay,
        lr_decay_style=scheduler_config.lr_decay_style,
        start_wd=optimizer_config.weight_decay if start_wd is None else start_wd,
        end_wd=optimizer_config.weight_decay if end_wd is None else end_wd,
        wd_incr_steps=samples_after(planned),
        wd_incr_style=scheduler_config.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=override_opt_param_scheduler,
        wsd_decay_steps=wsd_decay,
        lr_wsd_decay_style=scheduler_config.lr_wsd_decay_style,
    )


def _lengths(
    config: SchedulerConfig, planned: int, samples_after: Callable[[int], int]
) -> tuple[float, float, float | None]:
    """Decay, warm-up and the decay of WSD in samples, whichever unit the configuration uses.

    Raises:
        ConfigError: if some are given in iterations and some in samples.
    """
    iterations = [name for name in _ITERATION_FIELDS if getattr(config, name)]
    samples = [name for name in _SAMPLE_FIELDS if getattr(config, name)]
    if iterations and samples:
        raise ConfigError(
            f"scheduler lengths must all be in iterations or all in samples, got {', '.join(iterations + samples)}; "
            "unset one kind"
        )
    if samples:
        decay = samples_after(planned) if config.lr_decay_samples is None else config.lr_decay_samples
        return decay, config.lr_warmup_samples, config.lr_wsd_decay_samples
    decay_iters = planned if config.lr_decay_iters is None else config.lr_decay_iters
    decay, wsd_iters = samples_after(decay_iters), config.lr_wsd_decay_iters
    wsd_decay = None if wsd_iters is None else decay - samples_after(max(0, decay_iters - wsd_iters))
    return decay, samples_after(config.lr_warmup_iters), wsd_decay


def _warmup(config: SchedulerConfig, warmup: float, decay: float) -> float:
    """Samples of warm-up, fewer than those of the decay."""
    fraction = config.lr_warmup_fraction
    if fraction is not None:
        if warmup:
            raise ConfigError(
                f"a warm-up must have one length, got lr_warmup_fraction {fraction} and {warmup} samples "
                "(lr_warmup_iters or lr_warmup_samples); unset one"
            )
        if not 0 <= fraction <= 1:
            raise ConfigError(f"lr_warmup_fraction must be between 0 and 1, got {fraction}; it is a share of the decay")
        warmup = fraction * decay
    if warmup < decay:
        return warmup
    warnings.warn(
        f"a warm-up of {warmup} samples must be shorter than the decay of {decay}; it is capped to {decay - 1}",
        UserWarning,
        stacklevel=3,
    )
    return decay - 1


def _max_lr_of(optimizer: HasParamGroups, config: OptimizerConfig) -> float:
    """The configured learning rate, or the optimizer's own, of which each group then keeps its fraction."""
    if config.lr is not None:
        return config.lr
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if len(set(rates)) > 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group.setdefault("max_lr", rate)
    return max(rates)


def _keep_weight_decay(optimizer: HasParamGroups, config: SchedulerConfig) -> None:
    """Keep the weight decay that a user set in the groups of their own optimizer."""
    if config.start_weight_decay is not None or config.end_weight_decay is not None:
        return
    for group in optimizer.param_groups:
        if "weight_decay" in group and "wd_mult" not in group:
            group.setdefault("start_wd", group["weight_decay"])
            group.setdefault("end_wd", group["weight_decay"])
