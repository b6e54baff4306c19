"""Runs the application in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from onstep.control.serving.accepting import Acceptor
from onstep.control.serving.connections import new_config
from onstep.control.serving.limits import ConnectionLimits
from onstep.diloco.server.served_run import ServedRun
from onstep.diloco.server.serving.connections import Connection
from onstep.diloco.wire.http import MOST_HEADER_BYTES
from onstep.errors import ConfigError

logger: logging.Logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel keeps waiting."""
MOST_CONNECTIONS, CONNECTIONS_OF_A_WORKER = 4096, 3
"""One for heartbeats, and one for each submission that is under way."""
ACCEPTS_PER_SECOND = 500.0
SPARE_DESCRIPTORS = 128
"""For files, and for what else the program does."""
FINISH_SECONDS = 1.0
"""For answers that are being given when the server stops."""


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
        certificate, key = (None, None) if tls is None else (tls.certificate, tls.key)
        self._config = new_config(app, Connection, MOST_HEADER_BYTES, certificate, key)
        self._is_started = False
        self._stopping = threading.Event()
        self._wake: Callable[[], object] = lambda: None
        self._ended = threading.Event()  # not join: interrupted by Ctrl-C, it marks a running thread as ended (3.11)
        self._thread = threading.Thread(target=self._main, name="onstep-diloco-server", daemon=True)

    def start(self) -> None:
        """Start to answer."""
        self._is_started = True
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Stop soon; from any thread."""
        self._stopping.set()
        with suppress(RuntimeError):  # the loop has ended by itself
            self._wake()

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
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_note_loop_error)
        end: asyncio.Future[None] = loop.create_future()
        self._wake = lambda: loop.call_soon_threadsafe(_end, end)
        if self._stopping.is_set():
            _end(end)
        acceptor = Acceptor(self._listener, self._config, partial(_end, end), _limits(self._run))
        acceptor.open()
        rounds = asyncio.create_task(self._run.serve())
        rounds.add_done_callback(lambda task: _end(end))
        try:
            await end
            await acceptor.finish(FINISH_SECONDS)
        finally:
            acceptor.close()
            rounds.cancel()
            with suppress(asyncio.CancelledError):
                await rounds


def _end(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if not future.done():
        future.set_result(None) if error is None else future.set_exception(error)


def _limits(run: ServedRun) -> ConnectionLimits:
    """Room for all workers: the soft limit of open files, usually 1024, is raised if it is too low for them."""
    needed = run.coordinator.settings.num_workers * CONNECTIONS_OF_A_WORKER + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    most = min(MOST_CONNECTIONS, max(soft - SPARE_DESCRIPTORS, SPARE_DESCRIPTORS))
    return ConnectionLimits(
        most, ACCEPTS_PER_SECOND, most, ACCEPTS_PER_SECOND, most, closed_for_room=max(1, most // 16)
    )


def _note_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.debug("A connection failed: %s", type(context.get("exception")).__name__)
