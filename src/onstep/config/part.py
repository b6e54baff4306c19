"""The base of every configuration dataclass, and what a field says of its value beside the default."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, TypeVar

from onstep.errors import ConfigError

T = TypeVar("T")
Bound = Literal["> 0", ">= 0", "at least 0 and below 1"]


class ChangeClass(StrEnum):
    """What changing a key does to a run that continues from a checkpoint."""

    SAFE = "safe"
    """Nothing that is learned depends on it: logging, evaluation, paths, workers, ranks, retention, limits."""
    TRAJECTORY = "changes the trajectory"
    """What is learned from here on differs (optimizer, schedule, batch, data); the stored state still loads."""
    INCOMPATIBLE = "incompatible"
    """The stored state does not fit any more: shapes of weights, what the optimizer keeps, what a token id means."""


SAFE, TRAJECTORY, INCOMPATIBLE = ChangeClass


@dataclass(frozen=True)
class Option:
    """What a key allows, and what changing it does. None is always allowed where the type has it."""

    on_change: ChangeClass
    bound: Bound | None = None
    choices: tuple[str, ...] = ()
    may_be_infinite: bool = False


def option(
    default: T,
    on_change: ChangeClass,
    bound: Bound | None = None,
    choices: tuple[str, ...] = (),
    may_be_infinite: bool = False,
) -> T:
    """A field of a configuration; each instance has its own copy of a default that is a list or a dictionary."""
    metadata = {"option": Option(on_change, bound, choices, may_be_infinite)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean 'x'?' for the known name nearest to `name`, or '' when none is near."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


@dataclass
class ConfigPart:
    """A dataclass whose attributes are its fields and nothing else."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if name not in known:
            hint = nearest(name, list(known))
            raise ConfigError(f"{type(self).__name__} has no field {name!r}.{hint} Its fields: {', '.join(known)}.")
        object.__setattr__(self, name, value)

    def validate(self) -> None:
        """Check the values of this part on their own.

        Raises:
            ConfigError: naming the value, the rule and the remedy.
        """

    def field_names(self) -> list[str]:
        """The names of the fields, in order."""
        return [f.name for f in fields(self)]
