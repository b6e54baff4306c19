"""Sends tensors from where they are in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from starlette.responses import Response
from torch import Tensor

from onstep.checkpoint import write_tensors
from onstep.diloco.codec.body import body_bytes
from onstep.diloco.server.memory import Buffers
from onstep.diloco.wire.http import MESSAGE_HEADER, TENSORS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

PIECE_BYTES = 1 << 20


class _Pieces:
    """Collects the buffers that `write_tensors` passes on: views of the tensors' own memory."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []

    def write(self, buffer: bytes | memoryview, /) -> None:
        """Append a buffer, in pieces."""
        view = memoryview(buffer)
        self.buffers += [view[start : start + PIECE_BYTES] for start in range(0, view.nbytes, PIECE_BYTES)]


class TensorResponse(Response):
    """An answer with a message in its header and tensors as its body, which must not change until it is sent."""

    def __init__(self, message: str, tensors: Mapping[str, Tensor], buffers: Buffers | None = None) -> None:
        self._buffers = buffers
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
        pieces = _Pieces()
        write_tensors(pieces, self._tensors)
        for piece in pieces.buffers:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            if self._buffers is not None and piece.nbytes == PIECE_BYTES:
                address = int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
                self._buffers.release_range(address, piece.nbytes)
            await asyncio.sleep(0)  # so that a client that leaves is noticed
        await send({"type": "http.response.body", "body": b""})
