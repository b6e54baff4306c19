"""Keeps the commands that an operator gives to all workers of a run, until every worker has received them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.commands import COMMANDS
from onstep.errors import ConfigError

RELAYED = {
    "save_checkpoint": "save a checkpoint",
    "graceful_stop": "stop",
    "save_and_stop": "save and stop",
    "abort": "stop without saving",
}
"""What the commands of a job that a server relays tell workers to do, by their names in `onstep.commands`."""
_SHORT = {COMMANDS[name].verb: name for name in RELAYED} | {"save_stop": "save_and_stop"}
NUM_KEPT = 100
"""Commands that are kept; a worker that was away for more gets the newest of them."""


def relayed_command(name: str) -> str:
    """The name of a command for workers, from its name or its verb in `onstep control`.

    Raises:
        ConfigError: for a command that is not relayed.
    """
    found = _SHORT.get(name, name)
    if found not in RELAYED:
        raise ConfigError(f"command must be one of {', '.join((*RELAYED, *_SHORT))}, got {name[:100]!r}.")
    return found


class Relay:
    """Numbered commands: each worker receives those with a larger number than the last that it has, in order."""

    def __init__(self) -> None:
        self.number = 0
        """Of the newest command."""
        self._kept: list[str] = []

    def add(self, name: str) -> int:
        """Add a command; returns its number."""
        self.number += 1
        self._kept = [*self._kept, name][-NUM_KEPT:]
        return self.number

    def since(self, number: int) -> tuple[str, ...]:
        """The commands after the one with this number."""
        missing = min(self.number - number, len(self._kept))
        return tuple(self._kept[len(self._kept) - missing :]) if missing > 0 else ()

    @property
    def newest(self) -> str | None:
        """The newest command."""
        return self._kept[-1] if self._kept else None

    def state_dict(self) -> dict[str, object]:
        """JSON-safe."""
        return {"number": self.number, "commands": list(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; one of an earlier version is empty."""
        self.number, self._kept = int(state.get("number", 0)), [str(one) for one in state.get("commands", ())]
