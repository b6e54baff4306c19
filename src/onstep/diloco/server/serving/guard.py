"""Checks every request before it reaches a route: its size, and whether the sender may use the server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from onstep.control.serving.access import Access
from onstep.control.serving.messages import answer, refusal
from onstep.diloco.wire.http import HEALTH, MOST_HEADER_BYTES

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger: logging.Logger = logging.getLogger(__name__)

REALM = "onstep-diloco"
NO_TOKEN = (
    "The token is missing or wrong; set DILOCO_TOKEN, or DILOCO_TOKEN_FILE (--token-file) to a copy of the file whose "
    "path the server prints when it starts."
)
"""Everybody can read this, so it names no path."""


class Guard:
    """Lets a request through if it has the token; nothing of its body is read before."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        has_started = False

        async def note_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, note_start)
        except Exception as error:  # whatever a handler raises is answered, without its text, and harms nobody else
            logger.warning("A request to the DiLoCo server failed", exc_info=error)
            if not has_started:
                await refusal(500, type(error).__name__)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers) + len(scope["raw_path"])
        size += len(scope["query_string"])
        if size > MOST_HEADER_BYTES:
            return refusal(431, f"The headers have {size} bytes; at most {MOST_HEADER_BYTES} are read.")
        if any(name == b"origin" for name, _ in headers):
            return refusal(403, "Requests from pages in a browser are refused.")
        given = [value for name, value in headers if name == b"authorization"]
        is_admitted = self._access.is_open or (len(given) == 1 and self._access.is_bearer(given[0]))
        scope["state"]["connection"].is_admitted = is_admitted
        if is_admitted or scope["path"] == HEALTH:
            return None
        challenge = {"WWW-Authenticate": f'Bearer realm="{REALM}"'}
        return answer({"error": NO_TOKEN, "realm": REALM}, 401, challenge)
