"""`TrainingArguments`: Hugging Face's names and defaults (transformers 5.23), and Forgather's own names."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar

from onstep.config.field_types import coerce, field_types
from onstep.config.hf.accelerate_state import partial_state
from onstep.config.hf.accelerator import check_accelerator, settle_accelerator
from onstep.config.hf.argument import FOLLOW_METRIC, Values, argument_named, declares_arguments
from onstep.config.hf.checks import check_arguments
from onstep.config.hf.compute_rules import check_compute, settle_compute
from onstep.config.hf.fields.compute import ComputeArguments
from onstep.config.hf.fields.data import DataArguments
from onstep.config.hf.fields.evaluation import EvaluationArguments
from onstep.config.hf.fields.length import LengthArguments
from onstep.config.hf.fields.logging import LoggingArguments
from onstep.config.hf.fields.optimization import OptimizationArguments
from onstep.config.hf.fields.saving import SavingArguments
from onstep.config.hf.process import ProcessArguments
from onstep.config.hf.reserved import ReservedArguments, check_reserved, reserved_fields
from onstep.config.hf.serialization import SerializingMethods, typed_texts
from onstep.config.hf.setters import SettingMethods
from onstep.config.hf.unparsed import UNPARSED, Unparsed, UnparsedArguments, receives_unparsed
from onstep.config.lengths import share_of
from onstep.config.suggestions import nearest, shown
from onstep.config.trackers import tracker_list
from onstep.errors import ConfigError
from onstep.files.bounded_reading import parse_json

Arguments = TypeVar("Arguments", bound=type)


_DICTIONARIES = (
    "lr_scheduler_kwargs",
    "activation_checkpointing_kwargs",
    "gradient_checkpointing_kwargs",
    "liger_kernel_config",
    "config_overrides",
)
"""Arguments that also accept a dictionary as JSON."""
_IS_INTERNAL: ContextVar[bool] = ContextVar("_IS_INTERNAL", default=False)
"""Whether arguments are made to be compared, so that they do not decide accelerate's state."""
_SWITCHES = {"true": True, "false": False}
"""Texts of `HfArgumentParser`, which passes on what is typed, that are meant as switches."""


class UnknownArgumentError(ConfigError, TypeError):
    """A keyword that `TrainingArguments` does not have; a TypeError as Python itself would raise."""


def is_greater_better(metric: str) -> bool:
    """Whether a higher metric is better, judged by its name."""
    return not metric.endswith(("loss", "perplexity"))


def names_unknown_keywords(cls: Arguments) -> Arguments:
    """Make the constructor of a dataclass name the nearest field for an unknown keyword."""
    generated: Callable[..., None] = vars(cls)["__init__"]
    known = [*(f.name for f in fields(cls) if f.init), *UNPARSED]

    @functools.wraps(generated)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known and type(self) is cls:
                meant = argument_named(name)
                hint = f" Use {meant}." if meant else nearest(name, known, cutoff=0.6)
                raise UnknownArgumentError(f"{cls.__name__} has no argument {name!r}.{hint}")
        generated(self, *args, **kwargs)

    type.__setattr__(cls, "__init__", checked)
    return cls


@dataclass
class _Directory:
    """The one argument that may be passed by position, also where a subclass declares others again."""

    output_dir: str | None = None
    """Directory of the run: `<run.output_dir>/<run.name>`."""


