"""`TrainingArguments`: Hugging Face's names and defaults (transformers 5.23), and Forgather's own names."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from onstep.bounded_reading import integer_from_environment, parse_json
from onstep.config.field_types import coerce, field_types
from onstep.config.hf.argument import (
    RENAMED,
    Values,
    declares_arguments,
)
from onstep.config.hf.checks import check_arguments
from onstep.config.hf.fields.compute import ComputeArguments
from onstep.config.hf.fields.data import DataArguments
from onstep.config.hf.fields.evaluation import EvaluationArguments
from onstep.config.hf.fields.length import LengthArguments
from onstep.config.hf.fields.logging import LoggingArguments
from onstep.config.hf.fields.optimization import OptimizationArguments
from onstep.config.hf.fields.saving import SavingArguments
from onstep.config.hf.reserved import ReservedArguments, check_reserved, reserved_fields
from onstep.config.lengths import share_of
from onstep.config.suggestions import nearest, shown
from onstep.config.trackers import tracker_list
from onstep.errors import ConfigError

Arguments = TypeVar("Arguments", bound=type)


_SWITCHES = {"true": True, "false": False}
"""Texts of `HfArgumentParser`, which passes on what is typed, that are meant as switches."""


class UnknownArgumentError(ConfigError, TypeError):
    """A keyword that `TrainingArguments` does not have; a TypeError as Python itself would raise."""


def is_greater_better(metric: str) -> bool:
    """Whether a higher metric is better, judged by its name."""
    return not metric.endswith(("loss", "perplexity"))


def _names_unknown_keywords(cls: Arguments) -> Arguments:
    """Make the constructor of a dataclass name the nearest field for an unknown keyword."""
    generated: Callable[..., None] = vars(cls)["__init__"]
    known = [f.name for f in fields(cls) if f.init]

    @functools.wraps(generated)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known and type(self) is cls:
                hint = f" Use {RENAMED[name]}." if name in RENAMED else nearest(name, known)
                raise UnknownArgumentError(f"{cls.__name__} has no argument {name!r}.{hint}")
        generated(self, *args, **kwargs)

    type.__setattr__(cls, "__init__", checked)
    return cls


@_names_unknown_keywords
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
):
    """A run in the words of Hugging Face's `TrainingArguments`.

    Every field of transformers 5.23 exists with its default. Those of `ReservedArguments` are accepted at their
    default only; all others have an effect. As in `transformers`, `output_dir=None` becomes
    'trainer_output', an unset `eval_steps` becomes `logging_steps`, and `eval_strategy` other than 'no' sets `do_eval`.
    Enum members are kept as their values. Continuing an unfinished run is automatic, unlike Hugging Face's.

    Raises:
        ConfigError: an unknown name, a value of another type or out of range, or one that is not supported.
    """

    output_dir: str | None = None
    """Directory of the run: `<run.output_dir>/<run.name>`."""
    _: KW_ONLY
    config_overrides: Values | None = None
    """Values of the `ConfigContainer` that have no name above, by section or dotted key; they win."""

    def __post_init__(self) -> None:
        self._settle()
        self.check()

    def check(self) -> None:
        """Check all values, as the constructor does; call it again after assigning to fields.

        Raises:
            ConfigError: naming the field, the value and the rule.
        """
        for name, annotation in field_types(type(self)).items():
            if name in _OWN_FIELDS:
                setattr(self, name, coerce(getattr(self, name), annotation, f"TrainingArguments.{name}"))
        self.report_to = tracker_list(self.report_to, "TrainingArguments.report_to")
        check_reserved(self)
        check_arguments(self)

    def _settle(self) -> None:
        """Turn enum members into their values and fill in what Hugging Face fills in."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Enum):
                setattr(self, each.name, value.value)
            elif isinstance(value, list):
                setattr(self, each.name, [v.value if isinstance(v, Enum) else v for v in value])
        self.output_dir = os.path.expanduser("trainer_output" if self.output_dir is None else self.output_dir)
        for name in ("lr_scheduler_kwargs", "config_overrides"):
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, _dictionary(value, f"TrainingArguments.{name}"))
        resume = self.resume_from_checkpoint
        if isinstance(resume, str) and resume.lower() in _SWITCHES and not os.path.exists(resume):
            self.resume_from_checkpoint = _SWITCHES[resume.lower()]
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
        if self.metric_for_best_model is None and self.load_best_model_at_end:
            self.metric_for_best_model = "loss"
        if self.greater_is_better is None and self.preserve_best_model:
            self.greater_is_better = self.best_model_greater_is_better
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = is_greater_better(self.metric_for_best_model)

    @property
    def train_batch_size(self) -> int:
        """Samples of one forward pass on this rank."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Samples of one evaluation batch on this rank."""
        return self.per_device_eval_batch_size

    @property
    def world_size(self) -> int:
        """Processes of the run (`WORLD_SIZE`)."""
        return integer_from_environment("WORLD_SIZE", 1)

    @property
    def process_index(self) -> int:
        """Rank of this process (`RANK`)."""
        return integer_from_environment("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine (`LOCAL_RANK`)."""
        return integer_from_environment("LOCAL_RANK", 0)

    @property
    def device(self) -> str:
        """Where this rank trains, as text: 'cpu' or 'cuda:<local rank>'.

        Asks torch only if it is imported already, so that reading arguments does not import it; before that, 'cpu'.
        """
        torch = sys.modules.get("torch")
        if self.use_cpu or torch is None or not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{self.local_process_index}"

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: 0 or 1."""
        return 0 if self.device == "cpu" else 1

    @property
    def should_log(self) -> bool:
        """Whether this process reports: the first of each machine, or of all with `log_on_each_node=False`."""
        return (self.local_process_index if self.log_on_each_node else self.process_index) == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes the weights."""
        return self.process_index == 0

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of the warm-up in a run of `num_training_steps`."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return share_of(num_training_steps, self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; tokens are hidden."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return {name: f"<{name.upper()}>" if name.endswith("_token") else value for name, value in values.items()}

    def to_json_string(self) -> str:
        """`to_dict()` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return TrainingArguments(**values)


_OWN_FIELDS = {each.name for each in fields(TrainingArguments)} - {each.name for each in reserved_fields()}
