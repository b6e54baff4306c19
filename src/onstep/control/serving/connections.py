"""Speaks HTTP/1.1 on one connection, with bounds on time and on work: uvicorn's protocol, which has few."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol
from uvicorn.server import ServerState

from onstep.control.serving.limits import (
    FREE_READS,
    MOST_BODY_BYTES,
    MOST_HEADER_BYTES,
    READ_PAUSE_SECONDS,
    REQUEST_SECONDS,
    WRITE_SECONDS,
)

_MOST_DISCARDED_BYTES = 16 * MOST_BODY_BYTES
"""Of a body that is too large; reading some of it lets the client see the answer."""


class _Silent(logging.Logger):
    """Drops what uvicorn would log of garbage; not part of the user's logging."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name in logging
        return False


_SILENT = _Silent("onstep.control.serving.silent", logging.CRITICAL)


class Connection(H11Protocol):
    """One connection of a client."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self.logger = _SILENT
        self.access_log = False
        self.is_admitted = False
        """Whether the last request had a valid token or session; set by whoever checks that."""
        self._since = self.loop.time()
        self._phase: object = None
        self._reads = 0
        self._discarded = 0
        self._is_stuck_since: float | None = None

    @property
    def waits_since(self) -> float | None:
        """When the server began to wait for the client's next request, or for the rest of it; None if it does not."""
        is_complete = self.conn.their_state is not h11.SEND_BODY
        return None if self.is_answering and is_complete else self._since

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def is_overdue(self, now: float) -> bool:
        """Whether the client is too slow to send or to read."""
        since = self.waits_since
        return self.is_stuck(now) or (since is not None and now - since > REQUEST_SECONDS)

    def is_stuck(self, now: float) -> bool:
        """Whether the client is too slow to read."""
        return self._is_stuck_since is not None and now - self._is_stuck_since > WRITE_SECONDS

    def abort(self) -> None:
        """Close at once, without the rest of an answer."""
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read a piece; what comes in many small ones is read with pauses."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        if is_answered and self.conn.their_state is h11.SEND_BODY:
            self._discarded += len(data)
            if self._discarded > _MOST_DISCARDED_BYTES:
                self.abort()
                return
        super().data_received(data)
        self._note_phase()
        self._reads += 1
        if self._reads > FREE_READS and not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_later(READ_PAUSE_SECONDS, self._read_on)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since, self._reads = self.loop.time(), 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP; called while uvicorn handles h11's error, which has the status."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()  # an answer has begun
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=msg.encode("ascii")),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:  # the handler of a request with a broken body
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def pause_writing(self) -> None:
        """The client does not read."""
        self._is_stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self._is_stuck_since = None
        super().resume_writing()

    def _note_phase(self) -> None:
        phase = (self.conn.their_state, self.cycle)
        if phase != self._phase:
            self._phase, self._since, self._discarded = phase, self.loop.time(), 0

    def _read_on(self) -> None:
        if not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()


def new_config(
    app: Any,
    connection: type[Connection] = Connection,
    most_header_bytes: int = MOST_HEADER_BYTES,
    certificate: Path | None = None,
    key: Path | None = None,
) -> Config:
    """What uvicorn's protocol needs; it logs nothing, and changes nobody's loggers."""
    config = Config(
        app,
        log_config=None,
        log_level=None,
        access_log=True,  # False would change the logger of every other uvicorn in this process
        lifespan="off",
        ws="none",
        http=connection,
        interface="asgi3",
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(REQUEST_SECONDS),
        h11_max_incomplete_event_size=most_header_bytes,
        ssl_certfile=certificate,
        ssl_keyfile=None if key is None else str(key),
    )
    config.load()
    return config
