"""Checks whether the sender of a request may use the server, before anything of its body is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.diloco.wire.http import CONTROL, HEALTH, PAGE, PATHS
from onstep.diloco.wire.roles import REVOKED, ROLES, RoleTokens
from onstep.http.access import Access
from onstep.http.messages import RefusedError
from onstep.http.watch import client_of

if TYPE_CHECKING:
    from starlette.types import Scope

REALM = "onstep-diloco"
_OF_WORKERS = frozenset(PATHS.values())
_SET_IT = (
    "set DILOCO_TOKEN, or DILOCO_TOKEN_FILE (--token-file) to a copy of the file whose path the server prints when it "
    "starts."
)
"""Everybody can read this, so it names no path."""
NO_TOKEN = f"This server requires a token; {_SET_IT}"
WRONG_TOKEN = f"The token is wrong: this server has no such token; {_SET_IT}"
REVOKED_TOKEN = "This token was revoked; ask the operator of the server for another one."


def check_access(scope: Scope, access: Access, roles: RoleTokens) -> None:
    """Note whether the sender of a request is admitted.

    Raises:
        RefusedError: 401 without a token, 403 from a page in a browser, or with a token that does not allow it.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if b"origin" in dict(headers):
        raise RefusedError(403, "Requests from pages of other servers are refused; open this server's own page.")
    given = [value for name, value in headers if name == b"authorization"]
    is_owner = access.is_open or (len(given) == 1 and access.is_bearer(given[0]))
    role = None if is_owner or len(given) != 1 else roles.role_of(given[0].partition(b" ")[2])
    is_admitted = is_owner or role in ROLES
    client_of(scope).is_admitted = is_admitted
    if not is_admitted and scope["path"] != HEALTH and scope["path"] not in PAGE:
        error = REVOKED_TOKEN if role == REVOKED else WRONG_TOKEN if given else NO_TOKEN
        refused = RefusedError(401, error, realm=REALM)
        refused.response.headers["WWW-Authenticate"] = f'Bearer realm="{REALM}"'
        raise refused
    needed = _role_for(scope["path"])
    if role in ROLES and ROLES.index(role) < ROLES.index(needed):
        raise RefusedError(
            403,
            f"This token has the role {role}, and {scope['path']} requires the role {needed}; make one on the server's "
            f"machine with `onstep diloco token add NAME --role {needed}`.",
        )


def _role_for(path: str) -> str:
    if path.startswith(CONTROL):
        return "operator"
    return "worker" if path in _OF_WORKERS else "reader"
