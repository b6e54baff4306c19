"""Sends the events of a job as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from onstep.control.feed import Feed, FeedEvent
from onstep.control.serving.limits import HEARTBEAT_SECONDS
from onstep.http.messages import strict_json

_LOOK_SECONDS = 0.25
"""Between two looks at the feed. Looking costs the training thread nothing; a notification would."""


def as_text(event: FeedEvent) -> str:
    """One event in the form of server-sent events."""
    data = strict_json({"timestamp": event.timestamp, **event.data})
    return f"id: {event.id}\nevent: {event.kind}\ndata: {data}\n\n"


async def stream(
    feed: Feed, after: int, kinds: set[str] | None, heartbeat_seconds: float = HEARTBEAT_SECONDS
) -> AsyncIterator[str]:
    """The events after an id as they come, with a comment now and then, until the job has ended."""
    yield "retry: 2000\n\n"
    spoke_at = time.monotonic()
    while True:
        has_ended = feed.is_ended  # before the look, so that the last event is seen
        newest = feed.last_id
        events = feed.events_after(after, kinds)
        for event in events:
            yield as_text(event)
        if events:
            after, spoke_at = events[-1].id, time.monotonic()
            continue
        if has_ended:
            return
        after = max(after, newest)  # events of other kinds need not be looked at again
        if time.monotonic() - spoke_at >= heartbeat_seconds:
            yield ": still here\n\n"
            spoke_at = time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
