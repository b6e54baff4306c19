"""The rules of optimizers and schedules that involve several values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from onstep.config.container import ConfigContainer
from onstep.config.field_types import is_number
from onstep.config.lengths import warmup_and_decay
from onstep.config.sections.optimizer import OptimizerConfig
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

GROUP_SETTINGS = ("lr_mult", "wd_mult", "max_lr", "min_lr", "start_wd", "end_wd")
"""The settings of an entry of `optimizer.param_groups`, besides `match`."""

OUTER_NAMES = ("embedding.weight", "position_embedding.weight", "output.weight")
"""Names of the embedding and output matrices of Onstep's own models, before any is built."""


def check_optimizer(config: ConfigContainer) -> None:
    """Refuse settings of the optimizer that cannot work together."""
    optimizer, start = config.optimizer, config.scheduler.lr_warmup_init
    lr = optimizer.lr
    if lr is None and not config.validation.skip_train:
        raise ConfigError("optimizer.lr is not set; choose a learning rate such as 3e-4.")
    if lr is not None and optimizer.min_lr is not None and optimizer.min_lr > lr:
        raise ConfigError(f"optimizer.min_lr={optimizer.min_lr} must be at most optimizer.lr={lr}; lower it.")
    if lr is not None and start > lr:
        raise ConfigError(
            f"scheduler.lr_warmup_init={start} must be at most optimizer.lr={lr}: a warm-up rises; lower it."
        )
    _check_types(config)
    check_param_groups(optimizer)
    _check_decoupled(optimizer)
    for number, entry in enumerate(optimizer.param_groups):
        _check_weight_decay_of(f"optimizer.param_groups[{number}]", entry, config)
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        raise ConfigError(
            f"optimizer.min_loss_scale={optimizer.min_loss_scale} must be at most "
            f"optimizer.initial_loss_scale={optimizer.initial_loss_scale}."
        )


def _check_types(config: ConfigContainer) -> None:
    """Refuse types of weights that the precision of a step or the optimizer cannot work with."""
    optimizer = config.optimizer
    _check_averages(optimizer)
    if optimizer.params_dtype == "float32":
        return
    if config.mixed_precision == "fp16_mixed":
        raise ConfigError(
            f"optimizer.params_dtype={optimizer.params_dtype} and mixed_precision=fp16_mixed exclude each other: "
            "float16 requires float32 weights; set mixed_precision=bf16_mixed, or params_dtype=float32."
        )
    is_own = optimizer.optimizer in ("adam", "adamw", "sgd", "muon")
    if not is_own and (optimizer.main_params_dtype, optimizer.rounding) != ("bfloat16", "nearest"):
        raise ConfigError(
            f"optimizer.optimizer={optimizer.optimizer} updates bfloat16 weights by itself, without master weights; "
            "set optimizer.main_params_dtype=bfloat16 and optimizer.rounding=nearest, or use adam, sgd or muon."
        )


def _check_averages(optimizer: OptimizerConfig) -> None:
    """Refuse types of averages that an optimizer does not have."""
    low = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(optimizer, name) != "float32"]
    if not low:
        return
    asked = f"optimizer.{low[0]}={getattr(optimizer, low[0])}"
    if optimizer.optimizer not in ("adam", "adamw"):
        raise ConfigError(
            f"{asked} is the type of an average of AdamW, but optimizer.optimizer={optimizer.optimizer}; use adam, or "
            f"leave it float32."
        )
    if optimizer.main_params_dtype != "float32":
        raise ConfigError(
            f"{asked} has no effect with optimizer.main_params_dtype={optimizer.main_params_dtype}, whose state is in "
            f"bfloat16 in any case; leave it float32 and optimizer.use_precision_aware_optimizer false."
        )


