"""Checks whether the sender of a request may use the server, before anything of its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.diloco.wire.http import HEALTH
from onstep.http.access import Access
from onstep.http.messages import RefusedError
from onstep.http.watch import client_of

if TYPE_CHECKING:
    from starlette.types import Scope

REALM = "onstep-diloco"
NO_TOKEN = (
    "The token is missing or wrong; set DILOCO_TOKEN, or DILOCO_TOKEN_FILE (--token-file) to a copy of the file whose "
    "path the server prints when it starts."
)
"""Everybody can read this, so it names no path."""


def check_access(scope: Scope, access: Access) -> None:
    """Note whether the sender of a request is admitted.

    Raises:
        RefusedError: 401 without the token, 403 from a page in a browser.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if b"origin" in dict(headers):
        raise RefusedError(403, "Requests from pages in a browser are refused.")
    given = [value for name, value in headers if name == b"authorization"]
    is_admitted = access.is_open or (len(given) == 1 and access.is_bearer(given[0]))
    client_of(scope).is_admitted = is_admitted
    if not is_admitted and scope["path"] != HEALTH:
        refused = RefusedError(401, NO_TOKEN, realm=REALM)
        refused.response.headers["WWW-Authenticate"] = f'Bearer realm="{REALM}"'
        raise refused
