"""`TrainingArguments`, a configuration in Hugging Face's words, and its conversion to `ConfigContainer` and back.

An argument with the same value as a key is named at the key (`option(..., hf="learning_rate")`); the others are
converted by hand in `conversion` and `schedules`.
"""

from onstep.config.hf.arguments import TrainingArguments, UnknownArgumentError
from onstep.config.hf.conversion import args_to_config, config_to_args
from onstep.config.hf.seq2seq import Seq2SeqTrainingArguments

__all__ = ["Seq2SeqTrainingArguments", "TrainingArguments", "UnknownArgumentError", "args_to_config", "config_to_args"]
