"""The rules of values about optimizers and schedules that only mean something together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from onstep.config.optimizer_config import OptimizerConfig
from onstep.config.part import nearest
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

GROUP_SETTINGS = ("lr_mult", "wd_mult", "max_lr", "min_lr", "start_wd", "end_wd")
"""What an entry of `optimizer.param_groups` sets, beside `match`."""

OUTER_NAMES = ("embedding.weight", "position_embedding.weight", "output.weight")
"""Names of the embedding and output matrices of Onstep's own models, before any is built."""

MOST_NS_STEPS = 99
"""Newton-Schulz iterations that torch's Muon takes."""


def check_optimizer(config: ConfigContainer) -> None:
    """Refuse settings of the optimizer and its schedule that cannot work together.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    _check_muon(config.optimizer)
    _check_decoupled(config.optimizer)
    _check_warmup_init(config)
    check_param_groups(config.optimizer)
    _check_decoupled_entries(config.optimizer)
    for number, entry in enumerate(config.optimizer.param_groups):
        _check_weight_decay(f"optimizer.param_groups[{number}]", entry, config)
    scheduler = config.scheduler
    if scheduler.override_opt_param_scheduler and scheduler.use_checkpoint_opt_param_scheduler:
        raise ConfigError(
            "scheduler.override_opt_param_scheduler and scheduler.use_checkpoint_opt_param_scheduler are both true, "
            "but a checkpoint's schedule can only be kept or replaced; set one of them to false."
        )


def check_param_groups(optimizer: OptimizerConfig) -> None:
    """Refuse entries of `optimizer.param_groups` that no parameters could follow.

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
            _check_number(f"{name}.{key}", value)
        _check_rates(name, given, optimizer)


def check_decoupled_entry(number: int, optimizer: OptimizerConfig) -> None:
    """Refuse an entry of `optimizer.param_groups`, of embedding or output matrices with a rate of their own, by which
    that rate would rise.

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
            f"{name} (match={entry['match']!r}) holds for embedding or output, whose rate must not end above its "
            f"largest, got {highest_key}={highest} and {lowest_key}={lowest}; set max_lr and min_lr in the entry."
        )


def _first_set(*given: tuple[float | None, str]) -> tuple[float | None, str]:
    """The first value that is set, with its key."""
    return next((pair for pair in given if pair[0] is not None), given[-1])


def _check_decoupled_entries(optimizer: OptimizerConfig) -> None:
    """Entries that hold for the embedding or output of our own models; of others only the built model tells."""
    if optimizer.decoupled_lr is None and optimizer.decoupled_min_lr is None:
        return
    entries = [str(entry["match"]) for entry in optimizer.param_groups]
    matched = {
        next((number for number, entry in enumerate(entries) if fnmatchcase(name, entry)), None) for name in OUTER_NAMES
    }
    for number in sorted(number for number in matched if number is not None):
        check_decoupled_entry(number, optimizer)


def _check_warmup_init(config: ConfigContainer) -> None:
    start, highest = config.scheduler.lr_warmup_init, config.optimizer.lr
    if highest is not None and start > highest:
        raise ConfigError(
            f"scheduler.lr_warmup_init={start} must be at most optimizer.lr={highest}: a warm-up rises; lower it."
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


def _check_number(key: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ConfigError(f"{key}={value!r} must be a finite number >= 0.")


def _check_rates(name: str, given: Mapping[str, float], optimizer: OptimizerConfig) -> None:
    highest = given.get("max_lr", optimizer.lr)
    lowest = given.get("min_lr", optimizer.min_lr or 0.0)
    if ("max_lr" in given or "min_lr" in given) and highest is not None and highest < lowest:
        raise ConfigError(
            f"{name}: max_lr={highest} must be at least min_lr={lowest} (where not set: optimizer.lr and "
            f"optimizer.min_lr); set both."
        )


def _check_weight_decay(name: str, entry: Mapping[str, Any], config: ConfigContainer) -> None:
    """An entry's own weight decay keeps to the style that all groups have."""
    if entry.get("start_wd") is None and entry.get("end_wd") is None:
        return
    optimizer, scheduler = config.optimizer, config.scheduler
    start, end = (
        optimizer.weight_decay if default is None else default
        for default in (scheduler.start_weight_decay, scheduler.end_weight_decay)
    )
    start = start if entry.get("start_wd") is None else entry["start_wd"]
    end = end if entry.get("end_wd") is None else entry["end_wd"]
    style = scheduler.weight_decay_incr_style
    if end < start or (style == "constant" and start != end):
        rule = "must not shrink" if end < start else "must stay, with scheduler.weight_decay_incr_style=constant"
        raise ConfigError(
            f"{name}: weight decay {rule}, got start_wd={start} and end_wd={end} (where not set: those of all "
            f"groups); set both."
        )


def _check_muon(optimizer: OptimizerConfig) -> None:
    if optimizer.muon_num_ns_steps > MOST_NS_STEPS:
        raise ConfigError(
            f"optimizer.muon_num_ns_steps={optimizer.muon_num_ns_steps} must be at most {MOST_NS_STEPS}; 5 is usual."
        )
    if optimizer.optimizer == "muon":
        return
    defaults = OptimizerConfig()
    for name in optimizer.field_names():
        value, default = getattr(optimizer, name), getattr(defaults, name)
        if name.startswith("muon_") and value != default:
            raise ConfigError(
                f"optimizer.{name}={value} means nothing for optimizer.optimizer={optimizer.optimizer}; set "
                f"optimizer.optimizer=muon, or leave it at {default}."
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
