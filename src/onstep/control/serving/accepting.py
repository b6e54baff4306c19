"""Accepts connections, and gives those that send something to HTTP; the others cost next to nothing."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from heapq import nsmallest

from uvicorn.config import Config
from uvicorn.server import ServerState

from onstep.control.serving.connections import Connection
from onstep.control.serving.limits import (
    ACCEPT_PAUSE_SECONDS,
    REQUEST_SECONDS,
    SWEEP_SECONDS,
    ConnectionLimits,
    Throttle,
)

_OUT_OF_DESCRIPTORS_SECONDS = 0.5
_LOOK_SECONDS = 0.02
_METHODS_BEGIN_WITH = frozenset(b"CDGHOPT")
"""CONNECT, DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, TRACE"""
_TLS_BEGINS_WITH = frozenset(b"\x16")
"""The handshake's record type."""


class Acceptor:
    """The connections of a server: those that wait for a first byte, and those that speak HTTP. Lives in its loop.

    Args:
        listener: a listening socket that does not block.
        config: for uvicorn's protocol, which must be a `Connection`.
        on_error: called with what makes further work impossible.
        limits: of all connections together.
    """

    def __init__(
        self,
        listener: socket.socket,
        config: Config,
        on_error: Callable[[Exception], None],
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._config = config
        self._on_error = on_error
        limits = limits or ConnectionLimits()
        self._most, self._closed_for_room = limits.most, limits.closed_for_room
        self._accepts = Throttle(limits.accepts_per_second, limits.accepts_at_once)
        self._throttle = Throttle(limits.per_second, limits.at_once)
        self._begins_with = _TLS_BEGINS_WITH if config.ssl else _METHODS_BEGIN_WITH
        self._newest: socket.socket | None = None
        """Accepted, while room is made for it."""
        self._silent: dict[socket.socket, float] = {}
        """Connections that have sent nothing yet, oldest first, and since when."""
        self._speaking: set[socket.socket] = set()
        """Those that are HTTP's, or wait for their turn to be."""
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        """Those that wait for it."""
        self._handshakes: dict[socket.socket, asyncio.Task[None]] = {}
        """Of TLS, oldest first."""
        self._given_up: socket.socket | None = None
        """The last of them that was closed to make room; it is open for a while."""
        self._state = ServerState()
        self._is_finishing = False

    @property
    def sockets(self) -> list[socket.socket]:
        """The sockets of all connections."""
        return [*self._silent, *self._speaking, *([] if self._newest is None else [self._newest])]

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
        for handshake in self._handshakes.values():
            handshake.cancel()
        for one in list(self._silent):
            self._drop(one)
        for one, turn in self._waiting.items():
            turn.cancel()
            one.close()
        if self._newest is not None:
            self._newest.close()

    def _accept(self) -> None:
        """Accept what has come, or as much of it as may come in a while."""
        for _ in range(self._most):
            try:
                self._newest = self._newest or self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            seconds = self._make_room() if self._is_full() else None
            if seconds is not None:
                self._pause(seconds)
                return
            newest, self._newest = self._newest, None
            self._admit(newest)
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
            self._accept()

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        if self._is_full():  # and all are busy
            accepted.close()
            return
        self._silent[accepted] = self._loop.time()
        self._listen_to(accepted)
        if accepted in self._silent:
            self._loop.add_reader(accepted, self._listen_to, accepted)

    def _is_full(self) -> bool:
        if len(self._silent) + len(self._speaking) >= self._most:
            self._speaking = {one for one in self._speaking if one.fileno() >= 0}
        return len(self._silent) + len(self._speaking) >= self._most

    def _make_room(self) -> float | None:
        """Close those that have been idle for longest, strangers' first.

        Returns:
            Seconds until they are closed, or until it is known which of the newest are strangers'; None if there is
            nothing to wait for: there is room, or none can be made.
        """
        if self._silent:
            self._drop(next(iter(self._silent)))
            return None
        waiting = [one for one in self._connections() if one.waits_since is not None]
        idle = nsmallest(self._closed_for_room, waiting, key=lambda one: (one.is_admitted, one.waits_since or 0.0))
        strangers = [one for one in idle if not one.is_admitted]
        if not strangers and self._config.ssl and self._handshakes:
            if self._given_up is None or self._given_up.fileno() < 0:
                self._given_up = next(iter(self._handshakes))
                self._handshakes.pop(self._given_up).cancel()
            return 0.0
        if not strangers and (self._waiting or self._handshakes):
            return _LOOK_SECONDS
        for one in strangers or idle[:1]:
            one.abort()
        return 0.0 if idle else None

    def _listen_to(self, one: socket.socket) -> None:
        """Look at the first byte of a connection: garbage is not answered."""
        try:
            first = one.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        if not first or first[0] not in self._begins_with:
            self._drop(one)
            return
        self._loop.remove_reader(one)
        del self._silent[one]
        self._speaking.add(one)
        self._waiting[one] = self._loop.call_later(self._throttle.reserve(), self._hand_over, one)

    def _hand_over(self, one: socket.socket) -> None:
        """Let HTTP have a connection."""
        del self._waiting[one]
        task = self._loop.create_task(self._connect(one))
        self._handshakes[one] = task
        task.add_done_callback(lambda done: self._connected(one, done.cancelled()))

    async def _connect(self, one: socket.socket) -> None:
        tls = self._config.ssl
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._config.http_protocol_class(self._config, self._state, {}),  # type: ignore[call-arg]
                one,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else REQUEST_SECONDS,
            )
        except OSError:  # the client has gone, or does not speak TLS
            one.close()

    def _connected(self, one: socket.socket, is_cancelled: bool) -> None:
        self._handshakes.pop(one, None)
        if is_cancelled:
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
