"""Holds what a job shows of itself: its status, its newest metrics, its curves, and what has happened."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import asdict, dataclass
from typing import Any

from onstep.control.history import History, time_of

KINDS = ("metrics", "evaluation", "decision", "save", "sample", "command", "status", "end")
"""What an event can be."""
_KEPT = 2000
"""Events of each kind that are kept."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """Something that happened to a job. `data` must not be changed."""

    id: int
    """1, 2, ..."""
    kind: str
    timestamp: float
    """Unix time in seconds."""
    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class Feed:
    """What a job shows. The training thread writes, which costs it microseconds; any thread reads.

    Dictionaries that are handed in must not be changed afterwards: they are not copied.

    Args:
        history: the curves; those that are not read from a log get their points from `add_record`.
    """

    def __init__(self, history: History | None = None) -> None:
        self.live: Callable[[], dict[str, Any]] | None = None
        """Gives the part of the status that changes by itself; called when the status is read."""
        self.history = history or History()
        self._lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._events: dict[str, deque[FeedEvent]] = {kind: deque(maxlen=_KEPT) for kind in KINDS}
        self._last_id = 0
        self._is_ended = False

    @property
    def status(self) -> dict[str, Any]:
        """The job's status, as it is now."""
        live = self.live
        return {**self._status, **({} if live is None else live())}

    @property
    def latest(self) -> dict[str, Any]:
        """The newest value of every key of the records so far."""
        return dict(self._latest)

    @property
    def last_id(self) -> int:
        """Id of the newest event; 0 before the first."""
        return self._last_id

    @property
    def is_ended(self) -> bool:
        """Whether the event `end` has been added: none follows it."""
        return self._is_ended

    def update(self, **status: Any) -> None:
        """Set keys of the job's status; the others remain."""
        with self._lock:
            self._status = {**self._status, **status}

    def add_record(self, record: dict[str, Any]) -> None:
        """Add what was logged: to `latest`, as an event `metrics` or `evaluation`, and to curves that no record has."""
        if not self.history.is_read_from_log:
            self.history.add_record(record)
        is_evaluation = "loss" not in record and any(name.startswith("eval_") for name in record)
        self._latest = {**self._latest, **record}
        self._append("evaluation" if is_evaluation else "metrics", time_of(record), record)

    def go_back(self, records: Iterable[dict[str, Any]]) -> None:
        """Show the newest values of these records as `latest`: those that a rollback has kept."""
        self._latest = {name: value for record in records for name, value in record.items()}

    def add_event(self, kind: str, data: dict[str, Any]) -> None:
        """Add something that happened now; `kind` is one of `KINDS`. After `end` nothing is added."""
        assert kind in self._events, f"{kind!r} is not one of {', '.join(KINDS)}"
        self._append(kind, time.time(), data)

    def events_after(self, event_id: int, kinds: Set[str] | None = None, limit: int = 500) -> list[FeedEvent]:
        """The oldest `limit` events that are newer than `event_id`, in order; only of these kinds, if given.

        Only the newest 2,000 events of each kind are kept.
        """
        if event_id >= self._last_id:
            return []
        chosen = [events for kind, events in self._events.items() if kinds is None or kind in kinds]
        with self._lock:
            copies = [list(events) for events in chosen if events and events[-1].id > event_id]
        found = [event for events in copies for event in _newer(events, event_id)]
        return sorted(found, key=lambda event: event.id)[:limit]

    def _append(self, kind: str, timestamp: float, data: dict[str, Any]) -> None:
        with self._lock:
            if self._is_ended:
                return
            self._last_id += 1
            self._events[kind].append(FeedEvent(self._last_id, kind, timestamp, data))
            self._is_ended = kind == "end"


def _newer(events: list[FeedEvent], event_id: int) -> list[FeedEvent]:
    """The end of `events` whose ids are above `event_id`."""
    first = len(events)
    while first and events[first - 1].id > event_id:
        first -= 1
    return events[first:]
