"""Keeps tokens that allow less than the server's own: for a worker or a reader, by name, each revocable."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from pathlib import Path

from onstep.diloco.wire.tokens import token_path
from onstep.errors import ConfigError, require
from onstep.files.durability import replace_durably

logger: logging.Logger = logging.getLogger(__name__)

ROLES = ("reader", "worker", "operator")
"""Each may do what those before it may: see the status and fetch parameters; train; change the run."""
REVOKED = "revoked"
"""In place of the role of a token that was revoked."""
_NAME = re.compile(r"[\w.-]{1,64}")


def roles_path(port: int) -> Path:
    """The file with the hashes of the tokens of the server at a port of this machine."""
    return token_path(port).with_suffix(".tokens.json")


class RoleTokens:
    """The named tokens of one server; the file has their hashes only. A server follows changes at once.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int] | None = None
        self._roles: dict[str, str] = {}

    def add(self, name: str, role: str) -> str:
        """Make a token; returns it, as it is not kept.

        Raises:
            ConfigError: for another role, or a name that is invalid or has a token.
        """
        require(role in ROLES, "role", f"one of {', '.join(ROLES)}", role)
        require(bool(_NAME.fullmatch(name)), "name", "1 to 64 letters, digits, dots, hyphens and underscores", name)
        known = self._read()
        if name in known:
            raise ConfigError(f"there is a token {name!r}; revoke it first, or give another name.")
        token = secrets.token_hex(32)
        self._write({**known, name: {"role": role, "sha256": _hash(token.encode())}})
        return token

    def revoke(self, name: str) -> None:
        """End a token: the next request with it is refused.

        Raises:
            ConfigError: if there is none of this name.
        """
        known = self._read()
        if name not in known:
            raise ConfigError(f"there is no token {name!r}; there are: {', '.join(self.names()) or 'none'}.")
        kept = {one: entry for one, entry in known.items() if one != name}
        gone = known[name] | {"role": REVOKED}
        self._write({**kept, f"{name} {gone['sha256'][:16]}": gone})  # no name has a space

    def names(self) -> dict[str, str]:
        """The role of each token, by name."""
        return {name: entry["role"] for name, entry in self._read().items() if entry["role"] != REVOKED}

    def revoked(self) -> list[str]:
        """The names of the tokens that were revoked, each as often as that."""
        return [name.partition(" ")[0] for name, entry in self._read().items() if entry["role"] == REVOKED]

    def role_of(self, token: bytes) -> str | None:
        """The role of a token, `REVOKED` for one that was revoked; None for one that is not known."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        seen = (found.st_mtime_ns, found.st_ino)
        if seen != self._seen:
            try:
                self._roles = {entry["sha256"]: entry["role"] for entry in self._read().values()}
            except ConfigError as error:
                logger.error("Only the server's own token is accepted: %s", error)
                self._roles = {}
            self._seen = seen
        return self._roles.get(_hash(token))

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            content = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} cannot be read ({error}); remove it, and make the tokens again.") from None
        try:
            return {
                str(name): {"role": str(one["role"]), "sha256": str(one["sha256"])} for name, one in content.items()
            }
        except (AttributeError, KeyError, TypeError):
            raise ConfigError(f"{self.path} has no tokens; remove it, and make the tokens again.") from None

    def _write(self, tokens: dict[str, dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_durably(self.path, json.dumps(tokens, indent=1), mode=0o600)


def _hash(token: bytes) -> str:
    return hashlib.sha256(token).hexdigest()
