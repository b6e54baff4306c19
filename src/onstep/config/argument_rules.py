"""The rules of single `TrainingArguments` fields, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, Protocol, TypeVar

from onstep.config.part import nearest
from onstep.errors import ConfigError

T = TypeVar("T")

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

RENAMED = {
    "warmup_ratio": "warmup_steps: below 1 it is a share of the run",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "group_by_length": "train_sampling_strategy ('group_by_length' is not supported yet)",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "tpu_num_cores": "torchrun to start more than one process",
    "half_precision_backend": "bf16 or fp16",
}
"""Names of earlier transformers that 5.23 no longer has, and what to use."""


@dataclass(frozen=True)
class Argument:
    """What an argument allows, and what it means in a configuration."""

    key: str | None
    bound: Literal["> 0", ">= 0"] | None
    choices: tuple[Any, ...]
    may_be_none: bool


def argument(
    default: T,
    key: str | None = None,
    *,
    bound: Literal["> 0", ">= 0"] | None = None,
    choices: tuple[Any, ...] = (),
    may_be_none: bool = False,
) -> T:
    """A field of `TrainingArguments`.

    Args:
        default: Hugging Face's.
        key: the value of the configuration that is the same.
        bound: what a number must be.
        choices: all values that there are.
        may_be_none: None in the configuration is None here; else it has no name here.
    """
    return field(default=default, metadata={"argument": Argument(key, bound, choices, may_be_none)})


def rules_of(args: Any) -> dict[str, Argument]:
    """The arguments that say something of their values, by name."""
    return {one.name: one.metadata["argument"] for one in fields(args) if "argument" in one.metadata}


class Values(Protocol):
    """Anything with the fields of `TrainingArguments`."""

    def __getattribute__(self, name: str, /) -> Any: ...


def check_arguments(args: Values) -> None:
    """Check the implemented fields.

    Raises:
        ConfigError: naming the field, the value and the rule.
    """
    rules = rules_of(args)
    for name, rule in rules.items():
        if rule.choices and getattr(args, name) not in rule.choices:
            raise _not_supported(name, getattr(args, name), rule.choices)
    for name, rule in rules.items():
        value = getattr(args, name)
        if rule.bound and value is not None and not (0 <= value < math.inf and (value > 0 or rule.bound == ">= 0")):
            raise ConfigError(f"TrainingArguments.{name}={value} must be {rule.bound} and finite.")
    _check_length(args)
    _check_interval("logging_steps", args.logging_strategy, args.logging_steps)
    _check_interval("eval_steps", args.eval_strategy, args.eval_steps)
    _check_interval("save_steps", args.save_strategy, args.save_steps)
    _check_precision(args)
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise ConfigError(
            f"TrainingArguments.save_total_limit={args.save_total_limit} would keep no checkpoint; use None for all, "
            f"or at least 1: the newest one."
        )
    foreign = [name for name in args.include_for_metrics if name not in ("inputs", "loss")]
    if foreign:
        raise ConfigError(f"TrainingArguments.include_for_metrics has {foreign[0]!r}; it may hold 'inputs' and 'loss'.")


def check_best_model(args: Values) -> None:
    """Refuse what can never give a best checkpoint: it is one that was evaluated, by one metric.

    What `config_overrides` change about checkpoints or evaluations is left to the rules of the configuration.

    Raises:
        ConfigError: naming the fields, the rule and the remedy.

    Source: the rules of transformers 5.23 for load_best_model_at_end and save_strategy='best'.
    """
    if any(str(key).startswith(("checkpoint", "validation")) for key in args.config_overrides or {}):
        return
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError("TrainingArguments.save_strategy='best' takes metric_for_best_model, such as 'loss'.")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ConfigError("TrainingArguments.save_strategy='best' takes evaluations; set eval_strategy.")
    if args.preserve_best_model and args.best_model_metric not in ("loss", args.metric_for_best_model):
        raise ConfigError(
            f"TrainingArguments.best_model_metric={args.best_model_metric!r} contradicts "
            f"metric_for_best_model={args.metric_for_best_model!r}: one metric chooses; drop one of them."
        )
    asked = {"load_best_model_at_end": args.load_best_model_at_end, "preserve_best_model": args.preserve_best_model}
    names = [f"{name}=True" for name, value in asked.items() if value]
    if names and not _saves_meet_evaluations(args):
        shown = f"eval_strategy={args.eval_strategy!r} and save_strategy={args.save_strategy!r}"
        if args.eval_strategy == args.save_strategy == "steps":
            shown = f"eval_steps={args.eval_steps} and save_steps={args.save_steps}"
        raise ConfigError(
            f"TrainingArguments.{' and '.join(names)} takes checkpoints of evaluated steps, got {shown}; use the same "
            f"strategy for both, save_steps a multiple of eval_steps, or save_strategy='best', or eval_on_save=True."
        )


def _saves_meet_evaluations(args: Values) -> bool:
    if args.save_strategy == "best":
        return True
    if args.eval_on_save:
        return bool(args.save_strategy != "no")
    if args.save_strategy != args.eval_strategy or args.save_strategy == "no":
        return False
    if args.save_strategy == "epoch":
        return True
    if (args.save_steps < 1) != (args.eval_steps < 1):
        return False  # a share of the run and a number of steps need not meet
    return bool(Fraction(str(args.save_steps)) % Fraction(str(args.eval_steps)) == 0)


def _not_supported(name: str, value: Any, choices: tuple[Any, ...]) -> ConfigError:
    known = [choice for choice in choices if choice is not None]
    hint = nearest(value, known) if isinstance(value, str) else ""
    spelled = ", ".join(repr(choice) for choice in choices)
    return ConfigError(f"TrainingArguments.{name}={value!r} is not supported; use one of {spelled}.{hint}")


def _check_precision(args: Values) -> None:
    """Several arguments may say the precision; they must say the same."""
    given = {"bf16=True": "bf16"} if args.bf16 else {}
    given |= {"fp16=True": "fp16"} if args.fp16 else {}
    given |= {f"mixed_precision={args.mixed_precision!r}": args.mixed_precision} if args.mixed_precision else {}
    if len(set(given.values())) > 1:
        first, second, *_ = given
        raise ConfigError(f"TrainingArguments: {first} contradicts {second}; drop one of them.")


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
