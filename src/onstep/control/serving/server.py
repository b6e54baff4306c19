"""Serves the control of jobs over HTTP, from a thread of its own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from onstep.http.binding import listen, listen_on_path
from onstep.http.listener import ClientLimits, Listener
from onstep.http.server import HttpServer

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger: logging.Logger = logging.getLogger(__name__)

_PORTS = range(8900, 9000)
_LIMITS = ClientLimits()


class ControlServer:
    """Serves an application from a daemon thread, which never keeps the process alive.

    The socket is bound and listens when this returns; requests are answered from `start` on.

    Args:
        app: what to serve.
        host: address to bind; ignored with `uds`.
        port: 0 for any; None for the first free one from 8900.
        uds: path of a Unix socket to bind instead, whose directory only its owner may enter.

    Raises:
        ConfigError: for an address or port that cannot be used, or a path that is too long.
        NoFreePortError: if none of the ports 8900 to 8999 is free. It is a RuntimeError.
    """

    def __init__(
        self, app: ASGIApp, *, host: str | None = "127.0.0.1", port: int | None = None, uds: Path | None = None
    ) -> None:
        host = host or "127.0.0.1"
        bound = listen(host, port, _PORTS, _LIMITS.backlog) if uds is None else listen_on_path(uds, _LIMITS.backlog)
        self.host = host if uds is None else ""
        self.port: int = bound.getsockname()[1] if uds is None else 0
        self._uds = uds
        self._process = os.getpid()
        self._server = HttpServer(app, Listener(bound, _LIMITS), name="onstep-control-server", on_end=_report)

    def start(self) -> None:
        """Start to answer."""
        self._server.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Close the socket, and all connections as soon as they have their answers, within about a second.

        An event stream whose job has ended is complete then; others are cut off. Calling this twice, or in a forked
        child, is harmless.
        """
        self._server.stop(timeout)
        if self._uds is not None and os.getpid() == self._process:
            self._uds.unlink(missing_ok=True)


def _report(error: BaseException | None) -> None:
    """Whatever ends the server must not end the training."""
    if error is not None:
        logger.warning("The control server has ended (%s); training continues without it.", error, exc_info=error)
