"""Reads the body of a request into memory of exactly its size."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import ClientDisconnect, Request

from onstep.diloco.server.memory import Buffers
from onstep.http.messages import RefusedError

_RELEASED_BYTES = 8 << 20
"""Received, after which the memory of a body that is mapped from a file is released."""


async def read_body(request: Request, most_bytes: int, buffers: Buffers) -> memoryview:
    """The body, in memory that may be written.

    Memory is reserved at once and used as bytes arrive, so that a body costs what was sent of it, not what its header
    says.

    Raises:
        RefusedError: 411 without a length, 413 if it is too large.
        ClientDisconnect: if the client leaves before its end.
    """
    block = buffers.take(_length(request, most_bytes))
    memory, start = block.data, int(block.__array_interface__["data"][0])
    receive, position, released, is_complete = request.receive, 0, 0, False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message["body"]
        memory[position : position + len(piece)] = piece
        position += len(piece)
        if position - released >= _RELEASED_BYTES:
            buffers.release_range(start + released, position - released)
            released = position
        is_complete = not message["more_body"]
    return memory


async def skip_body(request: Request, most_bytes: int) -> None:
    """Read a body of which nothing is needed, so that its connection stays, unless it is too large or not yet sent."""
    with suppress(RefusedError):
        if b"expect" not in dict(request.scope["headers"]) and _length(request, most_bytes):
            async for _ in request.stream():
                pass


def _length(request: Request, most_bytes: int) -> int:
    headers: dict[bytes, bytes] = dict(request.scope["headers"])
    text = headers.get(b"content-length", b"")
    if not text or b"transfer-encoding" in headers:
        raise RefusedError(411, "A body must be sent with its Content-Length, and without Transfer-Encoding.")
    if not text.isdigit() or len(text) > 19 or int(text) > most_bytes:
        shown = text[:30].decode("latin-1")
        raise RefusedError(413, f"This body may have at most {most_bytes} bytes, not {shown}.")
    return int(text)
