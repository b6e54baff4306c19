"""Converts messages to JSON and back; every value from a network is checked before it becomes part of a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from onstep.diloco.protocol.messages import Registered, Reply, Request, Settings
from onstep.errors import ConfigError
from onstep.files.bounded_reading import brief

MAX_TEXT = 1_000
"""Characters in a text."""
MAX_NUMBER = 2**53
"""The largest integer that every JSON parser represents exactly."""
MAX_ITEMS = 100_000
"""Elements of a list or object: contributors, fragments."""
LOWEST: Mapping[str, int] = {
    **dict.fromkeys(
        ("sequence", "fragment", "base_version", "steps", "step", "version", "have_version", "command_number"), 0
    ),
    **dict.fromkeys(("wait", "steps_per_second", "resumes_at", "lost_steps", "kept_steps"), 0),
    **dict.fromkeys(("tokens", "sync_every", "num_fragments"), 1),
}
"""Smallest value of numbers, by name."""

REQUESTS: Mapping[str, type] = {kind.__name__: kind for kind in get_args(Request)}
REPLIES: Mapping[str, type] = {kind.__name__: kind for kind in get_args(Reply)}
Check = Callable[[Any], bool]


class InvalidMessageError(ConfigError):
    """A message from the network is malformed; the text names the field and the rule."""


def to_json(message: Request | Reply) -> dict[str, Any]:
    """The message as a JSON object; `type` names its class."""
    kind: type = type(message)
    values = {name: getattr(message, name) for name in _readers(kind)}
    if isinstance(message, Registered):
        values["settings"] = asdict(message.settings)
    return {"type": kind.__name__, **values}


def request_from_json(value: object) -> Request:
    """The request that a JSON value represents.

    Raises:
        InvalidMessageError: for anything else.
    """
    request: Request = _message(value, REQUESTS)
    worker_id = request.worker_id
    if not worker_id or len(worker_id) > 200 or not worker_id.isprintable():
        raise InvalidMessageError(f"worker_id must have 1 to 200 printable characters, got {worker_id[:200]!r}")
    return request


def reply_from_json(value: object) -> Reply:
    """The reply that a JSON value represents.

    Raises:
        InvalidMessageError: for anything else.
    """
    reply: Reply = _message(value, REPLIES)
    return reply


def _message(value: object, types: Mapping[str, type]) -> Any:
    if not isinstance(value, dict):
        raise InvalidMessageError(f"a message must be a JSON object, got {type(value).__name__}")
    name = value.get("type")
    if not isinstance(name, str) or name not in types:
        raise InvalidMessageError(f"type must be one of {', '.join(types)}, got {str(name)[:100]!r}")
    return _read(types[name], {key: item for key, item in value.items() if key != "type"})


def _read(kind: type, values: Mapping[str, object]) -> Any:
    """An instance of a dataclass from the values of its fields."""
    readers = _readers(kind)
    plain = _plain(kind)
    read: dict[str, object] = {}
    for name, value in values.items():
        if name not in readers:
            raise InvalidMessageError(f"{kind.__name__} has no field {str(name)[:100]!r}")
        size = len(value) if isinstance(value, str) else value
        hint, least, most = plain.get(name, _NOT_PLAIN)
        is_valid = type(value) is hint and isinstance(size, int) and least <= size <= most
        read[name] = value if is_valid else readers[name](value)
    for name in _required(kind):
        if name not in values:
            raise InvalidMessageError(f"{kind.__name__} needs {name!r}")
    return kind(**read)


_NOT_PLAIN = (None, 0, 0)


@cache
def _plain(kind: type) -> dict[str, tuple[type, int, int]]:
    """For each field that is an integer or a text, its type and the bounds of its value or length.

    They are most of the fields, and need no call of a reader.
    """
    hints = get_type_hints(kind).items()
    integers = {name: (int, LOWEST.get(name, -MAX_NUMBER), MAX_NUMBER) for name, hint in hints if hint is int}
    return integers | {name: (str, 0, MAX_TEXT) for name, hint in hints if hint is str}


@cache
def _required(kind: type) -> list[str]:
    """Names of the fields without a default."""
    return [one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]


@cache
def _readers(kind: type) -> dict[str, Callable[[object], object]]:
    """For each field of a dataclass, the function that checks a JSON value and returns the field's."""
    hints = get_type_hints(kind)
    return {one.name: _reader(f"{kind.__name__}.{one.name}", hints[one.name]) for one in fields(kind)}


def _reader(name: str, hint: Any) -> Callable[[object], object]:
    """The reader of a field with this annotation."""
    if get_origin(hint) is tuple:
        read_item = _reader(name, get_args(hint)[0])
        check = _checker(name, lambda value: isinstance(value, list | tuple) and len(value) <= MAX_ITEMS, "a list")
        return lambda value: tuple(map(read_item, check(value)))
    if hint is Settings:
        check = _checker(name, lambda value: isinstance(value, dict), "an object")
        return lambda value: _read(Settings, check(value))
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return _checker(name, lambda value: isinstance(value, str) and value in options, f"one of {', '.join(options)}")
    if type(None) in options:
        read = _reader(name, options[0])
        return lambda value: None if value is None else read(value)
    holds, rule = _SCALARS[hint if hint in _SCALARS else dict]
    lowest = LOWEST.get(name.rpartition(".")[2])
    check = _checker(name, holds, rule)
    if lowest is None or hint not in (int, float):
        return check
    return _checker(name, lambda value: check(value) >= lowest, f">= {lowest}")


def _checker(name: str, holds: Check, rule: str) -> Callable[[object], Any]:
    """A function that returns its argument if the rule holds."""

    def check(value: object) -> Any:
        if not holds(value):
            raise InvalidMessageError(f"{name} must be {rule}, got {brief(value, 100)}")
        return value

    return check


def _is_int(value: Any) -> bool:
    return type(value) is int and -MAX_NUMBER <= value <= MAX_NUMBER


def _is_float(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_SCALARS: Mapping[Any, tuple[Check, str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_int, "an integer of at most 2**53"),
    float: (_is_float, "a finite number"),
    str: (lambda value: isinstance(value, str) and len(value) <= MAX_TEXT, f"a text of at most {MAX_TEXT} characters"),
    dict: (lambda value: isinstance(value, dict) and len(value) <= MAX_ITEMS, "an object"),
}
