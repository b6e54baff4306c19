"""Accepts connections, and bounds how many there are and how long they may keep the server waiting."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onstep.http.throttle import Throttle

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_UNLIMITED = 1 << 62
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(frozen=True)
class ClientLimits:
    """What the clients of a server may cost; by default of one beside a training."""

    connections: int = 64
    """Open at a time. Room for a new one is made by closing unauthenticated ones, then idle ones."""
    accepts_per_second: float = 40.0
    accepts_at_once: float = 128.0
    backlog: int = 32
    """Connections that the kernel keeps waiting."""
    request_seconds: float = 10.0
    """For the beginning of a request, and between two requests."""
    body_seconds: float = 10.0
    """For the next kilobyte of a body, or its end."""
    answer_seconds: float = 30.0
    """For a client to read some of an answer that fills its connection's buffers."""
    header_bytes: int = 16 << 10
    """Of a request, before its body."""
    finish_seconds: int = 1
    """For answers that are being given when the server stops."""


class Client:
    """One connection, as far as its server decides about it."""

    def __init__(
        self,
        connection: socket.socket | None = None,
        deadline: float | None = None,
        header_bytes: int = _UNLIMITED,
    ) -> None:
        self._connection = connection
        self._header_bytes = header_bytes
        self.receivable_bytes = header_bytes
        """How many bytes are read from its socket until the server expects more."""
        self.is_admitted = False
        """Whether the last request had a valid token or session; set by what checks that."""
        self.deadline = deadline
        """When the connection is cut off, in seconds of `time.monotonic`; None while the server works for it."""

    def expect(self, *, has_body: bool) -> None:
        """Read the body of the request that has begun, which what reads it bounds; without one, another request."""
        self.receivable_bytes = _UNLIMITED if has_body else self._header_bytes

    @property
    def descriptor(self) -> int:
        """Of its socket; negative once that is closed."""
        return -1 if self._connection is None else self._connection.fileno()

    def cut(self) -> None:
        """End the connection at once; what reads from it, or writes to it, sees that."""
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)


class Connection(socket.socket):
    """The socket of a client, at its end as soon as a request has too many headers: parsers keep incomplete ones."""

    client: Client

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """Receive as many bytes as the client may send; none if it has sent them."""
        data = super().recv(min(size, self.client.receivable_bytes), flags)
        self.client.receivable_bytes -= len(data)
        return data

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """The same into memory, as TLS needs it."""
        size = min(nbytes or len(memoryview(buffer)), self.client.receivable_bytes)
        count = super().recv_into(buffer, size, flags) if size else 0
        self.client.receivable_bytes -= count
        return count


class Listener(socket.socket):
    """A listening socket, and the clients that came through it. A Unix socket, which only its owner can open, has none.

    Args:
        listening: the socket, which is taken over.
        limits: of all clients together.
    """

    def __init__(self, listening: socket.socket, limits: ClientLimits) -> None:
        super().__init__(fileno=listening.detach())
        self.setblocking(False)
        self.limits = limits
        self._clients: dict[tuple[str, int], Client] = {}
        """By address, in the order in which they came."""
        self._throttle = Throttle(limits.accepts_per_second, limits.accepts_at_once)
        self._resumes_at = 0.0
        self._is_pausing = False
        self._failure: OSError | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            OSError: EMFILE if too many came in a short time, after which asyncio pauses for a second.
        """
        if time.monotonic() < self._resumes_at:
            if self._is_pausing:
                raise BlockingIOError
            self._is_pausing = True
            raise OSError(errno.EMFILE, "too many new connections")
        self._is_pausing = False
        try:
            connection, address = super().accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            raise
        except OSError as error:
            self._failure = None if error.errno in _PASSING else error
            raise
        return connection if self.family == socket.AF_UNIX else self._add(address[:2], connection), address

    def client(self, address: tuple[str, int] | None) -> Client:
        """The client at an address; one without limits if it is unknown, as on a Unix socket."""
        return (self._clients.get(address) if address is not None else None) or Client()

    def cut_slow(self) -> None:
        """Cut off the clients that let the server wait for too long. To be called about once a second.

        Raises:
            OSError: if nothing can be accepted any more.
        """
        if self._failure is not None:
            raise self._failure
        now = time.monotonic()
        for client in self._clients.values():
            if client.deadline is not None and now > client.deadline:
                client.cut()
        self._forget_closed()

    def cut_all(self) -> bool:
        """End all connections; whether there were any."""
        self._forget_closed()
        for client in self._clients.values():
            client.cut()
        return bool(self._clients)

    def release(self) -> None:
        """Let go of all sockets in a forked child, whose parent continues to use them."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (self.fileno(), *(one.descriptor for one in self._clients.values())):
            if descriptor >= 0:
                os.dup2(nothing, descriptor, inheritable=False)  # their owners close them later, by number
        os.close(nothing)

    def _add(self, address: tuple[str, int], accepted: socket.socket) -> Connection:
        now = time.monotonic()
        self._resumes_at = now + self._throttle.reserve()
        if len(self._clients) >= self.limits.connections:
            self._make_room()
        self._clients.pop(address, None)
        connection = Connection(fileno=accepted.detach())
        connection.client = Client(connection, now + self.limits.request_seconds, self.limits.header_bytes)
        self._clients[address] = connection.client
        return connection

    def _make_room(self) -> None:
        """Cut off some unauthenticated clients, or else the first idle client; a busy server answers 503 by itself."""
        self._forget_closed()
        if len(self._clients) < self.limits.connections:
            return
        strangers = [address for address, one in self._clients.items() if not one.is_admitted]
        idle = [address for address, one in self._clients.items() if one.deadline is not None]
        for address in strangers[: max(1, self.limits.connections // 16)] or idle[:1]:
            self._clients.pop(address).cut()

    def _forget_closed(self) -> None:
        self._clients = {address: one for address, one in self._clients.items() if one.descriptor >= 0}
