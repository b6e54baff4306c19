"""Sends tensors from where they are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response
from torch import Tensor

from onstep.checkpoint import write_tensors
from onstep.diloco.codec import body_bytes
from onstep.diloco.server.serving.connections import Connection
from onstep.diloco.wire.http import MESSAGE_HEADER, TENSORS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

PIECE_BYTES = 1 << 20


class _Pieces:
    """Collects the buffers that `write_tensors` passes on: views of the tensors' own memory."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def write(self, buffer: bytes | memoryview, /) -> None:
        """Append a buffer."""
        self.buffers.append(memoryview(buffer))


class TensorResponse(Response):
    """An answer with a message in its header and tensors as its body, which must not change until it is sent."""

    def __init__(self, message: str, tensors: Mapping[str, Tensor]) -> None:
        self.status_code = 200
        self.background = None
        self._tensors = tensors
        self.raw_headers = [
            (b"content-type", TENSORS.encode()),
            (b"content-length", str(body_bytes(tensors)).encode()),
            (MESSAGE_HEADER.encode(), message.encode("ascii")),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        connection: Connection = scope["state"]["connection"]
        for piece in _pieces(self._tensors):
            if not await connection.write_body(piece):
                return
        await send({"type": "http.response.body", "body": b""})


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    collected = _Pieces()
    write_tensors(collected, tensors)
    for buffer in collected.buffers:
        for start in range(0, buffer.nbytes, PIECE_BYTES):
            yield buffer[start : start + PIECE_BYTES]
