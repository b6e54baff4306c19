"""Accepts connections, and gives those that send something to HTTP; the others cost next to nothing."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress

from uvicorn.config import Config
from uvicorn.server import ServerState

from onstep.control.serving.connections import Connection
from onstep.control.serving.limits import (
    ACCEPT_PAUSE_SECONDS,
    ACCEPTS_AT_ONCE,
    ACCEPTS_PER_SECOND,
    CONNECTIONS_AT_ONCE,
    CONNECTIONS_PER_SECOND,
    MOST_CONNECTIONS,
    REQUEST_SECONDS,
    SWEEP_SECONDS,
    Throttle,
)

_OUT_OF_DESCRIPTORS_SECONDS = 0.5
_LOOK_SECONDS = 0.02
_METHODS_BEGIN_WITH = frozenset(b"CDGHOPT")
"""CONNECT, DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, TRACE"""


class Acceptor:
    """The connections of a server: those that wait for a first byte, and those that speak HTTP. Lives in its loop.

    Args:
        listener: a listening socket that does not block.
        config: for uvicorn's protocol.
        on_error: called with what makes further work impossible.
    """

    def __init__(self, listener: socket.socket, config: Config, on_error: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._config = config
        self._on_error = on_error
        self._accepts = Throttle(ACCEPTS_PER_SECOND, ACCEPTS_AT_ONCE)
        self._throttle = Throttle(CONNECTIONS_PER_SECOND, CONNECTIONS_AT_ONCE)
        self._silent: dict[socket.socket, float] = {}
        """Connections that have sent nothing yet, oldest first, and since when."""
        self._speaking: set[socket.socket] = set()
        """Those that are HTTP's, or wait for their turn to be."""
        self._state = ServerState()
        self._is_finishing = False

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets of all connections."""
        return [*self._silent, *self._speaking]

    def open(self) -> None:
        """Begin to accept."""
        self._loop.add_reader(self._listener, self._accept)
        self._loop.call_later(SWEEP_SECONDS, self._sweep)

    async def finish(self, seconds: float) -> None:
        """Accept no more, and wait until all requests are answered, but not for longer than this."""
        self._is_finishing = True
        self._loop.remove_reader(self._listener)
        deadline = self._loop.time() + seconds
        while self._loop.time() < deadline and any(one.is_answering for one in self._connections()):
            await asyncio.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Close everything, at once."""
        self._is_finishing = True
        self._loop.remove_reader(self._listener)
        for connection in self._connections():
            connection.abort()
        for one in list(self._silent):
            self._drop(one)

    def _accept(self) -> None:
        """Accept what has come, or as much of it as may come in a while."""
        for _ in range(MOST_CONNECTIONS):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            self._admit(accepted)
            if self._accepts.reserve() > 0:
                self._pause(ACCEPT_PAUSE_SECONDS)
                return

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self._pause(_OUT_OF_DESCRIPTORS_SECONDS)
        else:
            self._loop.remove_reader(self._listener)
            self._on_error(error)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._accept_on)

    def _accept_on(self) -> None:
        if not self._is_finishing:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if self._is_full() and not self._make_room():
            accepted.close()
            return
        self._silent[accepted] = self._loop.time()
        self._listen_to(accepted)
        if accepted in self._silent:
            self._loop.add_reader(accepted, self._listen_to, accepted)

    def _is_full(self) -> bool:
        if len(self._silent) + len(self._speaking) >= MOST_CONNECTIONS:
            self._speaking = {one for one in self._speaking if one.fileno() >= 0}
        return len(self._silent) + len(self._speaking) >= MOST_CONNECTIONS

    def _make_room(self) -> bool:
        """Close the connection that has been idle for longest; returns whether there was one."""
        if self._silent:
            self._drop(next(iter(self._silent)))
            return True
        waiting = [one for one in self._connections() if one.waits_since is not None]
        idle = min(waiting, key=lambda one: one.waits_since or 0.0, default=None)
        if idle is not None:
            idle.abort()
        return idle is not None

    def _listen_to(self, one: socket.socket) -> None:
        """Look at the first byte of a connection: garbage is not answered."""
        try:
            first = one.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first or first[0] not in _METHODS_BEGIN_WITH:
            self._drop(one)
            return
        self._loop.remove_reader(one)
        del self._silent[one]
        self._speaking.add(one)
        delay = self._throttle.reserve()
        self._loop.call_later(delay, self._hand_over, one)

    def _hand_over(self, one: socket.socket) -> None:
        """Let HTTP have a connection."""
        task = self._loop.create_task(self._connect(one))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _connect(self, one: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: Connection(self._config, self._state, {}), one)
        except OSError:  # the client has gone
            one.close()

    def _drop(self, one: socket.socket) -> None:
        self._silent.pop(one, None)
        with suppress(OSError, ValueError):
            self._loop.remove_reader(one)
        one.close()

    def _sweep(self) -> None:
        """Close the connections of clients that are too slow."""
        self._loop.call_later(SWEEP_SECONDS, self._sweep)
        now = self._loop.time()
        for one, since in list(self._silent.items()):
            if now - since > REQUEST_SECONDS:
                self._drop(one)
        for connection in self._connections():
            if connection.is_overdue(now):
                connection.abort()

    def _connections(self) -> list[Connection]:
        """Those that speak HTTP."""
        return [one for one in self._state.connections if isinstance(one, Connection)]
