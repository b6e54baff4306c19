"""`argument`, which declares a field of `TrainingArguments` that has an effect, and tables of its names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from onstep.config.keys import KEYS, OTHER_NAMES
from onstep.config.section import BOUNDS, Bound

T = TypeVar("T")
AnyClass = TypeVar("AnyClass", bound=type)

if TYPE_CHECKING:
    Steps = int | float
    Choice = str | bool
    Texts = str | list[str] | None
    Values = dict[str, Any]
    Anything = Any
else:  # for transformers' HfArgumentParser, which reads the first type only, or text
    Steps = Annotated[float, int]
    """An integer number of steps, or a share below 1."""
    Choice = Annotated[str, bool]
    Texts = Annotated[str, list[str]] | None
    Values = dict[str, Any] | str
    """A dictionary, or the same as JSON."""
    Anything = str | None
    """Any value, which a command line gives as text."""

LOG_LEVELS = {"passive": None, "detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Hugging Face's names of log levels; 'passive' leaves the level unchanged."""

STYLES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
"""`lr_scheduler_type` and the corresponding `lr_decay_style`."""

SCHEDULES = (
    *STYLES,
    *("cosine_with_restarts", "polynomial", "cosine_warmup_with_min_lr", "reduce_lr_on_plateau", "greedy"),
)
"""`lr_scheduler_type`: all of transformers 5.23; those without a `lr_decay_style` are transformers' own schedulers."""

FOLLOW_METRIC = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the metric of the evaluations."""

RENAMED = {
    "warmup_ratio": "warmup_steps: below 1 it is a share of the run",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "tpu_num_cores": "torchrun to start more than one process",
    "half_precision_backend": "bf16 or fp16",
    "use_legacy_prediction_loop": "evaluation_loop: override it in place of prediction_loop",
    "include_inputs_for_metrics": "include_for_metrics=['inputs']",
}
"""Names of earlier versions of transformers, and their replacements."""

KEY_OF = {one.option.hf: one for one in KEYS.values() if one.option.hf}
"""The key of the configuration that has the same value as an argument, as the key itself declares (`hf=`)."""

_ARGUMENT_OF = {
    "train.train_iters": "max_steps",
    "train.num_epochs": "num_train_epochs",
    "train.global_batch_size": "per_device_train_batch_size * gradient_accumulation_steps * processes",
    "train.deterministic": "full_determinism",
    "dataset.shuffle": "train_sampling_strategy",
    "optimizer.optimizer": "optim",
    "optimizer.clip_grad": "max_grad_norm",
    "mixed_precision": "bf16 or fp16",
    "rng.data_seed": "seed or data_seed",
    "scheduler.lr_warmup_iters": "warmup_steps",
    "scheduler.lr_decay_style": "lr_scheduler_type",
    "logger.log_interval": "logging_steps",
    "validation.eval_interval": "eval_steps",
    "checkpoint.save_interval": "save_steps",
    "checkpoint.most_recent_k": "save_total_limit",
    "dist.device": "use_cpu",
    **{key.name: name for name, key in KEY_OF.items()},
}


def argument_of(key: str) -> str:
    """What a key of the configuration is called in `TrainingArguments`."""
    section, _, name = key.partition(".")
    if section == "trainer":
        return name
    return _ARGUMENT_OF.get(key, f"config_overrides[{key!r}]")


def argument_named(name: str) -> str | None:
    """What is called `name` in the configuration or in another library, as `TrainingArguments` call it, if they do."""
    key = OTHER_NAMES.get(name) or next((key for key in KEYS if key.rpartition(".")[2] == name), None)
    return RENAMED.get(name) or _ARGUMENT_OF.get(key or "")


@dataclass(frozen=True)
class Argument:
    """The values that an argument allows."""

    bound: Bound | None = None
    choices: tuple[Any, ...] = ()


def argument(
    default: T, *, bound: Literal["> 0", ">= 0", "from 0 to 1"] | None = None, choices: tuple[Any, ...] = ()
) -> T:
    """A field of `TrainingArguments` with Hugging Face's default and rules of its own.

    A field with the value of a key and without rules of its own has those of the key.
    """
    return field(default=default, metadata={"argument": Argument(BOUNDS[bound] if bound else None, choices)})


DECLARED: dict[str, Mapping[str, Any]] = {}
"""What fields declare with `argument` and `reserved`, by name. Their metadata is empty: `HfArgumentParser` passes it to
argparse."""


_FLAG: Mapping[str, Any] = {"nargs": "?", "const": True}
PARSED: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing", "fsdp"), _FLAG),
    "include_num_input_tokens_seen": _FLAG,
    "debug": {"nargs": "+"},
}
"""How a command line gives these arguments, as with Hugging Face: a flag may come without a value."""


def declares_arguments(cls: AnyClass) -> AnyClass:
    """Move the declarations of a dataclass's fields to `DECLARED`."""
    for one in fields(cls):
        if one.metadata and one.metadata is not PARSED.get(one.name):
            DECLARED[one.name] = one.metadata
        one.metadata = MappingProxyType(PARSED.get(one.name, {}))
    return cls


def rules_of() -> dict[str, Argument]:
    """The rules of the arguments that have some, by name: their own, else those of the key with the same value."""
    rules = {
        name: Argument(key.option.bound, (None, *key.option.choices) if key.option.choices else ())
        for name, key in KEY_OF.items()
    }
    own = {name: declared["argument"] for name, declared in DECLARED.items() if "argument" in declared}
    return {name: rule for name, rule in {**rules, **own}.items() if rule != Argument()}
