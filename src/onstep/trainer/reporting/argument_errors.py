"""Lets the errors that leave a Trainer name arguments where the loop names keys of the configuration."""

from __future__ import annotations

import functools
import logging
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from onstep.config import TrainingArguments
from onstep.config.field_types import accepts_text
from onstep.config.hf.argument import argument_of
from onstep.config.hf.sharding import written_names
from onstep.config.keys import KEYS
from onstep.errors import OnstepError, of_exhausted_iterator

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self")

_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}


def errors_name_arguments(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """A method of a Trainer whose `OnstepError`s, and what Onstep logs meanwhile, name arguments in their message."""

    @functools.wraps(method)
    def wrapped(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with _Records.made_for(self):
            try:
                return method(self, *args, **kwargs)
            except OnstepError as error:
                if error.args and isinstance(error.args[0], str):
                    error.args = (in_arguments(error.args[0], _names(self)), *error.args[1:])
                raise
            except (RuntimeError, StopIteration) as error:
                stop = error.__cause__ if isinstance(error, RuntimeError) else error
                if not isinstance(stop, StopIteration):  # Python's "generator raised StopIteration"
                    raise
                place = traceback.extract_tb(stop.__traceback__)[-1]
                raise of_exhausted_iterator(f"{place.name} ({place.filename}:{place.lineno})", stop) from stop

    return wrapped


class _Records:
    """Makes records of `logging`: those of Onstep's loggers name arguments, on all threads."""

    def __init__(self, trainer: object, make: Callable[..., logging.LogRecord]) -> None:
        self.trainer, self.make = trainer, make

    def __call__(self, name: str, *args: object, **kwargs: object) -> logging.LogRecord:
        record = self.make(name, *args, **kwargs)
        if name.startswith("onstep."):
            said = record.getMessage()
            text = in_arguments(said, _names(self.trainer))
            if text != said:
                record.msg, record.args = text, ()
        return record

    @classmethod
    @contextmanager
    def made_for(cls, trainer: object) -> Iterator[None]:
        """Context in which records are made like this; within another such context, it changes nothing."""
        before = logging.getLogRecordFactory()
        if isinstance(before, cls):
            yield
            return
        own = cls(trainer, before)
        logging.setLogRecordFactory(own)
        try:
            yield
        finally:
            if logging.getLogRecordFactory() is own:  # else the user has set one meanwhile
                logging.setLogRecordFactory(before)


def _names(trainer: object) -> Mapping[str, str]:
    """What the arguments of a Trainer call the keys that they set in more than one way."""
    args = getattr(trainer, "args", None)
    return written_names(args) if isinstance(args, TrainingArguments) else {}


_OWN_WORDS = {
    "an EvalLoader": "a dataset",
    "collate_fn": "data_collator",
    "drop_last": "dataloader_drop_last",
    "global_batch_size": argument_of("train.global_batch_size"),
    "micro_batch_size": "per_device_train_batch_size",
    "num_workers": "dataloader_num_workers",
}
"""What the functional door calls an object or a parameter, and what a Trainer's user passes or overrides instead."""


def in_arguments(text: str, names: Mapping[str, str]) -> str:
    """The text with every key of the configuration replaced by its argument; `key=word` becomes `argument='word'`.

    Keys in `names` are called so. A text that speaks of `config_overrides` is written for the
    Trainer, and stays. What the functional door names its own way (`collate_fn`) becomes an argument too.
    """

    def replaced(found: re.Match[str]) -> str:
        own, key, equals, word = found.groups(default="")
        if own:
            return _OWN_WORDS[own]
        name = names.get(key) or argument_of(key)
        equals = " = " if equals and " " in name else equals
        return name + equals + _as_value(key, word)

    return text if "config_overrides" in text else _keys().sub(replaced, text)


def _as_value(key: str, word: str) -> str:
    """A value in a configuration as Python's; a word that the key cannot have (`int with ... digits`) stays."""
    return _CONSTANTS.get(word, repr(word) if word and accepts_text(KEYS[key].annotation) else word)


@functools.cache
def _keys() -> re.Pattern[str]:
    known = "|".join(re.escape(key) for key in KEYS if "." in key)
    own = "|".join(map(re.escape, _OWN_WORDS))
    key = rf"({known})(?![\w/\\'\"-]|\.\w)(=(?!=))?((?<==)[a-z][a-z_-]*\b(?![/\\]))?"
    return re.compile(rf"(?<![\w./\\'\"-])(?:({own})(?![\w/\\'\"(-]|\.\w)|{key})")
