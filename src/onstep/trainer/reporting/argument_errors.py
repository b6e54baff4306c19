"""Lets the errors that leave a Trainer name arguments where the loop names keys of the configuration."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Collection
from typing import Any, Concatenate, ParamSpec, TypeVar

from onstep.config.hf.argument import argument_of
from onstep.config.keys import KEYS
from onstep.errors import OnstepError, of_exhausted_iterator

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self")

_CONSTANTS = {"true": "True", "false": "False", "null": "None", "none": "None"}


def errors_name_arguments(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """A method of a Trainer whose `OnstepError`s name arguments in their message, and are otherwise as they were."""

    @functools.wraps(method)
    def wrapped(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except OnstepError as error:
            if error.args and isinstance(error.args[0], str):
                overrides = getattr(getattr(self, "args", None), "config_overrides", None)
                error.args = (in_arguments(error.args[0], overrides or ()), *error.args[1:])
            raise
        except (RuntimeError, StopIteration) as error:
            stop = error.__cause__ if isinstance(error, RuntimeError) else error
            if not isinstance(stop, StopIteration):  # Python's "generator raised StopIteration"
                raise
            place = traceback.extract_tb(stop.__traceback__)[-1]
            raise of_exhausted_iterator(f"{place.name} ({place.filename}:{place.lineno})", stop) from stop

    return wrapped


def in_arguments(text: str, overridden: Collection[Any] = ()) -> str:
    """The text with every key of the configuration replaced by its argument; `key=word` becomes `argument='word'`.

    Keys that are `overridden` have no other argument. A text that speaks of `config_overrides` is written for the
    Trainer, and stays.
    """

    def replaced(found: re.Match[str]) -> str:
        key, equals, word = found.groups(default="")
        name = f"config_overrides[{key!r}]" if key in overridden else argument_of(key)
        equals = " = " if equals and " " in name else equals
        return name + equals + (_CONSTANTS.get(word, repr(word)) if word else "")

    return text if "config_overrides" in text else _keys().sub(replaced, text)


@functools.cache
def _keys() -> re.Pattern[str]:
    known = "|".join(re.escape(key) for key in KEYS if "." in key)
    return re.compile(rf"(?<![\w./\\'\"-])({known})(?![\w/\\'\"-]|\.\w)(=(?!=))?((?<==)[a-z][a-z_-]*\b(?![/\\]))?")
