"""Learning-rate schedules in Hugging Face's words, to a configuration and back."""

from __future__ import annotations

from typing import Any

from onstep.config.container import ConfigContainer
from onstep.config.hf.argument import STYLES
from onstep.config.hf.arguments import TrainingArguments
from onstep.config.sections.optimizer import OptimizerConfig, SchedulerConfig
from onstep.errors import ConfigError

WSD_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`decay_type` of Hugging Face's warmup_stable_decay and our `lr_wsd_decay_style`."""

_WITH_MINIMUM = ("num_cycles", "min_lr", "min_lr_rate")
_OF_PLATEAU = ("mode", "factor", "patience", "threshold", "threshold_mode", "cooldown", "min_lr", "eps")
_KWARGS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": _WITH_MINIMUM,
    "cosine_warmup_with_min_lr": (*_WITH_MINIMUM, "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
    "reduce_lr_on_plateau": _OF_PLATEAU,
    "greedy": (*_OF_PLATEAU, "warmup", "max_lr", "verbose", "smooth", "window_size", "reset_start"),
}
"""The keywords of each schedule in transformers 5.23, but for `last_epoch`, which a resumed run restores."""


def check_schedule(args: Any) -> None:
    """Refuse (ConfigError) keywords that the schedule does not read, and a lack of those that it requires."""
    name, kwargs = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}
    for key in kwargs:
        if key not in _KWARGS.get(name, ()):
            allowed = ", ".join(_KWARGS.get(name, ())) or "nothing"
            raise ConfigError(
                f"lr_scheduler_kwargs of {name!r} has {key!r}, which it does not read; it reads {allowed}."
            )
    given = [key for key in ("min_lr", "min_lr_rate") if kwargs.get(key) is not None]
    if "min_lr_rate" in _KWARGS.get(name, ()) and len(given) != 1:
        raise ConfigError(f"lr_scheduler_type={name!r} requires lr_scheduler_kwargs with one of min_lr, min_lr_rate.")
    steps = kwargs.get("num_decay_steps")
    if name == "warmup_stable_decay" and not (isinstance(steps, int) and steps > 0):
        raise ConfigError(
            "lr_scheduler_type='warmup_stable_decay' requires lr_scheduler_kwargs={'num_decay_steps': <steps>}."
        )
    if kwargs.get("decay_type", "cosine") not in WSD_STYLES:
        raise ConfigError(f"lr_scheduler_kwargs decay_type={kwargs['decay_type']!r} must be {' | '.join(WSD_STYLES)}.")


def is_native(args: Any, total_steps: int | None, *, scales_groups: bool = False) -> bool:
    """Whether a schedule of the configuration has the curve of the one that the arguments name.

    Args:
        total_steps: steps of the run; None if they are not known yet.
        scales_groups: whether each group has a learning rate of its own, of which a smallest rate is then a share.
    """
    name, kwargs = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}
    warmup = args.get_warmup_steps(total_steps or 0) if total_steps or args.warmup_steps >= 1 else None
    if name not in STYLES or kwargs.get("num_cycles", 0.5) != 0.5:
        return False
    if name != "constant" and total_steps and warmup and warmup >= total_steps:
        return False
    if name == "inverse_sqrt":
        return args.warmup_steps > 0 and kwargs.get("timescale") in (None, warmup)
    if name == "warmup_stable_decay":
        if kwargs.get("warmup_type", "linear") != "linear" or kwargs.get("num_stable_steps") is not None:
            return False
        has_room = total_steps is None or (warmup or 0) + kwargs["num_decay_steps"] <= total_steps
        return has_room and not (scales_groups and kwargs.get("min_lr_ratio"))
    return not (scales_groups and name == "cosine_with_min_lr")


def is_expressed(scheduler: SchedulerConfig, args: Any, total_steps: int, *, scales_groups: bool) -> bool:
    """Whether the configured schedule is the one that the arguments name; see `is_native`."""
    is_same = STYLES.get(args.lr_scheduler_type) == scheduler.lr_decay_style
    return is_same and is_native(args, total_steps, scales_groups=scales_groups)


def set_schedule(args: TrainingArguments, config: ConfigContainer, total_steps: int | None) -> None:
    """A schedule that only transformers has is 'constant' in the configuration.

    A warm-up that is a share of the run becomes a number of steps where `total_steps` is known.

    Source: transformers 5.23, optimization.py; the curves of both are compared in the tests.
    """
    check_schedule(args)
    name, kwargs = args.lr_scheduler_type, args.lr_scheduler_kwargs or {}
    assert isinstance(kwargs, dict)
    if not is_native(args, total_steps):
        config.scheduler.lr_decay_style = "constant"
        return
    config.scheduler.lr_decay_style = STYLES[name]
    if name != "constant":
        if args.warmup_steps >= 1 or total_steps is not None:
            config.scheduler.lr_warmup_iters = args.get_warmup_steps(total_steps or 0)
        elif args.warmup_steps > 0:
            config.scheduler.lr_warmup_fraction = float(args.warmup_steps)
    if name == "cosine_with_min_lr":
        rate = kwargs.get("min_lr")
        config.optimizer.min_lr = float(args.learning_rate * kwargs["min_lr_rate"] if rate is None else rate)
    elif name == "warmup_stable_decay":
        _set_wsd(args, kwargs, config)


def named_schedule(scheduler: SchedulerConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """The closest schedule in Hugging Face's words; {} for a WSD curve that they cannot express."""
    share = scheduler.lr_warmup_fraction
    warmup: int | float = scheduler.lr_warmup_iters
    if not warmup and share is not None and share < 1:  # Hugging Face's `warmup_steps` below 1 is a share
        warmup = share
    style, min_lr = scheduler.lr_decay_style, optimizer.min_lr
    named: dict[str, Any] = {"lr_scheduler_type": style}
    if style == "WSD":
        named = _wsd_arguments(scheduler, optimizer)
    elif style == "cosine" and min_lr is not None:
        named = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": min_lr}}
    elif style == "constant":
        named = {"lr_scheduler_type": "constant_with_warmup" if warmup else "constant"}
    elif style == "inverse-square-root":
        named = {"lr_scheduler_type": "inverse_sqrt"} if warmup else {}
    return {**named, "warmup_steps": warmup}


def _set_wsd(args: TrainingArguments, kwargs: dict[str, Any], config: ConfigContainer) -> None:
    config.scheduler.lr_wsd_decay_iters = kwargs["num_decay_steps"]
    config.scheduler.lr_wsd_decay_style = WSD_STYLES[kwargs.get("decay_type", "cosine")]
    ratio = float(kwargs.get("min_lr_ratio", 0.0))
    if ratio:
        # Hugging Face's warm-up of this schedule starts at the minimum, not at 0.
        config.optimizer.min_lr = config.scheduler.lr_warmup_init = args.learning_rate * ratio


def _wsd_arguments(scheduler: SchedulerConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in WSD_STYLES.items()}
    if scheduler.lr_wsd_decay_iters is None or scheduler.lr_wsd_decay_style not in names:
        return {}
    kwargs: dict[str, Any] = {
        "num_decay_steps": scheduler.lr_wsd_decay_iters,
        "decay_type": names[scheduler.lr_wsd_decay_style],
    }
    if optimizer.min_lr and optimizer.lr:
        kwargs["min_lr_ratio"] = optimizer.min_lr / optimizer.lr
    return {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": kwargs}
