"""Hugging Face's learning-rate schedules and ours for the same curve, in both directions."""

from __future__ import annotations

from typing import Any

from onstep.config.parts import ConfigContainer, OptimizerConfig, SchedulerConfig
from onstep.config.training_arguments import TrainingArguments
from onstep.errors import ConfigError

STYLES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
"""`lr_scheduler_type` and our `lr_decay_style`."""

WSD_STYLES = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`decay_type` of Hugging Face's warmup_stable_decay and our `lr_wsd_decay_style`."""

_KWARGS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}


def set_schedule(args: TrainingArguments, config: ConfigContainer, total_steps: int | None) -> None:
    """Write the schedule that the arguments name into `config.scheduler` and `config.optimizer.min_lr`.

    A warm-up that is a share of the run becomes a number of steps where `total_steps` is known.

    Raises:
        ConfigError: `lr_scheduler_kwargs` that the schedule does not have or that ours cannot follow exactly.

    Source: transformers 5.23, optimization.py; the curves of both are compared in the tests.
    """
    kwargs = _checked_kwargs(args)
    config.scheduler.lr_decay_style = STYLES[args.lr_scheduler_type]
    if args.lr_scheduler_type != "constant":
        _set_warmup(args, config.scheduler, total_steps)
    if args.lr_scheduler_type == "cosine_with_min_lr":
        config.optimizer.min_lr = _min_lr(args.learning_rate, kwargs)
    elif args.lr_scheduler_type == "warmup_stable_decay":
        _set_wsd(args, kwargs, config)


def schedule_arguments(scheduler: SchedulerConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """The schedule in Hugging Face's words, as near as they come; {} for a WSD curve that they cannot say."""
    warmup = _warmup_steps(scheduler)
    if scheduler.lr_decay_style == "WSD":
        named = _wsd_arguments(scheduler, optimizer)
    else:
        named = _plain_arguments(scheduler.lr_decay_style, optimizer.min_lr, bool(warmup))
    return {**named, "warmup_steps": warmup}


def _warmup_steps(scheduler: SchedulerConfig) -> int | float:
    """Hugging Face's `warmup_steps`: a share is below 1, so a share of 1 has no name."""
    if scheduler.lr_warmup_iters:
        return scheduler.lr_warmup_iters
    share = scheduler.lr_warmup_fraction
    return share if share is not None and share < 1 else 0


def _checked_kwargs(args: TrainingArguments) -> dict[str, Any]:
    kwargs = args.lr_scheduler_kwargs
    if isinstance(kwargs, str):
        raise ConfigError(f"TrainingArguments.lr_scheduler_kwargs={kwargs!r} must be a dictionary.")
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
        _check_inverse_sqrt(args, kwargs)
    return kwargs


def _check_inverse_sqrt(args: TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Ours has the length of the warm-up as its time scale, as Hugging Face's has by default."""
    timescale = kwargs.get("timescale")
    if args.warmup_steps == 0:
        raise ConfigError("lr_scheduler_type='inverse_sqrt' takes warmup_steps > 0: its time scale is the warm-up.")
    if timescale is not None and timescale != args.warmup_steps:
        raise ConfigError(f"lr_scheduler_kwargs timescale={timescale} must equal warmup_steps={args.warmup_steps}.")


def _set_warmup(args: TrainingArguments, scheduler: SchedulerConfig, total_steps: int | None) -> None:
    if args.warmup_steps >= 1 or total_steps is not None:
        scheduler.lr_warmup_iters = args.get_warmup_steps(total_steps or 0)
    elif args.warmup_steps > 0:
        scheduler.lr_warmup_fraction = float(args.warmup_steps)


def _min_lr(lr: float, kwargs: dict[str, Any]) -> float:
    given = [kwargs[key] for key in ("min_lr", "min_lr_rate") if kwargs.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(
            "lr_scheduler_type='cosine_with_min_lr' takes lr_scheduler_kwargs with one of min_lr, min_lr_rate."
        )
    return float(given[0]) if kwargs.get("min_lr") is not None else lr * float(given[0])


def _set_wsd(args: TrainingArguments, kwargs: dict[str, Any], config: ConfigContainer) -> None:
    steps, decay_type = kwargs.get("num_decay_steps"), kwargs.get("decay_type", "cosine")
    if not isinstance(steps, int) or steps <= 0:
        raise ConfigError(
            "lr_scheduler_type='warmup_stable_decay' takes lr_scheduler_kwargs={'num_decay_steps': <steps>}."
        )
    if decay_type not in WSD_STYLES:
        raise ConfigError(f"lr_scheduler_kwargs decay_type={decay_type!r} must be {' | '.join(WSD_STYLES)}.")
    config.scheduler.lr_wsd_decay_iters = steps
    config.scheduler.lr_wsd_decay_style = WSD_STYLES[decay_type]
    ratio = float(kwargs.get("min_lr_ratio", 0.0))
    if ratio:
        # Hugging Face's warm-up of this schedule starts at the minimum, not at 0.
        config.optimizer.min_lr = config.scheduler.lr_warmup_init = args.learning_rate * ratio


def _plain_arguments(style: str, min_lr: float | None, has_warmup: bool) -> dict[str, Any]:
    if style == "cosine" and min_lr is not None:
        return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": min_lr}}
    if style == "constant":
        return {"lr_scheduler_type": "constant_with_warmup" if has_warmup else "constant"}
    if style == "inverse-square-root":
        return {"lr_scheduler_type": "inverse_sqrt"} if has_warmup else {}
    return {"lr_scheduler_type": style}


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
