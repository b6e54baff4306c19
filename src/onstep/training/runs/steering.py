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
WITHDRAWN = "withdrawn"
"""The decision of a start with `run.without_commands_from`: which commands are not repeated any more."""
FAILED_AFTER = "failed_after"
"""The decision of a run that ended with an error: the command that may be the cause."""
BATCHES_TO_SKIP = "batches_to_skip"
"""Key of `TrainState.overrides`: how many of the next steps only read their batches."""
TO_REPEAT = "to_repeat"
"""Of the decision `saved`: ids of the requests that were still to be repeated, so that the checkpoint lacks them."""
_MOST_BYTES = 1 << 28
_HARMLESS = ("log_interval", "eval_interval", "save_interval", "train_iters")


@dataclass
class Steering:
    """What a run was asked for while it runs, beside the flags of its control."""

    pause: Request | None = None
    """Who asked the run to wait; None while it trains."""
    is_paused: bool = False
    """Whether the run waits, so that the pause is recorded."""
    commands: list[Request] = field(default_factory=list)
    """Commands for callbacks that ranks have agreed on."""
    repeats: deque[tuple[int, Request]] = field(default_factory=deque)
    """On rank 0, decisions to repeat, each after its step: those made between the checkpoint and an interruption."""
    applied: dict[str, Any] = field(default_factory=dict)
    """The overrides that are in force."""
    configured: dict[str, tuple[DeclaredSetting, Any]] = field(default_factory=dict)
    """The configured values of the callbacks' settings that are overridden."""
    last: tuple[int, Request] | None = None
    """The last command that changed what is learned, and the step after which it did; named if the run fails."""


def decisions_after(
    path: Path, step: int, *, is_chosen: bool = False, since: float = 0.0
) -> deque[tuple[int, Request]]:
    """What the run was asked for from outside after its checkpoint of `step`, and after which step each.

    Lines that cannot be read, such as the last one of a killed process, are ignored.

    Raises:
        DataError: if the file cannot be read.

    Args:
        path: the run's `decisions.jsonl`.
        step: the checkpoint's.
        is_chosen: the user chose the checkpoint; if a later one was saved, what followed is of an abandoned branch.
        since: Unix time before which the decisions are those of an earlier run in the same directory.
    """
    lines = [one for one in _commands_and_saves(path) if _time(one) >= since]
    return _not_in(lines, step, is_chosen=is_chosen)


def withdrawable(path: Path, from_step: int) -> list[tuple[int, Request]]:
    """The commands that were applied after `from_step` or later, in the order of the file.

    None if they have been withdrawn once: a restart with the same options repeats what the run was sent since, unless
    the run has failed because of it.
    """
    lines = list(_decisions(path))
    withdrawn_at = [at for at, details in _withdrawals(lines) if details.get("from_step") == from_step]
    since = lines[withdrawn_at[-1] + 1 :] if withdrawn_at else []
    blamed = [one["details"].get("command_step") for one in since if one.get("flag") == FAILED_AFTER]
    if withdrawn_at and not any(isinstance(step, int) and step >= from_step for step in blamed):
        return []
    found = [(_step(one), _request(one)) for one in _commands_and_saves(path) if _is_command(one)]
    return [(step, request) for step, request in found if step >= from_step]


def steps_without(path: Path, commands: Iterable[tuple[int, Request]]) -> list[int]:
    """The steps of the checkpoints that contain none of these commands, by `decisions.jsonl`; the newest first."""
    lines, ids = _commands_and_saves(path), set(ids_to_repeat(commands))
    steps = {step for one in lines if isinstance(step := one["details"].get("checkpoint_step"), int)}
    return [step for step in sorted(steps, reverse=True) if ids <= set(ids_to_repeat(_not_in(lines, step)))]


def last_within(path: Path, step: int) -> tuple[int, Request] | None:
    """The last command that the checkpoint of `step` contains and that can be the cause of a failure."""
    lines = _commands_and_saves(path)
    others = {*ids_to_repeat(_not_in(lines, step)), *(_id(one) for one in lines if one.get("flag") == "refused")}
    found = ((_step(one), _request(one)) for one in lines if _is_command(one) and _id(one) not in others)
    return next((one for one in reversed(list(found)) if changes_learning(one[1])), None)


def changes_learning(request: Request) -> bool:
    """Whether what is learned depends on a request from outside."""
    return request.flag in REPEATED and not (request.flag == "set" and request.details.get("key") in _HARMLESS)


def _not_in(lines: list[dict[str, Any]], step: int, *, is_chosen: bool = False) -> deque[tuple[int, Request]]:
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
    waiting |= set(_texts(listed))
    found = (one for at, one in enumerate(lines) if at >= at_save or _id(one) in waiting)
    return _in_order((_step(one), _request(one)) for one in found if _is_command(one))


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


def _commands_and_saves(path: Path) -> list[dict[str, Any]]:
    """The decisions, without the commands that were withdrawn."""
    lines = list(_decisions(path))
    ids = {one for _, details in _withdrawals(lines) for one in _texts(details.get("command_ids"))}
    return [one for one in lines if _id(one) not in ids]


def _withdrawals(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(at, one["details"]) for at, one in enumerate(lines) if one.get("flag") == WITHDRAWN]


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _is_command(entry: dict[str, Any]) -> bool:
    """Whether it came from outside, changes what is learned, and is not the repetition of another."""
    return entry.get("flag") in REPEATED and _id(entry) is not None and not entry["details"].get("repeated")


def _id(entry: dict[str, Any]) -> str | None:
    identity = entry["details"].get("command_id")
    return identity if isinstance(identity, str) else None


def _step(entry: dict[str, Any]) -> int:
    step = entry.get("step")
    return step if isinstance(step, int) else -1


def _time(entry: dict[str, Any]) -> float:
    timestamp = entry.get("timestamp")
    return timestamp if isinstance(timestamp, int | float) else 0.0


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
