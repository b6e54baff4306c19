"""Binds the sockets of servers."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from onstep.errors import ConfigError

_MOST_PATH_BYTES = 100


def listen(host: str, port: int | None, ports: range, backlog: int) -> socket.socket:
    """A listening TCP socket.

    Args:
        port: None for the first free one of `ports`, 0 for any.
        backlog: connections that the kernel keeps waiting.

    Raises:
        ConfigError: for an address that cannot be used.
        NoFreePortError: if none of the ports is free.
    """
    if port is not None:
        return _bound(host, port, backlog)
    for one in ports:
        try:
            return _bound(host, one, backlog)
        except _TakenError:
            continue
    raise NoFreePortError(
        f"no port from {ports.start} to {ports.stop - 1} is free on {host}; give another `port`, or 0 for any."
    )


def listen_on_path(path: Path, backlog: int) -> socket.socket:
    """A listening Unix socket that only its owner can open; one that a killed process has left there is replaced.

    Raises:
        ConfigError: for a path that is too long or cannot be used.
    """
    size = len(os.fsencode(path))
    if size > _MOST_PATH_BYTES:
        raise ConfigError(
            f"The path of a Unix socket may have {_MOST_PATH_BYTES} bytes, and {path} has {size}; "
            "set ONSTEP_REGISTRY to a shorter directory, or use TCP (uds=False)."
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise ConfigError(f"The Unix socket {path} cannot be made ({error.strerror or error}); use TCP.") from None
    return listener


class NoFreePortError(ConfigError, RuntimeError):
    """All ports that a server chooses from are used by other programs."""


class _TakenError(ConfigError):
    """A port that another program uses."""


def _bound(host: str, port: int, backlog: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, got {port}; 0 means any free one.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _TakenError(f"port must be free, and {port} on {host} is in use; give another, or None.") from None
        raise ConfigError(
            f"host and port must be an address of this machine, and {host}:{port} cannot be bound "
            f"({error.strerror or error}); use 127.0.0.1 with a port from 1024 on."
        ) from None
