"""Notes what the server and its clients wait for, and logs the errors of handlers."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect

from onstep.http.listener import Client, ClientLimits, Listener

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger: logging.Logger = logging.getLogger(__name__)

_CLOSE = (b"connection", b"close")
_LEAST_BYTES = 1 << 10
"""Of a body within the time for a piece of it."""


def client_of(scope: Scope) -> Client:
    """The client that sent a request."""
    found: Client = scope["state"]["client"]
    return found


class Watch:
    """An application that passes requests on to another one, with the client in their state."""

    def __init__(self, app: ASGIApp, listener: Listener) -> None:
        self._app = app
        self._listener = listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        client = scope["state"]["client"] = self._listener.client(scope["client"])
        exchange = _Exchange(client, self._listener.limits, scope, receive, send)
        client.deadline = None
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except ClientDisconnect:
            pass
        except Exception as error:  # its answer is the application's, but it must not end the server
            logger.warning("A request failed", exc_info=error)
        finally:
            client.deadline = time.monotonic() + self._listener.limits.request_seconds


class _Exchange:
    """A request and its answer, with deadlines for the client to send the one and to read the other."""

    def __init__(self, client: Client, limits: ClientLimits, scope: Scope, receive: Receive, send: Send) -> None:
        self._client = client
        self._limits = limits
        self._receive = receive
        self._send = send
        headers = dict(scope["headers"])
        self._has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        client.expect(has_body=self._has_body)
        self._body_deadline = 0.0
        self._missing_bytes = 0
        """Of the piece that is to arrive until then."""
        self._has_started = False

    async def receive(self) -> Message:
        """Receive a piece of the body."""
        if not self._has_body:
            return await self._receive()
        if self._missing_bytes <= 0:
            self._body_deadline = time.monotonic() + self._limits.body_seconds
            self._missing_bytes = _LEAST_BYTES
        self._client.deadline = self._body_deadline
        message = await self._receive()
        self._client.deadline = None
        self._missing_bytes -= len(message.get("body", b""))
        if not message.get("more_body"):
            self._has_body = False
            self._client.expect(has_body=False)
        return message

    async def send(self, message: Message) -> None:
        """Send a piece of the answer; with the first, give up the rest of a body that nobody has read."""
        if not self._has_started and self._has_body:
            message = {**message, "headers": [*message["headers"], _CLOSE]}
        self._has_started = True
        self._client.deadline = time.monotonic() + self._limits.answer_seconds
        try:
            await self._send(message)
        except Exception:  # noqa: BLE001 - uvicorn has answered by itself what is not HTTP
            self._client.cut()
            raise ClientDisconnect from None
        self._client.deadline = None
