"""Computes learning rate and weight decay from the number of samples trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WD_INCR_STYLES = ("constant", "linear", "cosine")


def check_choice(name: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Raise a ConfigError for a `value` that is not one of the `choices`."""
    if value not in choices:
        hint = nearest(value, list(choices)) if value else ""
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}.{hint}")


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """The shape of a learning-rate schedule; counts are in samples, names are Megatron-Core's.

    Raises:
        ConfigError: if a value is out of range, a style is unknown, or WSD has no decay length.
    """

    init_lr: float
    """Initial learning rate of the warm-up."""
    max_lr: float
    """The peak learning rate."""
    min_lr: float
    """The learning rate at the end of the decay."""
    lr_warmup_steps: float
    """Samples of the warm-up."""
    lr_decay_steps: float
    """Samples after which the decay, including the warm-up, has reached `min_lr`."""
    lr_decay_style: str
    """The shape of the decay: `constant`, `linear`, `cosine`, `inverse-square-root` or `WSD`."""
    wsd_decay_steps: float | None = None
    """Length in samples of the last phase of WSD (warm-up, stable, decay)."""
    lr_wsd_decay_style: str | None = None
    """The shape of the last phase of `WSD`."""

    def __post_init__(self) -> None:
        check_choice("lr_decay_style", self.lr_decay_style, LR_DECAY_STYLES)
        if self.min_lr < 0:
            raise ConfigError(f"min_lr must be >= 0, got {self.min_lr}; pass 0 to decay to nothing")
        if self.max_lr < self.min_lr:
            raise ConfigError(f"max_lr must be >= min_lr ({self.min_lr}), got {self.max_lr}; lower min_lr")
        if self.init_lr > self.max_lr:
            raise ConfigError(f"init_lr must be <= max_lr ({self.max_lr}), got {self.init_lr}; lower lr_warmup_init")
        if self.lr_decay_steps <= 0:
            raise ConfigError(f"lr_decay_steps must be > 0 samples, got {self.lr_decay_steps}; train at least one step")
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ConfigError(
                f"lr_warmup_steps must be >= 0 and < lr_decay_steps ({self.lr_decay_steps}), "
                f"got {self.lr_warmup_steps}; shorten the warm-up or lengthen the decay"
            )
        if self.lr_decay_style != "WSD":
            return
        check_choice("lr_wsd_decay_style", self.lr_wsd_decay_style, WSD_DECAY_STYLES)
        longest = self.lr_decay_steps - self.lr_warmup_steps
        if self.wsd_decay_steps is None or not 0 < self.wsd_decay_steps <= longest:
            raise ConfigError(
                f"wsd_decay_steps must be > 0 and at most the {longest} samples after the warm-up, "
                f"got {self.wsd_decay_steps}; set lr_wsd_decay_iters (or lr_wsd_decay_samples)"
            )


@dataclass(frozen=True, slots=True)
class WdSchedule:
    """The growth of the weight decay; the count is in samples, names are Megatron-Core's.

    Raises:
        ConfigError: if a value is out of range, a style is unknown, or a constant value would change.
    """

    start_wd: float
    """The weight decay at the start."""
    end_wd: float
    """The weight decay at the end."""
    wd_incr_steps: float
    """Samples in which the weight decay goes from one to the other."""
    wd_incr_style: str
    """The shape of that: `constant`, `linear` or `cosine`."""

    def __post_init__(self) -> None:
        check_choice("wd_incr_style", self.wd_incr_style, WD_INCR_STYLES)
        if self.start_wd < 0 or self.end_wd < self.start_wd:
            raise ConfigError(
                f"weight decay must start at >= 0 and not shrink, got {self.start_wd} to {self.end_wd}; "
                "swap start and end, or make them equal"
            )
        if self.wd_incr_style == "constant":
            if self.start_wd != self.end_wd:
                raise ConfigError(
                    f"a constant weight decay must end where it starts, got {self.start_wd} to {self.end_wd}; "
                    "set the style to linear or cosine"
                )
        elif self.wd_incr_steps <= 0:
            raise ConfigError(f"wd_incr_steps must be > 0 samples for a growing weight decay, got {self.wd_incr_steps}")


def learning_rate(num_steps: float, schedule: LrSchedule) -> float:
    """The learning rate after `num_steps` samples.

    Args:
        schedule: the shape of the schedule.

    Source: Megatron-Core's OptimizerParamScheduler; WSD: MiniCPM (arXiv:2404.06395), section 4.
    """
    warmup = schedule.lr_warmup_steps
    max_lr = schedule.max_lr
    if 0 < warmup >= num_steps:
        return schedule.init_lr + (max_lr - schedule.init_lr) * num_steps / warmup
    style = schedule.lr_decay_style
    if style == "constant":
        return max_lr
    min_lr = schedule.min_lr
    if num_steps > schedule.lr_decay_steps:
        return min_lr
    if style == "inverse-square-root":
        return max(min_lr, max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(num_steps, 1)))
    if style == "WSD":
        return min_lr + (max_lr - min_lr) * _wsd_share(num_steps, schedule)
    ratio = (num_steps - warmup) / (schedule.lr_decay_steps - warmup)
    share = 1.0 - ratio if style == "linear" else _cosine(ratio)
    return min_lr + (max_lr - min_lr) * share


def weight_decay(num_steps: float, schedule: WdSchedule) -> float:
    """The weight decay after `num_steps` samples, before a group's `wd_mult`.

    Args:
        schedule: the shape of the schedule.
    """
    if schedule.wd_incr_style == "constant" or num_steps > schedule.wd_incr_steps:
        return schedule.end_wd
    ratio = num_steps / schedule.wd_incr_steps
    share = ratio if schedule.wd_incr_style == "linear" else _cosine(1.0 - ratio)
    return schedule.start_wd + (schedule.end_wd - schedule.start_wd) * share


def _cosine(ratio: float) -> float:
    """Half a cosine wave from 1 (ratio 0) to 0 (ratio 1)."""
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


_WSD_SHARES: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: 1.0 - ratio,
    "cosine": _cosine,
    "exponential": lambda ratio: float(2.0 * 0.5**ratio - 1.0),
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}


def _wsd_share(num_steps: float, schedule: LrSchedule) -> float:
    """1 while stable, then from 1 to 0 over the last `wsd_decay_steps` samples."""
    assert schedule.wsd_decay_steps is not None
    assert schedule.lr_wsd_decay_style is not None
    decayed = num_steps - (schedule.lr_decay_steps - schedule.wsd_decay_steps)
    if decayed <= 0:
        return 1.0
    return _WSD_SHARES[schedule.lr_wsd_decay_style](decayed / schedule.wsd_decay_steps)
