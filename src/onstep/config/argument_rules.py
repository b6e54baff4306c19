"""What a field of `TrainingArguments` allows and means, by name, and the fields that have no effect."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, Literal, TypeVar

from onstep.config.part import BOUNDS, nearest
from onstep.errors import ConfigError

T = TypeVar("T")

LOG_LEVELS = {"passive": None, "detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Hugging Face's names of log levels; 'passive' leaves the level alone."""

OPTIMIZERS = {"adamw_torch_fused": "adam", "adamw_torch": "adam", "sgd": "sgd"}
"""`optim` and the optimizer that it means."""

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
    """A field of `TrainingArguments` with Hugging Face's default; `key` is the same value in the configuration.

    None in the configuration is None here where it `may_be_none`; else it has no name here.
    """
    return field(default=default, metadata={"argument": Argument(key, bound, choices, may_be_none)})


def rules_of(args: Any) -> dict[str, Argument]:
    """The arguments that say something of their values, by name."""
    return {one.name: one.metadata["argument"] for one in fields(args) if "argument" in one.metadata}


def check_arguments(args: Any) -> None:
    """Refuse (ConfigError) values of the implemented fields; the message names the field, the value and the rule."""
    for name, rule in rules_of(args).items():
        value = getattr(args, name)
        if rule.choices and value not in rule.choices:
            hint = nearest(value, [choice for choice in rule.choices if choice]) if isinstance(value, str) else ""
            spelled = ", ".join(repr(choice) for choice in rule.choices)
            raise ConfigError(f"TrainingArguments.{name}={value!r} is not supported; use one of {spelled}.{hint}")
        if rule.bound and value is not None and not (BOUNDS[rule.bound].holds(value) and value < math.inf):
            raise ConfigError(f"TrainingArguments.{name}={value} must be {rule.bound} and finite.")
    if args.max_steps <= 0 and not 0 < args.num_train_epochs < math.inf:
        raise ConfigError(
            f"TrainingArguments.num_train_epochs={args.num_train_epochs} must be > 0; for a length in steps set "
            f"max_steps > 0."
        )
    for what in ("logging", "eval", "save"):
        if getattr(args, f"{what}_strategy") == "steps":
            _check_interval(f"{what}_steps", getattr(args, f"{what}_steps"))
    given = {"bf16=True": "bf16"} if args.bf16 else {}
    given |= {"fp16=True": "fp16"} if args.fp16 else {}
    given |= {f"mixed_precision={args.mixed_precision!r}": args.mixed_precision} if args.mixed_precision else {}
    if len(set(given.values())) > 1:  # several arguments may say the precision, and must say the same
        first, second, *_ = given
        raise ConfigError(f"TrainingArguments: {first} contradicts {second}; drop one of them.")
    if args.save_total_limit is not None and args.save_total_limit < 1:
        raise ConfigError(
            f"TrainingArguments.save_total_limit={args.save_total_limit} would keep no checkpoint; use None for all, "
            f"or at least 1: the newest one."
        )
    foreign = [name for name in args.include_for_metrics if name not in ("inputs", "loss")]
    if foreign:
        raise ConfigError(f"TrainingArguments.include_for_metrics has {foreign[0]!r}; it may hold 'inputs' and 'loss'.")


def _check_interval(name: str, value: float | None) -> None:
    if not value:
        raise ConfigError(
            f"TrainingArguments.{name}={value} must be > 0 with the strategy 'steps'; use 'no' for never."
        )
    if value > 1 and value != int(value):
        raise ConfigError(f"TrainingArguments.{name}={value} must be a whole number of steps, or a share below 1.")


