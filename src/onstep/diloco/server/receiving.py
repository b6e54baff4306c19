"""Reads the body of a request into memory of exactly its size, with bounds on size and time."""

from __future__ import annotations

import asyncio

import numpy as np
from starlette.requests import ClientDisconnect, Request

from onstep.control.serving.messages import RefusedError

STALL_SECONDS = 60.0
"""A sender or reader may pause for that long; then it is cut off."""


async def read_body(request: Request, most_bytes: int) -> memoryview:
    """The body, in memory that may be written.

    Memory is reserved at once and used as bytes arrive, so that a body costs what was sent of it, not what its header
    says.

    Raises:
        RefusedError: 411 without a length, 413 if it is too large, 408 if it stalls, 400 if it is incomplete.
    """
    size = _length(request, most_bytes)
    memory = np.empty(size, np.uint8).data if size else memoryview(bytearray())
    position = 0
    pieces = request.stream()
    try:
        while True:
            async with asyncio.timeout(STALL_SECONDS):
                piece = await anext(pieces, None)
            if piece is None:
                break
            memory[position : position + len(piece)] = piece
            position += len(piece)
    except TimeoutError:
        raise RefusedError(408, f"The body stopped for {STALL_SECONDS:g} s after {position} of {size} bytes.") from None
    except (ClientDisconnect, ValueError):
        position = -1
    if position != size:
        raise RefusedError(400, "The body is incomplete.")
    return memory


def _length(request: Request, most_bytes: int) -> int:
    text = request.headers.get("content-length", "")
    if not text:
        raise RefusedError(411, "A body must be sent with its Content-Length.")
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > most_bytes:
        raise RefusedError(413, f"This body may have at most {most_bytes} bytes, not {text[:30]}.")
    return int(text)
