"""A value checked against the annotation of the field that is to hold it."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from enum import Enum
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from onstep.errors import ConfigError

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
    if get_origin(annotation) is list:
        return _list(value, *get_args(annotation))
    if get_origin(annotation) is dict:
        return _dict(value, *get_args(annotation))
    if annotation not in _CONVERTERS:
        raise TypeError
    return _CONVERTERS[annotation](value)


def _list(value: Any, item: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return [_converted(element, item) for element in value]


def _dict(value: Any, key: Any, item: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_converted(k, key): _converted(v, item) for k, v in value.items()}


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    if isinstance(value, Integral):
        return int(value)
    if not float(value).is_integer():
        raise TypeError
    return int(float(value))


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise TypeError
    return float(value)


def _str(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise TypeError
    return value


def _none(value: Any) -> None:
    if value is not None:
        raise TypeError


_CONVERTERS: dict[Any, Any] = {bool: _bool, int: _int, float: _float, str: _str, type(None): _none}
