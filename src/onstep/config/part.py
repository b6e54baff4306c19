"""The base of every configuration dataclass, and what a field says of its value: rules beside the default, a type."""

from __future__ import annotations

import copy
import difflib
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onstep.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """What a value must be, in words and as a test."""

    text: str
    holds: Callable[[float], bool]


BOUNDS = {
    "> 0": Bound("> 0", lambda value: value > 0),
    ">= 0": Bound(">= 0", lambda value: value >= 0),
    "at least 0 and below 1": Bound("at least 0 and below 1", lambda value: 0 <= value < 1),
}
"""Those that many keys have."""


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
    bound: Literal["> 0", ">= 0", "at least 0 and below 1"] | Bound | None = None,
    choices: tuple[str, ...] = (),
    may_be_infinite: bool = False,
) -> T:
    """A field of a configuration; each instance has its own copy of a default that is a list or a dictionary."""
    checked = BOUNDS[bound] if isinstance(bound, str) else bound
    metadata = {"option": Option(on_change, checked, choices, may_be_infinite)}
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

    def changed(self) -> dict[str, Any]:
        """The values that differ from their defaults, by name."""
        default = type(self)()
        values = {name: getattr(self, name) for name in self.field_names()}
        return {name: value for name, value in values.items() if value != getattr(default, name)}


_FIELD_TYPES: dict[Any, dict[str, Any]] = {}
"""What `field_types` has worked out already."""


def field_types(cls: type) -> dict[str, Any]:
    """The resolved annotation of every field of a dataclass."""
    if cls not in _FIELD_TYPES:
        _FIELD_TYPES[cls] = get_type_hints(cls)
    return _FIELD_TYPES[cls]


def type_name(annotation: Any) -> str:
    """The annotation in words: ``int | None`` is 'int or None'."""
    members = _members(annotation)
    if len(members) > 1:
        return " or ".join(type_name(member) for member in members)
    if annotation is type(None):
        return "None"
    origin = get_origin(annotation)
    if origin is None:
        return str(getattr(annotation, "__name__", annotation))
    return f"{origin.__name__} of {' to '.join(type_name(argument) for argument in get_args(annotation))}"


def is_number(value: Any) -> bool:
    """Whether a value is a real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number that is at least `least`; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def accepts_text(annotation: Any) -> bool:
    """Whether a field of this annotation may hold a str."""
    return any(member in (str, Any) for member in _members(annotation))


def coerce(value: Any, annotation: Any, name: str) -> Any:
    """`value` as the annotation wants it; what would change its meaning is refused.

    An int serves as a float, a whole float (``1e5``) as an int, a number in a string (YAML's ``1e-3``) as a float, a
    path as a str, a tuple as a list and an enum member as its value. Nothing else is converted.

    Raises:
        ConfigError: naming the key, the value and the type.
    """
    try:
        return _converted(value, annotation)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r} must be {type_name(annotation)}, got {type(value).__name__}.") from None


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _converted(value: Any, annotation: Any) -> Any:
    if isinstance(value, Enum):
        value = value.value
    members = _members(annotation)
    if len(members) > 1:
        for member in members:
            try:
                return _converted(value, member)
            except (TypeError, ValueError):
                continue
        raise TypeError
    if annotation is Any:
        return value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is list and isinstance(value, list | tuple):
        return [_converted(element, arguments[0]) for element in value]
    if origin is dict and isinstance(value, Mapping):
        return {_converted(key, arguments[0]): _converted(item, arguments[1]) for key, item in value.items()}
    if annotation in (bool, type(None)) and isinstance(value, annotation):
        return value
    if annotation is str and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if annotation is int and is_number(value) and (isinstance(value, Integral) or float(value).is_integer()):
        return int(value)
    if annotation is float and (is_number(value) or isinstance(value, str)):
        return float(value)
    raise TypeError