def check_schedule(config: ConfigContainer) -> None:
    """Refuse a schedule of learning rate and weight decay whose values contradict one another or the run's length."""
    scheduler = config.scheduler
    if scheduler.override_opt_param_scheduler and scheduler.use_checkpoint_opt_param_scheduler:
        raise ConfigError(
            "scheduler.override_opt_param_scheduler and scheduler.use_checkpoint_opt_param_scheduler are both true, "
            "but a checkpoint's schedule can only be kept or replaced; set one of them to false."
        )
    by_samples = config.train.train_samples is not None
    foreign, own = ("iters", "samples") if by_samples else ("samples", "iters")
    for name in ("lr_decay", "lr_wsd_decay", "lr_warmup"):
        value = getattr(scheduler, f"{name}_{foreign}")
        if value:
            length = "train.train_samples" if by_samples else "train.train_iters or num_epochs"
            raise ConfigError(
                f"scheduler.{name}_{foreign}={value} does not fit a run whose length is {length}; "
                f"set scheduler.{name}_{own}."
            )
    if scheduler.lr_warmup_fraction is not None and (scheduler.lr_warmup_iters or scheduler.lr_warmup_samples):
        raise ConfigError("the warm-up is given twice: keep scheduler.lr_warmup_fraction or its length, not both.")
    wsd = (scheduler.lr_wsd_decay_iters, scheduler.lr_wsd_decay_samples)
    if scheduler.lr_decay_style == "WSD" and wsd == (None, None):
        raise ConfigError("lr_decay_style=WSD requires the length of its decay: set scheduler.lr_wsd_decay_iters.")
    start, end = scheduler.start_weight_decay, scheduler.end_weight_decay
    style = scheduler.weight_decay_incr_style
    if style == "constant" and start != end:
        raise ConfigError(
            f"weight_decay_incr_style=constant requires start_weight_decay == end_weight_decay, got {start} and {end}; "
            "choose linear or cosine for a weight decay that rises."
        )
    if style != "constant" and (start is None or end is None or end < start):
        raise ConfigError(
            f"weight_decay_incr_style={style} requires scheduler.start_weight_decay <= end_weight_decay, "
            f"got {start} and {end}."
        )


def check_phases(filled: ConfigContainer, iters: int, world_size: int) -> None:
    """Check that warm-up and decay fit into a run of `iters` steps; warn if the warm-up is as long as the decay."""
    scheduler = filled.scheduler
    warmup, decay = warmup_and_decay(filled, iters, world_size)
    unit, suffix = ("iterations", "iters") if filled.train.train_samples is None else ("samples", "samples")
    wsd = scheduler.lr_wsd_decay_iters or scheduler.lr_wsd_decay_samples
    room = decay - min(warmup, decay - 1)
    if scheduler.lr_decay_style == "WSD" and wsd is not None and wsd > room:
        raise ConfigError(
            f"scheduler.lr_wsd_decay_{suffix}={wsd}: the WSD decay ({wsd} {unit}) is longer than what the schedule "
            f"({decay} {unit}) has after the warm-up ({warmup} {unit}); choose at most {room}, or a shorter warm-up."
        )
    if warmup >= decay:
        warnings.warn(
            f"the warm-up ({warmup} {unit}) is not shorter than the learning-rate schedule of {decay} {unit}; it is "
            f"cut to {decay - 1}.",
            UserWarning,
            stacklevel=4,
        )


def check_param_groups(optimizer: OptimizerConfig) -> None:
    """Refuse malformed entries of `optimizer.param_groups`.

    Raises:
        ConfigError: naming the entry, the value, the rule and the remedy.
    """
    for number, entry in enumerate(optimizer.param_groups):
        name = f"optimizer.param_groups[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{name}={entry!r} must be a mapping such as {{match: '*.bias', lr_mult: 0.1}}.")
        _check_keys(name, entry)
        given = {key: entry[key] for key in GROUP_SETTINGS if entry.get(key) is not None}
        for key, value in given.items():
            if not is_number(value) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}.{key}={value!r} must be a finite number >= 0.")
        highest, lowest = given.get("max_lr", optimizer.lr), given.get("min_lr", optimizer.min_lr or 0.0)
        if ("max_lr" in given or "min_lr" in given) and highest is not None and highest < lowest:
            raise ConfigError(
                f"{name}: max_lr={highest} must be at least min_lr={lowest} (where not set: optimizer.lr and "
                f"optimizer.min_lr); set both."
            )


