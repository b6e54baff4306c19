"""The rules of `TrainingArguments`: of single arguments, and of those that choose the best model."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from onstep.config.hf.argument import FOLLOW_METRIC, rules_of
from onstep.config.hf.optimizers import WITHOUT_BETAS, check_optimizer
from onstep.config.section import EPOCHS
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError
from onstep.files.bounded_reading import integer_from_environment


def check_arguments(args: Any) -> None:
    """Refuse (ConfigError) values of the implemented fields; the message names the field, the value and the rule."""
    for name, rule in rules_of().items():
        value = getattr(args, name)
        if rule.choices and value not in rule.choices:
            hint = nearest(value, [choice for choice in rule.choices if choice]) if isinstance(value, str) else ""
            spelled = ", ".join(repr(choice) for choice in rule.choices)
            raise ConfigError(f"TrainingArguments.{name}={value!r} is not supported; use one of {spelled}.{hint}")
        if rule.bound and value is not None and not (rule.bound.holds(value) and value != math.inf):
            raise ConfigError(f"TrainingArguments.{name}={value} must be {rule.bound.text} and finite.")
    check_optimizer(args)
    if args.max_steps <= 0 and not EPOCHS.holds(args.num_train_epochs):
        raise ConfigError(
            f"TrainingArguments.num_train_epochs={args.num_train_epochs} must be {EPOCHS.text}; for a length in steps "
            f"set max_steps > 0."
        )
    for name in ("max_steps", "max_eval_steps"):
        value = getattr(args, name)
        if value < 1 and value != -1:
            meaning = (
                "a run by num_train_epochs"
                if name == "max_steps"
                else "the whole set; no evaluation is eval_strategy='no'"
            )
            raise ConfigError(f"TrainingArguments.{name}={value} must be at least 1, or -1: {meaning}.")
    for what in ("logging", "eval", "save"):
        if getattr(args, f"{what}_strategy") == "steps":
            _check_interval(f"{what}_steps", getattr(args, f"{what}_steps"))
    if args.dataloader_prefetch_factor is not None and args.dataloader_num_workers == 0:
        raise ConfigError(
            f"TrainingArguments.dataloader_prefetch_factor={args.dataloader_prefetch_factor} requires workers that "
            f"prefetch; set dataloader_num_workers > 0, or drop it."
        )
    if args.save_on_each_node and args.parallel_sizes.ranks > integer_from_environment("LOCAL_WORLD_SIZE", 1):
        raise ConfigError(
            "TrainingArguments.save_on_each_node=True is not supported with ranks on several machines: rank 0 "
            "completes a checkpoint whose files it sees; use an output_dir on storage that all machines share."
        )
    given = {"bf16=True": "bf16"} if args.bf16 else {}
    given |= {"fp16=True": "fp16"} if args.fp16 else {}
    given |= {f"mixed_precision={args.mixed_precision!r}": args.mixed_precision} if args.mixed_precision else {}
    if len(set(given.values())) > 1:  # several arguments may say the precision, and must say the same
        first, second, *_ = given
        raise ConfigError(f"TrainingArguments: {first} contradicts {second}; drop one of them.")
    if args.bf16_full_eval and args.fp16_full_eval:
        raise ConfigError("TrainingArguments: bf16_full_eval=True contradicts fp16_full_eval=True; drop one of them.")
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise ConfigError(
            f"TrainingArguments.save_total_limit={args.save_total_limit} would keep no checkpoint; use None for all, "
            f"or at least 1: the newest one."
        )
    foreign = [name for name in args.include_for_metrics if name not in ("inputs", "loss")]
    if foreign:
        raise ConfigError(f"TrainingArguments.include_for_metrics has {foreign[0]!r}; use 'inputs' and 'loss'.")


def _check_interval(name: str, value: float | None) -> None:
    if not value:
        raise ConfigError(
            f"TrainingArguments.{name}={value} must be > 0 with the strategy 'steps'; use 'no' for never."
        )
    if value > 1 and value != int(value):
        raise ConfigError(f"TrainingArguments.{name}={value} must be an integer (steps), or below 1 (a share).")


def check_schedule_metric(args: Any) -> None:
    """Refuse (ConfigError) a schedule that follows the metric of the evaluations in a run without evaluations."""
    if args.lr_scheduler_type in FOLLOW_METRIC and not evaluates(args):
        raise ConfigError(
            f"TrainingArguments.lr_scheduler_type={args.lr_scheduler_type!r} follows the metric of the evaluations; "
            f"set eval_strategy."
        )


def check_best_model(args: Any) -> None:
    """Refuse (ConfigError) what can never give a best checkpoint: it is one that was evaluated, by one metric.

    What `config_overrides` change about checkpoints or evaluations is left to the rules of the configuration.

    Source: the rules of transformers 5.23 for load_best_model_at_end and save_strategy='best'.
    """
    if any(str(key).startswith(("checkpoint", "validation")) for key in args.config_overrides or {}):
        return
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError("TrainingArguments.save_strategy='best' requires metric_for_best_model, such as 'loss'.")
    if args.save_strategy == "best" and args.eval_strategy == "no":
        raise ConfigError("TrainingArguments.save_strategy='best' requires evaluations; set eval_strategy.")
    if args.preserve_best_model and args.best_model_metric not in ("loss", args.metric_for_best_model):
        raise ConfigError(
            f"TrainingArguments.best_model_metric={args.best_model_metric!r} contradicts "
            f"metric_for_best_model={args.metric_for_best_model!r}: both name the same setting; drop one of them."
        )
    asked = {"load_best_model_at_end": args.load_best_model_at_end, "preserve_best_model": args.preserve_best_model}
    names = [f"{name}=True" for name, value in asked.items() if value]
    if names and not _saves_meet_evaluations(args):
        shown = f"eval_strategy={args.eval_strategy!r} and save_strategy={args.save_strategy!r}"
        if args.eval_strategy == args.save_strategy == "steps":
            shown = f"eval_steps={args.eval_steps} and save_steps={args.save_steps}"
        raise ConfigError(
            f"TrainingArguments.{' and '.join(names)} requires checkpoints of evaluated steps, got {shown}; use the "
            f"same strategy for both, save_steps a multiple of eval_steps, save_strategy='best', or eval_on_save=True."
        )


def evaluates(args: Any) -> bool:
    """Whether arguments ask for evaluations during training; True for arguments of an unknown kind."""
    own = any(str(key).startswith("validation") for key in getattr(args, "config_overrides", None) or {})
    return own or bool(getattr(args, "eval_on_save", False)) or getattr(args, "eval_strategy", "steps") != "no"


_OF_WORKERS = "dataloader_persistent_workers dataloader_multiprocessing_context"
_GROUPS = ("group_by_length", "batch_rebalance")


def idle_arguments(args: Any) -> list[tuple[str, list[str]]]:
    """The arguments that have no effect in combination with the others, each with what it requires."""
    follows = args.lr_scheduler_type in ("constant", *FOLLOW_METRIC)
    rows = (
        (args.eval_strategy != "no", "an eval_strategy", "eval_steps eval_delay"),
        (args.max_steps < 1, "max_steps=-1, which else is the length", "num_train_epochs"),
        (not follows, "lr_scheduler_type='constant_with_warmup'", "warmup_steps"),
        (args.optim not in WITHOUT_BETAS, "an optim with betas", "adam_beta1 adam_beta2 adam_epsilon"),
        (args.preserve_best_model, "preserve_best_model=True", "preserve_n_best best_model_metric"),
        (args.activation_checkpointing, "activation_checkpointing=True", "activation_checkpointing_kwargs"),
        (args.use_liger_kernel, "use_liger_kernel=True", "liger_kernel_config"),
        (args.push_to_hub, "push_to_hub=True", "hub_strategy hub_always_push"),
        (args.dataloader_num_workers > 0, "dataloader_num_workers > 0", _OF_WORKERS),
        (args.train_sampling_strategy in _GROUPS, "a train_sampling_strategy that groups", "length_column_name"),
    )
    known, found = args.__dataclass_fields__, []
    for acts, need, names in rows:
        changed = [name for name in names.split() if getattr(args, name) != known[name].default]
        if changed and not acts:
            found.append((need, [f"{name}={getattr(args, name)!r}" for name in changed]))
    return found


def _saves_meet_evaluations(args: Any) -> bool:
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
