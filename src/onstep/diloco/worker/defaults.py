"""Reads what a worker asks for from the environment, and holds the defaults, which yield to the server's values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from onstep.diloco.protocol.messages import Settings
from onstep.errors import ConfigError

DEFAULTS: dict[str, Any] = {"sync_every": 500, "bf16_comm": True, "dylu": False, "num_fragments": 1}
"""Values of a worker that was given nothing; a server's own values win over these."""
DEFAULT_CODEC = "bf16"
"""Of submissions, where there is no server."""
_TRUE = ("1", "true", "yes")
Number = TypeVar("Number", int, float)


def number_from_environment(name: str, kind: type[Number]) -> Number | None:
    """A number of the environment; None if it is not set.

    Raises:
        ConfigError: for anything but a number.
    """
    text = os.environ.get(name)
    try:
        return kind(text) if text else None
    except ValueError:
        raise ConfigError(f"${name} must be a number, got {text!r}; unset it for the default.") from None


def flag_from_environment(name: str) -> bool | None:
    """A switch of the environment; None if it is not set."""
    text = os.environ.get(name)
    return None if text is None else text.strip().lower() in _TRUE


def check_one_way(server_addr: str, group: object) -> None:
    """Refuse (ConfigError) both ways of averaging at once."""
    if server_addr and group is not None:
        raise ConfigError(
            f"a group of sites needs no server, but there is one as well, {server_addr}; give the address "
            f"(DILOCO_SERVER) or the group (DILOCO_GROUP)."
        )


def check_verifies(verify_tls: bool | None) -> None:
    """Refuse (ConfigError) a connection to a server whose identity is not verified."""
    if verify_tls is None:
        verify_tls = flag_from_environment("DILOCO_VERIFY_TLS")
    if verify_tls is False:
        raise ConfigError(
            "verify_tls=False would trust any server with the token; pass the PEM file of its authority as verify, or "
            "as DILOCO_CA_FILE."
        )


def decided_by_server(settings: Settings, asked: Mapping[str, Any]) -> str | None:
    """A line about the server's values that are not the defaults, of those that the worker does not ask for."""
    found = {name: getattr(settings, name) for name in ("sync_every", "dylu", "num_fragments")}
    found["bf16_comm"] = settings.codec == "bf16"
    decided = [name for name in DEFAULTS if asked[name] is None and found[name] != DEFAULTS[name]]
    shown = {**{name: f"{name}={value}" for name, value in found.items()}, "bf16_comm": f"codec={settings.codec}"}
    ours = ", ".join(f"{name}={DEFAULTS[name]}" for name in decided)
    parts = [f"{', '.join(shown[name] for name in decided)} (by default {ours})"] if decided else []
    parts += [f"overlap_steps={settings.overlap_steps}"] if settings.overlap_steps is not None else []
    parts += ["eager=True"] if settings.eager else []
    return f"the server decides {', '.join(parts)}" if parts else None
