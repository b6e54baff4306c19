"""Checks the settings of a run, and whether a saved state or a worker fits them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from onstep.diloco.protocol.messages import PROTOCOL_VERSION, Refused, Register, Settings
from onstep.errors import ConfigError, require

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""Of `Coordinator.state_dict`."""
UNCHANGING = frozenset({"mode", "num_fragments", "outer optimizer", "model"})
"""Settings that cannot change during a run."""


def check_settings(settings: Settings) -> None:
    """Check that all settings are in range.

    Raises:
        ConfigError: for the first that is not.
    """
    require(settings.mode in ("sync", "async"), "mode", '"sync" or "async"', settings.mode)
    for name in ("num_workers", "min_workers", "sync_every", "num_fragments"):
        value = getattr(settings, name)
        require(isinstance(value, int) and value >= 1, name, "an integer >= 1", value)
    rule = f"at most num_workers ({settings.num_workers})"
    require(settings.min_workers <= settings.num_workers, "min_workers", rule, settings.min_workers)
    rule = f"at most sync_every ({settings.sync_every})"
    remedy = ", or some fragments would never be sent."
    require(settings.num_fragments <= settings.sync_every, "num_fragments", rule, settings.num_fragments, remedy)
    require(0 <= settings.blend <= 1, "blend", "from 0 to 1", settings.blend)
    overlap, rule = settings.overlap_steps, f"from 1 to sync_every ({settings.sync_every})"
    remedy = "; None merges a result once it is there."
    require(overlap is None or 1 <= overlap <= settings.sync_every, "overlap_steps", rule, overlap, remedy)
    require(not settings.eager or settings.mode == "sync", "eager", "False in asynchronous mode", settings.eager)
    require(settings.max_staleness >= 0, "max_staleness", ">= 0", settings.max_staleness)
    require(1 <= settings.patience < math.inf, "patience", "finite and >= 1", settings.patience)
    for name in ("heartbeat_timeout", "initial_deadline"):
        value = getattr(settings, name)
        require(0 <= value < math.inf, name, "finite and >= 0", value)


def saved_settings(saved: Mapping[str, Any]) -> Settings:
    """The settings in a saved state, also in that of a version which could divide the parameters among servers.

    Raises:
        ConfigError: if they were divided.
    """
    remedy = "; continue this run with onstep 0.5."
    require(saved.get("num_shares", 1) == 1, "num_shares of the saved run", "1", saved.get("num_shares"), remedy)
    return Settings(**{name: value for name, value in saved.items() if name != "num_shares"})


def other_protocol(worker: object, server: object) -> str:
    """The error of two ends that speak different versions of the protocol."""
    return (
        f"the worker speaks version {worker} of the protocol, the server {server}; "
        "install the same version of onstep at both ends"
    )


def misfit(request: Register, fingerprint: str, num_fragments: int) -> Refused | None:
    """The refusal of a worker that does not fit the run; None if it does."""
    if request.protocol_version != PROTOCOL_VERSION:
        return Refused(422, other_protocol(request.protocol_version, PROTOCOL_VERSION), {"kind": "protocol"})
    if request.fingerprint != fingerprint:
        error = "the worker's model is not the server's: names, shapes or dtypes differ; give both the same model"
        return Refused(422, error, {"kind": "fingerprint"})
    if request.num_fragments not in (None, num_fragments):
        error = f"num_fragments must be the server's, {num_fragments}, got {request.num_fragments}; omit it"
        return Refused(422, error, {"kind": "settings"})
    return None


def warn_of_disagreements(
    worker_id: str, settings: Settings, sync_every: int | None, codec: str | None, dylu: bool | None
) -> None:
    """Warn a worker that asks for other values than the server's; None is the server's value."""
    found = []
    if sync_every not in (None, settings.sync_every):
        found.append(
            f"this worker submits every {sync_every} steps, the others every {settings.sync_every} (sync_every, "
            f"--sync-every): a round then waits for the slowest; give them the server's number, or drop it"
        )
    if codec not in (None, settings.codec):
        found.append(f"this worker submits {codec} where the server's codec is {settings.codec} (bf16_comm, codec)")
    if dylu and not settings.dylu:
        found.append("dylu=True has no effect, as the server does not recommend numbers of steps; start it with --dylu")
    elif dylu is False and settings.dylu:
        found.append("dylu=False: this worker ignores the recommended numbers of steps, which the others follow")
    for line in found:
        logger.warning("%s: %s", worker_id, line)


def check_state(state: Mapping[str, Any], fingerprint: str, num_fragments: int) -> None:
    """Check that a saved state belongs to a run that can be continued.

    Raises:
        ConfigError: if it has another model, another number of fragments or a newer format.
    """
    require(
        state.get("state_version") == STATE_VERSION, "state_version", str(STATE_VERSION), state.get("state_version")
    )
    remedy = "; start the server with the model that the run was started with."
    require(state["fingerprint"] == fingerprint, "the saved fingerprint", fingerprint, state["fingerprint"], remedy)
    saved = len(state["fragments"])
    require(saved == num_fragments, "num_fragments", f"{saved}, as saved", num_fragments)


def arguments_of(settings: Settings, optimizer: str, groups: Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Settings, and the name and parameter groups of an outer optimizer, by name."""
    outer = {outer_name(key, number): value for number, group in enumerate(groups) for key, value in group.items()}
    return {**asdict(settings), "outer optimizer": optimizer, **outer}


def outer_name(key: str, number: int) -> str:
    """What an argument of the outer optimizer is called, for the group with this number."""
    return f"outer {key} of group {number}" if number else f"outer {key}"


def changed_arguments(
    given: Mapping[str, Any], started_with: Sequence[Mapping[str, Any]], now: Mapping[str, Any], *, may_change: bool
) -> frozenset[str]:
    """The names of the arguments that change a continued run: those that differ from all earlier starts and from the
    current value, which an operator may have set. If changes are allowed, only the current value matters.

    Raises:
        ConfigError: if they cannot change; names each with both values.
    """
    now = {**started_with[0], **now}
    known = [now] if may_change else [now, *started_with]
    changed = [name for name, value in given.items() if all(name in one and one[name] != value for one in known)]
    refused = [name for name in changed if name in UNCHANGING or not may_change]
    if refused:
        both = "; ".join(f"{name} is {now[name]}, got {given[name]}" for name in refused)
        remedy = "" if UNCHANGING & set(refused) else ", pass --change-settings (change_settings=True) to change it"
        raise ConfigError(
            f"the saved run has other settings: {both}. Give those that it was started with{remedy}, or another "
            "directory for another run."
        )
    return frozenset(changed)
