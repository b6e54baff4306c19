"""Reads what a request brings (its JSON body, the numbers in its query) and makes answers in strict JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from onstep.errors import DataError
from onstep.files.bounded_reading import parse_json
from onstep.files.json_values import encode, finite

MOST_BODY_BYTES = 64 << 10
"""Of a body in JSON."""


def strict_json(value: Any) -> str:
    """Encode as JSON that every parser reads: NaN and infinities become null, other values text."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(finite(json.loads(encode({"value": value}))["value"]), allow_nan=False)


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(strict_json(content), status, headers, media_type="application/json")


def refusal(status: int, error: str, headers: Mapping[str, str] | None = None, /, **more: Any) -> Response:
    """An error in JSON: `{"error": ...}` and further keys."""
    return answer({"error": error, **more}, status, headers)


class RefusedError(Exception):
    """A request that is answered with an error; raised where it is found."""

    def __init__(self, status: int, error: str, **more: Any) -> None:
        super().__init__(error)
        self.response = refusal(status, error, **more)


async def refused(request: Request, error: Exception) -> Response:
    """The answer to a request that a handler refused, or in which it failed; of a bug, only the name of the error."""
    if isinstance(error, RefusedError):
        return error.response
    if isinstance(error, HTTPException):
        return refusal(error.status_code, error.detail, error.headers)
    return refusal(500, type(error).__name__)


ERROR_HANDLERS = dict.fromkeys((RefusedError, HTTPException, Exception), refused)
"""For applications of Starlette."""


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RefusedError: 413 for a body that is too large, 415 for another type, 400 for one that is not an object.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RefusedError(415, "The body must be JSON: send Content-Type: application/json.")
    text = await _body(request)
    try:
        value = parse_json(text, "The body", max_nesting=20)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(400, "The body contains half a surrogate pair, which is not text.") from None
    except DataError as error:
        raise RefusedError(400, str(error)) from None
    if not isinstance(value, dict):
        raise RefusedError(400, f"The body must be a JSON object, got {type(value).__name__}.")
    return value


def number(request: Request, name: str, default: float | None, least: float, most: float) -> float | None:
    """A number in the query.

    Raises:
        RefusedError: 400 if it is none, too small or too large.
    """
    text = request.query_params.get(name)
    return default if text is None else _number(name, text, least, most)


def whole_number(request: Request, name: str, default: int | None, least: int, most: int) -> int | None:
    """An integer in the query.

    Raises:
        RefusedError: 400 if it is none, too small or too large.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    value = _number(name, text, least, most)
    if not text.lstrip("-").isdecimal():
        raise RefusedError(400, f"{name} must be an integer, got {text[:80]!r}.")
    return int(value)


def choice(request: Request, name: str) -> set[str] | None:
    """The names in a comma-separated list in the query; None without one."""
    text = request.query_params.get(name)
    return None if not text else {one.strip() for one in text.split(",") if one.strip()}


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text) if text.isascii() else float("nan")
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise RefusedError(400, f"{name} must be a number from {least:g} to {most:g}, got {text[:80]!r}.")
    return value


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BODY_BYTES:
            raise RefusedError(413, f"A body may have at most {MOST_BODY_BYTES} bytes.")
    return bytes(body)
