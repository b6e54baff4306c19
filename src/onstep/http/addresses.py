"""Says how servers are called: the URL of an address, and the names of this machine for itself."""

from __future__ import annotations

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
ANY = frozenset({"0.0.0.0", "::", ""})
"""What binds all addresses of a machine."""


def reachable(host: str) -> str:
    """A host that reaches, from this machine, what is bound to `host`."""
    return host if host not in ANY else "::1" if host == "::" else "127.0.0.1"


def authority(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
