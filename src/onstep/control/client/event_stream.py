"""Follows what a job reports as server-sent events, across lost connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from onstep.control.client.connection import Connection, ControlError
from onstep.control.feed import FeedEvent
from onstep.files.bounded_reading import parse_json

SILENCE_SECONDS = 60.0
"""A stream without a byte for so long is dead: the server sends a comment every 15 s."""
_LONGEST_LINE = 1 << 24
_NOTHING_MORE = 204
"""The job has ended, and its last event is known."""
_PAUSES_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0)
"""Before each attempt to reconnect; after the last one the job is given up."""


def parse_events(chunks: Iterable[bytes]) -> Iterator[FeedEvent]:
    """The events in the bytes of a stream.

    Lines end in a line feed, as those of our servers; the line separators of Unicode may occur within a text.
    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """
    fields: dict[str, str] = {}
    for line in _lines(chunks):
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        event = _event(fields)
        fields = {}
        if event is not None:
            yield event


def follow(connect: Callable[[], Connection], path: str, after: int, kinds: str | None) -> Iterator[FeedEvent]:
    """Events after the number `after`, until the event `end`.

    Args:
        connect: where the job is, asked before each attempt; raises when there is no such job any more.
        path: path of the events.
        after: number of the last event that is known.
        kinds: kinds of events, separated by commas; None for all.

    Raises:
        ControlError: if the server refuses, or cannot be reached again.
    """
    parameters: dict[str, Any] = {"stream": 1, "after": after, **({} if kinds is None else {"kinds": f"{kinds},end"})}
    attempt = 0
    while True:
        connection = connect()
        try:
            with connection.stream(path, parameters, {"Last-Event-ID": str(after)}, SILENCE_SECONDS) as chunks:
                for event in parse_events(chunks):
                    after, attempt = event.id, 0
                    yield event
                    if event.kind == "end":
                        return
        except ControlError as error:
            if error.status == _NOTHING_MORE:
                return
            if error.status is not None or attempt == len(_PAUSES_SECONDS):
                raise
        if attempt == len(_PAUSES_SECONDS):
            raise ControlError(f"{connection.place} closes the stream of events each time, without reporting the end.")
        time.sleep(_PAUSES_SECONDS[attempt])
        attempt += 1
        parameters["after"] = after


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            raise ControlError(f"the stream has a line of more than {_LONGEST_LINE:,} bytes; is it a control server?")
        for line in whole:
            yield line.removesuffix(b"\r").decode("utf-8", errors="replace")


def _event(fields: dict[str, str]) -> FeedEvent | None:
    """None for a comment, and for what is not an event of ours."""
    try:
        data = parse_json(fields["data"], "the event")
        return FeedEvent(int(fields["id"]), fields["event"], float(data["timestamp"]), data)
    except (KeyError, TypeError, ValueError):  # a DataError is a ValueError
        return None
