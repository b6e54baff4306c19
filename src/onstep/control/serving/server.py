"""Runs the control server in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from onstep.control.serving.accepting import Acceptor
from onstep.control.serving.connections import new_config
from onstep.control.serving.limits import BACKLOG, FINISH_SECONDS
from onstep.control.serving.listening import listen
from onstep.errors import ConfigError
from onstep.processes.forking import release_in_forked_children

logger: logging.Logger = logging.getLogger(__name__)

_PORTS = range(8900, 9000)
_MOST_SOCKET_PATH = 100


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
        self, app: Starlette, *, host: str | None = "127.0.0.1", port: int | None = None, uds: Path | None = None
    ) -> None:
        self._app = app
        self._listener = _listen_on_path(uds) if uds is not None else listen(host or "127.0.0.1", port, _PORTS, BACKLOG)
        self.host = "" if uds is not None else host or "127.0.0.1"
        self.port: int = 0 if uds is not None else self._listener.getsockname()[1]
        self._uds = uds
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._acceptor: Acceptor | None = None
        self._is_stopped = False
        self._is_ready = threading.Event()
        release_in_forked_children(self, ControlServer._close_in_child)

    def start(self) -> None:
        """Start to answer."""
        self._thread = threading.Thread(target=self._run, name="onstep-control-server", daemon=True)
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> None:
        """Close the socket, and all connections as soon as they have their answers, within half a second.

        An event stream whose job has ended is complete then; others are cut off. Calling this twice, or in a forked
        child, is harmless.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._thread is not None:
            self._is_ready.wait(timeout)
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop has ended by itself
                    self._loop.call_soon_threadsafe(self._end)
            self._thread.join(timeout)
        self._listener.close()
        if self._uds is not None:
            self._uds.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # whatever ends the server must not end the training
            logger.warning("The control server has ended (%s); training continues without it.", error, exc_info=error)
        finally:
            self._is_ready.set()
            self._listener.close()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_note_loop_error)
        self._stopping = self._loop.create_future()
        self._acceptor = Acceptor(self._listener, new_config(self._app), self._fail)
        self._acceptor.open()
        self._is_ready.set()
        try:
            await self._stopping
            await self._acceptor.finish(FINISH_SECONDS)
        finally:
            self._acceptor.close()  # asyncio.run cancels what is left: requests and streams

    def _end(self) -> None:
        """In the loop: stop to serve."""
        if self._stopping is not None and not self._stopping.done():
            self._stopping.set_result(None)

    def _fail(self, error: Exception) -> None:
        """In the loop: end the server with an error."""
        if self._stopping is not None and not self._stopping.done():
            self._stopping.set_exception(error)

    def _close_in_child(self) -> None:
        """Close the parent's sockets in a forked child; its loop is not touched, since it shares the parent's epoll."""
        self._is_stopped = True
        accepted = [] if self._acceptor is None else self._acceptor.sockets
        for one in (self._listener, *accepted):
            with suppress(OSError):
                os.close(one.detach())


def _note_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio would log, without what the message or the error may quote of a request."""
    logger.debug("The control server's connection failed: %s", type(context.get("exception")).__name__)


def _listen_on_path(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MOST_SOCKET_PATH:
        raise ConfigError(
            f"The path of a Unix socket may have {_MOST_SOCKET_PATH} bytes, and {path} has {len(os.fsencode(path))}; "
            "set ONSTEP_REGISTRY to a shorter directory, or use TCP (uds=False)."
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()  # of a killed process
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"The Unix socket {path} cannot be made ({error.strerror or error}); use TCP.") from None
    listener.setblocking(False)
    return listener
