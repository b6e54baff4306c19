"""Moves bodies between a socket and memory without copies: HTTP/1.1 as in `control`, but for tensors."""

from __future__ import annotations

import asyncio

import h11
from starlette.requests import Request

from onstep.control.serving import connections

STALL_SECONDS = 60.0
"""A sender or reader may pause for that long; then it is cut off."""
_SKIPPED_BYTES = 1 << 20
"""Of a body of which nothing is kept, at a time."""


class Connection(connections.Connection):
    """One connection of a worker.

    h11 would copy a body several times, piece by piece, and be slower than the network. So the bytes of one are read
    from the socket into their place, without h11, which starts again behind it.
    """

    _body: _Body | None = None
    _unsent = 0
    """Bytes of an answer that the client did not take until it was last looked at."""

    @property
    def waits_since(self) -> float | None:
        """When the server began to wait for the client; None while a body arrives, which `read_body` watches."""
        return super().waits_since if self._body is None else None

    def is_stuck(self, now: float) -> bool:
        """Whether the client has read nothing for long."""
        if self._is_stuck_since is None:
            return False
        unsent = self.transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._is_stuck_since = unsent, now
        return now - self._is_stuck_since > STALL_SECONDS

    async def read_body(self, memory: memoryview) -> int:
        """Read the body of the request that is being answered; returns how many bytes came before the client left.

        Args:
            memory: of the size that the request's Content-Length says.

        Raises:
            TimeoutError: if nothing comes for `STALL_SECONDS`.
        """
        return await self._receive(_Body(self, memory.nbytes, memory))

    async def skip_body(self, size: int) -> None:
        """Read the body of the request that is being answered, unless its sender still waits, and keep nothing of it.

        Raises:
            TimeoutError: if nothing comes for `STALL_SECONDS`.
        """
        if not self.cycle.waiting_for_100_continue:
            await self._receive(_Body(self, size, None))

    async def _receive(self, body: _Body) -> int:
        self._ask_for_body()
        if body.is_complete:
            return body.position
        self._body = body
        self.transport.set_protocol(body)
        self.flow.resume_reading()
        try:
            await body.wait()
        finally:
            if not body.is_complete:
                self.cycle.keep_alive = False  # what is still to come would be read as a request
                self.take_back()
        return body.position

    def take_back(self) -> None:
        """Receive what follows the body."""
        self._body = None
        self._restart_parser()
        self.transport.set_protocol(self)

    async def write_body(self, piece: memoryview) -> bool:
        """Send a piece of the answer's body, from where it is; waits while the client is slower.

        Returns:
            Whether the client is still there.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        else:
            await asyncio.sleep(0)  # so that its leaving is noticed
        if self.cycle.disconnected or self.transport.is_closing():
            return False
        for part in self.conn.send_with_data_passthrough(h11.Data(data=piece)) or ():  # type: ignore[arg-type]
            self.transport.write(part)
        return True

    def _ask_for_body(self) -> None:
        if self.cycle.waiting_for_100_continue:
            self.cycle.waiting_for_100_continue = False
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")

    def _restart_parser(self) -> None:
        """Bring h11 to where it is behind a request."""
        assert self.config.h11_max_incomplete_event_size is not None
        self.conn = h11.Connection(h11.SERVER, self.config.h11_max_incomplete_event_size)
        lines = [b"POST / HTTP/" + self.scope["http_version"].encode(), b"Host: -", b"Content-Length: 0"]
        lines += [b"Connection: " + value for name, value in self.headers if name == b"connection"]
        self.conn.receive_data(b"\r\n".join([*lines, b"", b""]))
        while not isinstance(self.conn.next_event(), h11.EndOfMessage):
            pass
        self.cycle.conn, self.cycle.more_body = self.conn, False


class _Body(asyncio.BufferedProtocol):
    """Receives the rest of a body in the place of its connection."""

    def __init__(self, connection: Connection, size: int, memory: memoryview | None) -> None:
        self._connection = connection
        self._size = size
        self._memory = memory
        received = connection.cycle.body
        self.position = len(received)
        if memory is None:
            self._skipped = memoryview(bytearray(min(size, _SKIPPED_BYTES)))
        else:
            memory[: self.position] = received
        connection.cycle.body = bytearray()
        self._ended = connection.loop.create_future()

    @property
    def is_complete(self) -> bool:
        return self.position == self._size

    async def wait(self) -> None:
        """Wait until it is complete, or the client has gone."""
        before = -1
        while not self._ended.done():
            if self.position == before:
                raise TimeoutError
            before = self.position
            await asyncio.wait([self._ended], timeout=STALL_SECONDS)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._memory is None:
            return self._skipped[: self._size - self.position]
        return self._memory[self.position :]

    def buffer_updated(self, nbytes: int) -> None:
        self.position += nbytes
        if self.is_complete:
            self._connection.take_back()
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        self._end()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def connection_of(request: Request) -> Connection:
    """The connection that a request came on."""
    found: Connection = request.scope["state"]["connection"]
    return found