def _check_keys(name: str, entry: Mapping[str, Any]) -> None:
    for key in entry:
        if key not in ("match", *GROUP_SETTINGS):
            hint = nearest(str(key), ["match", *GROUP_SETTINGS])
            raise ConfigError(f"{name} has no key {key!r}.{hint} Its keys: match, {', '.join(GROUP_SETTINGS)}.")
    match = entry.get("match")
    if not isinstance(match, str) or not match:
        raise ConfigError(f"{name}.match={match!r} must be a pattern of parameter names, such as '*.router.*'.")
    if all(entry.get(key) is None for key in GROUP_SETTINGS):
        raise ConfigError(f"{name} (match={match!r}) sets nothing; give it one of {', '.join(GROUP_SETTINGS)}.")


def _check_weight_decay_of(name: str, entry: Mapping[str, Any], config: ConfigContainer) -> None:
    """Check that an entry's own weight decay follows the style of all groups."""
    if entry.get("start_wd") is None and entry.get("end_wd") is None:
        return
    scheduler, default = config.scheduler, config.optimizer.weight_decay
    starts = (entry.get("start_wd"), scheduler.start_weight_decay, default)
    ends = (entry.get("end_wd"), scheduler.end_weight_decay, default)
    start, end = (next(value for value in values if value is not None) for values in (starts, ends))
    style = scheduler.weight_decay_incr_style
    if end < start or (style == "constant" and start != end):
        rule = "must not shrink" if end < start else "must stay, with scheduler.weight_decay_incr_style=constant"
        raise ConfigError(
            f"{name}: weight decay {rule}, got start_wd={start} and end_wd={end} (where not set: those of all "
            f"groups); set both."
        )


def _check_decoupled(optimizer: OptimizerConfig) -> None:
    if optimizer.decoupled_lr is None and optimizer.decoupled_min_lr is None:
        return
    highest = optimizer.lr if optimizer.decoupled_lr is None else optimizer.decoupled_lr
    lowest = (optimizer.min_lr or 0.0) if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
    if highest is not None and highest < lowest:
        raise ConfigError(
            f"the rate of embedding and output, at most {highest} (optimizer.decoupled_lr, else optimizer.lr), must "
            f"not end above that, got {lowest} (optimizer.decoupled_min_lr, else optimizer.min_lr); set "
            f"optimizer.decoupled_min_lr."
        )
    # entries for the embedding or output of our own models; for others, only the built model knows
    entries = [str(entry["match"]) for entry in optimizer.param_groups]
    matched = {
        next((number for number, entry in enumerate(entries) if fnmatchcase(name, entry)), None) for name in OUTER_NAMES
    }
    for number in sorted(number for number in matched if number is not None):
        check_decoupled_entry(number, optimizer)


def check_decoupled_entry(number: int, optimizer: OptimizerConfig) -> None:
    """Refuse an entry of `optimizer.param_groups` that would make the decoupled learning rate of embedding or output
    matrices rise.

    Raises:
        ConfigError: naming the entry, the keys of both rates and the remedy.
    """
    entry, name = optimizer.param_groups[number], f"optimizer.param_groups[{number}]"
    highest, highest_key = _first_set(
        (entry.get("max_lr"), f"{name}.max_lr"),
        (optimizer.decoupled_lr, "optimizer.decoupled_lr"),
        (optimizer.lr, "optimizer.lr"),
    )
    lowest, lowest_key = _first_set(
        (entry.get("min_lr"), f"{name}.min_lr"),
        (optimizer.decoupled_min_lr, "optimizer.decoupled_min_lr"),
        (optimizer.min_lr or 0.0, "optimizer.min_lr"),
    )
    if highest is not None and lowest is not None and highest < lowest:
        raise ConfigError(
            f"{name} (match={entry['match']!r}) applies to embedding or output, whose rate must not end above its "
            f"largest, got {highest_key}={highest} and {lowest_key}={lowest}; set max_lr and min_lr in the entry."
        )


def _first_set(*given: tuple[float | None, str]) -> tuple[float | None, str]:
    """The first value that is set, with its key."""
    return next((pair for pair in given if pair[0] is not None), given[-1])
