"""Reads the body of a request into memory of exactly its size."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request

from onstep.diloco.server.memory import Buffers
from onstep.http.messages import RefusedError


async def read_body(request: Request, most_bytes: int, buffers: Buffers) -> memoryview:
    """The body, in memory that may be written.

    Memory is reserved at once and used as bytes arrive, so that a body costs what was sent of it, not what its header
    says.

    Raises:
        RefusedError: 411 without a length, 413 if it is too large.
        ClientDisconnect: if the client leaves before its end.
    """
    memory = buffers.take(_length(request, most_bytes)).data
    position = 0
    async for piece in request.stream():
        memory[position : position + len(piece)] = piece
        position += len(piece)
    return memory


async def skip_body(request: Request, most_bytes: int) -> None:
    """Read a body of which nothing is needed, so that its connection stays, unless it is too large or not yet sent."""
    with suppress(RefusedError):
        if "expect" not in request.headers and _length(request, most_bytes):
            async for _ in request.stream():
                pass


def _length(request: Request, most_bytes: int) -> int:
    text = request.headers.get("content-length", "")
    if not text or "transfer-encoding" in request.headers:
        raise RefusedError(411, "A body must be sent with its Content-Length, and without Transfer-Encoding.")
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > most_bytes:
        raise RefusedError(413, f"This body may have at most {most_bytes} bytes, not {text[:30]}.")
    return int(text)
