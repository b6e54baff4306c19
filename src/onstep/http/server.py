"""Runs uvicorn in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvicorn import Config, Server

from onstep.errors import ConfigError
from onstep.http.listener import Listener
from onstep.http.watch import Watch
from onstep.processes.forking import release_in_forked_children

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger: logging.Logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 0.05
"""For asyncio to see that connections have ended."""


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


class HttpServer:
    """Serves an application from a daemon thread, which never keeps the process alive.

    A forked child releases the sockets; it cannot stop the server of its parent.

    Args:
        app: the application.
        listener: where clients connect. It listens already, and is closed at the end.
        name: of the thread.
        on_end: called in the thread at its end, with the error that ended it, if any.
        beside: runs in the same loop; when it ends, so does the server.
        tls: the PEM files to serve `https` with; None for plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener,
        *,
        name: str,
        on_end: Callable[[BaseException | None], None],
        beside: Callable[[], Awaitable[object]] | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._listener = listener
        self._beside = beside or asyncio.Event().wait
        self._on_end = on_end
        self._server = Server(_config(app, listener, tls))
        self._is_started = False
        self._ended = threading.Event()  # not join: interrupted by Ctrl-C, it marks a running thread as ended (3.11)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        release_in_forked_children(self, HttpServer._release)

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

    def stop(self, timeout: float) -> None:
        """Stop as soon as requests under way have their answers, within about a second. May be called twice."""
        self.ask_to_stop()
        if self._is_started:
            self._ended.wait(timeout)
        self._listener.close()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with _without_uvicorns_logs():
                asyncio.run(self._serve())
        except BaseException as raised:  # whatever ends the server is passed on, and ends nothing else
            logger.debug("%s has ended", self._thread.name, exc_info=raised)
            error = raised
        finally:
            self._listener.close()
            self._on_end(error)
            self._ended.set()

    async def _serve(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_note_loop_error)
        beside = asyncio.ensure_future(self._beside())
        beside.add_done_callback(lambda _: self.ask_to_stop())
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            if self._listener.cut_all():
                await asyncio.sleep(_NOTICE_SECONDS)
            beside.cancel()
            with suppress(asyncio.CancelledError):
                await beside

    def _release(self) -> None:
        """In a forked child: its loop is not touched, since it shares the parent's epoll."""
        self._is_started = False
        self._listener.release()


def _config(app: ASGIApp, listener: Listener, tls: TlsFiles | None) -> Config:
    """For a server beside another program, whose loggers stay as they are."""
    limits = listener.limits

    async def cut_slow() -> None:
        listener.cut_slow()

    config = Config(
        Watch(app, listener),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        limit_concurrency=limits.connections + 4 * limits.backlog,  # some that make room are not closed yet
        backlog=limits.backlog,
        timeout_keep_alive=int(limits.request_seconds),
        timeout_graceful_shutdown=limits.finish_seconds,
        callback_notify=cut_slow,
        timeout_notify=0,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    config.load()
    return config


@contextmanager
def _without_uvicorns_logs() -> Iterator[None]:
    """Drop what uvicorn logs in this thread: anybody could fill the log of a training with it."""
    thread = threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access")]
    for one in loggers:
        one.addFilter(is_elsewhere)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(is_elsewhere)


def _note_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what asyncio would log, without what the message or the error may quote of a request."""
    logger.debug("A connection failed: %s", type(context.get("exception")).__name__)
