"""Names the kinds of lines in the record of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

FILE_NAME = "record.jsonl"

Kind = Literal["start", "log", "evaluation", "test", "decision", "sample", "checkpoint", "end", "tags", "tracker"]
"""What a line is about: a start of the training, a logged step, an evaluation, a test, a decision, a text from the
model, a checkpoint whose state holds everything up to this line, the end of a process, Megatron Bridge's tags that no
logged step follows, or what the user's code sends to one tracker."""

Metrics = dict[str, Any]
"""A record of the log by name: numbers, and values that callbacks add."""

Listener = Callable[[Kind, int, Mapping[str, Any]], None]
"""Hears of a line: its kind, its step and its data."""

KINDS: tuple[Kind, ...] = get_args(Kind)
_WITHOUT_METRICS = frozenset({"start", "decision", "sample", "checkpoint", "end", "tags", "tracker"})


def has_metrics(line: Mapping[str, Any]) -> bool:
    """Whether a line holds metrics; so does every record of a metrics log, which has no kinds."""
    kind = line.get("kind")
    return not (isinstance(kind, str) and kind in _WITHOUT_METRICS)