def check_best_model(args: Any) -> None:
    """Refuse (ConfigError) what can never give a best checkpoint: it is one that was evaluated, by one metric.

    What `config_overrides` change about checkpoints or evaluations is left to the rules of the configuration.

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


_SHARDING = "sharded training comes with a later version"
_HUB = "nothing is uploaded; push the folder of the final weights yourself"
_COMPILE = "pass a compiled model instead"

_DEFAULT_ACCELERATOR: dict[str, Any] = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
}


def reserved(default: T, reason: str = "", *, same: tuple[Any, ...] = ()) -> T:
    """A field that has no effect: only its default is accepted, and what is the `same` in Hugging Face's `to_dict()`.

    `reason` is why, or what to do instead, where there is more to say than 'not supported yet'.
    """
    return field(default=default, metadata={"reason": reason, "same": same})


@dataclass(kw_only=True)
class ReservedArguments:
    """Hugging Face's and Forgather's names with no effect here. Hugging Face's first, in its order."""

    optim_args: Any = reserved(
        None, "what the optimizer takes is in config_overrides, such as {'optimizer.sgd_momentum': 0.9}"
    )
    optim_target_modules: Any = None
    average_tokens_across_devices: bool = reserved(True, "the loss is the mean over the tokens of all ranks")
    label_smoothing_factor: float = 0.0
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    activation_checkpointing: bool | None = reserved(None, same=(False,))
    activation_checkpointing_kwargs: Any = None
    gradient_checkpointing: bool | None = reserved(None, same=(False,))
    gradient_checkpointing_kwargs: Any = None
    torch_compile: bool = reserved(False, _COMPILE)
    torch_compile_backend: str | None = reserved(None, _COMPILE)
    torch_compile_mode: str | None = reserved(None, _COMPILE)
    use_liger_kernel: bool = False
    liger_kernel_config: Any = None
    use_cache: bool = False
    neftune_noise_alpha: float | None = None
    torch_empty_cache_steps: int | None = None
    auto_find_batch_size: bool = False
    logging_nan_inf_filter: bool = reserved(True, same=(False,))
    include_num_input_tokens_seen: Any = reserved("no", same=(False,))
    log_level_replica: str = "warning"
    trackio_static_space_id: Any = None
    eval_do_concat_batches: bool = True
    eval_use_gather_object: bool = False
    batch_eval_metrics: bool = False
    save_on_each_node: bool = reserved(False, "checkpoints are on storage that all nodes see")
    push_to_hub: bool = reserved(False, _HUB)
    hub_token: str | None = reserved(None, _HUB, same=("<HUB_TOKEN>",))
    hub_private_repo: bool | None = None
    hub_model_id: str | None = None
    hub_strategy: str = "every_save"
    hub_always_push: bool = False
    hub_revision: str | None = None
    ignore_data_skip: bool = reserved(False, "a resumed run goes on at the very sample where it was")
    full_determinism: bool = False
    accelerator_config: Any = reserved(None, same=(_DEFAULT_ACCELERATOR, {}))
    parallelism_config: Any = reserved(None, _SHARDING)
    dataloader_prefetch_factor: int | None = None
    dataloader_multiprocessing_context: str | None = None
    dataloader_in_order: bool = True
    length_column_name: str = "length"
    ddp_static_graph: bool | None = reserved(None, same=(False,))
    fsdp: Any = reserved(None, _SHARDING, same=("", False, []))
    fsdp_config: Any = reserved(None, _SHARDING, same=({},))
    deepspeed: Any = reserved(None, _SHARDING)
    debug: Any = reserved("", same=(None, []))
    skip_memory_metrics: bool = True

    overwrite_output_dir: bool = reserved(
        False, "config_overrides={'run.fresh': True} starts a new run beside the old one"
    )
    epoch_train_steps: int = reserved(100000, "give the length of a run over data without a length as max_steps")
    gc_threshold: float = 0.5
    save_safetensors: bool = reserved(True, "checkpoints hold safetensors and JSON, never a pickle")
    fuse_optim_with_backward: bool = reserved(False, "the update follows the whole backward pass")
    speed_metrics_start_step: int = reserved(1, "the speed of a run is measured from the end of its first step")
    set_dataset_epoch: bool = reserved(True, "a dataset with set_epoch is told the epoch")


REASONS = {one.name: one.metadata["reason"] for one in fields(ReservedArguments) if one.metadata.get("reason")}


def check_reserved(arguments: ReservedArguments) -> None:
    """Refuse (ConfigError) a reserved name that has another value than its default; a token is not shown."""
    for one in fields(ReservedArguments):
        value = getattr(arguments, one.name)
        if value == one.default or any(value == same for same in one.metadata.get("same", ())):
            continue
        shown = "<hidden>" if one.name.endswith("_token") else repr(value)
        reason = f" ({REASONS[one.name]})" if one.name in REASONS else ""
        raise ConfigError(
            f"TrainingArguments.{one.name}={shown} is not supported yet{reason}; "
            f"leave it at its default {one.default!r}."
        )
