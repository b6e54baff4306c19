"""Reads from `decisions.jsonl` what a run was sent, and what of it a checkpoint contains."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from itertools import dropwhile
from pathlib import Path
from typing import Any

from onstep.events import Request
from onstep.events.control import STICKY
from onstep.training.runs.decisions import (
    BRANCH,
    CHANGED,
    FAILED_AFTER,
    POSITION,
    REPEATED,
    WITHDRAWN,
    Sent,
    changes_learning,
    content_of,
    sets_length,
)


def decisions_after(path: Path, step: int, *, since: float = 0.0) -> deque[Sent]:
    """What the run was asked for from outside after its checkpoint of `step`, and after which step each.

    Lines that cannot be read, such as the last one of a killed process, are ignored.

    Raises:
        DataError: if the file cannot be read.

    Args:
        path: the run's `decisions.jsonl`.
        step: the checkpoint's.
        since: Unix time before which the decisions are those of an earlier run in the same directory.
    """
    lines = [one for one in _commands_and_saves(path) if _time(one) >= since]
    return _not_in(lines, step)


def branch_at(path: Path, step: int) -> int:
    """The number of rollbacks that the run had done at its checkpoint of `step`."""
    saved = _last_save(lines := list(_decisions(path)), step)
    return 0 if saved is None else _captured(lines[saved])[0]


def left_behind(path: Path, step: int | None) -> list[Sent]:
    """The commands of the branch that is left by a start that the user chose; none if it continues from the last save.

    Args:
        path: the run's `decisions.jsonl`.
        step: the checkpoint's; None if it is not the run's own.
    """
    lines = _commands_and_saves(path)
    saved = [one["details"].get("checkpoint_step") for one in lines if one.get("flag") == "saved"]
    if not saved or saved[-1] == step:
        return []
    return [one for one in _not_in(lines, -1 if step is None else step) if one.request.is_steered]


def is_cut(path: Path, captured: dict[str, Any]) -> bool:
    """Whether the file has lost the end of what it had when a checkpoint was captured, as after a power failure."""
    position = captured.get(POSITION)
    return isinstance(position, int) and (path.stat().st_size if path.is_file() else 0) < position


def is_recorded(path: Path, step: int, captured: dict[str, Any]) -> bool:
    """Whether the line `saved` of a checkpoint exists; `captured` is what its manifest has of `captured_now`."""
    wanted = {"checkpoint_step": step, **captured}
    saved = (one["details"] for one in _decisions(path) if one.get("flag") == "saved")
    return any(all(details.get(key) == value for key, value in wanted.items()) for details in saved)


def withdrawable(path: Path, from_step: int) -> list[Sent]:
    """The commands from the first one that was applied after `from_step` or later, in their order.

    None if they have been withdrawn once: a restart with the same options repeats what the run was sent since, unless
    the run has failed because of it.
    """
    lines = list(_decisions(path))
    withdrawn_at = [at for at, details in _withdrawals(lines) if details.get("from_step") == from_step]
    since = lines[withdrawn_at[-1] + 1 :] if withdrawn_at else []
    blamed = [one["details"].get("command_step") for one in since if one.get("flag") == FAILED_AFTER]
    if withdrawn_at and not any(isinstance(step, int) and step >= from_step for step in blamed):
        return []
    return list(dropwhile(lambda one: one.step < from_step, everything_sent(path)))


def steps_without(path: Path, commands: Iterable[Sent]) -> list[int]:
    """The steps of the checkpoints that contain none of these commands, by `decisions.jsonl`; the newest first."""
    lines, ids = _commands_and_saves(path), set(ids_to_repeat(commands))
    steps = {step for one in lines if isinstance(step := one["details"].get("checkpoint_step"), int)}
    return [step for step in sorted(steps, reverse=True) if ids <= set(ids_to_repeat(_not_in(lines, step)))]


def last_within(path: Path, step: int) -> tuple[int, Request] | None:
    """The last command that the checkpoint of `step` contains and that can be the cause of a failure."""
    lines = _commands_and_saves(path)
    others = {*ids_to_repeat(_not_in(lines, step)), *(_id(one) for one in lines if one.get("flag") == "refused")}
    found = ((_step(one), _request(one, {})) for one in lines if _is_command(one) and _id(one) not in others)
    return next((one for one in reversed(list(found)) if changes_learning(one[1])), None)


def commands_on_end(path: Path, *, with_length: bool) -> list[Sent]:
    """The stops that the run was sent and, `with_length`, the numbers of steps that were set."""
    return [
        one for one in everything_sent(path) if one.request.flag in STICKY or (with_length and sets_length(one.request))
    ]


def is_last_change(path: Path, settings: str) -> bool:
    """Whether a start has recorded already that it continues with these other settings, and none did with others."""
    changed = [one["details"].get("settings") for one in _decisions(path) if one.get("flag") == CHANGED]
    return changed[-1:] == [settings]


def what_ended(path: Path, step: int) -> str:
    """The command because of which a run ended at `step`, in words; empty if none is known."""
    for last in commands_on_end(path, with_length=True)[-1:]:
        if step == (last.request.details.get("value") if sets_length(last.request) else last.step):
            return f"it ended there because after step {last.step} it was {last.request}"
    return ""


def everything_sent(path: Path) -> list[Sent]:
    """The commands that were applied and not withdrawn, in their order."""
    lines = _commands_and_saves(path)
    return [one for one in _in_order(lines, lines) if one.request.is_steered]


def steps_to_keep(sent: Iterable[Sent]) -> tuple[int, ...]:
    """The steps that rollbacks which were sent from outside go back to."""
    steps = [one.request.details.get("to_step") for one in sent if one.request.flag == "rollback"]
    return tuple(step for step in steps if isinstance(step, int))


def _not_in(lines: list[dict[str, Any]], step: int) -> deque[Sent]:
    """What the checkpoint of `step` does not contain: what was sent later in the branch, and after later rollbacks."""
    own = _last_save(lines, step)
    if own is None:
        return _in_order(lines, [one for one in lines if _step(one) > step])
    captured = _captured(lines[own])
    return _in_order(lines, [one for one in lines if (one[BRANCH], _step(one), one[POSITION]) >= captured])


def _last_save(lines: list[dict[str, Any]], step: int) -> int | None:
    saved = (at for at, one in enumerate(lines) if one.get("flag") == "saved")
    return max((at for at in saved if lines[at]["details"].get("checkpoint_step") == step), default=None)


def _captured(saved: dict[str, Any]) -> tuple[int, int, int]:
    """Branch, step and position of a saved checkpoint; those of its line, if an earlier version recorded it."""
    details = saved["details"]
    branch, position = (details[key] if isinstance(details.get(key), int) else saved[key] for key in (BRANCH, POSITION))
    return branch, details["checkpoint_step"], position


def _in_order(lines: list[dict[str, Any]], found: Iterable[dict[str, Any]]) -> deque[Sent]:
    """The commands of `found` in the order in which they took effect, without those that were refused.

    A rollback is done after everything else that was sent in its step, and goes again where it went; what was sent
    after it is of the next branch. A rollback that a callback requested keeps its place, since the callback requests it
    again; one that was sent in the same step comes before it. A save that was sent with a stop belongs to it.
    """
    rolled_back = [one for one in lines if one.get("flag") == "rolled_back" and _id(one) is not None]
    to_steps = {_id(one): one["details"].get("to_step") for one in rolled_back}
    went_to = {key: step for key, step in to_steps.items() if isinstance(step, int)}
    refused = {_id(one) for one in lines if one.get("flag") == "refused"} - went_to.keys()
    stops = {_id(one) for one in lines if _is_command(one) and one["flag"] in STICKY}
    sent = [
        Sent(_step(one), _request(one, went_to), one[BRANCH])
        for one in found
        if (_is_command(one) and _id(one) not in refused)
        or _is_rollback_of_callback(one)
        or (one.get("flag") == "should_save" and _id(one) in stops and not one["details"].get("repeated"))
    ]
    return deque(sorted(sent, key=_place))


def _place(one: Sent) -> tuple[int, int, bool, bool]:
    return one.branch, one.step, one.request.flag == "rollback", not one.request.is_steered


def ids_to_repeat(repeats: Iterable[Sent]) -> list[str]:
    """The ids of requests that a checkpoint does not contain, since they are still to be repeated."""
    return [one.request.details["command_id"] for one in repeats if one.request.is_steered]


def _decisions(path: Path) -> Iterable[dict[str, Any]]:
    position, end = 0, 0
    for line in content_of(path).splitlines(keepends=True):
        position, end = end, end + len(line)
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("details"), dict):
            branch = entry.get(BRANCH)
            yield entry | {POSITION: position, BRANCH: branch if isinstance(branch, int) else 0}


def _commands_and_saves(path: Path) -> list[dict[str, Any]]:
    """The decisions, without the commands that were withdrawn."""
    lines = list(_decisions(path))
    ids = {one for _, details in _withdrawals(lines) for one in _texts(details.get("command_ids"))}
    return [one for one in lines if _id(one) not in ids]


def _withdrawals(lines: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    return [(at, one["details"]) for at, one in enumerate(lines) if one.get("flag") in (WITHDRAWN, CHANGED)]


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _is_command(entry: dict[str, Any]) -> bool:
    """Whether it came from outside, is one of those that are repeated, and is not the repetition of another."""
    return entry.get("flag") in REPEATED and _id(entry) is not None and not entry["details"].get("repeated")


def _is_rollback_of_callback(entry: dict[str, Any]) -> bool:
    return entry.get("flag") == "rollback" and "command_id" not in entry["details"]


def _id(entry: dict[str, Any]) -> str | None:
    identity = entry["details"].get("command_id")
    return identity if isinstance(identity, str) else None


def _step(entry: dict[str, Any]) -> int:
    step = entry.get("step")
    return step if isinstance(step, int) else -1


def _time(entry: dict[str, Any]) -> float:
    timestamp = entry.get("timestamp")
    return timestamp if isinstance(timestamp, int | float) else 0.0


def _request(entry: dict[str, Any], went_to: dict[str | None, int]) -> Request:
    details = {key: value for key, value in entry["details"].items() if key != "old"}
    if _id(entry) in went_to:
        details["to_step"] = details["went_to"] = went_to[_id(entry)]
    return Request(
        str(entry["flag"]),
        str(entry.get("author", "")),
        "",
        str(entry.get("reason", "")),
        0,
        details | {"repeated": True},
    )
