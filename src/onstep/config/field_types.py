"""Types of values: the annotation of a field in words, and the conversion of a value to it."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from onstep.config.suggestions import shown
from onstep.errors import ConfigError

_FIELD_TYPES: dict[Any, dict[str, Any]] = {}
"""The results of `field_types` so far."""


def field_types(cls: type) -> dict[str, Any]:
    """The resolved annotation of every field of a dataclass."""
    if cls not in _FIELD_TYPES:
        _FIELD_TYPES[cls] = get_type_hints(cls, include_extras=True)
    return _FIELD_TYPES[cls]


def type_name(annotation: Any) -> str:
    """The annotation in words: ``int | None`` is 'int or None'."""
    members = members_of(annotation)
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


def is_integer_from(value: Any, least: int) -> bool:
    """Whether a value is an integer of at least `least`; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def accepts_none(annotation: Any) -> bool:
    """Whether a field of this annotation may be None."""
    return any(member in (type(None), Any) for member in members_of(annotation))


def accepts_text(annotation: Any) -> bool:
    """Whether a field of this annotation may hold a str."""
    return any(member in (str, Any) for member in members_of(annotation))


def coerce(value: Any, annotation: Any, name: str) -> Any:
    """`value` as the annotation requires it; what would change its meaning is refused.

    An int serves as a float, an integral float (``1e5``) as an int, a number in a string (YAML's ``1e-3``) as a float,
    a path as a str, a tuple as a list, a text as a list of one where a list of texts is required, and an enum member as
    its value. Nothing else is converted. Integers have 64
    bits, and text has no NUL and no unpaired surrogates.

    Raises:
        ConfigError: naming the key, the value and the type.
    """
    try:
        return _converted(value, annotation)
    except (TypeError, ValueError, OverflowError) as error:
        inner = _first_refused(value, annotation, name)
        if inner is not None:
            raise inner from None
        rule = f"{type_name(annotation)}, got {type(value).__name__}"
        if accepts_text(annotation) and is_number(value):
            rule += "; write it in quotes"
        if isinstance(error, OverflowError):
            rule = f"{type_name(annotation)}, with integers from -2**63 to 2**63 - 1 and floats below 1.8e308"
        elif isinstance(error, _TextError):
            rule = "text that a file name can hold, without NUL and unpaired surrogates"
        raise ConfigError(f"{name}={shown(value)} must be {rule}.") from None


def _first_refused(value: Any, annotation: Any, name: str) -> ConfigError | None:
    """The error for the first entry of a dictionary or list that is not as required; None for any other value."""
    for member in members_of(annotation):
        origin, arguments = get_origin(member), get_args(member)
        entries: Iterable[tuple[Any, Any]] = ()
        if origin is dict and isinstance(value, Mapping):
            entries = value.items()
        elif origin is list and isinstance(value, list | tuple):
            entries = enumerate(value)
        for key, entry in entries:
            try:
                coerce(entry, arguments[-1], f"{name}.{key}" if origin is dict else f"{name}[{key}]")
            except ConfigError as error:
                return error
    return None


class _TextError(ValueError):
    """Text that no file can have as its name or its content."""


@functools.cache
def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """``list`` and ``(int,)`` of ``list[int]``."""
    return get_origin(annotation), get_args(annotation)


@functools.cache
def members_of(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of ``Annotated[float, int]``, the types in the annotation come first."""
    if get_origin(annotation) is Annotated:
        return (*annotation.__metadata__, *members_of(annotation.__origin__))
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for one in get_args(annotation) for member in members_of(one))
    return (annotation,)


def _converted(value: Any, annotation: Any) -> Any:
    if isinstance(value, Enum):
        value = value.value
    members = members_of(annotation)
    if (value is None or isinstance(value, bool)) and type(value) in members:
        return value
    if len(members) > 1:
        problem: Exception = TypeError()
        if str in members and isinstance(value, str | os.PathLike):  # it is not a list of one
            members = tuple(member for member in members if get_origin(member) is not list)
        for member in members:
            try:
                return _converted(value, member)
            except (OverflowError, _TextError) as error:
                problem = error
            except (TypeError, ValueError):
                continue
        raise problem
    if annotation is Any:
        return value
    origin, arguments = _parts(annotation)
    if origin is list and isinstance(value, list | tuple):
        return [_converted(element, arguments[0]) for element in value]
    if origin is list and isinstance(value, str | os.PathLike) and arguments == (str,):
        return [_converted(value, str)]
    if origin is dict and isinstance(value, Mapping):
        return {_converted(key, arguments[0]): _converted(item, arguments[1]) for key, item in value.items()}
    if annotation in (bool, type(None)) and isinstance(value, annotation):
        return value
    if annotation is str and isinstance(value, str | os.PathLike):
        return _text(os.fspath(value))
    if annotation is int and is_number(value) and (isinstance(value, Integral) or float(value).is_integer()):
        return _integer(int(value))
    if annotation is float and (is_number(value) or isinstance(value, str)):
        return float(value)
    raise TypeError


def _integer(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise OverflowError
    return value


def _text(value: str | bytes) -> str:
    if not isinstance(value, str):
        raise TypeError
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise _TextError from None
    if "\0" in value:
        raise _TextError
    return value
