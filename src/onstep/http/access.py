"""Decides who may use a server: by its token, by a session that a browser got for it, and by the names it is called."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from onstep.http.addresses import ANY, LOOPBACK

MOST_TOKEN_BYTES = 4096
LINK_SECONDS, MOST_LINKS = 60.0, 16
MOST_SESSIONS = 64


class Access:
    """The credentials of one server. Used by the server's thread alone.

    Args:
        token: the bearer token; None lets everyone in whose `Host` and `Origin` are right.
        allowed_hosts: names by which the server may be called, see `names_of`; None for any, as on a Unix socket.
        clock: seconds.
    """

    def __init__(
        self,
        token: str | None,
        allowed_hosts: Iterable[str] | None = LOOPBACK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = None if token is None else token.encode()
        self._names = None if allowed_hosts is None else frozenset(name.lower().rstrip(".") for name in allowed_hosts)
        self._clock = clock
        self._sessions: OrderedDict[bytes, None] = OrderedDict()
        self._links: OrderedDict[bytes, float] = OrderedDict()
        # Cookies are shared by all ports of a host, so that two jobs need two names.
        self.cookie_name = f"onstep_{secrets.token_hex(4)}"

    @property
    def is_open(self) -> bool:
        """Whether no token is required."""
        return self._token is None

    def is_token(self, given: bytes) -> bool:
        """Whether this is the token; the comparison needs the same time for every wrong one of its length."""
        if self._token is None or len(given) > MOST_TOKEN_BYTES:
            return False
        return hmac.compare_digest(given, self._token)

    def is_bearer(self, authorization: bytes) -> bool:
        """Whether an `Authorization` header has the token."""
        scheme, _, credentials = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and self.is_token(credentials)

    def is_called(self, host: str) -> bool:
        """Whether a `Host` header names this server. The port may differ, as behind an SSH tunnel."""
        return self._names is None or _name(f"//{host}") in self._names

    def is_own_origin(self, origin: str, host: str) -> bool:
        """Whether an `Origin` header names the very server that the request was sent to."""
        scheme, separator, authority = origin.partition("://")
        return separator != "" and scheme in ("http", "https") and authority.lower() == host.lower()

    def open_session(self) -> str:
        """Admit a browser; returns the cookie's value. The oldest session ends when there are too many."""
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = None
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def has_session(self, cookie: str) -> bool:
        """Whether a `Cookie` header has a session of this server."""
        session = self._session_in(cookie)
        return session is not None and _digest(session) in self._sessions

    def close_session(self, cookie: str) -> None:
        """End the session in a `Cookie` header."""
        session = self._session_in(cookie)
        if session is not None:
            self._sessions.pop(_digest(session), None)

    def new_link(self) -> str:
        """The code of a link that admits one browser, once, within a minute."""
        code = secrets.token_urlsafe(32)
        self._links[_digest(code)] = self._clock() + LINK_SECONDS
        if len(self._links) > MOST_LINKS:
            self._links.popitem(last=False)
        return code

    def use_link(self, code: str) -> bool:
        """Whether the code of a link is valid; it is not from now on."""
        expires_at = self._links.pop(_digest(code), None)
        return expires_at is not None and self._clock() < expires_at

    def _session_in(self, cookie: str) -> str | None:
        try:
            morsel = SimpleCookie(cookie).get(self.cookie_name)
        except CookieError:
            return None
        return None if morsel is None else morsel.value


def names_of(host: str | None) -> frozenset[str]:
    """The names by which a server that is bound to `host` may be called."""
    if host not in ANY:
        return LOOPBACK if host is None else LOOPBACK | {host}
    import psutil

    own = {one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found}
    return LOOPBACK | own | {socket.gethostname(), socket.getfqdn()}


def _name(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a port that is not a number
        name = parts.hostname
    except ValueError:
        return None
    return name.rstrip(".") if name and parts.username is None and not (parts.path or parts.query) else None


def _digest(secret: str) -> bytes:
    """What is stored and looked up in place of a secret, so that the time of a look-up tells nothing about it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
