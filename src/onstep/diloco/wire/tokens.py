"""Keeps the bearer token of each server of this user in a file, so that its clients on this machine find it."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from onstep.errors import ConfigError, extra
from onstep.files.durability import replace_durably

DIRECTORY = "ONSTEP_DILOCO_TOKENS"
"""Environment variable with the directory of the files, in place of the user's configuration."""
VARIABLES = ("DILOCO_TOKEN", "FORGATHER_DILOCO_SERVER_TOKEN")
FILE_VARIABLE = "DILOCO_TOKEN_FILE"
_MOST_BYTES = 4096
_WORD = re.compile(r"[!-~]{1,4096}")


def token_path(port: int) -> Path:
    """The file of the server at a port of this machine."""
    chosen = os.environ.get(DIRECTORY)
    if chosen:
        return Path(chosen).expanduser() / f"{port}.token"
    with extra("control", "DiLoCo requires platformdirs"):
        from platformdirs import user_config_path
    return user_config_path("onstep") / "diloco_server" / f"{port}.token"


def checked(token: str, where: str = "the token") -> str:
    """A token without the space around it.

    Raises:
        ConfigError: if it is not a single word of ASCII characters.
    """
    token = token.strip()
    if not _WORD.fullmatch(token):
        raise ConfigError(f"{where} must be a single word of 1 to 4096 ASCII characters; write another one.")
    return token


def read_token(path: Path) -> str:
    """The token in a file.

    Raises:
        ConfigError: if it cannot be read, or has something else.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 2)
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}; give its path again.") from None
    return checked(content.decode("latin-1"), f"the content of {path}")


def keep_token(port: int, *, renew: bool = False) -> str:
    """The token of this user's server at a port: the previous server's, or a new one in a file with mode 600.

    Raises:
        ConfigError: if it cannot be kept.
    """
    path = token_path(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not renew and _is_private(path):
            return read_token(path)
        token = secrets.token_hex(32)
        replace_durably(path, f"{token}\n", mode=0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); pass token=, or set {DIRECTORY} to another directory."
        ) from None
    return token


def _is_private(path: Path) -> bool:
    """Whether the path is a regular file of this user that no other user can read."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def find_token(host: str, port: int, environment: Mapping[str, str] = os.environ) -> str | None:
    """The token for a server: of the environment, or for one on this machine the file of its port; None if unknown.

    Raises:
        ConfigError: if a file that the environment names cannot be read.
    """
    for name in VARIABLES:
        if environment.get(name):
            return checked(environment[name], name)
    if environment.get(FILE_VARIABLE):
        return read_token(Path(environment[FILE_VARIABLE]).expanduser())
    path = token_path(port)
    return read_token(path) if _is_private(path) and is_this_machine(host) else None


def is_this_machine(host: str) -> bool:
    """Whether a name or address is one of this machine; asks no name server, and sends nothing."""
    if host.lower() in ("localhost", socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_unspecified or address.is_loopback:
        return True
    ours = own_address_towards(host)
    return (
        ours is not None and ipaddress.ip_address(ours) == address
    )  # a packet to this machine has the same source and destination


def own_address_towards(address: str) -> str | None:
    """The source address of packets from this machine to another; None without a route. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None
