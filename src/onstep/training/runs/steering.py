"""Holds what a run was asked for while it runs, and reads back what it was asked for before it was interrupted."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onstep.bounded_reading import read_bytes
from onstep.errors import DataError
from onstep.events import Request
from onstep.events.settings import DeclaredSetting

REPEATED = ("set", "skip_batch", "rollback")
"""Requests from outside that change what is learned."""
BATCHES_TO_SKIP = "batches_to_skip"
"""Key of `TrainState.overrides`: how many of the next steps only read their batches."""
TO_REPEAT = "to_repeat"
"""Of the decision `saved`: ids of the requests that were still to be repeated, so that the checkpoint lacks them."""
_MOST_BYTES = 1 << 28


@dataclass
class Steering:
    """What a run was asked for while it runs, beside the flags of its control."""

    pause: Request | None = None
    """Who asked the run to wait; None while it trains."""
    commands: list[Request] = field(default_factory=list)
    """Commands for callbacks that ranks have agreed on."""
    repeats: deque[tuple[int, Request]] = field(default_factory=deque)
    """On rank 0, decisions to repeat, each after its step: those made between the checkpoint and an interruption."""
    applied: dict[str, Any] = field(default_factory=dict)
    """The overrides that are in force."""
    configured: dict[str, tuple[DeclaredSetting, Any]] = field(default_factory=dict)
    """The configured values of the callbacks' settings that are overridden."""


def decisions_after(path: Path, step: int, *, is_chosen: bool = False) -> deque[tuple[int, Request]]:
    """What the run was asked for from outside after its checkpoint of `step`, and after which step each.

    Lines that cannot be read, such as the last one of a killed process, are ignored.

    Raises:
        DataError: if the file cannot be read.

    Args:
        path: the run's `decisions.jsonl`.
        step: the checkpoint's.
        is_chosen: the user chose the checkpoint; if a later one was saved, what followed is of an abandoned branch.
    """
    lines = list(_decisions(path))
    saved = [at for at, one in enumerate(lines) if one.get("flag") == "saved"]
    own = [at for at in saved if lines[at]["details"].get("checkpoint_step") == step]
    if is_chosen and saved and own[-1:] != saved[-1:]:
        return deque()
    at_save = own[-1] if own else len(lines)
    start = at_save
    while start > 0 and _step(lines[start - 1]) > step:  # made while the checkpoint was being written
        start -= 1
    waiting = {_id(one) for one in lines[start:at_save]}
    listed = lines[at_save]["details"].get(TO_REPEAT) if own else None
    waiting |= {one for one in listed if isinstance(one, str)} if isinstance(listed, list) else set()
    found = (one for at, one in enumerate(lines) if at >= at_save or _id(one) in waiting)
    return _in_order((_step(one), _request(one)) for one in found if one.get("flag") in REPEATED and _is_steered(one))


def _in_order(requests: Iterable[tuple[int, Request]]) -> deque[tuple[int, Request]]:
    """Requests by their step, as a run is sent new ones while older ones are still to be repeated.

    A rollback ends the steps before it: what was sent after it follows it.
    """
    ordered: deque[tuple[int, Request]] = deque()
    part: list[tuple[int, Request]] = []
    for one in requests:
        part.append(one)
        if one[1].flag == "rollback":
            ordered.extend(sorted(part, key=lambda pair: pair[0]))
            part = []
    ordered.extend(sorted(part, key=lambda pair: pair[0]))
    return ordered


def ids_to_repeat(repeats: Iterable[tuple[int, Request]]) -> list[str]:
    """The ids of requests that a checkpoint does not contain, since they are still to be repeated."""
    return [request.details["command_id"] for _, request in repeats]


def _decisions(path: Path) -> Iterable[dict[str, Any]]:
    try:
        text = read_bytes(path, _MOST_BYTES, error=DataError)
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}), so it is not known what the run was asked for after its "
            f"checkpoint; restore the file, or move what is there away to continue without."
        ) from None
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("details"), dict):
            yield entry


def _is_steered(entry: dict[str, Any]) -> bool:
    return _id(entry) is not None and not entry["details"].get("repeated")


def _id(entry: dict[str, Any]) -> str | None:
    identity = entry["details"].get("command_id")
    return identity if isinstance(identity, str) else None


def _step(entry: dict[str, Any]) -> int:
    step = entry.get("step")
    return step if isinstance(step, int) else -1


def _request(entry: dict[str, Any]) -> Request:
    details = {key: value for key, value in entry["details"].items() if key != "old"}
    return Request(
        str(entry["flag"]),
        str(entry.get("author", "")),
        "",
        str(entry.get("reason", "")),
        0,
        details | {"repeated": True},
    )
