"""Checks the settings of a run, and whether a saved state can be continued with them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onstep.diloco.protocol.messages import Settings
from onstep.errors import require

STATE_VERSION = 1
"""Of what `Coordinator.state_dict` returns."""


def check_settings(settings: Settings) -> None:
    """Check that all settings are in range.

    Raises:
        ConfigError: for the first that is not.
    """
    require(settings.mode in ("sync", "async"), "mode", '"sync" or "async"', settings.mode)
    for name in ("num_workers", "min_workers", "sync_every", "num_fragments", "num_shares"):
        value = getattr(settings, name)
        require(isinstance(value, int) and value >= 1, name, "an integer >= 1", value)
    rule = f"at most num_workers ({settings.num_workers})"
    require(settings.min_workers <= settings.num_workers, "min_workers", rule, settings.min_workers)
    rule = f"at most sync_every ({settings.sync_every})"
    remedy = ", or some fragments would never be sent."
    require(settings.num_fragments <= settings.sync_every, "num_fragments", rule, settings.num_fragments, remedy)
    require(0 <= settings.blend <= 1, "blend", "from 0 to 1", settings.blend)
    require(settings.max_staleness >= 0, "max_staleness", ">= 0", settings.max_staleness)
    require(1 <= settings.patience < math.inf, "patience", "finite and >= 1", settings.patience)
    for name in ("heartbeat_timeout", "initial_deadline"):
        value = getattr(settings, name)
        require(0 <= value < math.inf, name, "finite and >= 0", value)


def check_state(state: Mapping[str, object], fingerprint: str, num_fragments: int) -> None:
    """Check that a saved state belongs to a run that can be continued.

    Raises:
        ConfigError: if it has another model, another number of fragments or a newer format.
    """
    require(
        state.get("state_version") == STATE_VERSION, "state_version", str(STATE_VERSION), state.get("state_version")
    )
    remedy = "; start the server with the model that the run was started with."
    require(state["fingerprint"] == fingerprint, "the saved fingerprint", fingerprint, state["fingerprint"], remedy)
    fragments = state["fragments"]
    assert isinstance(fragments, list)
    require(len(fragments) == num_fragments, "num_fragments", f"{len(fragments)}, as saved", num_fragments)
