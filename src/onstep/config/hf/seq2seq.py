"""`Seq2SeqTrainingArguments`: the arguments of a run whose evaluations generate text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from onstep.config.field_types import is_integer_from
from onstep.config.hf.arguments import TrainingArguments, names_unknown_keywords
from onstep.errors import ConfigError

if TYPE_CHECKING:
    Generation = Any
else:  # for transformers' HfArgumentParser, which reads text
    Generation = Annotated[str, Path] | None
    """A `transformers.GenerationConfig`, or its name, file or directory."""


@names_unknown_keywords
@dataclass
class Seq2SeqTrainingArguments(TrainingArguments):
    """The arguments of a `Seq2SeqTrainer`, with Hugging Face's names and defaults (transformers 5.23).

    Raises:
        ConfigError: as `TrainingArguments`.
    """

    sortish_sampler: bool = False
    """Only False: it has no effect in transformers either; `train_sampling_strategy` can group by length."""
    predict_with_generate: bool = False
    """Predictions of evaluations are generated token ids, not logits."""
    generation_max_length: int | None = None
    """`max_length` of generated rows; None is that of the model's generation config."""
    generation_num_beams: int | None = None
    """Beams of the search; None is the number of the model's generation config."""
    generation_config: Generation = None
    """Replaces the model's generation config: a `transformers.GenerationConfig`, or its name, file or directory."""

    def check(self) -> None:
        """Check all values, as the constructor does; call it again after assigning to fields.

        Raises:
            ConfigError: naming the field, the value and the rule.
        """
        super().check()
        check_generation(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values; tokens are hidden, and a generation config is a dictionary."""
        values = super().to_dict()
        if hasattr(self.generation_config, "to_dict"):
            values["generation_config"] = self.generation_config.to_dict()
        return values


def check_generation(args: Any) -> None:
    """Check the arguments for generation, also those of Hugging Face's own class.

    Raises:
        ConfigError: naming the field, the value and the rule; for arguments of another class.
    """
    if not hasattr(args, "predict_with_generate"):
        raise ConfigError(f"Seq2SeqTrainer requires Seq2SeqTrainingArguments as args, got {type(args).__name__}.")
    if args.sortish_sampler:
        raise ConfigError(
            "Seq2SeqTrainingArguments.sortish_sampler=True is not supported, and has no effect in transformers either; "
            "use train_sampling_strategy='group_by_length'."
        )
    for name in ("generation_max_length", "generation_num_beams"):
        value = getattr(args, name)
        if value is not None and not is_integer_from(value, 1):
            raise ConfigError(f"Seq2SeqTrainingArguments.{name}={value!r} must be an integer >= 1, or None.")
