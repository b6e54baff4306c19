"""Checks every request before it reaches a route, and bounds what unauthenticated clients can cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onstep.control.serving.limits import MOST_STRANGERS_WAITING, STRANGERS_AT_ONCE, STRANGERS_PER_SECOND
from onstep.http.access import Access
from onstep.http.messages import MOST_BODY_BYTES, answer, refusal
from onstep.http.throttle import Throttle
from onstep.http.watch import client_of

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SAFE_METHODS = frozenset({"GET", "HEAD"})
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        b"font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


class Guard:
    """Lets a request through if its host, origin and size are right, and it is admitted or needs not be."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._strangers = Throttle(STRANGERS_PER_SECOND, STRANGERS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                extra = _HEADERS if b"cache-control" in names else [*_HEADERS, (b"cache-control", b"no-store")]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        refused = await self._refusal(scope)
        await (refused or self._app)(scope, receive, send_protected)

    async def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that goes no further."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        host, origin = _one(headers, b"host"), _one(headers, b"origin")
        is_admitted = client_of(scope).is_admitted = self._admits(scope, headers, host or "")
        if not is_admitted and self._strangers.waiting >= MOST_STRANGERS_WAITING:
            return refusal(503, "Too many requests without a valid token.", {"Connection": "close", "Retry-After": "1"})
        if not is_admitted:
            await self._strangers.turn()
        return self._foreign(scope, headers, host, origin) or (
            None if is_admitted or _is_public(scope["path"]) else unauthenticated()
        )

    def _foreign(
        self, scope: Scope, headers: list[tuple[bytes, bytes]], host: str | None, origin: str | None
    ) -> Response | None:
        """The answer to a request that another site may have made a browser send, or that is too large."""
        if not self._access.is_called(host or ""):
            return refusal(421, "This server is not called by that name; see allowed hosts in the documentation.")
        if b"origin" in dict(headers) and not self._access.is_own_origin(origin or "", host or ""):
            return refusal(403, "Requests from pages of other servers are refused.")
        length = _one(headers, b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 20 or int(length) > MOST_BODY_BYTES):
            return refusal(413, f"A body may have at most {MOST_BODY_BYTES} bytes.")
        return None

    def _admits(self, scope: Scope, headers: list[tuple[bytes, bytes]], host: str) -> bool:
        """Whether the sender has proved that it may use the server; notes how in the scope."""
        if self._access.is_open:
            scope["onstep.author"] = "http"
            return True
        given = [value for name, value in headers if name == b"authorization"]
        if given:
            scope["onstep.author"] = "http"
            return len(given) == 1 and self._access.is_bearer(given[0])
        scope["onstep.author"] = "browser"
        cookie = _one(headers, b"cookie")
        if cookie is None or not self._access.has_session(cookie):
            return False
        return scope["method"] in _SAFE_METHODS or self._is_same_origin(headers, host)

    def _is_same_origin(self, headers: list[tuple[bytes, bytes]], host: str) -> bool:
        """Whether a browser says that the server's own page sent a request."""
        origin = _one(headers, b"origin")
        if origin is not None:
            return self._access.is_own_origin(origin, host)
        return _one(headers, b"sec-fetch-site") == "same-origin"


def unauthenticated() -> Response:
    """The answer to a request without a valid token or session."""
    challenge = {"WWW-Authenticate": 'Bearer realm="onstep"'}
    return answer({"detail": "authentication required"}, 401, challenge)


def _is_public(path: str) -> bool:
    return path in ("/", "/login") or path.startswith(("/static/", "/login/"))


def _one(headers: list[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The value of a header; None unless it occurs exactly once."""
    values: list[Any] = [value for found, value in headers if found == name]
    return values[0].decode("latin-1") if len(values) == 1 else None
