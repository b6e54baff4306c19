"""Formats what a job reports, as lines for a terminal."""

from __future__ import annotations

from typing import Any

from onstep.analysis.logs.decisions_log import decision_lines
from onstep.analysis.text_tables import printable, shortened
from onstep.cli.cells import time_shown, value_shown
from onstep.control.feed import FeedEvent

_LONGEST_VALUE = 200
_HEAD_KEYS = ("timestamp", "step", "global_step")


def event_lines(event: FeedEvent) -> list[str]:
    """An event: time, step, kind and text; what belongs to it is in the lines after the first."""
    step = event.data.get("step", event.data.get("global_step"))
    place = "" if step is None else f"step {step}"
    first, *rest = _TEXTS.get(event.kind, _values)(event.data)
    line = f"{time_shown(event.timestamp) or '-'}  {place:<12}  {event.kind:<10}  {first}"
    return [printable(one).rstrip() for one in (line, *rest)]


def _values(data: dict[str, Any]) -> list[str]:
    shown = [(key, value) for key, value in data.items() if key not in _HEAD_KEYS and value not in (None, "", {})]
    return ["  ".join(f"{key} {value_shown(value, _LONGEST_VALUE)}" for key, value in shown)]


def _command(data: dict[str, Any]) -> list[str]:
    sent = _values(data.get("data") or {})[0]
    message = f": {data['message']}" if data.get("message") else ""
    return [f"{data.get('command')} {sent}".rstrip() + f", by {data.get('author')}: {data.get('status')}{message}"]


def _sample(data: dict[str, Any]) -> list[str]:
    return [shortened(f"{data.get('prompt', '')!r} -> {data.get('text', '')!r}", _LONGEST_VALUE)]


def _end(data: dict[str, Any]) -> list[str]:
    return [f"{data.get('reason', 'ended')}" + (f": {data['error']}" if data.get("error") else "")]


_TEXTS = {"decision": decision_lines, "save": decision_lines, "command": _command, "sample": _sample, "end": _end}
