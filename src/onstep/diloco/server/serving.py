"""Runs the application in a thread of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.wire.http import FIRST_PORT, MOST_HEADER_BYTES, NUM_PORTS
from onstep.errors import ConfigError

logger: logging.Logger = logging.getLogger(__name__)

BACKLOG = 256
MOST_CONNECTIONS = 1024
REQUEST_SECONDS = 30.0
"""For the headers of the first request on a connection, and between two requests."""


@dataclass(frozen=True)
class TlsFiles:
    """The PEM files with which a server proves its name."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise ConfigError if a file is missing."""
        for path in (self.certificate, self.key):
            if not path.is_file():
                raise ConfigError(f"{path} must be a PEM file to serve https with; give its path.")


class Connection(H11Protocol):
    """A connection that is closed if no request comes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client a while for its first request."""
        super().connection_made(transport)
        self.logger, self.access_log = _SILENT, False
        self.loop.call_later(REQUEST_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()


class _Silent(logging.Logger):
    """Drops what uvicorn would log of garbage."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name in logging
        return False


_SILENT = _Silent("onstep.diloco.server.silent", logging.CRITICAL)


class Serving:
    """A listening socket, and the thread that answers.

    Args:
        app: the application.
        run: whose rounds are executed in the same loop.
        listener: from `listen`.
        tls: the PEM files to serve `https` with; None for plain HTTP.
        on_failure: called in the thread if the run cannot continue.
    """

    def __init__(
        self,
        app: Starlette,
        run: ServedRun,
        listener: socket.socket,
        tls: TlsFiles | None = None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._run = run
        self._listener = listener
        self._on_failure = on_failure
        self._server = uvicorn.Server(_config(app, tls))
        self._is_started = False
        self._ended = threading.Event()  # not join: interrupted by Ctrl-C, it marks a running thread as ended (3.11)
        self._thread = threading.Thread(target=self._main, name="onstep-diloco-server", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._is_started = True
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Stop soon; from any thread."""
        self._server.should_exit = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; whether it has come."""
        return self._ended.wait(timeout)

    def stop(self, timeout: float = 30.0) -> None:
        """Stop, after the round that is being committed. Calling this twice is harmless."""
        self.ask_to_stop()
        if self._is_started:
            self._ended.wait(timeout)
        self._listener.close()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread's last words are passed on to whoever waits
            logger.error("The DiLoCo server has ended", exc_info=error)
            self._on_failure(error)
        finally:
            self._run.close()
            self._listener.close()
            self._ended.set()

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_note_loop_error)
        rounds = asyncio.create_task(self._run.serve())
        rounds.add_done_callback(lambda task: self.ask_to_stop())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            if not rounds.done():
                rounds.cancel()
            with suppress(asyncio.CancelledError):
                await rounds


def _note_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.debug("A connection failed: %s", type(context.get("exception")).__name__)


def _config(app: Starlette, tls: TlsFiles | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        log_level=None,
        access_log=True,  # False would change the logger of every other uvicorn in this process
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=int(REQUEST_SECONDS),
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
    )


def listen(host: str, port: int | None) -> socket.socket:
    """A listening socket at a port; None for the first free one from 8512, 0 for any.

    Raises:
        ConfigError: for an address that cannot be used.
    """
    if port is not None:
        return _bound(host, port)
    for one in range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        try:
            return _bound(host, one)
        except _TakenError:
            continue
    raise ConfigError(
        f"none of the ports {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} on {host} is free; give another."
    )


class _TakenError(ConfigError):
    """A port that another program uses."""


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, got {port}; 0 means any free one.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _TakenError(f"port must be free, and {port} on {host} is in use; give another, or None.") from None
        raise ConfigError(
            f"host and port must be an address of this machine, and {host}:{port} cannot be bound "
            f"({error.strerror or error}); use 127.0.0.1 with a port from 1024 on."
        ) from None
