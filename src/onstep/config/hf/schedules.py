"""Learning-rate schedules in Hugging Face's words, to a configuration and back."""

from __future__ import annotations

from typing import Any

from onstep.config.container import ConfigContainer
from onstep.config.hf.argument import STYLES
from onstep.config.hf.arguments import TrainingArguments
from onstep.config.sections import OptimizerConfig, SchedulerConfig
from onstep.errors import ConfigError

WSD_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`decay_type` of Hugging Face's warmup_stable_decay and our `lr_wsd_decay_style`."""

_KWARGS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}


def set_schedule(args: TrainingArguments, config: ConfigContainer, total_steps: int | None) -> None:
    """A warm-up that is a share of the run becomes a number of steps where `total_steps` is known.

    Source: transformers 5.23, optimization.py; the curves of both are compared in the tests.
    """
    kwargs = _checked_kwargs(args)
    config.scheduler.lr_decay_style = STYLES[args.lr_scheduler_type]
    if args.lr_scheduler_type != "constant":
        if args.warmup_steps >= 1 or total_steps is not None:
            config.scheduler.lr_warmup_iters = args.get_warmup_steps(total_steps or 0)
        elif args.warmup_steps > 0:
            config.scheduler.lr_warmup_fraction = float(args.warmup_steps)
    if args.lr_scheduler_type == "cosine_with_min_lr":
        config.optimizer.min_lr = _min_lr(args.learning_rate, kwargs)
    elif args.lr_scheduler_type == "warmup_stable_decay":
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


def _checked_kwargs(args: TrainingArguments) -> dict[str, Any]:
    kwargs = args.lr_scheduler_kwargs
    assert not isinstance(kwargs, str)
    kwargs = kwargs or {}
    name = args.lr_scheduler_type
    for key in kwargs:
        if key not in _KWARGS.get(name, ()):
            allowed = ", ".join(_KWARGS.get(name, ())) or "nothing"
            raise ConfigError(f"lr_scheduler_kwargs of {name!r} has {key!r}; supported here: {allowed}.")
    if kwargs.get("num_cycles", 0.5) != 0.5:
        raise ConfigError(f"lr_scheduler_kwargs num_cycles={kwargs['num_cycles']} must be 0.5: one half of a cosine.")
    if kwargs.get("warmup_type", "linear") != "linear":
        raise ConfigError(f"lr_scheduler_kwargs warmup_type={kwargs['warmup_type']!r} must be 'linear'.")
    if name == "inverse_sqrt":
        timescale = kwargs.get("timescale")
        if args.warmup_steps == 0:
            raise ConfigError("lr_scheduler_type='inverse_sqrt' requires warmup_steps > 0, which is its time scale.")
        if timescale is not None and timescale != args.warmup_steps:
            raise ConfigError(f"lr_scheduler_kwargs timescale={timescale} must equal warmup_steps={args.warmup_steps}.")
    return kwargs


def _min_lr(lr: float, kwargs: dict[str, Any]) -> float:
    given = [kwargs[key] for key in ("min_lr", "min_lr_rate") if kwargs.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(
            "lr_scheduler_type='cosine_with_min_lr' requires lr_scheduler_kwargs with one of min_lr, min_lr_rate."
        )
    return float(given[0]) if kwargs.get("min_lr") is not None else lr * float(given[0])


def _set_wsd(args: TrainingArguments, kwargs: dict[str, Any], config: ConfigContainer) -> None:
    steps, decay_type = kwargs.get("num_decay_steps"), kwargs.get("decay_type", "cosine")
    if not isinstance(steps, int) or steps <= 0:
        raise ConfigError(
            "lr_scheduler_type='warmup_stable_decay' requires lr_scheduler_kwargs={'num_decay_steps': <steps>}."
        )
    if decay_type not in WSD_STYLES:
        raise ConfigError(f"lr_scheduler_kwargs decay_type={decay_type!r} must be {' | '.join(WSD_STYLES)}.")
    config.scheduler.lr_wsd_decay_iters = steps
    config.scheduler.lr_wsd_decay_style = WSD_STYLES[decay_type]
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
