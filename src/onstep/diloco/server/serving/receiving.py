"""Reads the body of a request into memory of exactly its size, with bounds on size and time."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import Request

from onstep.control.serving.messages import RefusedError
from onstep.diloco.server.memory import Buffers
from onstep.diloco.server.serving.connections import STALL_SECONDS, connection_of


async def read_body(request: Request, most_bytes: int, buffers: Buffers) -> memoryview:
    """The body, in memory that may be written.

    Memory is reserved at once and used as bytes arrive, so that a body costs what was sent of it, or of those before
    it, not what its header says.

    Raises:
        RefusedError: 411 without a length, 413 if it is too large, 408 if it stalls, 400 if it is incomplete.
    """
    size = _length(request, most_bytes)
    memory = buffers.take(size).data if size else memoryview(bytearray())
    try:
        received = await connection_of(request).read_body(memory)
    except TimeoutError:
        raise RefusedError(408, f"The body stopped for {STALL_SECONDS:g} s before its {size} bytes.") from None
    if received != size:
        raise RefusedError(400, "The body is incomplete.")
    return memory


async def skip_body(request: Request, most_bytes: int) -> None:
    """Read a body of which nothing is needed, if it has at most this size: until it is sent, nobody reads an answer."""
    with suppress(RefusedError, TimeoutError):
        await connection_of(request).skip_body(_length(request, most_bytes))


def _length(request: Request, most_bytes: int) -> int:
    text = request.headers.get("content-length", "")
    if not text or "transfer-encoding" in request.headers:
        raise RefusedError(411, "A body must be sent with its Content-Length, and without Transfer-Encoding.")
    if not text.isascii() or not text.isdecimal() or len(text) > 19 or int(text) > most_bytes:
        raise RefusedError(413, f"This body may have at most {most_bytes} bytes, not {text[:30]}.")
    return int(text)
