"""Messages as JSON and back; what comes from a network is checked before it becomes a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from onstep.diloco.protocol.messages import (
    Accepted,
    Await,
    Beat,
    Deregister,
    Dropped,
    Heartbeat,
    Left,
    NotYet,
    Ready,
    Refused,
    Register,
    Registered,
    Reply,
    Request,
    Settings,
    Submit,
)
from onstep.errors import ConfigError

MAX_TEXT = 1_000
"""Characters in a text."""
MAX_NUMBER = 2**53
"""What a JSON number holds exactly."""
MAX_ITEMS = 100_000
"""Elements of a list: contributors, fragments."""

REQUESTS: Mapping[str, type] = {one.__name__: one for one in (Register, Submit, Await, Heartbeat, Deregister)}
REPLIES: Mapping[str, type] = {
    one.__name__: one for one in (Registered, Accepted, Dropped, Ready, NotYet, Beat, Left, Refused)
}


class InvalidMessageError(ConfigError):
    """A message from the network is malformed; the text names the field and the rule."""


def to_json(message: Request | Reply) -> dict[str, Any]:
    """The message as a JSON object; `type` names its class."""
    return {"type": type(message).__name__, **asdict(message)}


def request_from_json(value: object) -> Request:
    """The request that a JSON value stands for.

    Raises:
        InvalidMessageError: if it stands for none.
    """
    request: Request = _message(value, REQUESTS)
    for name, lowest in LOWEST.items():
        number = getattr(request, name, None)
        if number is not None and number < lowest:
            raise InvalidMessageError(f"{type(request).__name__}.{name} must be >= {lowest}, got {number}")
    worker_id = request.worker_id
    if not worker_id or len(worker_id) > 200 or not worker_id.isprintable():
        raise InvalidMessageError(f"worker_id must have 1 to 200 printable characters, got {worker_id[:200]!r}")
    return request


LOWEST: Mapping[str, int] = {
    "sequence": 0,
    "fragment": 0,
    "base_version": 0,
    "tokens": 1,
    "steps": 0,
    "step": 0,
    "version": 0,
    "have_version": 0,
    "wait": 0,
    "steps_per_second": 0,
    "sync_every": 1,
    "num_fragments": 1,
    "resumes_at": 0,
}
"""Smallest value of each number in a request."""


def reply_from_json(value: object) -> Reply:
    """The reply that a JSON value stands for.

    Raises:
        InvalidMessageError: if it stands for none.
    """
    reply: Reply = _message(value, REPLIES)
    return reply


def _message(value: object, types: Mapping[str, type]) -> Any:
    if not isinstance(value, dict):
        raise InvalidMessageError(f"a message must be a JSON object, got {type(value).__name__}")
    kind = types.get(str(value.get("type")))
    if kind is None:
        raise InvalidMessageError(f"type must be one of {', '.join(types)}, got {str(value.get('type'))[:100]!r}")
    return _made(kind, {key: one for key, one in value.items() if key != "type"})


def _made(kind: type, values: Mapping[str, object]) -> Any:
    known = {field.name: field for field in fields(kind)}
    if unknown := [key for key in values if key not in known]:
        raise InvalidMessageError(f"{kind.__name__} has no field {str(unknown[0])[:100]!r}")
    if missing := [name for name, field in known.items() if name not in values and _is_required(field)]:
        raise InvalidMessageError(f"{kind.__name__} needs {missing[0]!r}")
    hints = _hints(kind)
    return kind(**{name: _checked(f"{kind.__name__}.{name}", hints[name], one) for name, one in values.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _checked(name: str, hint: Any, value: object) -> object:
    """The value of a field, of the annotated type."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return _require(value in options and isinstance(value, str), name, f"one of {options}", value)
    if hint is Settings:
        _require(isinstance(value, dict), name, "an object", value)
        assert isinstance(value, dict)
        return _made(Settings, value)
    if get_origin(hint) is tuple:
        _require(isinstance(value, list | tuple) and len(value) <= MAX_ITEMS, name, "a list", value)
        assert isinstance(value, list | tuple)
        return tuple(_checked(name, options[0], one) for one in value)
    if NoneType in options:
        return None if value is None else _checked(name, options[0], value)
    check, rule = SCALARS[hint if hint in SCALARS else dict]
    return _require(check(value), name, rule, value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_float(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


SCALARS: Mapping[type, tuple[Callable[[object], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_int, "an integer of at most 2**53"),
    float: (_is_float, "a finite number"),
    str: (lambda value: isinstance(value, str) and len(value) <= MAX_TEXT, f"a text of at most {MAX_TEXT} characters"),
    dict: (lambda value: isinstance(value, dict) and len(value) <= MAX_ITEMS, "an object"),
}


def _require(holds: bool, name: str, rule: str, value: object) -> object:
    if not holds:
        raise InvalidMessageError(f"{name} must be {rule}, got {str(value)[:100]!r}")
    return value
