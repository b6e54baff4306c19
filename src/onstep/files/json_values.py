"""Encodes records as JSON, with text in place of what JSON cannot represent."""

from __future__ import annotations

import json
import math
from typing import Any

_MOST_NESTED = 100
"""Maximum nesting depth when converting values that JSON cannot represent."""


def encode(record: dict[str, Any]) -> str:
    """Encode a record as one line of JSON; NaN and infinities as in Python's ``json``.

    Keys and values that JSON cannot represent (tuples as keys, circular or very deep values) are converted to text.
    """
    try:
        return _ENCODER.encode(record)
    except Exception:  # noqa: BLE001 - code of the values can raise anything; one value must not lose a record
        return json.dumps(_held(record))


def finite(value: Any) -> Any:
    """Replace NaN and infinities in plain values, which strict JSON does not have, by None."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """Convert a value for JSON: arrays and tensors to lists and numbers, everything else to text."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


_ENCODER = json.JSONEncoder(default=_plain)


def _held(value: Any, around: tuple[int, ...] = ()) -> Any:
    """Replace what JSON cannot represent in `value` by text; `around` has the ids of the enclosing containers."""
    if isinstance(value, (dict, list, tuple)):
        if id(value) in around or len(around) >= _MOST_NESTED:
            return _text(value)
        inside = (*around, id(value))
        if isinstance(value, dict):
            return {_key(key): _held(one, inside) for key, one in value.items()}
        return [_held(one, inside) for one in value]
    try:
        plain = value if value is None or isinstance(value, (str, int, float)) else _plain(value)
        json.dumps(plain)
    except Exception:  # noqa: BLE001 - as in `encode`
        return _text(value)
    return plain


def _key(key: Any) -> str | float | None:
    held: Any = _held(key)
    return held if held is None or isinstance(held, (str, int, float)) else _text(key)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - as in `encode`
        return f"<{type(value).__qualname__}>"
