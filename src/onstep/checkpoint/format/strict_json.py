"""Parses JSON from untrusted files strictly: refuses NaN, repeated names and other leniencies of Python's parser."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from onstep.errors import CheckpointError

MAX_DIGITS = 20
"""Enough for 64 bits; the time to parse an integer grows with the square of its length."""


def load_strict(text: bytes, where: str) -> Any:
    """Parse UTF-8 JSON without repeated names, NaN, infinities or integers of more than 20 characters.

    Raises:
        CheckpointError: for anything else, with the reason.
    """
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=without_repetition,
            parse_int=_short_int,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{where} is not valid JSON: {reason}.") from error


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` that refuses repeated names."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return result


def _short_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