@names_unknown_keywords
@declares_arguments
@dataclass
class TrainingArguments(
    LengthArguments,
    OptimizationArguments,
    ComputeArguments,
    DataArguments,
    LoggingArguments,
    EvaluationArguments,
    SavingArguments,
    ReservedArguments,
    ProcessArguments,
    SettingMethods,
    SerializingMethods,
    UnparsedArguments,
    _Directory,
):
    """A run in the words of Hugging Face's `TrainingArguments`.

    Every field of transformers 5.23 exists with its default. Those of `ReservedArguments` are accepted at their
    default only; all others have an effect. As in `transformers`, `output_dir=None` becomes
    'trainer_output', an unset `eval_steps` becomes `logging_steps`, and `eval_strategy` other than 'no' sets `do_eval`.
    Enum members are kept as their values. Continuing an unfinished run is automatic, unlike Hugging Face's.

    Raises:
        ConfigError: an unknown name, a value of another type or out of range, or one that is not supported.
    """

    _: KW_ONLY
    config_overrides: Unparsed[Values | None] = None
    """Values of the `ConfigContainer` that have no name above, by section or dotted key; they win. Like `control`, it
    is an argument of the constructor and an attribute, but no field: an argument parser does not have it."""
    control: Unparsed[bool] = False
    """Serve the job to `onstep control` and the live page: adds a `TrainerControlCallback`."""

    use_legacy_prediction_loop = False
    """For code of transformers 4 that reads it; True calls `prediction_loop` in place of `evaluation_loop`."""

    @receives_unparsed
    def __post_init__(self) -> None:
        self._settle()
        self.check()
        if not _IS_INTERNAL.get():
            _ = self.parallel_sizes  # refuses those that do not make up the ranks
            partial_state(self)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an argument, or an attribute of the user's own, which is named if it is almost an argument."""
        known = self.__dataclass_fields__
        is_new = name not in known and not hasattr(self, name)
        if is_new and (near := get_close_matches(name, known, n=1, cutoff=0.9)):
            rule = f"{type(self).__name__} has no argument {name!r}, so setting it changes nothing"
            warnings.warn(f"{rule}; did you mean {near[0]!r}?", UserWarning, stacklevel=2)
        super().__setattr__(name, value)

    def check(self) -> None:
        """Check all values, as the constructor does; call it again after assigning to fields.

        Raises:
            ConfigError: naming the field, the value and the rule.
        """
        for name, annotation in field_types(TrainingArguments).items():
            if name in _COERCED:
                declared = getattr(annotation, "type", annotation)  # of an argument that is not a field
                setattr(self, name, coerce(getattr(self, name), declared, f"TrainingArguments.{name}"))
        self.report_to = tracker_list(self.report_to, "TrainingArguments.report_to")
        check_accelerator(self.accelerator_config)
        check_reserved(self)
        check_arguments(self)
        check_compute(self)

    def _settle(self) -> None:
        """Turn enum members into their values and fill in what Hugging Face fills in."""
        for each in fields(TrainingArguments):
            value = getattr(self, each.name)
            if isinstance(value, Enum):
                setattr(self, each.name, value.value)
            elif isinstance(value, list):
                setattr(self, each.name, [v.value if isinstance(v, Enum) else v for v in value])
        self.output_dir = os.path.expanduser("trainer_output" if self.output_dir is None else self.output_dir)
        for name in (*self._VALID_DICT_FIELDS, *_DICTIONARIES):
            value = getattr(self, name)
            if isinstance(value, str) and (name in _DICTIONARIES or value.startswith("{")):
                given = _dictionary(value, f"TrainingArguments.{name}")
                setattr(self, name, typed_texts(given) if name in self._VALID_DICT_FIELDS else given)
        if self.hub_token == "<HUB_TOKEN>":  # as `to_dict` hides it
            self.hub_token = None
        settle_compute(self)
        resume = self.resume_from_checkpoint
        if isinstance(resume, str) and resume.lower() in _SWITCHES and not os.path.exists(resume):
            self.resume_from_checkpoint = _SWITCHES[resume.lower()]
        settle_accelerator(self)
        if self.use_cpu:
            self.dataloader_pin_memory = False
        self._settle_strategy()
        counted = self.include_num_input_tokens_seen
        counted = _SWITCHES.get(counted.lower(), counted) if isinstance(counted, str) else counted
        if isinstance(counted, bool):
            self.include_num_input_tokens_seen = "all" if counted else "no"
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        if self.eval_strategy != "no":
            self.do_eval = True
        # one metric chooses the best checkpoints, under whichever of its two names it was given
        if self.metric_for_best_model is None and self.preserve_best_model:
            self.metric_for_best_model = self.best_model_metric
        if self.metric_for_best_model is None and (
            self.load_best_model_at_end or self.lr_scheduler_type in FOLLOW_METRIC
        ):
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.preserve_best_model:
            self.greater_is_better = self.best_model_greater_is_better
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = is_greater_better(self.metric_for_best_model)

    def _settle_strategy(self) -> None:
        """`group_by_length` is another name for a value of `train_sampling_strategy`."""
        if self.group_by_length and self.train_sampling_strategy not in ("random", "group_by_length"):
            raise ConfigError(
                f"TrainingArguments.group_by_length=True contradicts train_sampling_strategy="
                f"{self.train_sampling_strategy!r}; drop one of them."
            )
        if self.group_by_length:
            self.train_sampling_strategy = "group_by_length"
        self.group_by_length = self.train_sampling_strategy == "group_by_length"

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of the warm-up in a run of `num_training_steps`."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return share_of(num_training_steps, self.warmup_steps)


def _dictionary(text: str, name: str) -> Any:
    """The dictionary in JSON.

    Raises:
        ConfigError: for any other text.
    """
    rule = f"{name} must be a dictionary, or one as JSON, got {shown(text)}"
    value = parse_json(text, rule, error=ConfigError) if text.lstrip().startswith("{") else None
    if not isinstance(value, dict):
        raise ConfigError(f"{rule}.")
    return value


def build_silently(values: dict[str, Any]) -> TrainingArguments:
    """Arguments made from values whose warnings have been given already.

    Raises:
        ConfigError: as `TrainingArguments`.
    """
    token = _IS_INTERNAL.set(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return TrainingArguments(**values)
    finally:
        _IS_INTERNAL.reset(token)


_COERCED = {*(each.name for each in fields(TrainingArguments)), *UNPARSED} - {
    *("accelerator_config", "fsdp", "fsdp_config", "parallelism_config"),
    *(each.name for each in reserved_fields()),
}
"""The arguments whose values are converted to their types; those of the others have checks of their own."""
