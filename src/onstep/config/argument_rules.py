"""The rules of single `TrainingArguments` fields, by name."""

from __future__ import annotations

import math
from typing import Any, Protocol

from onstep.config.part import nearest
from onstep.errors import ConfigError

LOG_LEVELS = {"passive": None, "detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Hugging Face's names of log levels; 'passive' leaves the level alone."""

OPTIMIZERS = {"adamw_torch_fused": "adam", "adamw_torch": "adam", "sgd": "sgd"}
"""`optim` and the optimizer that it means."""

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "warmup_stable_decay",
)

CHOICES: dict[str, tuple[Any, ...]] = {
    "lr_scheduler_type": SCHEDULES,
    "optim": tuple(OPTIMIZERS),
    "logging_strategy": ("no", "steps", "epoch"),
    "eval_strategy": ("no", "steps", "epoch"),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "train_sampling_strategy": ("random", "sequential"),
    "ddp_backend": (None, "gloo", "nccl"),
    "log_level": tuple(LOG_LEVELS),
    "mixed_precision": (None, "no", "bf16"),
}

POSITIVE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "adam_epsilon",
    "eval_accumulation_steps",
    "ddp_timeout",
)
NOT_NEGATIVE = (
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "logging_steps",
    "eval_steps",
    "eval_delay",
    "save_steps",
    "dataloader_num_workers",
    "seed",
)

RENAMED = {
    "warmup_ratio": "warmup_steps: below 1 it is a share of the run",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "group_by_length": "train_sampling_strategy ('group_by_length' is not supported yet)",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "tpu_num_cores": "torchrun to start more than one process",
    "half_precision_backend": "bf16",
}
"""Names of earlier transformers that 5.23 no longer has, and what to use."""


class Values(Protocol):
    """Anything with the fields of `TrainingArguments`."""

    def __getattribute__(self, name: str, /) -> Any: ...


def check_arguments(args: Values) -> None:
    """Check the implemented fields.

    Raises:
        ConfigError: naming the field, the value and the rule.
    """
    for name, choices in CHOICES.items():
        if getattr(args, name) not in choices:
            raise _not_supported(name, getattr(args, name), choices)
    for name in POSITIVE + NOT_NEGATIVE:
        value = getattr(args, name)
        least = "> 0" if name in POSITIVE else ">= 0"
        if value is not None and not (0 <= value < math.inf and (value > 0 or name in NOT_NEGATIVE)):
            raise ConfigError(f"TrainingArguments.{name}={value} must be {least} and finite.")
    _check_length(args)
    _check_interval("logging_steps", args.logging_strategy, args.logging_steps)
    _check_interval("eval_steps", args.eval_strategy, args.eval_steps)
    if args.bf16 and args.mixed_precision == "no":
        raise ConfigError("TrainingArguments: bf16=True contradicts mixed_precision='no'; drop one of them.")
    if isinstance(args.resume_from_checkpoint, str):
        raise ConfigError(
            f"TrainingArguments.resume_from_checkpoint={args.resume_from_checkpoint!r}: checkpoints come with a later "
            "version; leave it out."
        )
    foreign = [name for name in args.include_for_metrics if name not in ("inputs", "loss")]
    if foreign:
        raise ConfigError(f"TrainingArguments.include_for_metrics has {foreign[0]!r}; it may hold 'inputs' and 'loss'.")


def _not_supported(name: str, value: Any, choices: tuple[Any, ...]) -> ConfigError:
    known = [choice for choice in choices if choice is not None]
    hint = nearest(value, known) if isinstance(value, str) else ""
    spelled = ", ".join(repr(choice) for choice in choices)
    return ConfigError(f"TrainingArguments.{name}={value!r} is not supported; use one of {spelled}.{hint}")


def _check_length(args: Values) -> None:
    epochs = args.num_train_epochs
    if args.max_steps <= 0 and not 0 < epochs < math.inf:
        raise ConfigError(
            f"TrainingArguments.num_train_epochs={epochs} must be > 0; for a length in steps set max_steps > 0."
        )


def _check_interval(name: str, strategy: str, value: float | None) -> None:
    if strategy != "steps":
        return
    if not value:
        raise ConfigError(
            f"TrainingArguments.{name}={value} must be > 0 with the strategy 'steps'; use 'no' for never."
        )
    if value > 1 and value != int(value):
        raise ConfigError(f"TrainingArguments.{name}={value} must be a whole number of steps, or a share below 1.")
