"""Checks whether the sender of a request may use the server, before anything of its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.diloco.wire.http import HEALTH
from onstep.http.access import Access
from onstep.http.messages import answer, refusal
from onstep.http.watch import client_of

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

REALM = "onstep-diloco"
NO_TOKEN = (
    "The token is missing or wrong; set DILOCO_TOKEN, or DILOCO_TOKEN_FILE (--token-file) to a copy of the file whose "
    "path the server prints when it starts."
)
"""Everybody can read this, so it names no path."""


class Guard:
    """Lets a request through if it has the token."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await (self._refusal(scope) or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if any(name == b"origin" for name, _ in headers):
            return refusal(403, "Requests from pages in a browser are refused.")
        given = [value for name, value in headers if name == b"authorization"]
        is_admitted = self._access.is_open or (len(given) == 1 and self._access.is_bearer(given[0]))
        client_of(scope).is_admitted = is_admitted
        if is_admitted or scope["path"] == HEALTH:
            return None
        challenge = {"WWW-Authenticate": f'Bearer realm="{REALM}"'}
        return answer({"error": NO_TOKEN, "realm": REALM}, 401, challenge)
