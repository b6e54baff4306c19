"""From the configuration of a run to its scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from onstep.config.parts import OptimizerConfig, SchedulerConfig
from onstep.errors import ConfigError
from onstep.optim.param_scheduler import OptimizerParamScheduler
from onstep.optim.protocol import HasParamGroups

_ITERATION_FIELDS = ("lr_decay_iters", "lr_wsd_decay_iters", "lr_warmup_iters")
_SAMPLE_FIELDS = ("lr_decay_samples", "lr_wsd_decay_samples", "lr_warmup_samples")


@dataclass(frozen=True)
class _Lengths:
    """Lengths of a schedule in samples."""

    decay: float
    warmup: float
    wsd_decay: float | None
    wd_incr: float


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
    """The scheduler that the configuration asks for, with the values at 0 samples already written.

    Values that the configuration leaves open are the optimizer's: with `lr` None each group keeps its own learning rate
    as its maximum, and a group without `wd_mult` (one that `build_optimizer` did not make) keeps its own weight decay
    unless the scheduler's configuration sets one. Such values are written into the groups as `max_lr`, `start_wd` and
    `end_wd`. A warm-up as long as the decay is shortened by one sample, with a UserWarning.

    Args:
        train_iters: optimizer steps of the run.
        global_batch_size: samples of one step over all ranks.
        samples_after: samples of the first so many steps of the run, where the batch grows.

    Raises:
        ConfigError: iteration and sample fields are mixed, `max_steps` is below `train_iters`, or a value does not make
            a schedule (see `LrSchedule`, `WdSchedule`).
    """
    samples_after = samples_after or (lambda steps: steps * global_batch_size)
    lengths = _lengths(scheduler_config, train_iters, samples_after)
    max_lr = _adopt_lr(optimizer, optimizer_config)
    _adopt_weight_decay(optimizer, scheduler_config)
    start_wd, end_wd = scheduler_config.start_weight_decay, scheduler_config.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=scheduler_config.lr_warmup_init,
        max_lr=max_lr,
        min_lr=optimizer_config.min_lr or 0.0,
        lr_warmup_steps=lengths.warmup,
        lr_decay_steps=lengths.decay,
        lr_decay_style=scheduler_config.lr_decay_style,
        start_wd=optimizer_config.weight_decay if start_wd is None else start_wd,
        end_wd=optimizer_config.weight_decay if end_wd is None else end_wd,
        wd_incr_steps=lengths.wd_incr,
        wd_incr_style=scheduler_config.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=override_opt_param_scheduler,
        wsd_decay_steps=lengths.wsd_decay,
        lr_wsd_decay_style=scheduler_config.lr_wsd_decay_style,
    )


def _lengths(config: SchedulerConfig, train_iters: int, samples_after: Callable[[int], int]) -> _Lengths:
    """Everything in samples, whichever unit the configuration uses."""
    planned = _planned_iters(config, train_iters)
    run_samples = samples_after(planned)
    if _counts_in_samples(config):
        decay, warmup, wsd = config.lr_decay_samples, config.lr_warmup_samples, config.lr_wsd_decay_samples
    else:
        decay_iters = planned if config.lr_decay_iters is None else config.lr_decay_iters
        decay = samples_after(decay_iters)
        warmup = samples_after(config.lr_warmup_iters)
        wsd_iters = config.lr_wsd_decay_iters
        wsd = None if wsd_iters is None else decay - samples_after(max(0, decay_iters - wsd_iters))
    decay = run_samples if decay is None else decay
    if decay <= 0:
        raise ConfigError(
            f"a learning-rate schedule must decay over more than 0 samples, got {decay} "
            f"({train_iters} steps); set train.train_iters or scheduler.lr_decay_iters"
        )
    return _Lengths(decay, _warmup(config, warmup, decay), wsd, run_samples)


def _planned_iters(config: SchedulerConfig, train_iters: int) -> int:
    """Steps of the run that the schedule is made for."""
    if config.max_steps is None:
        return train_iters
    if config.max_steps < train_iters:
        raise ConfigError(
            f"scheduler.max_steps must be >= train_iters ({train_iters}), got {config.max_steps}; "
            "raise it, or leave it None for a schedule as long as the run"
        )
    return config.max_steps


def _counts_in_samples(config: SchedulerConfig) -> bool:
    """Whether the configuration gives its lengths in samples.

    Raises:
        ConfigError: it gives some in iterations and some in samples.
    """
    iterations = [name for name in _ITERATION_FIELDS if getattr(config, name)]
    samples = [name for name in _SAMPLE_FIELDS if getattr(config, name)]
    if iterations and samples:
        raise ConfigError(
            f"scheduler lengths must all be in iterations or all in samples, got {', '.join(iterations + samples)}; "
            "unset one kind"
        )
    return bool(samples)


def _warmup(config: SchedulerConfig, warmup: float, decay: float) -> float:
    """Samples of warm-up, shorter than the decay."""
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
        stacklevel=4,
    )
    return decay - 1


def _adopt_lr(optimizer: HasParamGroups, config: OptimizerConfig) -> float:
    """The configured learning rate, or the optimizer's own, of which each group then keeps its share."""
    if config.lr is not None:
        return config.lr
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if len(set(rates)) > 1:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group.setdefault("max_lr", rate)
    return max(rates)


def _adopt_weight_decay(optimizer: HasParamGroups, config: SchedulerConfig) -> None:
    """Keep the weight decay that a user gave to the groups of an own optimizer."""
    if config.start_weight_decay is not None or config.end_weight_decay is not None:
        return
    for group in optimizer.param_groups:
        if "weight_decay" in group and "wd_mult" not in group:
            group.setdefault("start_wd", group["weight_decay"])
            group.setdefault("end_wd", group["weight_decay"])
